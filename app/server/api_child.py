"""The program of an API process beside the main one: HTTP on the same ports, with connections to the engines of its own.

It answers what a model computes. All other requests, and those for a model that is not ready here, the main process
answers, which knows the state of everything (`api_processes.py`).
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from itertools import count
from typing import Any, cast

from app.api.access import header
from app.api.application import create_app
from app.api.routing import ApiCall, ApiRuntime, Models, ModelState, ServedEntry
from app.api.server.load_report import ASKED
from app.engine.worker import SWITCH_SECONDS
from app.errors import NotReady, StepFailed
from app.messages import Command, EngineRequest
from app.metrics.instruments import Metrics
from app.metrics.load_progress import LoadProgress
from app.metrics.reports import MetricsReporter
from app.metrics.steps import EngineSnapshot
from app.server.api_messages import (
    PROCESS,
    AdmitClient,
    ApiRecipe,
    CallCancelled,
    CallEnded,
    CallMessage,
    Drain,
    EngineUp,
    ModelServed,
    PassedCall,
    Permitted,
    ReadKeys,
    Reported,
    ReportWanted,
    ReserveTokens,
    SettleTokens,
    SharedCounts,
)
from app.server.channel import Channel, ClientHello, Output, Pickled
from app.server.listeners import Listeners
from app.server.log_output import log_to_stderr
from app.server.models import keys_of
from app.server.process import PunctualServer, server_config, tls_context
from app.server.startup import FLUSH_SECONDS, ModelFront, ServedStart, api_runtime
from app.server.subprocesses import belong_to_server, inherited_descriptors
from app.service.admission import OpenCounts
from app.service.requests import CLIENT_REQUEST, ClientRequest
from app.service.served_model import ServedDecoder
from app.settings import parse_adapters
from app.tracing.start import start_tracer

log = logging.getLogger(__name__)
REPORT_SECONDS = 0.5
TAG = ":latest"  # Ollama's clients add it to a name without a tag
_PASSED_STATE = ("request_id", "has_key", "models")
_PASSED_SCOPE = (
    "type", "asgi", "http_version", "server", "client", "scheme", "method", "root_path", "path", "raw_path",
    "query_string", "headers",
)  # fmt: skip


class EngineConnection:
    """The engine of a model, as the service of this process sees it. Everything runs on the event loop."""

    def __init__(self, number: int, num_processes: int) -> None:
        self.alive = True
        self.state = self.stage = "loading"
        self.load_progress: LoadProgress | None = None
        self.snapshot = EngineSnapshot()
        self._hello = ClientHello(number, num_processes)
        self._channel: Channel | None = None

    def put(self, command: Command) -> None:
        if self._channel is not None:
            self._channel.send(command)
        elif isinstance(command, EngineRequest):
            raise NotReady("The engine is not ready: it has ended and is started again.")

    def connect(self, address: str, front: ModelFront) -> None:
        """Connect to the engine. Raises `OSError` if it has ended meanwhile."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address)
        except OSError:
            connection.close()
            raise
        self._channel = channel = Channel(connection, is_engine=False)
        channel.send(self._hello)
        asyncio.get_running_loop().add_reader(channel.fileno(), self._read, channel, front)
        self.state = self.stage = "ready"

    def _read(self, channel: Channel, front: ModelFront) -> None:
        try:
            messages = channel.receive(socket.MSG_DONTWAIT)
        except EOFError:
            self.close()
            front.service.on_worker_exit(
                StepFailed("The engine has ended unexpectedly and is started again; the request may be sent again.")
            )
            return
        for message in messages:
            assert isinstance(message, Output), "an engine tells the main process everything else"
            self.snapshot = message.snapshot
            if message.events:
                front.service.on_events(message.events)

    def close(self) -> None:
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()
        self._channel, self.snapshot = None, EngineSnapshot()
        self.state = self.stage = "loading"


