"""The one thread that owns device, model and engine: loads, takes commands from its mailbox, steps, and tells what happened once a step.

It knows no event loop and no metrics: callbacks carry its words away. When it ends in any way but `Stop`, `on_fatal` is told.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Literal, Protocol, TypeVar

from app.errors import ArmatureError, RequestError, ServiceStopping, StepFailed
from app.measured import Snapshot, StepStats
from app.messages import Abort, Command, Event, Order, RequestFailed, Stop

log = logging.getLogger(__name__)

T = TypeVar("T")
State = Literal["loading", "ready", "failed", "stopped"]

# Failing steps in a row after which it is looked whether the device still computes anything. That it does not is the only reason to end:
# what breaks for its own requests alone, a client could send for ever.
MAX_FAILED_STEPS = 3


class Engine(Protocol):
    """What a decoder and an encoder have in common."""

    stats: StepStats | None

    @property
    def has_work(self) -> bool: ...
    @property
    def patience_seconds(self) -> float:
        """How long the next step may wait for more orders, although there is work."""
        ...

    def add(self, order: Any) -> list[Event]: ...
    def abort(self, command: Abort) -> list[Event]: ...
    def step(self) -> list[Event]: ...
    def fail(self) -> list[Event]: ...
    def fail_all(self, error: RequestError) -> list[Event]: ...
    def check(self) -> None:
        """Computes something that is known to work, beside all requests: raises what a broken device raises."""
        ...

    def snapshot(self) -> Snapshot: ...


def _never(_: Exception) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Callbacks:
    """All are called on the worker thread. `on_events` never gets an empty list; `is_fatal` says that the device cannot survive this."""

    on_events: Callable[[list[Event]], None]
    on_fatal: Callable[[BaseException], None]
    on_step: Callable[[StepStats, Snapshot], None] = lambda stats, snapshot: None
    is_fatal: Callable[[Exception], bool] = _never


class Watch(Protocol):
    """Stands beside the loop, on the worker thread."""

    def begin(self) -> None:
        """The next thing is a step."""
        ...

    def end(self, step: StepStats) -> None:
        """The last thing was this one; its clients are still to be told."""
        ...

    def rest(self) -> None:
        """After a step of which everybody was told."""
        ...

    def idle(self) -> None:
        """There is nothing to compute until a command comes."""
        ...

    def close(self) -> None:
        """The thread ends."""
        ...


class Unwatched:
    """A `Watch` that sees nothing."""

    def begin(self) -> None: ...
    def end(self, step: StepStats) -> None: ...
    def rest(self) -> None: ...
    def idle(self) -> None: ...
    def close(self) -> None: ...


class Worker:
    """`state`, `stage`, `snapshot`, `error` and `alive` may be read from any thread, `put` called from any."""

    def __init__(
        self, build: Callable[[Callable[[str], None]], Engine], callbacks: Callbacks, watch: Watch | None = None
    ) -> None:
        self.state: State = "loading"
        self.stage = "starting"
        self.snapshot = Snapshot()
        self.error: BaseException | None = None
        self._build = build
        self._callbacks = callbacks
        self._watch = watch or Unwatched()
        self._mailbox: SimpleQueue[Command] = SimpleQueue()
        self._failed_steps = 0
        self._thread = threading.Thread(target=self._run, name="armature-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, command: Command) -> None:
        """Raises `ServiceStopping` for a request that nobody would read any more."""
        self._mailbox.put(command)
        if isinstance(command, Order) and self.state in ("failed", "stopped"):
            raise ServiceStopping("The server is stopping.")

    def join(self, timeout_seconds: float | None = None) -> None:
        self._thread.join(timeout_seconds)

    @property
    def alive(self) -> bool:
        """False before `start` and once the thread has ended, however it did."""
        return self._thread.is_alive()

    # ---- on the worker thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine, error = self._attempt(lambda: self._build(self._report))
            if engine is None:
                self.error = error
                return
            self.state, self.stage, self.snapshot = "ready", "ready", engine.snapshot()
            self._serve(engine)
        finally:
            self._finish()

    def _serve(self, engine: Engine) -> None:
        """Until `Stop` or a failure that cannot be survived. An idle engine blocks on the mailbox."""
        while self.error is None:
            events, stop = self._take_commands(engine)
            if stop:
                self.state = "stopped"
                self._tell([*events, *engine.fail_all(ServiceStopping("The server is stopping."))])
                return
            stats = None
            if engine.has_work:
                told, stats = self._step(engine)
                events += told
            self.snapshot = engine.snapshot()
            self._tell(events)
            if stats is not None:
                self._callbacks.on_step(stats, self.snapshot)
                self._watch.rest()

    def _take_commands(self, engine: Engine) -> tuple[list[Event], bool]:
        """Everything in the mailbox, waiting for the first where there is nothing else to do; True when `Stop` was among it."""
        events: list[Event] = []
        block = not engine.has_work
        if block:
            self._watch.idle()
        while (command := self._next(block, engine if not events else None)) is not None:
            block = False
            if isinstance(command, Stop):
                return events, True
            events += engine.abort(command) if isinstance(command, Abort) else engine.add(command)
        return events, False

    def _next(self, block: bool, waiting: Engine | None) -> Command | None:
        """The next command. Where there is none now, one that comes while the engine would wait with its step."""
        try:
            return self._mailbox.get(block=block)
        except Empty:
            patience = 0.0 if waiting is None else waiting.patience_seconds
        if patience <= 0.0:
            return None
        try:
            return self._mailbox.get(timeout=patience)
        except Empty:
            return None

    def _step(self, engine: Engine) -> tuple[list[Event], StepStats | None]:
        self._watch.begin()
        events, error = self._attempt(engine.step)
        if events is not None:
            self._failed_steps = 0
            if engine.stats is not None:
                self._watch.end(engine.stats)
            return events, engine.stats
        assert error is not None, "what returns nothing has raised"
        failed = engine.fail()
        self._failed_steps += bool(failed)  # a step that ended nobody's request is tried again in parts
        if not self._is_lost(engine, error):
            return failed, None
        self.error = error
        return failed + engine.fail_all(StepFailed("The server's device has failed; the server is restarting.")), None

    def _is_lost(self, engine: Engine, error: Exception) -> bool:
        """Whether the device has failed, and not only the step."""
        if self._callbacks.is_fatal(error):
            return True
        if self._failed_steps < MAX_FAILED_STEPS:
            return False
        self._failed_steps = 0
        _, broken = self._attempt(engine.check)
        if broken is None:
            log.warning("%d steps failed one after the other, and the device computes: it was their requests", MAX_FAILED_STEPS)
        return broken is not None

    def _attempt(self, action: Callable[[], T]) -> tuple[T | None, Exception | None]:
        """The one place of the engine where every failure is caught, so that the requests behind it are told."""
        try:
            return action(), None
        except Exception as error:
            # What loading says in a sentence, `on_fatal` passes on; anything else is told with its trace.
            if self.state != "loading" or not isinstance(error, ArmatureError):
                log.exception("%s failed", "Loading" if self.state == "loading" else "A step")
            return None, error

    def _finish(self) -> None:
        """Whatever ended the thread: who is still in the mailbox is told, and the process learns that it cannot serve."""
        self._watch.close()
        if self.state != "stopped":
            self.state, self.error = "failed", self.error or sys.exception()
        events: list[Event] = []
        while not self._mailbox.empty():
            command = self._mailbox.get()
            if isinstance(command, Order):
                events.append(RequestFailed(command.request_id, ServiceStopping("The server is stopping.")))
        self._tell(events)
        if self.state == "failed":
            self._callbacks.on_fatal(self.error or RuntimeError("The worker thread ended without an error."))

    def _tell(self, events: list[Event]) -> None:
        if events:
            self._callbacks.on_events(events)

    def _report(self, stage: str) -> None:
        self.stage = stage
