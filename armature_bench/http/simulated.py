"""Armature's HTTP server with a simulated engine, for what a request or a streamed token costs (`overhead.py`).

The engine makes a token with one space for each open request at fixed intervals, and computes nothing, so the figures
are the cost of the way from the sockets to the worker and back. An encoder answers with random vectors. `armature bench
overhead` starts the server as a child process: `python -m armature_bench.http.simulated MODEL`. It prints its port;
for each line on standard input it prints a line of JSON with counters.
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
from contextlib import redirect_stderr
from pathlib import Path
from queue import Empty, SimpleQueue

import uvicorn

from app.api.routing import ApiRuntime
from app.hardware.step_times import StepTimes, StepTimeTable
from app.messages import (
    Abort,
    Array,
    ArraysReady,
    Command,
    Encode,
    Event,
    Generate,
    SequenceFinished,
    Stop,
    TokensReady,
)
from app.metrics.instruments import Metrics
from app.metrics.load_progress import LoadProgress
from app.metrics.steps import EngineSnapshot
from app.models.encoders.config import EncoderConfig
from app.server.app import create_app
from app.server.log_output import log_to_stderr
from app.server.process import SWITCH_SECONDS, server_config
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


class SimulatedEngine:
    """A worker with an engine that makes `rate` tokens per second for all open requests, and computes nothing.

    `token_ids` are sampled in turn. `vector_size` is of an encoder, which answers each request in its next step.
    """

    def __init__(self, token_ids: tuple[int, ...], vector_size: int = 0) -> None:
        self.alive, self.state, self.stage = True, "ready", "ready"
        self.load_progress: LoadProgress | None = None
        table = StepTimeTable(_POINTS, _POINTS, encode_points=_POINTS if vector_size else ())
        self._step_times = StepTimes(table, 512)
        self.snapshot = EngineSnapshot(stepped_at=time.monotonic(), step_times=self._step_times)
        self.rate = PACED_RATE
        self.num_tokens = 0
        self._mailbox: SimpleQueue[Command] = SimpleQueue()
        self._token_ids = token_ids
        self._vector = array("f", (random.gauss() for _ in range(vector_size))).tobytes()
        self._open: dict[str, int] = {}  # tokens that are left
        self._encodes: list[Encode] = []

    def put(self, command: Command) -> None:
        self._mailbox.put(command)

    def run(self, service: Service) -> None:
        due = time.perf_counter()
        while True:
            try:
                has_work = self._open or self._encodes
                command = self._mailbox.get(timeout=max(due - time.perf_counter(), 0.0) if has_work else None)
            except Empty:
                events = self._step()
                due = max(due, time.perf_counter() - 0.05) + len(events) / self.rate
                self.snapshot = EngineSnapshot(stepped_at=time.monotonic(), step_times=self._step_times)
                service.on_events(events)
                continue
            if isinstance(command, Generate):
                self._open[command.request_id] = command.params.max_tokens or STREAM_TOKENS
                due = max(due, time.perf_counter())
            elif isinstance(command, Encode):
                self._encodes.append(command)
                due = max(due, time.perf_counter())
            elif isinstance(command, Abort):
                self._open.pop(command.request_id, None)
            elif isinstance(command, Stop):
                return

    def _step(self) -> list[Event]:
        events: list[Event] = []
        self.num_tokens += len(self._open)
        for request_id, left in self._open.items():
            token_id = self._token_ids[left % len(self._token_ids)]
            events.append(TokensReady(request_id, 0, (token_id,)))
            self._open[request_id] = left - 1
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


class _Lifetime:
    def __init__(self, service: Service, engine: SimulatedEngine, model: ServedModel) -> None:
        self.service, self.engine, self.model = service, engine, model
        self._thread = threading.Thread(target=engine.run, args=(service,), daemon=True)

    async def start(self) -> None:
        await self.service.start()
        self.service.serve(self.model)
        self._thread.start()

    async def stop(self) -> None:
        self.engine.put(Stop())
        await self.service.stop()


def _served(path: Path) -> tuple[ServedModel, SimulatedEngine]:
    path, _ = find_model(path)
    checkpoint, tokenizer = open_checkpoint(path), Tokenizer(path)
    limits = ServingLimits(2 * STREAM_TOKENS, 1024, 1024, 3600.0, tokenizer.vocab_size)
    if isinstance(config := checkpoint.model_config, EncoderConfig):
        return ServedEncoder(_MODEL, limits, tokenizer, config), SimulatedEngine((), config.embedding_size)
    chat = open_chat_template(path, tokenizer.config, tokenizer.named_tokens)
    ids = tokenizer.encode(_TEXT, add_special_tokens=False)
    engine = SimulatedEngine(tuple(one for one in ids if (tokenizer.piece(one) or "").count(" ") == 1))
    return ServedDecoder(_MODEL, limits, tokenizer, chat), engine


def serve(checkpoint: Path) -> None:
    """Serve until standard input ends."""
    sys.setswitchinterval(SWITCH_SECONDS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as the plan sets it
    settings = load_settings()[0]
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        with redirect_stderr(nowhere):
            log_to_stderr(settings)  # a line for each request is part of its cost
        _serve(settings, *_served(checkpoint))


def _serve(settings: Settings, model: ServedModel, engine: SimulatedEngine) -> None:
    metrics = Metrics()
    service = Service(engine, metrics)
    lifetime = _Lifetime(service, engine, model)
    server = uvicorn.Server(server_config(create_app(ApiRuntime(service, metrics, lifetime, dict, 1)), settings))
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def count() -> None:
            counts = {"loop": time.thread_time(), "process": time.process_time(), "tokens": engine.num_tokens}
            print(json.dumps(counts), flush=True)

        def listen() -> None:
            for line in sys.stdin:
                engine.rate = float(line)
                loop.call_soon_threadsafe(count)
            loop.call_soon_threadsafe(setattr, server, "should_exit", True)

        threading.Thread(target=listen, daemon=True).start()
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        await server.serve([listener])

    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(run())


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
