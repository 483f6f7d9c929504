"""The highest measured load of a machine within a p99 limit.

Only measured points count: there is no interpolation or extrapolation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.bench.compare.result import Load, Point, Result
from app.bench.stats import percentile
from app.bench.tco.target import Unit

ENOUGH_FOR_P99 = 100  # requests; with fewer, the p99 is the slowest request


@dataclass(frozen=True, slots=True)
class Work:
    """The kind of work of a sample. Loads that differ in this cannot be compared.

    `tokens` is the length of a prompt or text, `max_tokens` that of its answer.
    """

    kind: str
    tokens: int
    max_tokens: int

    def __str__(self) -> str:
        if self.kind == "generate":
            return f"answers of {self.max_tokens} tokens to prompts of {self.tokens}"
        return f"texts of {self.tokens} tokens" if self.kind == "embed" else "rows"


@dataclass(frozen=True, slots=True)
class Kept:
    """The load with the highest rate within the p99 limit.

    `rate` and `peak` are in the target's unit per second; `peak` is the highest rate of any load. `p99` is in seconds,
    of a whole request.
    """

    load: Load
    rate: float
    peak: float
    p99: float | None
    num_requests: int
    samples_per_second: float
    tokens_per_second: float
    watts: float | None
    watts_source: str

    @property
    def utilisation(self) -> float:
        """The usable share of this machine's peak rate."""
        return self.rate / self.peak


@dataclass(frozen=True, slots=True)
class NotKept:
    """No load was within the p99 limit. `least_p99`: the lowest p99 in seconds; None if no request was timed."""

    least_p99: float | None


def works(result: Result) -> dict[Work, list[Point]]:
    """Return the points of each kind of work, without points in which a request failed."""
    found: dict[Work, list[Point]] = {}
    for point in result.points:
        if point.samples > 0 and not point.failures:
            found.setdefault(Work(point.load.kind, point.load.tokens, point.load.max_tokens), []).append(point)
    return found


def most_kept(points: Sequence[Point], unit: Unit, limit: float | None) -> Kept | NotKept:
    """Return the best load within the limit.

    Args:
        points: Points of one kind of work, at least one.
        unit: The unit of the target.
        limit: The highest p99 in seconds, or None for no limit.
    """
    keeping = [point for point in points if limit is None or _keeps(point, limit)]
    if not keeping:
        return NotKept(min((p99 for point in points if (p99 := p99_of(point)) is not None), default=None))
    best = max(keeping, key=lambda point: _rate(point, unit))
    energy = best.energy
    return Kept(
        load=best.load,
        rate=_rate(best, unit),
        peak=max(_rate(point, unit) for point in points),
        p99=p99_of(best),
        num_requests=len(best.request_seconds),
        samples_per_second=best.samples_per_second,
        tokens_per_second=best.tokens_per_second,
        watts=None if energy is None else energy.joules / best.seconds,
        watts_source="" if energy is None else energy.source,
    )


def p99_of(point: Point) -> float | None:
    """Return the p99 of a point in seconds, or None if no request was timed."""
    return percentile(point.request_seconds, 0.99) if point.request_seconds else None


def _keeps(point: Point, limit: float) -> bool:
    p99 = p99_of(point)
    return p99 is not None and p99 <= limit


def _rate(point: Point, unit: Unit) -> float:
    return point.samples_per_second if unit == "samples" else point.tokens_per_second
