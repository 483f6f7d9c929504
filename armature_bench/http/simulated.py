"""Armature's HTTP server with a simulated engine, for what a request or a streamed token costs (`overhead.py`).

The engine makes a token with one space for each open request at fixed intervals, and computes nothing, so the figures
are the cost of the way from the sockets to the worker and back. An encoder answers with random vectors. `armature bench
overhead` starts the server as a child process: `python -m armature_bench.http.simulated MODEL PLACE`, where the last
word says where the engine runs: in a `thread`, in a `process`, or in one that `two` API processes share. It prints its
port; for each line on standard input it prints a line of JSON with counters.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import sys
import threading
import time
from array import array
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from app.api.application import create_app
from app.api.routing import ApiRuntime
from app.engine.worker import SWITCH_SECONDS, Callbacks, Engine, Worker
from app.errors import RequestError
from app.hardware.step_times import StepTimes, StepTimeTable
from app.messages import (
    Abort,
    Array,
    ArraysReady,
    Command,
    Encode,
    Event,
    Generate,
    RequestFailed,
    SequenceFinished,
    TokensReady,
)
from app.metrics.instruments import Metrics
from app.metrics.load_progress import LoadProgress
from app.metrics.step_monitor import StepBegin, StepRecorder
from app.metrics.steps import EngineSnapshot, StepStats
from app.models.encoders.config import EncoderConfig
from app.server.api_processes import ApiProcesses
from app.server.channel import Pickled
from app.server.engine_child import HostedEngine, fail
from app.server.engine_clients import EngineClients
from app.server.engine_host import EngineReady, HostMessage
from app.server.engine_process import EngineProcess
from app.server.log_output import log_to_stderr
from app.server.process import server_config
from app.server.startup import ModelFront, ServedDescription, settle_heap
from app.service.served_model import ServedDecoder, ServedEncoder, ServedModel, ServingLimits
from app.service.service import Service
from app.settings import Settings, load_settings
from app.text.chat import open_chat_template
from app.text.tokenizer import Tokenizer
from app.weights.checkpoint import open_checkpoint
from app.weights.open import find_model
from armature_bench.http.overhead import PACED_RATE, STREAM_TOKENS

_MODEL = "simulated"
_TEXT = "The keeper of the lighthouse wrote a letter to his sister every Sunday, and she answered in verse. "
# The service predicts each request's wait by such a table.
_POINTS = ((1, 0.001), (512, 0.05))
_LATE_SECONDS = 0.05  # that the engine catches up, at most


class SimulatedEngine:
    """An engine that makes `rate` tokens per second for all open requests, and computes nothing.

    `token_ids` are sampled in turn. `vector_size` is of an encoder, which answers each request in its next step.
    """

    batching_delay_seconds = 0.0

    def __init__(self, token_ids: tuple[int, ...], vector_size: int = 0) -> None:
        table = StepTimeTable(_POINTS, _POINTS, encode_points=_POINTS if vector_size else ())
        self._step_times = StepTimes(table, 512)
        self._vector = array("f", (random.gauss() for _ in range(vector_size))).tobytes()
        self._encodes: list[Encode] = []
        self.rate = PACED_RATE
        self.stats: StepStats | None = None
        self._token_ids = token_ids
        self._open: dict[str, int] = {}  # tokens that are left
        self._due = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._open or self._encodes)

    def add(self, order: Generate | Encode) -> list[Event]:
        if isinstance(order, Encode):
            self._encodes.append(order)
        else:
            self._open[order.request_id] = order.params.max_tokens or STREAM_TOKENS
        return []

    def abort(self, command: Abort) -> list[Event]:
        self._open.pop(command.request_id, None)
        return []

    def step(self) -> list[Event]:
        began = time.perf_counter()
        if self._due > began:
            time.sleep(self._due - began)
        self._due = max(self._due, began - _LATE_SECONDS) + len(self._open) / self.rate
        events: list[Event] = []
        for request_id, left in self._open.items():
            events.append(TokensReady(request_id, 0, (self._token_ids[left % len(self._token_ids)],)))
            self._open[request_id] = left - 1
        self.stats = StepStats(time.perf_counter() - began, decode_tokens=len(events), num_decode_sequences=len(events))
        for request_id in [one for one, left in self._open.items() if not left]:
            events.append(SequenceFinished(request_id, 0, "length"))
            del self._open[request_id]
        events += map(self._vectors, self._encodes)
        self._encodes.clear()
        return events

    def _vectors(self, command: Encode) -> ArraysReady:
        number = len(command.texts)
        vectors = Array("FP32", (number, len(self._vector) // 4), number * self._vector)
        return ArraysReady(command.request_id, {"embedding": vectors})

    def fail(self) -> list[Event]:
        return []

    def fail_all(self, error: RequestError) -> list[Event]:
        failed: list[Event] = [RequestFailed(request_id, error) for request_id in self._open]
        self._open.clear()
        return failed

    def check(self) -> None: ...

    def snapshot(self) -> EngineSnapshot:
        rows = tuple((STREAM_TOKENS - left, left) for left in self._open.values())
        return EngineSnapshot(len(self._open), stepped_at=time.monotonic(), rows=rows, step_times=self._step_times)


@dataclass(frozen=True, slots=True)
class _SetRate:
    rate: float


@dataclass(frozen=True, slots=True)
class _Recipe:
    token_ids: tuple[int, ...]
    vector_size: int = 0

    @property
    def log_level(self) -> str:
        return "info"

    def make(self, clients: EngineClients, began: StepBegin) -> HostedEngine:
        return _HostedSimulation(SimulatedEngine(self.token_ids, self.vector_size), clients)


class _HostedSimulation:
    """The simulated engine in a process of its own."""

    def __init__(self, engine: SimulatedEngine, clients: EngineClients) -> None:
        self._engine, self._clients = engine, clients
        self._worker = Worker(self._build, mailbox=clients)

    def _build(self, report: Callable[[str | LoadProgress], None]) -> Engine:
        self._clients.main.send(Pickled.of(EngineReady(self._engine.snapshot())))
        return self._engine

    def worker(self) -> tuple[Worker, Callbacks]:
        return self._worker, Callbacks(self._send, lambda error: fail(self._clients.main, error))

    def _send(self, events: list[Event], snapshot: EngineSnapshot, stats: StepStats | None) -> None:
        self._clients.send(events, snapshot, stats, time.time())

    def take(self, command: Any) -> Command | None:
        if isinstance(command, _SetRate):
            self._engine.rate = command.rate
            return None
        taken: Command = command
        return taken


@dataclass(frozen=True, slots=True)
class _ServedSimulation:
    """The model, for an API process beside the main one."""

    checkpoint: Path

    def serve(self, front: ModelFront) -> None:
        front.model, _ = _served(self.checkpoint)
        front.service.serve(front.model)

    def describe(self) -> ServedDescription:
        return ServedDescription(_MODEL, "decoder", frozenset({"generate"}), 2 * STREAM_TOKENS)


class _Simulation:
    """The serving half: the worker in a thread or in a process, with the service and the counters."""

    def __init__(self, checkpoint: Path, place: str, settings: Settings) -> None:
        self._model, recipe = _served(checkpoint)
        self._start = _ServedSimulation(checkpoint)
        self.num_tokens = 0
        self.metrics = Metrics()
        recorder = StepRecorder(self.metrics)
        self._engine = SimulatedEngine(recipe.token_ids, recipe.vector_size)
        self.processes = ApiProcesses(2, settings, [settings], is_single=True) if place == "two" else None
        self._beside = None if self.processes is None else self.processes.beside(0)
        address = "" if self._beside is None else self._beside.address
        self.worker: Worker | EngineProcess = (
            Worker(self._build)
            if place == "thread"
            else EngineProcess(lambda: recipe, self._take, recorder, self._fail, _MODEL, address)
        )
        self.service = Service(self.worker, self.metrics, place=None if self._beside is None else self._beside.place)

    @property
    def reported_metrics(self) -> Mapping[int, Metrics]:
        return {0: self.metrics}

    def runtime(self) -> ApiRuntime:
        return ApiRuntime(self.service, self.metrics, self, dict, 1)

    def _build(self, report: Callable[[str | LoadProgress], None]) -> Engine:
        return self._engine

    def _take(self, message: HostMessage) -> None:
        if self._beside is not None:
            self._beside.on_ready(self._start)

    def _fail(self, error: BaseException) -> None:
        os._exit(1)

    def _take_output(self, events: list[Event], snapshot: EngineSnapshot, stats: StepStats | None) -> None:
        self.num_tokens += len(events)
        self.service.on_events(events)
        if stats is not None:
            self.metrics.on_step(stats, snapshot)

    async def start(self) -> None:
        await self.service.start()
        self.service.serve(self._model)
        self.worker.start(Callbacks(self._take_output, self._fail))
        while self.worker.state == "loading":  # connections wait for the end of this startup
            await asyncio.sleep(0.01)
        settle_heap()

    async def stop(self) -> None:
        await self.service.stop()
        await self.worker.stop(1.0)

    def set_rate(self, rate: float) -> None:
        if isinstance(self.worker, EngineProcess):
            self.worker.send(_SetRate(rate))
        else:
            self._engine.rate = rate

    def counts(self) -> dict[str, float]:
        seconds = time.process_time()
        if isinstance(self.worker, EngineProcess):
            seconds += _cpu_seconds(self.worker.pid)
        for each in self.processes.others if self.processes is not None else ():
            seconds += _cpu_seconds(each.pid)
        return {"loop": time.thread_time(), "process": seconds, "tokens": self.num_tokens}


def _served(path: Path) -> tuple[ServedModel, _Recipe]:
    path, _ = find_model(path)
    checkpoint, tokenizer = open_checkpoint(path), Tokenizer(path)
    limits = ServingLimits(2 * STREAM_TOKENS, 1024, 1024, 3600.0, tokenizer.vocab_size)
    if isinstance(config := checkpoint.model_config, EncoderConfig):
        return ServedEncoder(_MODEL, limits, tokenizer, config), _Recipe((), config.embedding_size)
    chat = open_chat_template(path, tokenizer.config, tokenizer.named_tokens)
    ids = tokenizer.encode(_TEXT, add_special_tokens=False)
    recipe = _Recipe(tuple(one for one in ids if (tokenizer.piece(one) or "").count(" ") == 1))
    return ServedDecoder(_MODEL, limits, tokenizer, chat), recipe


def _cpu_seconds(pid: int | None) -> float:
    """Return the processor time of another process, where /proc has it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def serve(checkpoint: Path, place: str) -> None:
    """Serve until standard input ends."""
    sys.setswitchinterval(SWITCH_SECONDS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as the plan sets it
    settings = load_settings()[0]
    if place == "two":  # the other process would write its lines into those of the measurement
        settings = settings.model_copy(update={"request_log": "off"})
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        with redirect_stderr(nowhere):
            log_to_stderr(settings)  # a line for each request is part of its cost
        _serve(settings, _Simulation(checkpoint, place, settings))


def _serve(settings: Settings, simulation: _Simulation) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    if (processes := simulation.processes) is None:
        app = create_app(simulation.runtime())
    else:
        app, processes.sockets = processes.application(simulation), (listener,)
    server = uvicorn.Server(server_config(app, settings))

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def count(rate: float) -> None:
            simulation.set_rate(rate)
            print(json.dumps(simulation.counts()), flush=True)

        def listen() -> None:
            for line in sys.stdin:
                loop.call_soon_threadsafe(count, float(line))
            loop.call_soon_threadsafe(setattr, server, "should_exit", True)

        threading.Thread(target=listen, daemon=True).start()
        serving = loop.create_task(server.serve([listener]))
        while processes is not None and not (processes.others and all(each.served for each in processes.others)):
            await asyncio.sleep(0.01)
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        await serving

    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(run())


if __name__ == "__main__":
    from armature_bench.http import simulated  # the engine's process finds the classes by this name

    simulated.serve(Path(sys.argv[1]), sys.argv[2])
