"""The engine in a process of its own, as the service sees it: a worker whose loop runs elsewhere.

If the process ends while it serves, its requests get an error, and it is started again, with a back-off; requests that
arrive meanwhile are refused as while loading. Other processes that serve HTTP connect to it at its `address`.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from app.engine.worker import Callbacks, State
from app.errors import ArmatureError, NotReady, RequestError, ServiceStopping, ServingFailed, StepFailed
from app.messages import Command, EngineRequest, Stop
from app.metrics.load_progress import LoadProgress
from app.metrics.step_monitor import StepBegin, StepRecorder
from app.metrics.steps import EngineSnapshot
from app.server.channel import Channel, Output, Pickled
from app.server.engine_child import AdapterRead, EngineFailed, HostRecipe, LogLine, ReadAdapter
from app.server.engine_host import EngineReady, HostMessage, StageBegun
from app.server.subprocesses import RestartDelay, describe_end, launch, wait_for_end

log = logging.getLogger(__name__)
MAX_FAILED_STARTS = 5  # in a row, after which the server ends too
EXIT_SECONDS = 5.0  # longest wait for the status of a process that has closed its connection
ADAPTER_SECONDS = 60.0  # longest wait for the weights of an adapter
BACKLOG = 64  # of API processes that connect at the same time


class EngineProcess:
    """A worker in a process of its own. `put` may be called by any thread, everything else on the event loop.

    `make_recipe` says how to make the engine, at each start. `tell` gets the host's messages, in their order, on a
    thread; an error that it raises ends the server. `on_lost` is called on the event loop when the process has ended
    while it served, with the error for its requests. `name` is the model's, for its lines of the log. API processes
    beside this one connect to the UNIX socket at `address`, if it is given.
    """

    def __init__(
        self,
        make_recipe: Callable[[], HostRecipe],
        tell: Callable[[HostMessage], None],
        recorder: StepRecorder,
        on_lost: Callable[[RequestError], None],
        name: str,
        address: str = "",
    ) -> None:
        self.state: State = "loading"
        self.stage = "starting"
        self.load_progress: LoadProgress | None = None
        self.snapshot = EngineSnapshot()
        self.error: BaseException | None = None
        self.pid: int | None = None
        self._name = name
        self._make_recipe, self._tell, self._recorder, self._on_lost = make_recipe, tell, recorder, on_lost
        self._callbacks: Callbacks | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._is_stopping = self._was_ready = False
        self._ready_at = 0.0
        self._num_failed_starts, self._delay = 0, RestartDelay()
        self._restart: asyncio.Task[None] | None = None
        self._messages = ThreadPoolExecutor(1, thread_name_prefix="armature-engine")
        self._adapters: dict[int, Future[RequestError | None]] = {}  # that are being read, by slot
        with tempfile.TemporaryFile() as page:
            page.truncate(mmap.PAGESIZE)
            self._page = os.dup(page.fileno())
        self.address = address
        self._listener: socket.socket | None = None
        self._began = StepBegin(mmap.mmap(self._page, mmap.PAGESIZE))
        recorder.began.append(self._began)

    # ---- as the service sees it --------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """True from `start` until the engine has ended for good."""
        return self._callbacks is not None and self.state not in ("failed", "stopped")

    def put(self, command: Command) -> None:
        """Send a command. Raises `ServiceStopping` or `NotReady` for a request that no engine will get."""
        channel = self._channel
        if channel is not None:
            channel.send(command)
        elif isinstance(command, EngineRequest):
            if self._is_stopping or not self.alive:
                raise ServiceStopping("The server is stopping.")
            raise NotReady(f"The engine is not ready: {self.stage}.")

    def send(self, message: object) -> None:
        """Send a rare message, if there is an engine."""
        if self._channel is not None:
            self._channel.send(Pickled.of(message))

    def read_adapter(self, path: str, slot: int) -> None:
        """Read an adapter's weights for a slot, on any thread but the event loop's. Raises `RequestError`."""
        if self._channel is None:
            raise NotReady(f"The engine is not ready: {self.stage}.")
        reading = self._adapters[slot] = Future()
        self.send(ReadAdapter(path, slot))
        try:
            error = reading.result(ADAPTER_SECONDS)
        except TimeoutError:
            error = StepFailed(f"The adapter was not read within {ADAPTER_SECONDS:g} seconds.")
        finally:
            self._adapters.pop(slot, None)
        if error is not None:
            raise error

    # ---- its life ----------------------------------------------------------------------------------------------------

    def start(self, callbacks: Callbacks) -> None:
        self._callbacks, self._loop = callbacks, asyncio.get_running_loop()
        if self.address:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(self.address)
            self._listener.listen(BACKLOG)
        self._launch()

    async def stop(self, timeout_seconds: float) -> None:
        """Let the process end, and end it after that time. Nothing starts it again."""
        self._is_stopping = True
        if self._restart is not None:
            self._restart.cancel()
        self.put(Stop())
        if self._process is not None:
            await asyncio.to_thread(wait_for_end, self._process, timeout_seconds)
            if self._channel is not None:
                self._lose(self._channel, self._process)
        self.state = "stopped"
        self._messages.shutdown(wait=False)
        os.close(self._page)
        if self._listener is not None:
            self._listener.close()
            Path(self.address).unlink(missing_ok=True)

    def _launch(self) -> None:
        assert self._loop is not None, "the loop starts it"
        recipe = Pickled.of(self._make_recipe())
        listeners = () if self._listener is None else (self._listener.fileno(),)
        self._process, channel = launch("app.server.engine_child", "armature-engine", (self._page, *listeners))
        self.pid, self._channel = self._process.pid, channel
        channel.send(recipe)
        self._loop.add_reader(channel.fileno(), self._read, channel, self._process)

    async def _launch_again(self, delay: float) -> None:
        await asyncio.sleep(delay)
        self._launch()

    def _check_launched(self, launching: asyncio.Task[None]) -> None:
        """Try again later if the process could not be started: there is no memory, process or file left for it."""
        if not launching.cancelled() and (error := launching.exception()) is not None:
            if not isinstance(error, OSError):
                log.error("Starting the engine's process failed", exc_info=error)
            self._end(f"could not be started ({error})")

    def _read(self, channel: Channel, process: subprocess.Popen[bytes]) -> None:
        """Take what has arrived from the engine, on the event loop."""
        assert self._callbacks is not None, "it was started"
        try:
            messages = channel.receive(socket.MSG_DONTWAIT)
        except EOFError:
            self._lose(channel, process)
            return
        for message in messages:
            if isinstance(message, Output):
                self.snapshot = message.snapshot
                if message.stats is not None:
                    self._recorder.record(message.ended_at, message.stats, message.cause)
                self._callbacks.on_output(message.events, message.snapshot, message.stats)
            elif isinstance(rare := message.message(), AdapterRead):
                if reading := self._adapters.pop(rare.slot, None):
                    reading.set_result(rare.error)
            else:
                self._messages.submit(self._take, rare, process).add_done_callback(self._check_taken)

    def _lose(self, channel: Channel, process: subprocess.Popen[bytes]) -> None:
        """Fail the requests of a process that has closed its connection, and look why."""
        assert self._loop is not None, "it was started"
        self._loop.remove_reader(channel.fileno())
        self._channel = None
        self._began.write(0.0)
        was_serving = self.state == "ready"
        if not self._is_stopping:
            self.state, self.stage, self.load_progress = "loading", "the engine has ended", None
        self.snapshot = EngineSnapshot()
        if was_serving:
            self._on_lost(
                StepFailed("The engine has ended unexpectedly and is started again; the request may be sent again.")
            )
        while self._adapters:
            self._adapters.popitem()[1].set_result(StepFailed("The engine has ended while it read the adapter."))
        channel.close()
        if not self._is_stopping:
            self._messages.submit(self._find_end, process)

    # ---- on the thread of rare messages ------------------------------------------------------------------------------

    def _take(self, message: Any, process: subprocess.Popen[bytes]) -> None:
        if process is not self._process:
            return  # it has ended meanwhile
        if isinstance(message, LogLine):
            message.record.model = self._name
            logging.getLogger(message.record.name).handle(message.record)
        elif isinstance(message, EngineFailed):
            self.error = message.error
        else:
            self._take_host_message(message, process)

    def _take_host_message(self, message: HostMessage, process: subprocess.Popen[bytes]) -> None:
        if isinstance(message, StageBegun):
            self.stage = str(message.stage)
            self.load_progress = message.stage if isinstance(message.stage, LoadProgress) else None
        self._tell(message)
        if isinstance(message, EngineReady):
            self._call_on_loop(self._become_ready, process, message.snapshot)

    def _check_taken(self, taking: Future[None]) -> None:
        """End the engine if the serving half cannot serve it: by its tokenizer, its chat template or a fault of ours."""
        error = taking.exception()
        if error is not None and self._process is not None:
            if not isinstance(error, ArmatureError):
                log.error("Loading failed", exc_info=error)
            self.error = error
            self._process.kill()

    def _find_end(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the status of a process that has ended, and decide what follows."""
        self._call_on_loop(self._end, describe_end(process, EXIT_SECONDS))

    def _call_on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None, "it was started"
        with suppress(RuntimeError):  # the loop is closed: nobody is served any more
            self._loop.call_soon_threadsafe(function, *arguments)

    # ---- on the event loop -------------------------------------------------------------------------------------------

    def _become_ready(self, process: subprocess.Popen[bytes], snapshot: EngineSnapshot) -> None:
        if self._channel is None or process is not self._process or self._is_stopping:
            return
        self.state, self.stage, self.load_progress = "ready", "ready", None
        if not self.snapshot.stepped_at:
            self.snapshot = snapshot
        self._was_ready, self._ready_at, self._num_failed_starts = True, time.monotonic(), 0

    def _end(self, what: str) -> None:
        """Start the engine again, or end for good; `what` has happened to it."""
        assert self._loop is not None and self._callbacks is not None, "it was started"
        self.pid = None
        if self._is_stopping:
            return
        error, self.error = self.error, None
        served_seconds = time.monotonic() - self._ready_at if self._ready_at else 0.0
        self._num_failed_starts += not self._ready_at
        self._ready_at = 0.0
        if (error is not None and not self._was_ready) or self._num_failed_starts >= MAX_FAILED_STARTS:
            self.state = "failed"
            self.error = error or ServingFailed(
                f"The engine was started {MAX_FAILED_STARTS} times; its process {what}."
            )
            self._callbacks.on_fatal(self.error)
            return
        delay = self._delay.take(served_seconds)
        because = f": {error}" if error is not None else ""
        log.error("the engine's process %s%s; it is started again in %.0f s", what, because, delay)
        self.stage = f"the engine {what} and is started again"
        self._restart = self._loop.create_task(self._launch_again(delay))
        self._restart.add_done_callback(self._check_launched)