class ApiModel:
    """A model in this process, as one of the entries that requests find."""

    def __init__(self, api: ApiProcess, model: int) -> None:
        self._api, self._model = api, model
        recipe, self.metrics = api.recipe, Metrics()
        self.settings = recipe.models[model]
        self.counts = api.counts.of_model(model, recipe.number)
        self.generation = 0
        self.tasks: frozenset[str] = frozenset()
        self.kind, self.max_model_len, self.expires_at = "", 0, None
        self.runtime: ApiRuntime
        self.names = self._find_names(next(iter(self.settings.served_model_name), ""))
        self._renew()

    def _renew(self) -> None:
        recipe = self._api.recipe
        self.metrics.forget_gauges()
        self.engine = EngineConnection(recipe.number, recipe.num_processes)
        place = self._api.counts.place(self._model, recipe.number)
        self.front = ModelFront(self.engine, self.metrics, place)

    def _find_names(self, served: str) -> Sequence[str]:
        """Return the names that requests may give; adapters of the start too, unless clients may load and unload them."""
        configured = () if self.settings.lora_root else (name for name, _ in parse_adapters(self.settings.lora))
        return [*dict.fromkeys((served, *self.settings.served_model_name, *configured))]

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def can_serve(self) -> bool:
        return self.front.service.ready and self._api.counts.is_open(self._model)

    @property
    def state(self) -> ModelState:
        return "ready" if self.can_serve else "unloaded"

    @property
    def stage(self) -> str:
        return self.front.service.stage

    @property
    def num_open(self) -> int:
        return self.counts.own(OpenCounts.ENTERED)

    async def take(self, up: EngineUp) -> None:
        """Serve the model with its engine from now on."""
        if up.generation != self.generation or self.front.model is None:
            self.generation = up.generation
            await self.front.service.stop()
            self._renew()
            await self.front.service.start()
            self._api.use(self)
            await asyncio.to_thread(self._prepare, up.start)
        if self.generation == up.generation:  # no later one has come
            self.engine.close()
            with suppress(OSError):  # it has ended, and the next one is told
                self.engine.connect(up.address, self.front)
                self._api.tell(ModelServed(self._model))

    def _prepare(self, start: ServedStart) -> None:
        start.serve(self.front)
        found = start.describe()
        self.names, self.tasks = self._find_names(found.name), found.tasks
        self.kind, self.max_model_len = found.kind, found.max_model_len


class _ApiModels:
    """Several models, as far as this process answers for them. It is asked only for requests that it answers."""

    is_healthy = ready = True
    may_control = False  # such requests are passed on

    def __init__(self, entries: Sequence[ApiModel]) -> None:
        self.entries = entries

    def find(self, name: str) -> ApiModel | None:
        found = (each for each in self.entries if name in each.names or name.removesuffix(TAG) in each.names)
        return next(found, None)

    async def enter(self, entry: ServedEntry) -> None:
        """Keep the model loaded. The main process closes it before it looks whether somebody is in."""
        assert isinstance(entry, ApiModel), "it is one of the entries"
        entry.counts.add(OpenCounts.ENTERED, 1)
        if not entry.can_serve:
            entry.counts.add(OpenCounts.ENTERED, -1)
            raise NotReady(f"The model {entry.name!r} is being unloaded.")

    def leave(self, entry: ServedEntry) -> None:
        assert isinstance(entry, ApiModel), "it is one of the entries"
        entry.counts.add(OpenCounts.ENTERED, -1)
        entry.counts.note_use()


class _PassedAccount:
    """The account of a client, which the main process keeps."""

    def __init__(self, api: ApiProcess, client: Hashable) -> None:
        self._api, self.client = api, client

    async def reserve(self, num_tokens: int) -> None:
        await self._api.ask(lambda question: ReserveTokens(question, self.client, num_tokens))

    def settle(self, num_reserved: int, num_tokens: int) -> None:
        self._api.tell(SettleTokens(self.client, num_reserved, num_tokens))


