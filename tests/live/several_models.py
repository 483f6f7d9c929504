"""A real server with several models, in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from app.api.application import create_app
from app.hardware.plan.plan import decide_api_processes
from app.server.api_processes import ApiProcesses
from app.server.listeners import listen, url_of
from app.server.models import ModelRegistry
from app.server.process import server_config
from app.settings import Settings
from tests.live.live_server import PATIENCE, until


class LiveModels:
    """`client` speaks to the server; `registry` has its models."""

    def __init__(self, models: Mapping[str, Path | Mapping[str, Any]], **common: Any) -> None:
        self.fatal: list[BaseException] = []
        given = Settings(port=0, **common)
        usual: dict[str, Any] = {"threads": 1, "precision": "fp32", "calibrate": "off"}
        tables = {name: model if isinstance(model, Mapping) else {"model": model} for name, model in models.items()}
        settings = [
            Settings(**{**common, **usual, **table, "served_model_name": (name, *table.get("served_model_name", ()))})
            for name, table in tables.items()
        ]
        number = decide_api_processes(given).value
        self.processes = None if number == 1 else ApiProcesses(number, given, settings, is_single=False)
        self.registry = ModelRegistry(given, settings, self.fatal.append, processes=self.processes)
        (listener,) = listen(given.host, given.port).sockets
        self.url = url_of(listener)
        if self.processes is None:
            app = create_app(self.registry.runtime())
        else:
            app, self.processes.sockets = self.processes.application(self.registry), (listener,)
        self.server = uvicorn.Server(server_config(app, given, number))
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE)
        sockets = [listener] if self.processes is None else []
        self._thread, self._listener = threading.Thread(target=self.server.run, kwargs={"sockets": sockets}), listener
        self._thread.start()

    def wait_until_ready(self) -> LiveModels:
        until(lambda: bool(self.fatal) or self.client.get("/readyz").status_code == 200)
        return self

    def states(self) -> dict[str, str]:
        return {name: one["state"] for name, one in self.client.get("/readyz").json()["models"].items()}

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def run(self, function: Any, *arguments: Any) -> Any:
        """Call a function on the server's event loop, and return its result."""

        async def call() -> Any:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(call(), self.registry._loop).result(PATIENCE)

    def stop(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self._listener.close()


@contextlib.contextmanager
def several(models: Mapping[str, Path | Mapping[str, Any]], **common: Any) -> Iterator[LiveModels]:
    """A server that is ready, and stopped afterwards. What the tests hold stays frozen when it unloads a model."""
    environment = dict(os.environ)
    patch = pytest.MonkeyPatch()
    patch.setattr(gc, "unfreeze", lambda: None)
    server = LiveModels(models, **common)
    try:
        yield server.wait_until_ready()
    finally:
        server.stop()
        patch.undo()
        os.environ.clear()
        os.environ.update(environment)
