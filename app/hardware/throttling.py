"""Seconds as a CPU quota makes them, where more threads run than it pays for: the kernel then stops them for the rest of each period.

Most short steps run through and a few wait for most of a period: a median knows nothing of the waiting, one step alone is off by it.
What is steady is the CPU's time: a step that takes so much of it lasts, on average, that time over the quota.
"""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]


def steady_clock(quota_cores: float | None, cpu_seconds: Clock = time.process_time) -> Clock:
    """Goes as the wall's does on average while there is work. The whole process counts: all of it lives on the quota.

    None: no quota binds.
    """
    return time.perf_counter if quota_cores is None else lambda: cpu_seconds() / quota_cores


class Stretch:
    """Of one step after another: what such a step takes on average over what this one took; 1 where no quota binds."""

    def __init__(self, quota_cores: float | None = None, cpu_seconds: Clock = time.process_time) -> None:
        self.quota_cores = quota_cores
        self._clock = None if quota_cores is None else steady_clock(quota_cores, cpu_seconds)
        self._began = 0.0

    def begin(self) -> None:
        if self._clock is not None:
            self._began = self._clock()

    def of(self, seconds: float) -> float:
        """Of the step that took so long since `begin`."""
        if self._clock is None or seconds <= 0.0:
            return 1.0
        return (self._clock() - self._began) / seconds
