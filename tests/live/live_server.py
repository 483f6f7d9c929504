"""A real server on a free port: in a thread of this process, where tests can pause its engine, or in a subprocess."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from app.api.application import create_app
from app.engine.scheduler.batch import Batch, SampledTokens
from app.engine.worker import Worker
from app.hardware.plan.plan import decide_api_processes
from app.server.api_processes import ApiProcesses
from app.server.listeners import listen, url_of
from app.server.prepare import prepare
from app.server.process import server_config
from app.server.startup import ServerRuntime
from app.settings import Settings
from app.tracing.start import start_tracer
from synchronous_runner import AtOnce

# With `on`, the tests that hold no engine run with one in a process of its own.
WHERE = os.environ.get("ARMATURE_TEST_ENGINE_PROCESS", "off")
# With 2, they speak to an API process beside the main one, and to no other.
API_PROCESSES = int(os.environ.get("ARMATURE_TEST_API_PROCESSES", "1"))
PATIENCE = 60.0  # seconds; a busy machine is no failure


class Reins:
    """Stands before the runner: steps can be held at the gate, counted, and made to fail."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()  # a step has come to the gate
        self.faults: list[Exception] = []
        self.batches: list[Batch] = []
        self.runner: Any = None
        self.model_seconds = 0.0

    @property
    def prompt_scores(self) -> Any:
        return self.runner.prompt_scores

    def take(self, engine: Any) -> Any:
        if not hasattr(engine, "runner"):
            return engine
        self.runner, engine.runner = engine.runner, AtOnce(self)
        return engine

    def hold(self) -> None:
        self.reached.clear()
        self.gate.clear()

    def release(self) -> None:
        self.gate.set()

    def run(self, batch: Batch) -> list[SampledTokens]:
        self.batches.append(batch)
        self.reached.set()
        assert self.gate.wait(PATIENCE), "a test held the engine and never let it go"
        if self.faults:
            raise self.faults.pop(0)
        picked: list[SampledTokens] = self.runner.run(batch)
        return picked


class LiveServer:
    """`client` speaks to it; `reins` hold its engine.

    Of several API processes, the main one takes no connections, unless `all_accept`: each request tests another one.
    """

    def __init__(self, model: Path, all_accept: bool = False, **settings: Any) -> None:
        self.reins = Reins()
        self.fatal: list[BaseException] = []
        usual: dict[str, Any] = {"precision": "fp32", "engine_process": WHERE, "api_processes": API_PROCESSES}
        if settings.get("api_processes", API_PROCESSES) > 1:
            usual["engine_process"] = "on"
        given = Settings(model=model, port=0, threads=1, **{**usual, **settings})
        tracer = start_tracer(given, {})
        number = decide_api_processes(given).value
        self.processes = None if number == 1 else ApiProcesses(number, given, [given], is_single=True)
        beside = None if self.processes is None else self.processes.beside(0)
        self.find_served = ServerRuntime(prepare(given), self.fatal.append, tracer=tracer, beside=beside)
        worker = self.find_served.worker
        if isinstance(worker, Worker):
            build, worker._build = worker._build, lambda report: self.reins.take(build(report))
        (listener,) = listen(given.host, given.port).sockets
        self.url = url_of(listener)
        if self.processes is None:
            app = create_app(self.find_served.runtime())
        else:
            app, self.processes.sockets = self.processes.application(self.find_served), (listener,)
        self.server = uvicorn.Server(server_config(app, given, number))
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE)
        sockets = [listener] if self.processes is None or all_accept else []
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": sockets})
        self._listener = listener

    def start(self) -> LiveServer:
        self._thread.start()
        return self

    def wait_until_ready(self) -> LiveServer:
        until(lambda: self.client.get("/readyz").status_code == 200)
        if self.processes is not None:
            until(lambda: all(each.served for each in self.processes.others))  # type: ignore[union-attr]
        return self

    def stop(self) -> None:
        self.reins.release()
        self.client.close()
        self.server.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self._listener.close()

    def generate(self, **body: Any) -> httpx.Response:
        return self.client.post("/generate", json={"prompt": "Once upon", "temperature": 0, **body})

    def metric(self, name: str, **labels: str) -> float:
        """The value of one series; 0 where there is none yet."""
        for line in self.client.get("/metrics").text.splitlines():
            found = re.fullmatch(r"([a-zA-Z_:]+)(?:\{(.*)\})? (\S+)", line)
            if found and found[1] == name and dict(re.findall(r'(\w+)="([^"]*)"', found[2] or "")) == labels:
                return float(found[3])
        return 0.0

    @property
    def idle(self) -> bool:
        snapshot = self.find_served.service.snapshot
        return self.find_served.service.num_open == snapshot.num_running == snapshot.num_waiting == 0


@contextlib.contextmanager
def live(model: Path, **settings: Any) -> Iterator[LiveServer]:
    """A server that is ready, and stopped afterwards."""
    with starting(model, **settings) as server:
        yield server.wait_until_ready()


@contextlib.contextmanager
def starting(model: Path, **settings: Any) -> Iterator[LiveServer]:
    """A server whose port is open; what it does to the process's environment is undone afterwards."""
    environment = dict(os.environ)
    server = LiveServer(model, **settings)
    try:
        yield server.start()
    finally:
        server.stop()
        os.environ.clear()
        os.environ.update(environment)


def until(condition: Callable[[], bool]) -> None:
    """Waits for what must become true, looking often."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "what had to come did not"
        time.sleep(0.005)


class ServerProcess:
    """`armature serve` as its users start it: for signals, exit status and what is printed."""

    def __init__(self, model: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "app", "serve", "--model", str(model), "--port", "0", "--threads", "1", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def url(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(("listening on http://", "listening on https://")), (line, self.finish())
        return line.removeprefix("listening on ").strip()

    def finish(self) -> tuple[int, str]:
        """Exit status and what it said on stderr."""
        _, said = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, said

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def server_process(model: Path, *flags: str) -> Iterator[ServerProcess]:
    server = ServerProcess(model, *flags)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()
