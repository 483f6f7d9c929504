"""What a machine was seen to serve while it kept its p99: from measured points alone, nothing is read between or beyond them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.bench.compare.result import Load, Point, Result
from app.bench.stats import percentile
from app.bench.tco.target import Unit

ENOUGH_FOR_P99 = 100  # requests; of fewer, the p99 is the slowest


@dataclass(frozen=True, slots=True)
class Work:
    """What one sample is: loads that differ in this have nothing to do with each other. `tokens` of a prompt or text, of its answer."""

    kind: str
    tokens: int
    max_tokens: int

    def __str__(self) -> str:
        if self.kind == "generate":
            return f"answers of {self.max_tokens} tokens to prompts of {self.tokens}"
        return f"texts of {self.tokens} tokens" if self.kind == "embed" else "rows"


@dataclass(frozen=True, slots=True)
class Kept:
    """The load of the highest rate that kept the p99; `peak` is the highest rate of any. `p99` in seconds, of a whole request."""

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
        """The share of what this machine can do that it may be asked for."""
        return self.rate / self.peak


@dataclass(frozen=True, slots=True)
class NotKept:
    """No measured load kept the p99; the least one that was seen, None where no request was timed."""

    least_p99: float | None


def works(result: Result) -> dict[Work, list[Point]]:
    """The points of each kind of work, those apart of which a request failed."""
    found: dict[Work, list[Point]] = {}
    for point in result.points:
        if point.samples > 0 and not point.failures:
            found.setdefault(Work(point.load.kind, point.load.tokens, point.load.max_tokens), []).append(point)
    return found


def most_kept(points: Sequence[Point], unit: Unit, limit: float | None) -> Kept | NotKept:
    """`limit`: seconds that the p99 may take; None where nobody asks. `points` are of one kind of work, at least one."""
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
    return percentile(point.request_seconds, 0.99) if point.request_seconds else None


def _keeps(point: Point, limit: float) -> bool:
    p99 = p99_of(point)
    return p99 is not None and p99 <= limit


def _rate(point: Point, unit: Unit) -> float:
    return point.samples_per_second if unit == "samples" else point.tokens_per_second
