"""How many a second where answers come whole: of anything that a request counts as, alone or held against another server."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from app.bench.loops import Side, Stretch
from app.bench.stats import Figure


class Whole(Protocol):
    """A request that was answered at once; `client`: whose it was."""

    @property
    def client(self) -> int: ...

    @property
    def ended(self) -> float: ...


W = TypeVar("W", bound=Whole)


@dataclass(frozen=True, slots=True)
class Counted(Generic[W]):
    """What is counted, in words and its unit, and how much of it a request is. `requests`: they are told beside it."""

    what: str
    unit: str
    weight: Callable[[W], float]
    requests: bool = False


def speed(counted: Counted[W], side: Side[W], against: Side[W] | None) -> Figure:
    """Median of rounds; `against`: how many times as much, round by round."""
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
    """A second of `steady`."""
    begin, end = steady(run, closed)
    return sum(weight(each) for each in run.answered if begin < each.ended <= end) / (end - begin)


def steady(run: Stretch[W], closed: bool) -> tuple[float, float]:
    """While all clients wait for an answer where there are clients; else from the first request to the last answer."""
    by_client: dict[int, list[W]] = {}
    for answered in run.answered:
        by_client.setdefault(answered.client, []).append(answered)
    begin = max(ordered[0].ended for ordered in by_client.values())
    end = min(ordered[-1].ended for ordered in by_client.values())
    if not closed or run.failures or end <= begin:
        return run.started, max(answered.ended for answered in run.answered)
    return begin, end
