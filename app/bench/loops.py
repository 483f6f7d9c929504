"""Requests as they come: as many clients as wanted who wait for their answers, or arrivals that wait for nobody."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from app.bench.wire import RequestBroken

LONGEST_PAUSE_SECONDS = 5.0  # of a client that was sent away: at most so long, whatever the server asks for
SHORTEST_PAUSE_SECONDS = 0.05

A = TypeVar("A")  # what becomes of one request that is answered


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much of it: so many requests, or those sent within so many seconds; whichever comes first."""

    num_requests: int | None = None
    seconds: float | None = None

    def hold(self, num_sent: int, elapsed: float) -> bool:
        """Whether another one may be sent."""
        few_enough = self.num_requests is None or num_sent < self.num_requests
        return few_enough and (self.seconds is None or elapsed < self.seconds)


@dataclass(slots=True)
class Stretch(Generic[A]):
    """One stretch of load on one server."""

    started: float = 0.0
    ended: float = 0.0
    cpu_seconds: float = 0.0  # of this process
    num_sent: int = 0
    num_pieces: int = 0  # so far, for whoever watches
    answered: list[A] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)  # the first of each kind

    def done(self, bounds: Bounds) -> float:
        """The share of what it will be."""
        num_ended = len(self.answered) + self.failures.total()
        requests = num_ended / bounds.num_requests if bounds.num_requests else 0.0
        seconds = (time.perf_counter() - self.started) / bounds.seconds if bounds.seconds and self.started else 0.0
        return min(1.0, max(requests, seconds))

    def note(self, num_pieces: int) -> bool:
        self.num_pieces += 1
        return True


@dataclass(frozen=True, slots=True)
class Side(Generic[A]):
    """One server under one load: a stretch of every round. `server` is empty where there is but one."""

    label: str
    server: str
    runs: list[Stretch[A]]
    closed: bool

    @property
    def answered(self) -> list[A]:
        return [answered for run in self.runs for answered in run.answered]

    @property
    def requests_per_second(self) -> float:
        return len(self.answered) / sum(run.ended - run.started for run in self.runs)

    def pairs(self, other: Side[A]) -> list[tuple[Stretch[A], Stretch[A]]]:
        """Rounds in which both have answered something."""
        return [(run, its) for run, its in zip(self.runs, other.runs, strict=False) if run.answered and its.answered]


Send = Callable[
    [Stretch[A], int, float], Awaitable[A]
]  # of a client, or of an arrival's number, at its moment; raises `RequestBroken`


async def clients(run: Stretch[A], num_clients: int, bounds: Bounds, send: Send[A]) -> None:
    """A closed loop: each client sends its next request when the last has been answered."""

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
    """An open loop: requests come when they come, however busy the server is."""
    with _timed(run):
        async with asyncio.TaskGroup() as tasks:
            for number, moment in enumerate(moments):
                if not bounds.hold(number, moment):
                    break
                while (early := run.started + moment - time.perf_counter()) > 0:  # an event loop may wake a little too soon
                    await asyncio.sleep(early)
                tasks.create_task(_one(run, number, run.started + moment, send))


async def _one(run: Stretch[A], client: int, intended: float, send: Send[A]) -> float:
    """Sends one request, and answers for how many seconds its client should pause."""
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
    """When it began and ended, and what it cost this process, however it ends."""
    run.started, cpu_seconds = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        run.ended, run.cpu_seconds = time.perf_counter(), time.process_time() - cpu_seconds
