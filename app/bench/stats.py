"""What a bench found: spreads of samples, figures held against ceilings or targets, and whether the measurement itself can be believed."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class MeasurementFailed(Exception):
    """A bench could not measure what it was asked to; the message says why."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Samples of one quantity. Percentiles are of the samples themselves (nearest rank), so p99 of ten samples is the largest."""

    p50: float
    p99: float
    smallest: float
    largest: float
    num_samples: int


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of all samples do not exceed."""
    assert samples, "a percentile needs samples"
    assert 0.0 < share <= 1.0, "a share lies in (0, 1]"
    return sorted(samples)[math.ceil(share * len(samples)) - 1]


def spread(samples: Sequence[float]) -> Spread:
    return Spread(
        p50=statistics.median(samples),
        p99=percentile(samples, 0.99),
        smallest=min(samples),
        largest=max(samples),
        num_samples=len(samples),
    )


@dataclass(frozen=True, slots=True)
class Figure:
    """One number for people, `ratio` where it is held against something: `against` says what. `parts`: further numbers, a column each.

    `target` bounds the ratio where there is one, or else the value: from below unless `at_most`.
    `is_share` ratios are parts of a ceiling that cannot be passed: outside 0 to 1, something was measured wrongly.
    """

    name: str
    value: float
    unit: str
    p99: float | None = None
    ratio: float | None = None
    against: str = ""
    target: float | None = None
    at_most: bool = False
    is_share: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None where there is none."""
        if self.target is None:
            return None
        held = self.value if self.ratio is None else self.ratio
        return held <= self.target if self.at_most else held >= self.target

    @property
    def mistake(self) -> str | None:
        """Why this figure cannot be true, if it cannot."""
        if self.is_share and self.ratio is not None and not 0.0 <= self.ratio <= 1.0:
            return f"{self.name}: {self.ratio:.2f} of {self.against} cannot be: a failed measurement"
        return None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that one bench command found. `complete` is false where it was interrupted; `notes` are sentences below the table."""

    bench: str
    subject: str
    figures: tuple[Figure, ...]
    details: dict[str, Any] = field(default_factory=dict)
    complete: bool = True
    notes: tuple[str, ...] = ()

    @property
    def mistakes(self) -> list[str]:
        return [figure.mistake for figure in self.figures if figure.mistake is not None]

    def to_json(self) -> dict[str, Any]:
        figures = [dataclasses.asdict(figure) | {"met": figure.met} for figure in self.figures]
        return {
            "bench": self.bench,
            "subject": self.subject,
            "complete": self.complete,
            "mistakes": self.mistakes,
            "notes": list(self.notes),
            "figures": figures,
            "details": self.details,
        }
