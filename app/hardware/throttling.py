"""Correction of step times for a CPU quota that is smaller than the number of threads.

The kernel then stops the threads for the rest of each period. Most short steps are not stopped, and a few wait for
most of a period, so neither the median nor a single step shows the average time. CPU time is steady: a step takes,
on average, its CPU time divided by the quota.
"""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]


def steady_clock(quota_cores: float | None, cpu_seconds: Clock = time.process_time) -> Clock:
    """Return a clock that advances like wall time on average while there is work.

    With a quota it is the CPU time of the whole process over the quota, because all of the process is limited by
    it. With None no quota binds, and it is the wall clock.
    """
    return time.perf_counter if quota_cores is None else lambda: cpu_seconds() / quota_cores


class Stretch:
    """Ratio of a step's average time under the quota to its measured time; 1 if no quota binds."""

    def __init__(self, quota_cores: float | None = None, cpu_seconds: Clock = time.process_time) -> None:
        self.quota_cores = quota_cores
        self._clock = None if quota_cores is None else steady_clock(quota_cores, cpu_seconds)
        self._began = 0.0

    def begin(self) -> None:
        """Start the measurement of a step."""
        if self._clock is not None:
            self._began = self._clock()

    def of(self, seconds: float) -> float:
        """Return the ratio for the step that took `seconds` since `begin`."""
        if self._clock is None or seconds <= 0.0:
            return 1.0
        return (self._clock() - self._began) / seconds
