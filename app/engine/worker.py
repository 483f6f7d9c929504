"""The worker thread, which owns the device, the model and the engine.

It loads the model, takes commands from its mailbox, computes steps, and sends the events of each step. All output goes
through callbacks. If it ends for any reason other than `Stop`, it calls `on_fatal`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Literal, Protocol, TypeVar

from app.errors import ArmatureError, RequestError, ServiceStopping, StepFailed
from app.messages import Abort, Command, EngineRequest, Event, RequestFailed, Stop
from app.metrics.load_progress import LoadProgress
from app.metrics.steps import EngineSnapshot, StepStats

log = logging.getLogger(__name__)

T = TypeVar("T")
State = Literal["loading", "ready", "failed", "stopped"]

# Interval at which Python switches threads: the longest wait of the event loop for a busy worker thread.
SWITCH_SECONDS = 0.001
# Number of consecutive failed steps after which the device is checked. A device that no longer computes is the
# only reason to end the thread: a client could send requests that fail by themselves indefinitely.
MAX_FAILED_STEPS = 3
IDLE_SECONDS = 5.0  # without any command, after which the server counts as idle
PAUSE_SECONDS = 0.2  # the same for work that is done in every pause
CLOSE_SECONDS = 2.0  # for that work at the end


class Engine(Protocol):
    stats: StepStats | None

    @property
    def has_work(self) -> bool: ...

    @property
    def batching_delay_seconds(self) -> float:
        """Time that the next step may wait for more requests although there is work, in seconds."""

    def add(self, order: Any) -> list[Event]: ...

    def abort(self, command: Abort) -> list[Event]: ...

    def step(self) -> list[Event]: ...

    def fail(self) -> list[Event]: ...

    def fail_all(self, error: RequestError) -> list[Event]: ...

    def check(self) -> None:
        """Compute a small input that is known to work, outside all requests. Raises the error of a broken device."""

    def snapshot(self) -> EngineSnapshot: ...


def _only_failures(events: list[Event]) -> bool:
    return bool(events) and all(isinstance(one, RequestFailed) and isinstance(one.error, StepFailed) for one in events)


def _ignore(*_: object) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The worker's callbacks, all called on the worker thread.

    `on_output` gets the events after each pass through the loop, the state that clients may see then, and the statistics
    of a step, if one was computed. `is_fatal` returns True if the device cannot survive the error. `on_idle` is called
    when no command has arrived for `IDLE_SECONDS`; it gets the engine and a function that returns True as soon as a
    command waits, and must return at once then. It returns True to be called again after as long a time. `on_pause` is
    called with the same arguments whenever no command has arrived for `PAUSE_SECONDS`, and before the thread stops; then
    its function returns True after `CLOSE_SECONDS`.
    """

    on_output: Callable[[list[Event], EngineSnapshot, StepStats | None], None]
    on_fatal: Callable[[BaseException], None]
    is_fatal: Callable[[Exception], bool] = lambda error: False
    on_idle: Callable[[Engine, Callable[[], bool]], bool] | None = None
    on_pause: Callable[[Engine, Callable[[], bool]], None] | None = None


class StepObserver(Protocol):
    def begin(self) -> None: ...

    def end(self, step: StepStats) -> None:
        """Note that a step ended. Its events have not been sent yet."""

    def events_sent(self) -> None: ...

    def idle(self) -> None:
        """Note that there is nothing to compute until a command arrives."""

    def close(self) -> None: ...


class Mailbox(Protocol):
    """A queue of commands, as `queue.SimpleQueue` is one. Any thread puts, the worker's thread gets."""

    def put(self, command: Command) -> None: ...

    def get(self, block: bool = True, timeout: float | None = None) -> Command: ...

    def empty(self) -> bool: ...


class NullStepObserver:
    def begin(self) -> None: ...

    def end(self, step: StepStats) -> None: ...

    def events_sent(self) -> None: ...

    def idle(self) -> None: ...

    def close(self) -> None: ...


