"""Timing inside a budget, and what may be believed of it: rounds of samples that take turns, medians, order, and a bound on the spread.

What is timed is the caller's business (`engine/rehearsal.py`: steps of a model); here are only names, calls and seconds.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Clock = Callable[[], float]

MOST_SAMPLES = 9  # of one point; more would only use up the budget
LEAST_SAMPLES = 3  # below that a median says nothing
POINT_SECONDS = 0.1  # what takes long is told from noise by few samples: no more of them than this holds
LONG_SECONDS = 0.03  # a first run that takes so long is a sample: what it makes for later ones is a small part of it
MOST_SPREAD = 0.25  # of the middle half of a point's samples, over their median: what a quiet machine shows is a tenth of it
MOST_BENT = 0.25  # how far sanity may move a measured point
_GROWTH = 2.0  # what a point is taken to need before it has run, in that which comes before it in its block


@dataclass(frozen=True, slots=True)
class Point(Generic[Key]):
    """Something to be timed, by a name."""

    key: Key
    run: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Block(Generic[Key]):
    """Points that are timed after one another, the quickest first; `begin` makes the machine as they want it (threads)."""

    begin: Callable[[], object]
    points: Sequence[Point[Key]]


@dataclass(slots=True)
class Rounds(Generic[Key]):
    """Samples of every point, taken in turns until all have enough or the deadline has come; no point that would overrun it is begun.

    The first run of a short point is no sample: it makes what later ones use again. `patience`: times the samples that are enough.
    """

    deadline: float
    clock: Clock = time.perf_counter
    patience: int = 1
    samples: dict[Key, list[float]] = field(default_factory=dict)
    _expected: dict[Key, float] = field(default_factory=dict)

    def take(self, blocks: Sequence[Block[Key]]) -> None:
        while sum(self._pass(block) for block in blocks):  # every block has its turn
            pass

    def _pass(self, block: Block[Key]) -> bool:
        """Whether anything was run."""
        if self.clock() >= self.deadline or not any(self._wants(point.key) for point in block.points):
            return False
        block.begin()
        ran, before = False, 0.0
        for point in block.points:
            if self._wants(point.key) and self.clock() + self._needs(point.key, before) <= self.deadline:
                self._sample(point)
                ran = True
            before = self._expected.get(point.key, before)
        return ran

    def _wants(self, key: Key) -> bool:
        seconds = self._expected.get(key)
        enough = MOST_SAMPLES if not seconds else min(max(LEAST_SAMPLES, int(POINT_SECONDS / seconds)), MOST_SAMPLES)
        return len(self.samples.get(key, ())) < self.patience * enough

    def _needs(self, key: Key, before: float) -> float:
        """Seconds that must be left: of a point that was begun one run; of a new one all that count, and what begun ones still want."""
        if key in self._expected:
            return self._expected[key]
        owed = sum(max(0, LEAST_SAMPLES - len(self.samples.get(one, ()))) * seconds for one, seconds in self._expected.items())
        return owed + (LEAST_SAMPLES + 1) * _GROWTH * before

    def _sample(self, point: Point[Key]) -> None:
        start = self.clock()
        point.run()
        seconds = self.clock() - start
        if point.key in self._expected or seconds >= LONG_SECONDS:
            self.samples.setdefault(point.key, []).append(seconds)
        self._expected[point.key] = seconds

    def medians(self) -> dict[Key, float]:
        """Of all points that have enough samples."""
        return {key: statistics.median(found) for key, found in self.samples.items() if len(found) >= LEAST_SAMPLES}

    def noise(self) -> str:
        """Why these samples are no measurement; empty: they are one."""
        spreads = [spread(found) for found in self.samples.values() if len(found) >= LEAST_SAMPLES]
        if not spreads:
            return "there was no time for enough samples"
        middle = statistics.median(spreads)
        if middle > MOST_SPREAD:
            return f"the machine is too busy: samples of one and the same step differ by {middle:.0%} ({MOST_SPREAD:.0%} at the most)"
        return ""


def spread(samples: Sequence[float]) -> float:
    """Width of the middle half of the samples, over their median."""
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle if middle > 0 else 0.0


def rising(values: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls (least squares): neighbours in the wrong order become their mean."""
    runs: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while runs and runs[-1][0] > mean:
            other, more = runs.pop()
            mean, count = (mean * count + other * more) / (count + more), count + more
        runs.append((mean, count))
    return list(itertools.chain.from_iterable([mean] * count for mean, count in runs))


def table(seconds: Mapping[int, float]) -> dict[int, float] | None:
    """Seconds by size, where more never costs less; None where that would bend a point too far: then it is no measurement."""
    sizes = sorted(seconds)
    measured = [seconds[size] for size in sizes]
    ordered = rising(measured)
    if any(value <= 0 for value in measured) or any(
        abs(new - old) > MOST_BENT * old for new, old in zip(ordered, measured, strict=True)
    ):
        return None
    return dict(zip(sizes, ordered, strict=True))


def border(few: Mapping[int, float], many: Mapping[int, float]) -> int | None:
    """Up to how many rows `few` is the quicker of two forms; None: not measured.

    Below the first number of rows that both know, nobody has looked, nor beyond the last: what reads less is taken to be quicker there.
    """
    best = None
    for rows in sorted(few.keys() & many.keys()):
        if few[rows] > many[rows]:
            return rows - 1 if best is None else best
        best = rows
    return best


def whole(parts: Mapping[int, float], num_layers: float) -> float | None:
    """Seconds of all layers from those of a few: `parts` are seconds by the number of layers that ran, what is around them included.

    A number that is not whole stands for layers and for what costs as much as a part of one.
    """
    if int(num_layers) == num_layers and int(num_layers) in parts:
        return parts[int(num_layers)]
    least, most = min(parts), max(parts)
    if least == most or parts[most] <= parts[least]:
        return None
    return parts[most] + (num_layers - most) * (parts[most] - parts[least]) / (most - least)


def by_size(parts: Iterable[tuple[int, int, float]], num_layers: float) -> dict[int, float]:
    """(size, layers, seconds) to seconds of the whole model by size; sizes of which that cannot be said are left out."""
    found: dict[int, dict[int, float]] = {}
    for size, layers, seconds in parts:
        found.setdefault(size, {})[layers] = seconds
    totals = {size: whole(few, num_layers) for size, few in found.items()}
    return {size: seconds for size, seconds in totals.items() if seconds is not None}
