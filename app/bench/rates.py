"""Throughput of answers that arrive whole: units per second, alone or compared with another server."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from app.bench.loops import Side, Stretch
from app.bench.stats import Figure


class Whole(Protocol):
    """A request whose answer arrived at once."""

    @property
    def client(self) -> int:
        """Index of the client, or number of the arrival."""

    @property
    def ended(self) -> float:
        """Time at which the answer arrived, in `time.perf_counter` seconds."""


W = TypeVar("W", bound=Whole)


@dataclass(frozen=True, slots=True)
class Counted(Generic[W]):
    """A throughput metric: its name, its unit, and the number of units of a request.

    If `requests` is True, requests per second and answered requests are shown in the same row.
    """

    what: str
    unit: str
    weight: Callable[[W], float]
    requests: bool = False


def speed(counted: Counted[W], side: Side[W], against: Side[W] | None) -> Figure:
    """Return the median throughput of the rounds; the ratio to `against` is the median of the ratios of each round."""
    weight = counted.weight
    parts = {"overall": sum(map(weight, side.answered)) / sum(run.ended - run.started for run in side.runs)}
    if counted.requests:
        parts |= {"req/s": side.requests_per_second, "answered": len(side.answered)}
    median = statistics.median(rate(run, side.closed, weight) for run in side.runs if run.answered)
    pairs = [] if against is None else side.pairs(against)
    ratios = [rate(run, side.closed, weight) / rate(its, side.closed, weight) for run, its in pairs]
    ratio = statistics.median(ratios) if ratios else None
    return Figure(
        f"{side.label} {counted.what}", median, counted.unit, ratio=ratio, against=against.server if against else "", parts=parts
    )


def rate(run: Stretch[W], closed: bool, weight: Callable[[W], float]) -> float:
    """Return the units per second within the steady window of a run."""
    begin, end = steady(run, closed)
    return sum(weight(each) for each in run.answered if begin < each.ended <= end) / (end - begin)


def steady(run: Stretch[W], closed: bool) -> tuple[float, float]:
    """Return the begin and end of the window in which throughput is counted.

    In a closed loop this is while all clients wait for an answer; otherwise from the first request to the last
    answer.
    """
    by_client: dict[int, list[W]] = {}
    for answered in run.answered:
        by_client.setdefault(answered.client, []).append(answered)
    begin = max(ordered[0].ended for ordered in by_client.values())
    end = min(ordered[-1].ended for ordered in by_client.values())
    if not closed or run.failures or end <= begin:
        return run.started, max(answered.ended for answered in run.answered)
    return begin, end