class Worker:
    """The worker thread and its mailbox. Any thread may call `put` and read the public attributes."""

    def __init__(
        self,
        build: Callable[[Callable[[str | LoadProgress], None]], Engine],
        observer: StepObserver | None = None,
        mailbox: Mailbox | None = None,
    ) -> None:
        self.state: State = "loading"
        self.stage = "starting"
        self.load_progress: LoadProgress | None = None
        self.snapshot = EngineSnapshot()
        self.error: BaseException | None = None
        self._build = build
        self._callbacks = Callbacks(_ignore, _ignore)  # until `start`
        self._observer = observer or NullStepObserver()
        self._mailbox: Mailbox = SimpleQueue[Command]() if mailbox is None else mailbox
        self._held: Command | None = None  # a command that ended the wait for idle time
        self._has_idle_work = True
        self._failed_steps = 0
        self._thread = threading.Thread(target=self._run, name="armature-worker", daemon=True)

    def start(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks
        self._thread.start()

    def put(self, command: Command) -> None:
        """Put a command into the mailbox. Raises `ServiceStopping` for a request after the worker has ended."""
        self._mailbox.put(command)
        if isinstance(command, EngineRequest) and self.state in ("failed", "stopped"):
            raise ServiceStopping("The server is stopping.")

    async def stop(self, timeout_seconds: float) -> None:
        """Let the thread end, and wait for limited time."""
        self.put(Stop())
        await asyncio.to_thread(self.join, timeout_seconds)

    def join(self, timeout_seconds: float | None = None) -> None:
        self._thread.join(timeout_seconds)

    @property
    def alive(self) -> bool:
        """True while the thread runs; False before `start` and after the thread has ended for any reason."""
        return self._thread.is_alive()

    # ---- on the worker thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine, error = self._attempt(lambda: self._build(self._report))
            if engine is None:
                self.error = error
                return
            self._report("ready")
            self.state, self.snapshot = "ready", engine.snapshot()
            self._serve(engine)
        finally:
            self._finish()

    def _serve(self, engine: Engine) -> None:
        while self.error is None:
            events, stop = self._take_commands(engine)
            if stop:
                self.state = "stopped"
                events += engine.fail_all(ServiceStopping("The server is stopping."))
                self._callbacks.on_output(events, self.snapshot, None)
                self._close(engine)
                return
            stats = None
            if engine.has_work:
                step_events, stats = self._step(engine)
                events += step_events
            self.snapshot = engine.snapshot()
            self._callbacks.on_output(events, self.snapshot, stats)
            if stats is not None:
                self._observer.events_sent()

    def _take_commands(self, engine: Engine) -> tuple[list[Event], bool]:
        """Process all commands in the mailbox, of which the first is waited for if there is no work; True: `Stop`."""
        events: list[Event] = []
        block = not engine.has_work
        if block:
            self._observer.idle()
            self._use_idle_time(engine)
        while (command := self._next(block, engine if not events else None)) is not None:
            block = False
            if isinstance(command, Stop):
                return events, True
            events += engine.abort(command) if isinstance(command, Abort) else engine.add(command)
        return events, False

    def _use_idle_time(self, engine: Engine) -> None:
        """Call `on_pause` after a short time without commands, then `on_idle` until it has nothing to do."""
        on_idle = self._callbacks.on_idle
        if self._callbacks.on_pause is not None and self._held is None:
            try:
                self._held = self._mailbox.get(timeout=PAUSE_SECONDS)
            except Empty:
                self._use_pause(engine, lambda: not self._mailbox.empty())
        while on_idle is not None and self._has_idle_work and self._held is None:
            try:
                self._held = self._mailbox.get(timeout=IDLE_SECONDS)
            except Empty:
                again, error = self._attempt(lambda: on_idle(engine, lambda: not self._mailbox.empty()))
                self._has_idle_work = bool(again)
                if error is not None:
                    engine.fail()

    def _close(self, engine: Engine) -> None:
        deadline = time.monotonic() + CLOSE_SECONDS
        self._use_pause(engine, lambda: time.monotonic() > deadline)

    def _use_pause(self, engine: Engine, is_wanted: Callable[[], bool]) -> None:
        on_pause = self._callbacks.on_pause
        if on_pause is not None:
            self._attempt(lambda: on_pause(engine, is_wanted))

    def _next(self, block: bool, waiting: Engine | None) -> Command | None:
        """Return the next command; None if there is none, after the engine's batching delay if not `block`."""
        if self._held is not None:
            held, self._held = self._held, None
            return held
        try:
            return self._mailbox.get(block=block)
        except Empty:
            delay = 0.0 if waiting is None else waiting.batching_delay_seconds
        if delay <= 0.0:
            return None
        try:
            return self._mailbox.get(timeout=delay)
        except Empty:
            return None

    def _step(self, engine: Engine) -> tuple[list[Event], StepStats | None]:
        self._observer.begin()
        events, error = self._attempt(engine.step)
        if events is not None:
            self._failed_steps = self._failed_steps + 1 if _only_failures(events) else 0
            if engine.stats is not None:
                self._observer.end(engine.stats)
            if self._failed_steps < MAX_FAILED_STEPS:
                return events, engine.stats
            return self._check_device(engine, events), engine.stats
        assert error is not None, "an attempt without a result has an error"
        failed = engine.fail()
        self._failed_steps += bool(failed)  # a step that ended no request is retried in parts
        if not self._is_lost(engine, error):
            return failed, None
        self.error = error
        return failed + engine.fail_all(StepFailed("The server's device has failed; the server is restarting.")), None

    def _check_device(self, engine: Engine, events: list[Event]) -> list[Event]:
        broken = self._broken_device(engine)
        if broken is None:
            return events
        self.error = broken
        return events + engine.fail_all(StepFailed("The server's device has failed; the server is restarting."))

    def _is_lost(self, engine: Engine, error: Exception) -> bool:
        if self._callbacks.is_fatal(error):
            return True
        return self._failed_steps >= MAX_FAILED_STEPS and self._broken_device(engine) is not None

    def _broken_device(self, engine: Engine) -> Exception | None:
        self._failed_steps = 0
        _, broken = self._attempt(engine.check)
        if broken is None:
            log.warning(
                "%d consecutive steps failed, but the device still works: their requests caused the failures.",
                MAX_FAILED_STEPS,
            )
        return broken

    def _attempt(self, action: Callable[[], T]) -> tuple[T | None, Exception | None]:
        """Run an action and return its result or its exception: the one place of the engine that catches all."""
        try:
            return action(), None
        except Exception as error:
            # `on_fatal` reports loading errors that are a complete sentence; all others are logged with a
            # traceback.
            if self.state != "loading" or not isinstance(error, ArmatureError):
                log.exception("%s failed", "Loading" if self.state == "loading" else "A step")
            return None, error

    def _finish(self) -> None:
        """Reject the requests that are still in the mailbox, and report a failure of the worker to the process."""
        self._observer.close()
        if self.state != "stopped":
            self.state, self.error = "failed", self.error or sys.exception()
        events: list[Event] = []
        while not self._mailbox.empty():
            command = self._mailbox.get()
            if isinstance(command, EngineRequest):
                events.append(RequestFailed(command.request_id, ServiceStopping("The server is stopping.")))
        if events:
            self._callbacks.on_output(events, self.snapshot, None)
        if self.state == "failed":
            self._callbacks.on_fatal(self.error or RuntimeError("The worker thread ended without an error."))

    def _report(self, stage: str | LoadProgress) -> None:
        self.stage = str(stage)
        self.load_progress = stage if isinstance(stage, LoadProgress) else None
