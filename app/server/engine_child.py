"""The program of an engine's process: the worker thread, its commands from the sockets, its events to them.

The server starts it (`engine_process.py`), and stops it. `EngineClients` has its sockets.
"""

from __future__ import annotations

import copy
import logging
import mmap
import os
import socket
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from app.engine.worker import SWITCH_SECONDS, Callbacks, Worker
from app.errors import ArmatureError, RequestError, ServingFailed
from app.messages import Abort, Command, Event, Generate, GrammarSource, RequestFailed, Stop
from app.metrics.instruments import Metrics
from app.metrics.step_monitor import StepBegin
from app.metrics.steps import Cause, EngineSnapshot, StepStats
from app.metrics.thermal_monitor import ThermalMonitor
from app.server.channel import Channel, Pickled
from app.server.engine_clients import EngineClients
from app.server.engine_host import EngineHost, EngineTexts, HostMessage, HostSurroundings, read_tokenizer
from app.server.prepare import Prepared, UnfetchedModel
from app.server.subprocesses import belong_to_server, inherited_descriptors
from app.server.termination_log import describe_exception
from app.text.grammar import CompiledGrammar, GrammarCompiler

FLUSH_SECONDS = 2.0  # longest wait at the end for the server to read the last messages


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """A command: read an adapter for a slot, and answer with `AdapterRead`."""

    path: str
    slot: int


@dataclass(frozen=True, slots=True)
class AdapterRead:
    slot: int
    error: RequestError | None


@dataclass(frozen=True, slots=True)
class LogLine:
    record: logging.LogRecord


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The worker has ended by this error."""

    error: BaseException


class HostRecipe(Protocol):
    """What the server sends first: how to make the host."""

    @property
    def log_level(self) -> str: ...

    def make(self, clients: EngineClients, began: StepBegin) -> HostedEngine: ...


class HostedEngine(Protocol):
    def worker(self) -> tuple[Worker, Callbacks]:
        """Return the worker, whose mailbox are the clients, and its callbacks, to start."""

    def take(self, command: Any) -> Command | None:
        """Return the command that the worker gets at once; None if it does not get this one, or later."""


# ---- grammars --------------------------------------------------------------------------------------------------------


class EngineGrammars:
    """The grammars of requests that the engine has not taken yet, compiled here as they were in the server."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._lock = threading.Lock()
        self._compiled: dict[GrammarSource, list[CompiledGrammar]] = {}

    def compile(self, source: GrammarSource, definition: str) -> None:
        """Compile a grammar for one request. Raises `InvalidRequest`."""
        compiled = self._compiler.compile_definition(source, definition)
        with self._lock:
            self._compiled.setdefault(source, []).append(compiled)

    def find(self, source: GrammarSource) -> CompiledGrammar | None:
        """Return the grammar of a request, once."""
        with self._lock:
            found = self._compiled.get(source, [])
            compiled = found.pop() if found else None
            if not found:
                self._compiled.pop(source, None)
            return compiled


# ---- the engine of a checkpoint --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckpointRecipe:
    start: Prepared | UnfetchedModel

    @property
    def log_level(self) -> str:
        return self.start.settings.log_level

    def make(self, clients: EngineClients, began: StepBegin) -> HostedEngine:
        return _HostedCheckpoint(self.start, clients, began)


