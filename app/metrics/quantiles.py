"""Quantiles of latencies and rates of counts over the last minute, for gauges that need no query language.

One thread records, any thread reads: a time slice is replaced as a whole and never cleared while it may be read.
"""

from __future__ import annotations

import math
import time
from collections.abc import (
    Callable,
    Sequence,
)
from typing import (
    Generic,
    TypeVar,
)

WINDOW_SECONDS = 60.0
T = TypeVar("T")

# Buckets grow by 4%. A value is reported as the middle of its bucket, an error of at most 1.97% (Masson et al.,
# "DDSketch", VLDB 2019).
GROWTH = 1.04
_LOWEST_SECONDS = 1e-5
_HIGHEST_SECONDS = 1e4
_PER_LOG = 1.0 / math.log(GROWTH)
_NUM_BUCKETS = math.ceil(math.log(_HIGHEST_SECONDS / _LOWEST_SECONDS) * _PER_LOG) + 1


class TimeSlices(Generic[T]):
    """A ring of time slices, of which the newest is being written. `empty` creates the content of a new slice."""

    def __init__(self, num_slices: int, empty: Callable[[], T], clock: Callable[[], float]) -> None:
        self._seconds = WINDOW_SECONDS / num_slices
        self._empty = empty
        self._clock = clock
        self._slices: list[tuple[int, T]] = [(-num_slices, empty()) for _ in range(num_slices)]

    def now(self) -> T:
        """Return the content of the current slice, to be written to."""
        number = int(self._clock() / self._seconds)
        place = number % len(self._slices)
        if self._slices[place][0] != number:
            self._slices[place] = (number, self._empty())
        return self._slices[place][1]

    def recent(self) -> list[T]:
        """Return the contents of the window's slices, in no particular order."""
        oldest = int(self._clock() / self._seconds) - len(self._slices) + 1
        return [content for number, content in list(self._slices) if number >= oldest]

    def covered_seconds(self) -> float:
        """Return the seconds that `recent` covers now; the current slice is not complete yet."""
        return WINDOW_SECONDS - self._seconds + self._clock() % self._seconds


class RecentQuantiles:
    """Quantiles over the last 55 to 60 seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._slices = TimeSlices(12, lambda: [0] * _NUM_BUCKETS, clock)

    def record(self, seconds: float) -> None:
        """Add a latency; it is clipped to 10 microseconds to 10,000 seconds."""
        clipped = min(max(seconds, _LOWEST_SECONDS), _HIGHEST_SECONDS)
        self._slices.now()[math.ceil(math.log(clipped / _LOWEST_SECONDS) * _PER_LOG)] += 1

    def read(self, quantiles: Sequence[float]) -> list[float] | None:
        """Return for each quantile the smallest recorded value that this share of the values does not exceed.

        Args:
            quantiles: Shares between 0 and 1, in rising order.

        Returns:
            One value per quantile, or None if nothing was recorded.
        """
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
    """Return the value with the same relative error to both ends of the bucket."""
    return _LOWEST_SECONDS * GROWTH**bucket * 2 / (1 + GROWTH) if bucket else _LOWEST_SECONDS


class RecentRate:
    """Amounts per second over the last minute, or since the start if that is shorter."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._slices = TimeSlices(60, lambda: [0], clock)
        self._clock = clock
        self._began = clock()

    def record(self, amount: int = 1) -> None:
        """Add an amount to the current second."""
        self._slices.now()[0] += amount

    def per_second(self) -> float:
        """Return the mean rate over the window."""
        age = max(self._clock() - self._began, 1.0)
        return sum(content[0] for content in self._slices.recent()) / min(age, self._slices.covered_seconds())