class ApiProcess:
    """The API of this process. Everything runs on the event loop."""

    def __init__(self, channel: Channel, recipe: ApiRecipe, counts: SharedCounts, early: Sequence[Any] = ()) -> None:
        self._channel, self.recipe, self.counts, self._early = channel, recipe, counts, early
        self.models = [ApiModel(self, model) for model in range(len(recipe.models))]
        self._several = None if recipe.is_single else cast(Models, _ApiModels(self.models))
        self._has_control = recipe.settings.model_control == "on"
        self._tracer = start_tracer(recipe.settings, os.environ)
        first = self.models[0]
        metrics = first.metrics if recipe.is_single else Metrics()
        keys = None if recipe.is_single else keys_of(recipe.models)
        made = api_runtime(recipe.models[0], first.front, self, keys)
        self.runtime = replace(
            made, metrics=metrics, tracer=self._tracer, models=self._several, main=self, limiter=self
        )
        self.app = create_app(self.runtime)
        for model in self.models:
            self.use(model)
        reported = {PROCESS: metrics, **{number: model.metrics for number, model in enumerate(self.models)}}
        if recipe.is_single:
            del reported[PROCESS]
        self._reporters = {key: MetricsReporter(each) for key, each in reported.items()}
        self.on_drain: Callable[[], None] = lambda: None
        self._numbers = count()
        self._calls: dict[int, asyncio.Queue[CallMessage | CallEnded]] = {}
        self._questions: dict[int, asyncio.Future[None]] = {}
        self._ups = [asyncio.Lock() for _ in self.models]  # one at a time, in their order
        self._tasks: set[asyncio.Task[None]] = set()

    def use(self, model: ApiModel) -> None:
        """Let requests use the model's present service."""
        names = self.runtime.names if self._several is None else replace(self.runtime.names, aliases=())
        if self._several is not None:
            names = replace(
                names, aliases=model.settings.served_model_name[1:], accepts_any=False, accepts_any_path=False
            )
        model.runtime = replace(self.runtime, service=model.front.service, metrics=model.metrics, names=names)
        if self._several is None:
            self.app.state.runtime = model.runtime

    # ---- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to take messages of the main process."""
        self._loop = asyncio.get_running_loop()
        for model in self.models:
            await model.front.service.start()
        for message in self._early:
            self._take(message.message())
        self._loop.add_reader(self._channel.fileno(), self._read)
        self._report_again()

    async def stop(self) -> None:
        """End the requests that are left, and report for the last time."""
        self._timer.cancel()
        for model in self.models:
            await model.front.service.stop()
        self._report(None)
        self._channel.flush(FLUSH_SECONDS)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close, FLUSH_SECONDS)

    def tell(self, message: object) -> None:
        self._channel.send(Pickled.of(message))

    def _read(self) -> None:
        try:
            messages = self._channel.receive(socket.MSG_DONTWAIT)
        except EOFError:
            os._exit(1)  # the server has ended
        for message in messages:
            self._take(message.message())

    def _take(self, message: Any) -> None:
        if isinstance(message, CallMessage | CallEnded):
            if (queue := self._calls.get(message.call)) is not None:
                queue.put_nowait(message)
        elif isinstance(message, Permitted):
            self._answer_question(message)
        elif isinstance(message, EngineUp):
            task = self._loop.create_task(self._take_up(message))
            self._tasks.add(task)
            task.add_done_callback(self._check_up)
        elif isinstance(message, ReportWanted):
            self._report(message.scrape)
        elif isinstance(message, ReadKeys):
            self.runtime.api_keys.read()  # type: ignore[union-attr]  # `api_runtime` makes them
        elif isinstance(message, Drain):
            self.on_drain()

    async def _take_up(self, up: EngineUp) -> None:
        async with self._ups[up.model]:
            await self.models[up.model].take(up)

    def _check_up(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a model cannot be served by an API process, and is served by the main one", exc_info=error)

    # ---- metrics -----------------------------------------------------------------------------------------------------

    def _report_again(self) -> None:
        self._report(None)
        self._timer = self._loop.call_later(REPORT_SECONDS, self._report_again)

    def _report(self, scrape: int | None) -> None:
        for model in self.models:
            model.front.service.note_reading()
        taken = {key: reporter.take() for key, reporter in self._reporters.items()}
        reports = {key: report for key, report in taken.items() if not report.is_empty}
        if reports or scrape is not None:
            self.tell(Reported(reports, scrape))

    # ---- what the main process answers -------------------------------------------------------------------------------

    async def is_needed_for(self, call: ApiCall) -> bool:
        """Return True unless a model that is ready here computes the answer, and nothing else has a part in it."""
        if not call.route.computes or header(call.request.scope, ASKED):
            return True
        if self._has_control and await call.has_field("keep_alive"):
            return True
        model = await self._find(call)
        if model is None or not model.can_serve:
            return True
        served = model.front.model
        if isinstance(served, ServedDecoder) and served.pictures is not None:  # one process keeps their vectors
            return b"image" in await call.read()
        return False

    async def _find(self, call: ApiCall) -> ApiModel | None:
        """Return the model of a request; None if this process does not know it."""
        if self._several is None:
            model = self.models[0]
            if not model.settings.lora_root or (name := await call.named_model()) is None:
                return model
            return model if name in model.names else None
        name = await call.named_model()
        found = call.default_model(self._several, name) if name is None else self._several.find(name)
        return cast(ApiModel | None, found)

    async def answer(self, call: ApiCall, send: Callable[[Any], Awaitable[None]]) -> None:
        """Let the main process answer. Raises what it raises."""
        number, scope = next(self._numbers), call.request.scope
        passed = {name: scope[name] for name in _PASSED_SCOPE if name in scope}
        passed["state"] = {name: scope["state"][name] for name in _PASSED_STATE if name in scope["state"]}
        http = CLIENT_REQUEST.get() or ClientRequest()
        client = http.account.client if isinstance(http.account, _PassedAccount) else None
        body = bytes(await call.read()) if call.request.method == "POST" else b""
        queue = self._calls[number] = asyncio.Queue()
        self.tell(PassedCall(number, passed, body, client))
        ended: CallEnded | None = None
        try:
            while ended is None:
                message = await queue.get()
                if isinstance(message, CallEnded):
                    ended = message
                else:
                    await send(dict(message.message))
        finally:
            del self._calls[number]
            if ended is None:
                self.tell(CallCancelled(number))
        http.add(*ended.tokens, *ended.seconds)
        http.error, http.model = ended.code or http.error, ended.model
        if ended.errors is not None:
            scope["state"]["errors"] = ended.errors
        if ended.error is not None:
            raise ended.error

    # ---- rate limits -------------------------------------------------------------------------------------------------

    async def admit(self, client: Hashable) -> _PassedAccount:
        """Take one request of the client. Raises `RateLimited`."""
        await self.ask(lambda question: AdmitClient(question, client))
        return _PassedAccount(self, client)

    async def ask(self, make: Callable[[int], object]) -> None:
        """Ask the main process for a permission. Raises its refusal."""
        question = next(self._numbers)
        answer = self._questions[question] = self._loop.create_future()
        self.tell(make(question))
        try:
            await answer
        finally:
            del self._questions[question]

    def _answer_question(self, message: Permitted) -> None:
        if (answer := self._questions.get(message.question)) is None or answer.done():
            return
        if message.error is None:
            answer.set_result(None)
        else:
            answer.set_exception(message.error)


class ApiServer(PunctualServer):
    """The server of an API process, which the main process alone stops."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


def main() -> None:
    """Serve until the main process says so or has ended."""
    belong_to_server()
    sys.setswitchinterval(SWITCH_SECONDS)
    connection, page, *listeners = inherited_descriptors()
    channel = Channel(socket.socket(fileno=connection), is_engine=False)
    messages: list[Any] = []
    try:
        while not messages:
            messages = channel.receive()
    except EOFError:
        os._exit(1)
    recipe: ApiRecipe = messages.pop(0).message()
    settings = recipe.settings
    log_to_stderr(settings)
    memory = mmap.mmap(page, SharedCounts.num_bytes(len(recipe.models), recipe.num_processes))
    api = ApiProcess(channel, recipe, SharedCounts(memoryview(memory), recipe.num_processes), messages)
    config = server_config(api.app, settings, recipe.num_processes)
    server = ApiServer(config, settings.drain_seconds, tls_context(settings))
    server.listeners = Listeners(tuple(socket.socket(fileno=each) for each in listeners))
    api.on_drain = server.drain
    server.run(sockets=list(server.listeners.sockets))
    logging.shutdown()
    os._exit(0)  # a thread that reads a text cannot be ended


if __name__ == "__main__":
    main()
