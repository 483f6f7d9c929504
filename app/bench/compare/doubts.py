"""Reasons to doubt the figures of a result, one sentence each: about the server, its machine, and this client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.bench.compare.result import Point

MUCH_THROTTLED = 0.01  # fraction of a load's seconds
MUCH_STOLEN = 0.05  # fraction of all cores
MUCH_CLIENT = 0.5  # fraction of one core
STEADY_RATIO = 1.1  # fastest over slowest measurement of the same load


@dataclass(frozen=True, slots=True)
class Measured:
    """All that the caveats of one measurement are derived from.

    `info` was read when the first load began, `info_after` after the last one. `repeats` are later measurements of the
    first load.
    """

    info: Mapping[str, Any]
    info_after: Mapping[str, Any]
    version: str
    url: str | None
    local: bool
    points: Sequence[Point]
    repeats: Sequence[Point] = ()
    lost_steps: int = 0
    told: Sequence[str] = field(default=())  # sentences collected while measuring: loads that were left out, why it ended early

    @property
    def loads(self) -> list[Point]:
        """All measured points, including the repeats."""
        return [*self.points, *self.repeats]


def doubts(measured: Measured) -> list[str]:
    """Return the caveats of a measurement, one sentence each."""
    return [*measured.told, *_of_the_server(measured), *_of_the_machine(measured), *_of_this_client(measured)]


def _of_the_server(measured: Measured) -> Iterator[str]:
    version = measured.info.get("version")
    if version != measured.version:
        yield f"The server has version {version}, the client that measured it has version {measured.version}."
    calibration = measured.info.get("calibration")
    fallback = "" if calibration is None else calibration["measurements"]["fallback"]
    if calibration is None:
        yield "The machine was not calibrated: the plan was made from hardware facts alone."
    elif fallback:
        yield f"The machine was not calibrated, since {fallback}: the plan was made from hardware facts alone."
    speed = measured.info_after.get("speed") or {}
    if speed.get("drifted"):
        factors = ", ".join(f"{phase} {factor:.2f}" for phase, factor in speed["steps_over_measured"].items())
        yield f"Steps did not take the time that calibration had measured ({factors} times as long): the machine's speed has changed."
    failed = sum((Counter(point.failures) for point in measured.loads), Counter[str]())
    if failed:
        kinds = ", ".join(f"{kind} ({number})" for kind, number in sorted(failed.items()))
        yield f"{failed.total()} requests failed: {kinds}."
    if measured.lost_steps:
        yield f"{measured.lost_steps} of the engine's steps are missing: there were more steps than the server or the result file keeps."


def _of_the_machine(measured: Measured) -> Iterator[str]:
    if not measured.local:
        yield (
            f"The server was reached over a network, at {measured.url}: latencies include the network, and other load on its machine "
            "is unknown."
        )
    throttled = [point for point in measured.loads if (point.throttled_seconds or 0.0) > MUCH_THROTTLED * point.seconds]
    if throttled:
        seconds = sum(point.throttled_seconds or 0.0 for point in throttled)
        yield f"The server was throttled to its CPU quota, for {seconds:.1f} s in {_of(throttled, measured)}."
    yield from _beyond(
        measured, MUCH_STOLEN, lambda point: point.stolen_ratio, "Other processes took up to {:.0%} of all cores, in {}."
    )
    again = [measured.points[0], *measured.repeats]
    rates = [point.samples_per_second for point in again]
    if min(rates) * STEADY_RATIO < max(rates):
        shown = ", ".join(f"{rate:.4g}" for rate in rates)
        yield f"The machine was not steady: repeated measurements of one load ({again[0].load.name}) reached {shown} samples a second."


def _of_this_client(measured: Measured) -> Iterator[str]:
    lacked = ", which the server could not use" if measured.local else ""
    sentence = f"The measuring client took up to {{:.0%}} of a core{lacked}, in {{}}."
    yield from _beyond(measured, MUCH_CLIENT, lambda point: point.client_cpu_ratio, sentence)


def _beyond(measured: Measured, bound: float, read: Callable[[Point], float | None], sentence: str) -> Iterator[str]:
    """Yield `sentence` with the highest ratio and the number of loads above `bound`, if there are any."""
    found = [(ratio, point) for point in measured.loads if (ratio := read(point)) is not None and ratio > bound]
    if found:
        yield sentence.format(max(ratio for ratio, _ in found), _of([point for _, point in found], measured))


def _of(points: Sequence[Point], measured: Measured) -> str:
    """Return text such as `3 of 14 loads`."""
    return f"{len(points)} of {len(measured.loads)} loads"
