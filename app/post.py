"""The way to the worker thread and back: who waits for which answer, until it has come or its time is over.

Lives on the event loop; the worker's thread only calls in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Protocol, TypeVar

from app.admission import Permit
from app.errors import NotReady, RequestError, ServiceStopping, StepFailed
from app.measured import Snapshot
from app.messages import Abort, Command, Event, RequestFailed

T = TypeVar("T")
# An event of the worker with the time it came; None when the request's time is over.
Letter = tuple[Event, float] | None
Tell = Callable[[Letter], None]


class WorkerPort(Protocol):
    """What the service sees of the worker: a mailbox and a few words about its state, readable from any thread."""

    @property
    def alive(self) -> bool: ...
    @property
    def state(self) -> str: ...
    @property
    def stage(self) -> str: ...
    @property
    def snapshot(self) -> Snapshot: ...
    def put(self, command: Command) -> None: ...


class Post:
    """Bound to the event loop that called `start`."""

    def __init__(self, worker: WorkerPort, clock: Callable[[], float]) -> None:
        self._worker, self._clock = worker, clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = count()
        self._open: dict[str, Tell] = {}  # by the worker's name for the request

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Whatever is open fails."""
        self._fail_open(ServiceStopping("The server is stopping."))

    def name(self, request_id: str) -> str:
        """A unique one for the worker, whatever id a client gave."""
        return f"{request_id}#{next(self._numbers)}"

    @contextmanager
    def expecting(self, name: str, tell: Tell, permit: Permit, deadline: float) -> Iterator[None]:
        """In here `tell` hears the worker's answers to the order of this name, and None at the deadline; then its place is free too."""
        assert self._loop is not None, "the service is started before it is asked"
        self._open[name] = tell
        timer = self._loop.call_later(deadline - self._clock(), self._expire, name, permit)
        try:
            if not self._worker.alive:  # looked at after enrolling: a worker that ends later will tell
                raise NotReady("The engine has stopped; the server is about to end.")
            yield
        finally:
            timer.cancel()
            del self._open[name]

    def _expire(self, name: str, permit: Permit) -> None:
        """Out of time: engine and place are free at once, even if nobody ever looks at what was told."""
        self._worker.put(Abort(name, reason="timeout"))
        permit.release()
        self._open[name](None)

    # ---- from the worker thread ------------------------------------------------------------------------------------

    def on_events(self, events: Sequence[Event]) -> None:
        """Once a step: one wake of the loop, however many requests are told."""
        self._call(self._deliver, events)

    def on_worker_exit(self) -> None:
        """After the worker's last events."""
        self._call(self._fail_open, StepFailed("The engine has stopped; the server is about to end."))

    def _call(self, function: Callable[[T], None], argument: T) -> None:
        if self._loop is None or self._loop.is_closed():
            return  # nobody is left to be told
        self._loop.call_soon_threadsafe(function, argument)

    def _deliver(self, events: Sequence[Event]) -> None:
        now = self._clock()
        for event in events:
            tell = self._open.get(event.request_id)
            if tell is not None:
                tell((event, now))

    def _fail_open(self, error: RequestError) -> None:
        self._deliver([RequestFailed(name, error) for name in self._open])
