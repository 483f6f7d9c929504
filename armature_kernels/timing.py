"""Timing within a time budget: interleaved samples, medians, monotone tables and a bound on the spread.

This module knows only names, callables and seconds. The caller decides what is timed (steps of a model during
calibration).
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

MAX_SAMPLES = 9  # per point; more samples would only use up the budget
MIN_SAMPLES = 3  # a median of fewer samples is not reliable
SAMPLING_SECONDS = 0.1  # long runs need few samples to exceed the noise: no more than fit in this time
# A first run that takes at least this long counts as a sample: its one-time work is a small part of it.
LONG_RUN_SECONDS = 0.03
MAX_SPREAD = 0.25  # limit of a point's interquartile range over its median; an idle machine shows a tenth of it
MAX_ADJUSTMENT = 0.25  # largest relative change of a measured point by the monotone fit
NO_TIME = "there was no time for enough samples"
# Expected time of a point that has not run yet, as a multiple of the time of the point before it in its block.
_GROWTH = 2.0


@dataclass(frozen=True, slots=True)
class TimedPoint(Generic[Key]):
    """A callable to be timed, and its key."""

    key: Key
    run: Callable[[], object]


@dataclass(frozen=True, slots=True)
class TimedBlock(Generic[Key]):
    """Points that are timed one after another, the quickest first.

    `begin` prepares the machine for them (for example the number of threads).
    """

    begin: Callable[[], object]
    points: Sequence[TimedPoint[Key]]


@dataclass(slots=True)
class TimingRounds(Generic[Key]):
    """Samples of every point, taken in rounds over all blocks.

    Rounds end when every point has enough samples or the deadline has come. A point that would run past the
    deadline is not started. The first run of a short point is not a sample, because it prepares what later runs
    reuse. `patience` multiplies the number of samples that is enough.
    """

    deadline: float
    clock: Clock = time.perf_counter
    patience: int = 1
    samples: dict[Key, list[float]] = field(default_factory=dict)
    _expected: dict[Key, float] = field(default_factory=dict)

    def run(self, blocks: Sequence[TimedBlock[Key]]) -> None:
        """Run rounds over all blocks until no point needs another sample or the time is over."""
        while sum(self._pass(block) for block in blocks):  # every block runs once per round
            pass

    def _pass(self, block: TimedBlock[Key]) -> bool:
        """Run one round of this block and return True if any point ran."""
        if self.clock() >= self.deadline or not any(self._needs_samples(point.key) for point in block.points):
            return False
        block.begin()
        ran, before = False, 0.0
        for point in block.points:
            if (
                self._needs_samples(point.key)
                and self.clock() + self._required_seconds(point.key, before) <= self.deadline
            ):
                self._sample(point)
                ran = True
            before = self._expected.get(point.key, before)
        return ran

    def _needs_samples(self, key: Key) -> bool:
        seconds = self._expected.get(key)
        enough = MAX_SAMPLES if not seconds else min(max(MIN_SAMPLES, int(SAMPLING_SECONDS / seconds)), MAX_SAMPLES)
        return len(self.samples.get(key, ())) < self.patience * enough

    def _required_seconds(self, key: Key, before: float) -> float:
        """Return the seconds that must be left before the deadline to start this point.

        A point that has run before needs one run. A new point needs all its runs, in addition to the samples that
        started points still lack.
        """
        if key in self._expected:
            return self._expected[key]
        owed = sum(
            max(0, MIN_SAMPLES - len(self.samples.get(one, ()))) * seconds for one, seconds in self._expected.items()
        )
        return owed + (MIN_SAMPLES + 1) * _GROWTH * before

    def _sample(self, point: TimedPoint[Key]) -> None:
        start = self.clock()
        point.run()
        seconds = self.clock() - start
        if point.key in self._expected or seconds >= LONG_RUN_SECONDS:
            self.samples.setdefault(point.key, []).append(seconds)
        self._expected[point.key] = seconds

    def medians(self) -> dict[Key, float]:
        """Return the median seconds of every point that has enough samples."""
        return {key: statistics.median(found) for key, found in self.samples.items() if len(found) >= MIN_SAMPLES}

    def least(self) -> dict[Key, float]:
        """Return the least seconds of every point that has a sample: what other work disturbed least."""
        return {key: min(found) for key, found in self.samples.items()}

    def spread(self) -> float:
        """Return the relative spread of the middle point among those that have enough samples; 0 if none has."""
        return statistics.median(
            [relative_spread(found) for found in self.samples.values() if len(found) >= MIN_SAMPLES] or [0.0]
        )

    def unusable_reason(self) -> str:
        """Return the reason why these samples are not usable, or an empty string if they are."""
        if not self.medians():
            return NO_TIME
        spread = self.spread()
        if spread > MAX_SPREAD:
            return f"the machine is too busy: samples of one and the same step differ by {spread:.0%} ({MAX_SPREAD:.0%} at the most)"
        return ""


def relative_spread(samples: Sequence[float]) -> float:
    """Return the interquartile range of the samples divided by their median."""
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle if middle > 0 else 0.0


def isotonic_fit(values: Sequence[float]) -> list[float]:
    """Return the nearest non-decreasing sequence by least squares (isotonic regression).

    Neighbours in the wrong order are replaced by their mean.
    """
    runs: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while runs and runs[-1][0] > mean:
            other, more = runs.pop()
            mean, count = (mean * count + other * more) / (count + more), count + more
        runs.append((mean, count))
    return list(itertools.chain.from_iterable([mean] * count for mean, count in runs))


def monotone_table(seconds: Mapping[int, float], max_adjustment: float = MAX_ADJUSTMENT) -> dict[int, float] | None:
    """Return seconds by size, made non-decreasing in the size.

    The result is None if that would change a point by more than `max_adjustment`, or if a value is not positive: then
    the samples are not usable.
    """
    sizes = sorted(seconds)
    measured = [seconds[size] for size in sizes]
    fitted = isotonic_fit(measured)
    if any(value <= 0 for value in measured) or any(
        abs(new - old) > max_adjustment * old for new, old in zip(fitted, measured, strict=True)
    ):
        return None
    return dict(zip(sizes, fitted, strict=True))


def crossover_rows(few: Mapping[int, float], many: Mapping[int, float]) -> int | None:
    """Return the largest number of rows at which `few` is the faster of two forms; None if it was not measured.

    Row counts below the first common one, and beyond the last, were not measured. There the form that reads fewer
    bytes (`few`) is assumed to be faster.
    """
    last_faster = None
    for rows in sorted(few.keys() & many.keys()):
        if few[rows] > many[rows]:
            return rows - 1 if last_faster is None else last_faster
        last_faster = rows
    return last_faster


def extrapolate_layers(parts: Mapping[int, float], num_layers: float) -> float | None:
    """Extrapolate the seconds of all layers from measurements of a few layers.

    `parts` maps the number of layers that ran to seconds, including the work before and after the layers. A
    fractional `num_layers` counts work that costs a part of a layer. The result is None if the measurements do not
    grow with the number of layers.
    """
    if int(num_layers) == num_layers and int(num_layers) in parts:
        return parts[int(num_layers)]
    least, most = min(parts), max(parts)
    if least == most or parts[most] <= parts[least]:
        return None
    return parts[most] + (num_layers - most) * (parts[most] - parts[least]) / (most - least)


def extrapolate_by_size(parts: Iterable[tuple[int, int, float]], num_layers: float) -> dict[int, float]:
    """Convert (size, layers, seconds) to seconds of the whole model by size.

    Sizes that cannot be extrapolated are left out.
    """
    by_layers: dict[int, dict[int, float]] = {}
    for size, layers, seconds in parts:
        by_layers.setdefault(size, {})[layers] = seconds
    totals = {size: extrapolate_layers(few, num_layers) for size, few in by_layers.items()}
    return {size: seconds for size, seconds in totals.items() if seconds is not None}
