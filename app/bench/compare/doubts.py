"""What a reader must know before believing a result's figures, each in a sentence: about the server, its machine, and this client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.bench.compare.result import Point

MUCH_THROTTLED = 0.01  # of a load's seconds
MUCH_STOLEN = 0.05  # of all cores
MUCH_CLIENT = 0.5  # of a core
STEADY_RATIO = 1.1  # between the slowest and the quickest of the same load


@dataclass(frozen=True, slots=True)
class Measured:
    """`info` when the first load began, `info_after` the last; `points` with those that were measured again."""

    info: Mapping[str, Any]
    info_after: Mapping[str, Any]
    version: str
    url: str | None
    local: bool
    points: Sequence[Point]
    repeats: Sequence[Point] = ()
    lost_steps: int = 0
    told: Sequence[str] = field(default=())  # what was said on the way: loads left out, and what ended it

    @property
    def loads(self) -> list[Point]:
        return [*self.points, *self.repeats]


def doubts(measured: Measured) -> list[str]:
    return [*measured.told, *_of_the_server(measured), *_of_the_machine(measured), *_of_this_client(measured)]


def _of_the_server(measured: Measured) -> Iterator[str]:
    version = measured.info.get("version")
    if version != measured.version:
        yield f"The server is of version {version}, the client that measured it of {measured.version}."
    calibration = measured.info.get("calibration")
    fallback = "" if calibration is None else calibration["measurements"]["fallback"]
    if calibration is None:
        yield "The machine was not calibrated: what the plan decided, it decided from facts alone."
    elif fallback:
        yield f"The machine was not calibrated, since {fallback}: what the plan decided, it decided from facts alone."
    speed = measured.info_after.get("speed") or {}
    if speed.get("drifted"):
        factors = ", ".join(f"{phase} {factor:.2f}" for phase, factor in speed["steps_over_measured"].items())
        yield f"Steps took other times than calibration had measured ({factors} times as long): the machine was not as it had been."
    failed = sum((Counter(point.failures) for point in measured.loads), Counter[str]())
    if failed:
        kinds = ", ".join(f"{kind} ({number})" for kind, number in sorted(failed.items()))
        yield f"{failed.total()} requests failed: {kinds}."
    if measured.lost_steps:
        yield f"{measured.lost_steps} of the engine's steps are missing: there were more than are kept."


def _of_the_machine(measured: Measured) -> Iterator[str]:
    if not measured.local:
        yield (
            f"The server was reached over a network, at {measured.url}: latencies have the way in them, and what else its machine "
            "did is not known."
        )
    throttled = [point for point in measured.loads if (point.throttled_seconds or 0.0) > MUCH_THROTTLED * point.seconds]
    if throttled:
        seconds = sum(point.throttled_seconds or 0.0 for point in throttled)
        yield f"The server was throttled to its CPU quota, for {seconds:.1f} s in {_of(throttled, measured)}."
    yield from _beyond(measured, MUCH_STOLEN, lambda point: point.stolen_ratio, "Others took up to {:.0%} of all cores, in {}.")
    again = [measured.points[0], *measured.repeats]
    rates = [point.samples_per_second for point in again]
    if min(rates) * STEADY_RATIO < max(rates):
        shown = ", ".join(f"{rate:.4g}" for rate in rates)
        yield f"The machine was not steady: the same load ({again[0].load.name}), again and again, had {shown} samples a second."


def _of_this_client(measured: Measured) -> Iterator[str]:
    lacked = ", which the server lacked" if measured.local else ""
    sentence = f"The client that measured took up to {{:.0%}} of a core{lacked}, in {{}}."
    yield from _beyond(measured, MUCH_CLIENT, lambda point: point.client_cpu_ratio, sentence)


def _beyond(measured: Measured, bound: float, read: Callable[[Point], float | None], sentence: str) -> Iterator[str]:
    """Of loads in which it was more than that, the most."""
    found = [(ratio, point) for point in measured.loads if (ratio := read(point)) is not None and ratio > bound]
    if found:
        yield sentence.format(max(ratio for ratio, _ in found), _of([point for _, point in found], measured))


def _of(points: Sequence[Point], measured: Measured) -> str:
    """`3 of 14 loads`."""
    return f"{len(points)} of {len(measured.loads)} loads"
