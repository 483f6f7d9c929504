"""Load loops: a closed loop of clients that wait for their answers, or an open loop of arrivals that do not wait.

For answers that arrive whole, it also computes the throughput in units per second, alone or compared with another
server.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from armature_bench.console import Figure
from armature_bench.http.wire import HttpRequestFailed

MAX_PAUSE_SECONDS = 5.0  # upper limit of a rejected client's pause, even if Retry-After is longer
MIN_PAUSE_SECONDS = 0.05

A = TypeVar("A")  # result of one answered request


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Limits of one run: a number of requests, or the seconds within which requests are sent, whichever ends first."""

    num_requests: int | None = None
    seconds: float | None = None

    def allow(self, num_sent: int, elapsed: float) -> bool:
        few_enough = self.num_requests is None or num_sent < self.num_requests
        return few_enough and (self.seconds is None or elapsed < self.seconds)


@dataclass(slots=True)
class LoadRun(Generic[A]):
    started: float = 0.0
    ended: float = 0.0
    cpu_seconds: float = 0.0  # processor time of this process
    num_sent: int = 0
    num_units: int = 0  # units received so far, for the progress display
    answered: list[A] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)  # first message of each kind of failure

    def done(self, bounds: RunLimits) -> float:
        """Return the completed fraction of the run, 0 to 1."""
        num_ended = len(self.answered) + self.failures.total()
        requests = num_ended / bounds.num_requests if bounds.num_requests else 0.0
        seconds = (time.perf_counter() - self.started) / bounds.seconds if bounds.seconds and self.started else 0.0
        return min(1.0, max(requests, seconds))

    def note(self, num_tokens: int) -> bool:
        """Count one chunk that arrived, and return True to continue the stream."""
        self.num_units += 1
        return True


@dataclass(frozen=True, slots=True)
class ServerRuns(Generic[A]):
    """One server under one load: one run per round. `server` is empty if only one server is measured."""

    label: str
    server: str
    runs: list[LoadRun[A]]
    closed: bool

    @property
    def answered(self) -> list[A]:
        return [answered for run in self.runs for answered in run.answered]

    @property
    def requests_per_second(self) -> float:
        return len(self.answered) / sum(run.ended - run.started for run in self.runs)

    def pairs(self, other: ServerRuns[A]) -> list[tuple[LoadRun[A], LoadRun[A]]]:
        """Return the runs of both servers in those rounds in which both answered at least one request."""
        return [(run, its) for run, its in zip(self.runs, other.runs, strict=False) if run.answered and its.answered]


# Sends one request: (run, client or arrival number, intended time). Raises `HttpRequestFailed`.
SendRequest = Callable[[LoadRun[A], int, float], Awaitable[A]]


async def run_closed_loop(run: LoadRun[A], num_clients: int, bounds: RunLimits, send: SendRequest[A]) -> None:
    """Run a closed loop: each client sends its next request when its last one was answered."""

    async def visit(client: int) -> None:
        while bounds.allow(run.num_sent, time.perf_counter() - run.started):
            pause = await _send_one(run, client, time.perf_counter(), send)
            if pause:
                await asyncio.sleep(pause)

    with _timed(run):
        async with asyncio.TaskGroup() as tasks:
            for client in range(num_clients):
                tasks.create_task(visit(client))


async def run_open_loop(run: LoadRun[A], moments: Iterable[float], bounds: RunLimits, send: SendRequest[A]) -> None:
    """Run an open loop: requests are sent at the given moments, regardless of the server's load."""
    with _timed(run):
        async with asyncio.TaskGroup() as tasks:
            for number, moment in enumerate(moments):
                if not bounds.allow(number, moment):
                    break
                while (early := run.started + moment - time.perf_counter()) > 0:  # the event loop may wake early
                    await asyncio.sleep(early)
                tasks.create_task(_send_one(run, number, run.started + moment, send))


async def _send_one(run: LoadRun[A], client: int, intended: float, send: SendRequest[A]) -> float:
    """Send one request and return the seconds that its client should pause."""
    run.num_sent += 1
    try:
        run.answered.append(await send(run, client, intended))
    except HttpRequestFailed as error:
        run.failures[error.kind] += 1
        run.messages.setdefault(error.kind, str(error))
        return min(max(error.retry_after, MIN_PAUSE_SECONDS), MAX_PAUSE_SECONDS)
    return 0.0


@contextmanager
def _timed(run: LoadRun[A]) -> Iterator[None]:
    """Record start, end and processor time of a run, also if it fails."""
    run.started, cpu_seconds = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        run.ended, run.cpu_seconds = time.perf_counter(), time.process_time() - cpu_seconds


class WholeAnswer(Protocol):
    """A request with an answer that arrived at once."""

    @property
    def client(self) -> int:
        """Index of the client, or number of the arrival."""

    @property
    def ended(self) -> float:
        """Time at which the answer arrived, in `time.perf_counter` seconds."""


W = TypeVar("W", bound=WholeAnswer)


@dataclass(frozen=True, slots=True)
class RateMetric(Generic[W]):
    """A throughput metric: its name, its unit, and the number of units of a request.

    With `requests`, requests per second and answered requests are shown in the same row.
    """

    what: str
    unit: str
    weight: Callable[[W], float]
    requests: bool = False


def rate_figure(counted: RateMetric[W], side: ServerRuns[W], against: ServerRuns[W] | None) -> Figure:
    """Return the median throughput of the rounds; the ratio to `against` is the median of each round's ratios."""
    weight = counted.weight
    parts = {"overall": sum(map(weight, side.answered)) / sum(run.ended - run.started for run in side.runs)}
    if counted.requests:
        parts |= {"req/s": side.requests_per_second, "answered": len(side.answered)}
    median = statistics.median(units_per_second(run, side.closed, weight) for run in side.runs if run.answered)
    pairs = [] if against is None else side.pairs(against)
    ratios = [
        units_per_second(run, side.closed, weight) / units_per_second(its, side.closed, weight) for run, its in pairs
    ]
    ratio = statistics.median(ratios) if ratios else None
    return Figure(
        f"{side.label} {counted.what}",
        median,
        counted.unit,
        ratio=ratio,
        against=against.server if against else "",
        parts=parts,
    )


def units_per_second(run: LoadRun[W], closed: bool, weight: Callable[[W], float]) -> float:
    begin, end = whole_answer_window(run, closed)
    return sum(weight(each) for each in run.answered if begin < each.ended <= end) / (end - begin)


def whole_answer_window(run: LoadRun[W], closed: bool) -> tuple[float, float]:
    """Return the begin and end of the window in which throughput is counted.

    In a closed loop this is while all clients wait for an answer; otherwise from the first request to the last answer.
    """
    by_client: dict[int, list[W]] = {}
    for answered in run.answered:
        by_client.setdefault(answered.client, []).append(answered)
    begin = max(answers[0].ended for answers in by_client.values())
    end = min(answers[-1].ended for answers in by_client.values())
    if not closed or run.failures or end <= begin:
        return run.started, max(answered.ended for answered in run.answered)
    return begin, end
