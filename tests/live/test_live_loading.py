"""While the model loads, the port is open, the stage is reported, and a stop is not a failure."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from app.weights.load import load_model
from tests.live.live_server import starting, until


def test_the_port_is_open_before_the_model_is_there(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def slowly(*arguments: Any) -> Any:
        assert gate.wait(60)
        return load_model(*arguments)

    monkeypatch.setattr("app.engine.build.load_model", slowly)
    with starting(tiny) as server:
        until(lambda: "weights" in server.client.get("/readyz").json()["stage"])
        assert server.client.get("/readyz").status_code == 503
        assert server.client.get("/healthz").status_code == 200
        assert server.client.get("/metrics").status_code == 200
        assert server.client.get("/info").json()["model"]["name"] == "tiny"
        early = server.generate(max_tokens=2)
        assert (early.status_code, early.json()["error"]["code"]) == (503, "not_ready")
        assert int(early.headers["retry-after"]) >= 1
        gate.set()
        server.wait_until_ready()
        assert server.generate(max_tokens=2).status_code == 200


def test_a_stop_meanwhile_is_no_failure(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, told = threading.Event(), threading.Event()

    def until_told(checkpoint: Any, plan: Any, backend: Any, progress: Any, *rest: Any) -> Any:
        begun.set()
        assert told.wait(60)
        progress(1, 100)
        raise AssertionError("loading went on though it was told to stop")

    monkeypatch.setattr("app.engine.build.load_model", until_told)
    with starting(tiny) as server:
        assert begun.wait(60)
        server.server.should_exit = True
        until(server.find_served.host.stopping.is_set)
        told.set()
        until(lambda: not server.find_served.worker.alive)
        assert server.fatal == []
