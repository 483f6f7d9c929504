"""The API processes beside the main one, as the main process sees them.

The main process serves too. It has the engines and all state, starts each of the others, and starts it again if it ends:
requests that are open in one that ends are lost, their engines abort them, and everybody else is served.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from app.api.application import Application, create_app
from app.api.routing import ANSWERING_ERRORS, ApiRuntime
from app.errors import RateLimited, ServingFailed
from app.metrics.instruments import Metrics
from app.metrics.reports import add_report
from app.server.api_messages import (
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
from app.server.channel import Channel, Pickled
from app.server.startup import EngineBeside, ServedStart
from app.server.subprocesses import RestartDelay, describe_end, launch
from app.service.admission import OpenCounts
from app.service.rate_limit import RateLimiter
from app.service.requests import CLIENT_REQUEST, ClientRequest
from app.settings import Settings

log = logging.getLogger(__name__)
END_SECONDS = 1.0  # of a process whose requests have ended or were cut off
EXIT_SECONDS = 5.0  # longest wait for the status of a process that has closed its connection
SCRAPE_SECONDS = 0.03  # longest wait of a scrape for the others' counts, which are half a second old otherwise


class Serving(Protocol):
    """What the main process serves: one model, or several."""

    @property
    def reported_metrics(self) -> Mapping[int, Metrics]:
        """The metrics that the others report to, by the number of the model, or `PROCESS`."""

    def runtime(self) -> ApiRuntime: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class ApiProcesses:
    """`num_processes` serve, this one among them. Use it as the application's lifespan around `serving`, its own.

    Everything runs on the event loop, except what `beside` returns. `sockets` are the listening ones, which all share.
    """

    def __init__(self, num_processes: int, settings: Settings, models: Sequence[Settings], is_single: bool) -> None:
        self._recipe = partial(
            ApiRecipe, num_processes=num_processes, settings=settings, models=models, is_single=is_single
        )
        self._num_processes = num_processes
        self._drain_seconds = settings.drain_seconds
        self.sockets: Sequence[socket.socket] = ()
        num_bytes = SharedCounts.num_bytes(len(models), num_processes)
        with tempfile.TemporaryFile() as page:
            page.truncate(num_bytes)
            self._page = os.dup(page.fileno())
        self.counts = SharedCounts(memoryview(mmap.mmap(self._page, num_bytes)), num_processes)
        self._num_models = len(models)
        self._folder = Path(tempfile.gettempdir()) / f"armature-{secrets.token_hex(8)}"
        self._ups: dict[int, EngineUp] = {}
        self._generations = [0] * len(models)
        self.others: list[_ApiProcess] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drained_at = 0.0
        self._scrape, self._scraped = 0, asyncio.Event()
        self.metrics: Mapping[int, Metrics] = {}
        self.num_passed = 0  # requests that this process has answered for others
        self.app: Application
        self._serving: Serving
        self.threads = ThreadPoolExecutor(1, thread_name_prefix="armature-api")

    def application(self, serving: Serving) -> Application:
        """Return the application of the main process. Call it before `start`."""
        self._serving, self.metrics = serving, serving.reported_metrics
        runtime = replace(serving.runtime(), lifetime=self, collect_metrics=self.collect_metrics)
        self.ends = runtime.metrics.counter("api_process_ends", "Ends of API processes that nobody asked for.")
        self.lost = runtime.metrics.counter("lost_requests", "Requests that were open in an API process that ended.")
        self.app = create_app(runtime)
        return self.app

    def beside(self, model: int) -> EngineBeside:
        """Return what a new engine of a model tells the API processes, and where they find it."""
        self._generations[model] += 1
        generation, address = self._generations[model], str(self._folder / f"{model}.{self._generations[model]}")

        def tell_ready(start: ServedStart) -> None:
            up = EngineUp(model, generation, address, start)
            if self._loop is not None:
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._tell_up, up)

        def tell_lost() -> None:
            self._ups.pop(model, None)

        return EngineBeside(address, self.counts.place(model, 0), tell_ready, tell_lost)

    def _tell_up(self, up: EngineUp) -> None:
        self._ups[up.model] = up
        self.counts.set_open(up.model, True)
        for each in self.others:
            each.tell(up)

    # ---- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._folder.mkdir(mode=0o700)
        await self._serving.start()
        self.others = [_ApiProcess(self, number) for number in range(1, self._num_processes)]
        for each in self.others:
            each.launch()

    def drain(self) -> None:
        """Let the others close their listeners, and end after their open requests."""
        if not self.is_draining:
            self._drained_at = time.monotonic()
            for each in self.others:
                each.tell(Drain())

    async def stop(self) -> None:
        """Stop everything, the engines after all processes that serve."""
        self.drain()
        left = max(self._drained_at + self._drain_seconds + END_SECONDS - time.monotonic(), 0.0)
        await asyncio.gather(*(each.stop(left) for each in self.others))
        await self._serving.stop()
        self.threads.shutdown(wait=False)
        os.close(self._page)
        shutil.rmtree(self._folder, ignore_errors=True)

    def read_keys(self) -> None:
        """Let the others read the files of API keys again."""
        for each in self.others:
            each.tell(ReadKeys())

    # ---- for the processes -------------------------------------------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        return self._drained_at > 0.0

    def descriptors(self) -> list[int]:
        return [self._page, *(each.fileno() for each in self.sockets)]

    def first_messages(self, number: int) -> list[object]:
        return [self._recipe(number=number), *self._ups.values()]

    def clear(self, number: int) -> int:
        """Clear the counts of a process that has ended, and return the number of its open requests."""
        rows = [self.counts.of_model(model, number).clear(number) for model in range(self._num_models)]
        return sum(row[OpenCounts.OPEN] for row in rows)

    @property
    def limiter(self) -> RateLimiter:
        limiter = self.app.access.limiter
        assert isinstance(limiter, RateLimiter), "the main process keeps the accounts"
        return limiter

    # ---- metrics -----------------------------------------------------------------------------------------------------

    async def collect_metrics(self) -> None:
        """Wait for a short time for what the others have counted until now."""
        self._scrape += 1
        waiting = [each for each in self.others if each.is_running]
        for each in waiting:
            each.tell(ReportWanted(self._scrape))
        with suppress(TimeoutError):
            async with asyncio.timeout(SCRAPE_SECONDS):
                while any(each.scrape < self._scrape and each.is_running for each in waiting):
                    self._scraped.clear()
                    await self._scraped.wait()

    def take_report(self, message: Reported) -> None:
        for key, report in message.reports.items():
            add_report(self.metrics[key], report)
        self._scraped.set()


class _ApiProcess:
    """One of the other processes. It is started again after 1, 2, … 60 seconds whenever it ends."""

    def __init__(self, owner: ApiProcesses, number: int) -> None:
        self._owner, self._number = owner, number
        self._delay, self._began = RestartDelay(), 0.0
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._reserved: dict[Hashable, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()
        self.scrape = 0
        self.served: set[int] = set()  # models whose requests it answers itself

    @property
    def is_running(self) -> bool:
        return self._channel is not None

    @property
    def pid(self) -> int | None:
        return None if self._process is None or self._channel is None else self._process.pid

    def tell(self, message: object) -> None:
        if self._channel is not None:
            self._channel.send(Pickled.of(message))

    def launch(self) -> None:
        """Start the process, unless the server is stopping; if that fails, try again later."""
        if self._owner.is_draining:
            return
        self._began = time.monotonic()
        try:
            process, channel = launch("app.server.api_child", "armature-api", self._owner.descriptors())
        except OSError as error:
            self._launch_again(f"could not be started ({error})", 0.0)
            return
        self._process, self._channel = process, channel
        self._ended.clear()
        for message in self._owner.first_messages(self._number):
            self.tell(message)
        self._loop.add_reader(channel.fileno(), self._read, channel, process)

    def _launch_again(self, what: str, served_seconds: float) -> None:
        delay = self._delay.take(served_seconds)
        log.error("API process %d %s; it is started again in %.0f s", self._number, what, delay)
        self._timer = self._loop.call_later(delay, self.launch)

    async def stop(self, timeout_seconds: float) -> None:
        """Wait for the process to end, and end it after that time."""
        if self._timer is not None:
            self._timer.cancel()
        if self._process is None or self._channel is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._ended.wait()
        if self._channel is not None:
            self._process.kill()
            await self._ended.wait()

    def _read(self, channel: Channel, process: subprocess.Popen[bytes]) -> None:
        try:
            messages = channel.receive(socket.MSG_DONTWAIT)
        except EOFError:
            self._lose(channel, process)
            return
        for message in messages:
            self._take(message.message())

    def _lose(self, channel: Channel, process: subprocess.Popen[bytes]) -> None:
        """Forget what the process had open; its engines abort its requests."""
        self._loop.remove_reader(channel.fileno())
        self._channel = None
        channel.close()
        for call in list(self._calls.values()):
            call.cancel()
        for client, num_reserved in self._reserved.items():
            self._owner.limiter.account(client).settle(num_reserved, 0)
        self._reserved.clear()
        self.served.clear()
        lost = self._owner.clear(self._number)
        self._ended.set()
        finding = self._loop.run_in_executor(self._owner.threads, describe_end, process, EXIT_SECONDS)
        finding.add_done_callback(lambda found: self._note_end(found.result(), lost))

    def _note_end(self, how: str, lost: int) -> None:
        if self._owner.is_draining:
            return
        self._owner.ends.inc()
        self._owner.lost.inc(lost)
        requests = f"{lost} requests that were open there are lost" if lost else "no request was open there"
        self._launch_again(f"{how}, and {requests}", time.monotonic() - self._began)

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _take(self, message: Any) -> None:
        if isinstance(message, Reported):
            if message.scrape is not None:
                self.scrape = message.scrape
            self._owner.take_report(message)
        elif isinstance(message, ModelServed):
            self.served.add(message.model)
        elif isinstance(message, PassedCall):
            self._pass(message)
        elif isinstance(message, CallCancelled):
            if (call := self._calls.get(message.call)) is not None:
                call.cancel()
        elif isinstance(message, SettleTokens):
            self._reserved[message.client] = self._reserved.get(message.client, 0) - message.num_reserved
            if not self._reserved[message.client]:
                del self._reserved[message.client]
            self._owner.limiter.account(message.client).settle(message.num_reserved, message.num_tokens)
        elif isinstance(message, AdmitClient | ReserveTokens):
            self._begin(message.question, self._permit(message), lambda task: None)

    def _begin(self, number: int, work: Coroutine[Any, Any, Any], then: Callable[[asyncio.Task[Any]], None]) -> None:
        self._calls[number] = task = self._loop.create_task(work)
        task.add_done_callback(lambda _: self._calls.pop(number, None))
        task.add_done_callback(then)

    async def _permit(self, message: AdmitClient | ReserveTokens) -> None:
        error: Exception | None = None
        try:
            if isinstance(message, AdmitClient):
                await self._owner.limiter.admit(message.client)
            else:
                await self._owner.limiter.account(message.client).reserve(message.num_tokens)
                self._reserved[message.client] = self._reserved.get(message.client, 0) + message.num_tokens
        except RateLimited as found:
            error = found.with_traceback(None)
        self.tell(Permitted(message.question, error))

    # ---- requests that are passed on ---------------------------------------------------------------------------------

    def _pass(self, call: PassedCall) -> None:
        self._owner.num_passed += 1
        account = None if call.client is None else self._owner.limiter.account(call.client)
        http, scope = ClientRequest(account), {**call.scope, "app": self._owner.app, "extensions": {}}
        self._begin(call.call, self._answer(call, scope, http), partial(self._end_call, call.call, scope, http))

    async def _answer(self, call: PassedCall, scope: dict[str, Any], http: ClientRequest) -> None:
        """Answer a request by the routes of this process. Raises what they raise."""
        CLIENT_REQUEST.set(http)
        is_read = False

        async def receive() -> dict[str, Any]:
            nonlocal is_read
            if is_read:
                await asyncio.Event().wait()  # if its client leaves, this task is cancelled
            is_read = True
            return {"type": "http.request", "body": call.body, "more_body": False}

        async def send(message: Any) -> None:
            self.tell(CallMessage(call.call, message))

        await self._owner.app.routes(scope, receive, send)

    def _end_call(self, call: int, scope: Mapping[str, Any], http: ClientRequest, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, ANSWERING_ERRORS):
            log.error("request %s failed", scope["state"]["request_id"], exc_info=error)
            error = ServingFailed("The main process could not answer the request; its log says why.")
        self.tell(
            CallEnded(
                call,
                None if error is None else error.with_traceback(None),
                scope["state"].get("errors"),
                http.error,
                http.model,
                (http.prompt_tokens, http.completion_tokens),
                (http.queue_seconds, http.first_token_seconds),
            )
        )
