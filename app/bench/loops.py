"""Load loops: a closed loop of clients that wait for their answers, or an open loop of arrivals that do not wait."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from app.bench.wire import RequestBroken

LONGEST_PAUSE_SECONDS = 5.0  # upper limit of a rejected client's pause, even if Retry-After is longer
SHORTEST_PAUSE_SECONDS = 0.05

A = TypeVar("A")  # result of one answered request


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one run: a number of requests, or the seconds within which requests are sent, whichever ends first."""

    num_requests: int | None = None
    seconds: float | None = None

    def hold(self, num_sent: int, elapsed: float) -> bool:
        """Return True if another request may be sent."""
        few_enough = self.num_requests is None or num_sent < self.num_requests
        return few_enough and (self.seconds is None or elapsed < self.seconds)


@dataclass(slots=True)
class Stretch(Generic[A]):
    """One run of load on one server, and its results."""

    started: float = 0.0
    ended: float = 0.0
    cpu_seconds: float = 0.0  # processor time of this process
    num_sent: int = 0
    num_pieces: int = 0  # units received so far, for the progress display
    answered: list[A] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)  # first message of each kind of failure

    def done(self, bounds: Bounds) -> float:
        """Return the completed fraction of the run, 0 to 1."""
        num_ended = len(self.answered) + self.failures.total()
        requests = num_ended / bounds.num_requests if bounds.num_requests else 0.0
        seconds = (time.perf_counter() - self.started) / bounds.seconds if bounds.seconds and self.started else 0.0
        return min(1.0, max(requests, seconds))

    def note(self, num_pieces: int) -> bool:
        """Count one chunk that arrived, and return True to continue the stream."""
        self.num_pieces += 1
        return True


@dataclass(frozen=True, slots=True)
class Side(Generic[A]):
    """One server under one load: one run per round. `server` is empty if only one server is measured."""

    label: str
    server: str
    runs: list[Stretch[A]]
    closed: bool

    @property
    def answered(self) -> list[A]:
        """All answered requests of all runs."""
        return [answered for run in self.runs for answered in run.answered]

    @property
    def requests_per_second(self) -> float:
        """Answered requests per second of run time."""
        return len(self.answered) / sum(run.ended - run.started for run in self.runs)

    def pairs(self, other: Side[A]) -> list[tuple[Stretch[A], Stretch[A]]]:
        """Return the runs of both servers in those rounds in which both answered at least one request."""
        return [(run, its) for run, its in zip(self.runs, other.runs, strict=False) if run.answered and its.answered]


# Sends one request: (run, client or arrival number, intended time). Raises `RequestBroken`.
Send = Callable[[Stretch[A], int, float], Awaitable[A]]


async def clients(run: Stretch[A], num_clients: int, bounds: Bounds, send: Send[A]) -> None:
    """Run a closed loop: each client sends its next request when its last one was answered."""

    async def visit(client: int) -> None:
        while bounds.hold(run.num_sent, time.perf_counter() - run.started):
            pause = await _one(run, client, time.perf_counter(), send)
            if pause:
                await asyncio.sleep(pause)

    with _timed(run):
        async with asyncio.TaskGroup() as tasks:
            for client in range(num_clients):
                tasks.create_task(visit(client))


async def arrivals(run: Stretch[A], moments: Iterable[float], bounds: Bounds, send: Send[A]) -> None:
    """Run an open loop: requests are sent at the given moments, regardless of the server's load."""
    with _timed(run):
        async with asyncio.TaskGroup() as tasks:
            for number, moment in enumerate(moments):
                if not bounds.hold(number, moment):
                    break
                while (early := run.started + moment - time.perf_counter()) > 0:  # the event loop may wake early
                    await asyncio.sleep(early)
                tasks.create_task(_one(run, number, run.started + moment, send))


async def _one(run: Stretch[A], client: int, intended: float, send: Send[A]) -> float:
    """Send one request and return the seconds that its client should pause."""
    run.num_sent += 1
    try:
        run.answered.append(await send(run, client, intended))
    except RequestBroken as error:
        run.failures[error.kind] += 1
        run.messages.setdefault(error.kind, str(error))
        return min(max(error.retry_after, SHORTEST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
    return 0.0


@contextmanager
def _timed(run: Stretch[A]) -> Iterator[None]:
    """Record start, end and processor time of a run, also if it fails."""
    run.started, cpu_seconds = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        run.ended, run.cpu_seconds = time.perf_counter(), time.process_time() - cpu_seconds
