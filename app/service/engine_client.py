"""Client of the worker thread: puts requests into its mailbox and routes its events to the open requests.

Everything runs on the event loop. The worker thread only calls `on_events` and `on_worker_exit`.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    Callable,
    Iterator,
    Sequence,
)
from contextlib import contextmanager
from itertools import count
from typing import (
    Protocol,
    TypeVar,
)

from app.errors import (
    NotReady,
    RequestError,
    ServiceStopping,
    StepFailed,
)
from app.messages import (
    Abort,
    Command,
    Event,
    RequestFailed,
)
from app.metrics.stats import EngineSnapshot
from app.service.admission import Permit

T = TypeVar("T")
# An event of the worker with its arrival time; None when the request has timed out.
TimedEvent = tuple[Event, float] | None
EventCallback = Callable[[TimedEvent], None]


class WorkerInterface(Protocol):
    """Interface of the worker as the service sees it: a mailbox and its state, readable from any thread."""

    @property
    def alive(self) -> bool:
        """True while the worker thread runs."""

    @property
    def state(self) -> str:
        """Lifecycle state, such as `ready`."""

    @property
    def stage(self) -> str:
        """Loading stage in words for people."""

    @property
    def snapshot(self) -> EngineSnapshot:
        """Queue and cache state after the last step."""

    def put(self, command: Command) -> None:
        """Put a command into the mailbox."""


class EngineClient:
    """Client of the worker, bound to the event loop that called `start`."""

    def __init__(self, worker: WorkerInterface, clock: Callable[[], float]) -> None:
        self._worker, self._clock = worker, clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._counter = count()
        self._callbacks: dict[str, EventCallback] = {}  # keys: the request ids that the worker sees

    def start(self) -> None:
        """Bind to the running event loop."""
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Fail all open requests with `ServiceStopping`."""
        self._fail_open(ServiceStopping("The server is stopping."))

    def name(self, request_id: str) -> str:
        """Return a request id that is unique in this process, whatever id the client sent."""
        return f"{request_id}#{next(self._counter)}"

    @contextmanager
    def register(self, request_id: str, callback: EventCallback, permit: Permit, deadline: float) -> Iterator[None]:
        """Pass the worker's events for one request to `callback` while the block runs.

        At the deadline `callback` receives None, the worker receives an `Abort`, and the permit is released.

        Raises:
            NotReady: the worker has stopped.
        """
        assert self._loop is not None, "start() is called before the first request"
        self._callbacks[request_id] = callback
        timer = self._loop.call_later(deadline - self._clock(), self._expire, request_id, permit)
        try:
            if not self._worker.alive:  # checked after registration: a worker that ends later fails it
                raise NotReady("The engine has stopped; the server is about to end.")
            yield
        finally:
            timer.cancel()
            del self._callbacks[request_id]

    def _expire(self, request_id: str, permit: Permit) -> None:
        """Time out a request.

        Its engine capacity and its place become free at once, even if the reader never looks at the result.
        """
        self._worker.put(Abort(request_id, reason="timeout"))
        permit.release()
        self._callbacks[request_id](None)

    # ---- from the worker thread ------------------------------------------------------------------------------------

    def on_events(self, events: Sequence[Event]) -> None:
        """Deliver one step's events with a single wake-up of the event loop. Called from the worker thread."""
        self._call(self._deliver, events)

    def on_worker_exit(self) -> None:
        """Fail all open requests. Called from the worker thread after its last events."""
        self._call(self._fail_open, StepFailed("The engine has stopped; the server is about to end."))

    def _call(self, function: Callable[[T], None], argument: T) -> None:
        if self._loop is None or self._loop.is_closed():
            return  # no event loop, so no open request
        self._loop.call_soon_threadsafe(function, argument)

    def _deliver(self, events: Sequence[Event]) -> None:
        now = self._clock()
        for event in events:
            callback = self._callbacks.get(event.request_id)
            if callback is not None:
                callback((event, now))

    def _fail_open(self, error: RequestError) -> None:
        self._deliver([RequestFailed(name, error) for name in self._callbacks])
