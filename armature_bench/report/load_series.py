"""Latencies of `armature bench http` by load and over time, from the requests in its JSON object."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Request = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LatencyMeasure:
    """A latency of a request: its short name, its meaning, and its seconds, None if the request has none."""

    name: str
    meaning: str
    seconds: Callable[[Request], float | None]


def _seconds_per_token(request: Request) -> float | None:
    later = request["tokens"] - 1
    return (request["last_token"] - request["first_token"]) / later if later > 0 and request["pieces"] > 1 else None


MEASURES = (
    LatencyMeasure("TTFT", "time to the first token", lambda request: request.get("first_token")),
    LatencyMeasure(
        "TPOT",
        "mean time of a token after the first",
        lambda request: _seconds_per_token(request) if "first_token" in request else None,
    ),
    LatencyMeasure("E2E", "time to the last token", lambda request: request.get("last_token")),
    LatencyMeasure("latency", "time to the answer", lambda request: request.get("answered")),
)


@dataclass(frozen=True, slots=True)
class LoadSeries:
    """The requests of one load: when each was due, in seconds from the start of its run, and its latency in seconds.

    The requests of all rounds are together, in the order of their times.
    """

    label: str
    at: tuple[float, ...]
    seconds: tuple[float, ...]


def load_series(runs: Sequence[Mapping[str, Any]]) -> dict[LatencyMeasure, list[LoadSeries]]:
    """Return the series of each measure that requests have, in the order of the loads."""
    several = len({run["server"] for run in runs}) > 1
    by_load: dict[str, list[Request]] = {}
    for run in runs:
        label = f"{run['level']} {run['server'].rpartition('//')[2]}" if several else str(run["level"])
        by_load.setdefault(label, []).extend(run["requests"])
    found: dict[LatencyMeasure, list[LoadSeries]] = {}
    for measure in MEASURES:
        for label, requests in by_load.items():
            timed = ((float(request["intended"]), measure.seconds(request)) for request in requests)
            known = sorted((at, seconds) for at, seconds in timed if seconds is not None)
            if known:
                at, seconds = (tuple(column) for column in zip(*known, strict=True))
                found.setdefault(measure, []).append(LoadSeries(label, at, seconds))
    return found


def log_bounds(all_series: Sequence[LoadSeries]) -> tuple[float, float]:
    """Return the shortest and the longest time of all, at least a factor of two apart."""
    shortest = max(1e-6, min(min(series.seconds) for series in all_series))
    return shortest, max(2 * shortest, *(max(series.seconds) for series in all_series))


def log_place(seconds: float, bounds: tuple[float, float]) -> float:
    """Return the place of a time on a logarithmic axis with these bounds, 0 to 1."""
    low, high = bounds
    return min(1.0, math.log(max(seconds, low) / low) / math.log(high / low))
