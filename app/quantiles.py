"""What happened in the last minute: quantiles of latencies and rates of counts, for gauges that need no query language.

One thread records, any thread reads: a slice of time is replaced whole, never emptied under a reader.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

WINDOW_SECONDS = 60.0
T = TypeVar("T")

# Buckets grow by 4%, and a value is told as the middle of its bucket: at most 1.97% off (Masson et al., "DDSketch", VLDB 2019).
GROWTH = 1.04
_LOWEST_SECONDS = 1e-5
_HIGHEST_SECONDS = 1e4
_PER_LOG = 1.0 / math.log(GROWTH)
_NUM_BUCKETS = math.ceil(math.log(_HIGHEST_SECONDS / _LOWEST_SECONDS) * _PER_LOG) + 1


class Slices(Generic[T]):
    """A ring of slices of time, the newest being written. `empty` makes what a new slice holds."""

    def __init__(self, num_slices: int, empty: Callable[[], T], clock: Callable[[], float]) -> None:
        self._seconds = WINDOW_SECONDS / num_slices
        self._empty = empty
        self._clock = clock
        self._slices: list[tuple[int, T]] = [(-num_slices, empty()) for _ in range(num_slices)]

    def now(self) -> T:
        """The slice of this moment, to write to."""
        number = int(self._clock() / self._seconds)
        place = number % len(self._slices)
        if self._slices[place][0] != number:
            self._slices[place] = (number, self._empty())
        return self._slices[place][1]

    def recent(self) -> list[T]:
        """The slices of the window, in no order."""
        oldest = int(self._clock() / self._seconds) - len(self._slices) + 1
        return [content for number, content in list(self._slices) if number >= oldest]

    def covered_seconds(self) -> float:
        """The time that `recent` spans now: the current slice is not over yet."""
        return WINDOW_SECONDS - self._seconds + self._clock() % self._seconds


class RecentQuantiles:
    """Quantiles over the last 55 to 60 seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._slices = Slices(12, lambda: [0] * _NUM_BUCKETS, clock)

    def record(self, seconds: float) -> None:
        clipped = min(max(seconds, _LOWEST_SECONDS), _HIGHEST_SECONDS)
        self._slices.now()[math.ceil(math.log(clipped / _LOWEST_SECONDS) * _PER_LOG)] += 1

    def read(self, quantiles: Sequence[float]) -> list[float] | None:
        """For each quantile, in rising order, the smallest value that so large a part is not above; None without values."""
        counts = [sum(column) for column in zip(*self._slices.recent(), strict=True)]
        total = sum(counts)
        if not total:
            return None
        values: list[float] = []
        seen, bucket = 0, -1
        for quantile in quantiles:
            rank = max(math.ceil(quantile * total), 1)
            while seen < rank:
                bucket += 1
                seen += counts[bucket]
            values.append(_middle(bucket))
        return values


def _middle(bucket: int) -> float:
    """The value with the same relative error to both ends of the bucket."""
    return _LOWEST_SECONDS * GROWTH**bucket * 2 / (1 + GROWTH) if bucket else _LOWEST_SECONDS


class RecentRate:
    """Amounts per second over the last minute, or since the beginning where that is shorter."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._slices = Slices(60, lambda: [0], clock)
        self._clock = clock
        self._began = clock()

    def record(self, amount: int = 1) -> None:
        self._slices.now()[0] += amount

    def per_second(self) -> float:
        age = max(self._clock() - self._began, 1.0)
        return sum(content[0] for content in self._slices.recent()) / min(age, self._slices.covered_seconds())