class _HostedCheckpoint:
    def __init__(self, start: Prepared | UnfetchedModel, clients: EngineClients, began: StepBegin) -> None:
        self._clients = clients
        self._metrics = Metrics()  # of which the sensors read whether steps ran
        self._thermal = ThermalMonitor(self._metrics, start.facts.thermal)
        self._step: tuple[float, Cause | None] = (0.0, None)
        surroundings = HostSurroundings(self._tell, self._read_texts, self._record, began, self._thermal.cause)
        self._host = EngineHost(start, surroundings)
        self._worker = Worker(self._host.build, self._host.monitor, clients)
        self._grammars: EngineGrammars | None = None
        self._compiling: dict[str, Generate] = {}  # by request id
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="armature-grammar")

    def worker(self) -> tuple[Worker, Callbacks]:
        self._thermal.start()
        return self._worker, self._host.callbacks(self._send, self._fail)

    def take(self, command: Any) -> Command | None:
        if isinstance(command, ReadAdapter):
            threading.Thread(target=self._read_adapter, args=(command,), daemon=True).start()
            return None
        if isinstance(command, Generate) and command.grammar is not None:
            with self._lock:
                self._compiling[command.request_id] = command
            self._pool.submit(self._compile, command)
            return None
        if isinstance(command, Abort) and self._compiling:
            with self._lock:
                self._compiling.pop(command.request_id, None)
        elif isinstance(command, Stop):
            self._host.stopping.set()
        taken: Command = command
        return taken

    def _compile(self, command: Generate) -> None:
        """Compile the grammar of a request beside the steps, and pass the request to the worker if it is still open."""
        grammars = self._grammars
        assert grammars is not None and command.grammar is not None, "they are made before the engine is ready"
        with self._lock:
            if command.request_id not in self._compiling:
                return
        try:
            grammars.compile(command.grammar, command.definition)
        except RequestError as error:
            self._clients.send([RequestFailed(command.request_id, error)], self._worker.snapshot)
            return
        with self._lock:
            if self._compiling.pop(command.request_id, None) is None:  # it was aborted meanwhile
                grammars.find(command.grammar)
            else:
                self._worker.put(command)

    def _tell(self, message: HostMessage | AdapterRead) -> None:
        self._clients.main.send(Pickled.of(message))

    def _read_adapter(self, command: ReadAdapter) -> None:
        error = None
        try:
            self._host.read_adapter(command.path, command.slot)
        except RequestError as found:
            error = found
        self._tell(AdapterRead(command.slot, error))

    # ---- on the worker thread --------------------------------------------------------------------------------------

    def _read_texts(self, prepared: Prepared) -> EngineTexts:
        tokenizer = read_tokenizer(prepared.checkpoint, prepared.settings.cache_directory)
        if tokenizer is None:
            return EngineTexts()
        if not prepared.needs.generates:
            return EngineTexts(tokenizer.eos_token_ids)
        compiler = GrammarCompiler(tokenizer, prepared.checkpoint.needs().vocab_size)
        self._grammars = EngineGrammars(compiler)
        pool = ThreadPoolExecutor(1, thread_name_prefix="armature-grammar")
        preparing: Future[None] = pool.submit(compiler.prepare_vocabulary)
        pool.shutdown(wait=False)
        return EngineTexts(tokenizer.eos_token_ids, self._grammars, (preparing,))

    def _record(self, ended_at: float, step: StepStats, cause: Cause | None) -> None:
        self._step = ended_at, cause
        self._metrics.busy_seconds += step.seconds

    def _send(self, events: list[Event], snapshot: EngineSnapshot, stats: StepStats | None) -> None:
        self._clients.send(events, snapshot, stats, *(self._step if stats is not None else ()))

    def _fail(self, error: BaseException) -> None:
        fail(self._clients.main, error)


def fail(channel: Channel, error: BaseException) -> None:
    """Tell the server that the worker has ended by an error, and end this process."""
    told = error if isinstance(error, ArmatureError) else ServingFailed(describe_exception(error))
    channel.send(Pickled.of(EngineFailed(told.with_traceback(None))))
    channel.flush(FLUSH_SECONDS)
    os._exit(1)


# ---- the process -----------------------------------------------------------------------------------------------------


class _ForwardingHandler(logging.Handler):
    """Sends the lines of the log to the server, whose form they get."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel, self._formatter = channel, logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        sent = copy.copy(record)
        sent.msg, sent.args = record.getMessage(), None
        if record.exc_info:
            sent.exc_text, sent.exc_info = self._formatter.formatException(record.exc_info), None
        self._channel.send(Pickled.of(LogLine(sent)))


def main() -> None:
    """Run the engine that the server describes, until it says `Stop` or has ended."""
    belong_to_server()
    sys.setswitchinterval(SWITCH_SECONDS)
    connection, page, *listeners = inherited_descriptors()
    channel = Channel(socket.socket(fileno=connection), is_engine=True)
    clients = EngineClients(channel, *(socket.socket(fileno=each) for each in listeners))
    recipe: HostRecipe = clients.receive_recipe()
    logging.basicConfig(level=recipe.log_level.upper(), handlers=[_ForwardingHandler(channel)], force=True)
    hosted = recipe.make(clients, StepBegin(mmap.mmap(page, mmap.PAGESIZE)))
    clients.take = hosted.take
    worker, callbacks = hosted.worker()
    worker.start(callbacks)
    clients.read_while_loading()
    worker.join()
    channel.flush(FLUSH_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    main()
