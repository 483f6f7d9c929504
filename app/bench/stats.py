"""Results of a bench: statistics of samples, figures with targets, and checks for failed measurements."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class MeasurementFailed(Exception):
    """Raised when a bench cannot measure what was requested; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Statistics of the samples of one quantity.

    Percentiles are nearest-rank, so p99 of ten samples is the largest.
    """

    p50: float
    p99: float
    smallest: float
    largest: float
    num_samples: int


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the smallest sample that is at least as large as `share` (0 to 1) of all samples."""
    assert samples, "a percentile needs samples"
    assert 0.0 < share <= 1.0, "a share must be in (0, 1]"
    return sorted(samples)[math.ceil(share * len(samples)) - 1]


def spread(samples: Sequence[float]) -> Spread:
    """Return the statistics of a non-empty list of samples."""
    return Spread(
        p50=statistics.median(samples),
        p99=percentile(samples, 0.99),
        smallest=min(samples),
        largest=max(samples),
        num_samples=len(samples),
    )


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the result table.

    `ratio` compares the value with something that `against` names. `parts` are further numbers, one column each.
    `target` is a limit of the ratio if there is one, else of the value: a lower limit unless `at_most` is True. If
    `is_share` is True, the ratio is a fraction of a ceiling, and outside 0 to 1 the measurement has failed.
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
        """True if the target is reached; None if there is no target."""
        if self.target is None:
            return None
        held = self.value if self.ratio is None else self.ratio
        return held <= self.target if self.at_most else held >= self.target

    @property
    def mistake(self) -> str | None:
        """Reason why this figure cannot be correct, or None."""
        if self.is_share and self.ratio is not None and not 0.0 <= self.ratio <= 1.0:
            return f"{self.name}: {self.ratio:.2f} of {self.against} is impossible: a failed measurement"
        return None


@dataclass(frozen=True, slots=True)
class Outcome:
    """All results of one bench command.

    `complete` is False after an interruption; `notes` are sentences printed below the table.
    """

    bench: str
    subject: str
    figures: tuple[Figure, ...]
    details: dict[str, Any] = field(default_factory=dict)
    complete: bool = True
    notes: tuple[str, ...] = ()

    @property
    def mistakes(self) -> list[str]:
        """Messages of all figures that cannot be correct."""
        return [figure.mistake for figure in self.figures if figure.mistake is not None]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that the command prints and writes."""
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
