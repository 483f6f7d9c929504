"""Energy account of the machine: power, and joules for each token and vector, with and without idle power.

The averages are those of the last minute. A timer on the event loop and metrics scrapes read the account. No step
waits for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from app.hardware.power_meters import EnergyMeter

WINDOW_SECONDS = 60.0
READING_SPACING_SECONDS = 1.0
MIN_READING_SECONDS = 0.1  # a scrape sooner than this repeats the last reading; endpoint pickers scrape every 50 ms
IDLE_SECONDS = 10.0
TIMER_SECONDS = (
    5.0  # period of the timer, for servers that are not scraped; counters wrap after a minute at the earliest
)


@dataclass(frozen=True, slots=True)
class WorkCounters:
    """Work done since the start. `idle` is true if the server is ready and has no open request."""

    busy_seconds: float = 0.0
    tokens: int = 0
    vectors: int = 0
    idle: bool = False


@dataclass(frozen=True, slots=True)
class EnergyReport:
    """Energy readings.

    `joules` counts from the start. `idle_watts` is the lowest idle power seen. All other values are for the last
    minute. A value that is not known, or not known yet, is None.
    """

    joules: float
    watts: float | None = None
    idle_watts: float | None = None
    per_token: float | None = None
    per_vector: float | None = None
    above_idle_per_token: float | None = None
    above_idle_per_vector: float | None = None


@dataclass(frozen=True, slots=True)
class _EnergyReading:
    at: float
    joules: float
    work: WorkCounters


class EnergyAccount:
    """Energy account of one meter. Not thread-safe; used by the event loop only."""

    def __init__(
        self, meter: EnergyMeter, work: Callable[[], WorkCounters], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.source = meter.source
        self.close = meter.close
        self._meter, self._work, self._clock = meter, work, clock
        first = _EnergyReading(clock(), meter.joules(), work())
        self._recent: deque[_EnergyReading] = deque([first])
        self._latest = self._idle_since = first
        self._idle_watts: float | None = None

    def read(self) -> EnergyReport:
        """Read the meter if the last reading is old enough, and return the account.

        Call it at least once a minute; otherwise a counter that wrapped is misread.
        """
        if self._clock() - self._latest.at >= MIN_READING_SECONDS:
            self._latest = _EnergyReading(self._clock(), self._meter.joules(), self._work())
            self._update_idle_watts(self._latest)
            self._record(self._latest)
        return self._spent(self._recent[0], self._latest)

    def _record(self, now: _EnergyReading) -> None:
        """Keep the reading, and drop readings so that the oldest one is about a minute old."""
        if now.at - self._recent[-1].at >= READING_SPACING_SECONDS:
            self._recent.append(now)
        while len(self._recent) > 1 and self._recent[1].at <= now.at - WINDOW_SECONDS:
            self._recent.popleft()

    def _update_idle_watts(self, now: _EnergyReading) -> None:
        """Update the idle power from periods of ten seconds without a step.

        The lowest power of such periods is the idle power, because other programs on the machine can only add to
        it.
        """
        since = self._idle_since
        if not (since.work.idle and now.work.idle and since.work.busy_seconds == now.work.busy_seconds):
            self._idle_since = now
        elif now.at - since.at >= IDLE_SECONDS:
            watts = (now.joules - since.joules) / (now.at - since.at)
            if watts > 0.0:
                self._idle_watts = watts if self._idle_watts is None else min(watts, self._idle_watts)
            self._idle_since = now

    def _spent(self, first: _EnergyReading, now: _EnergyReading) -> EnergyReport:
        seconds, joules = now.at - first.at, now.joules - first.joules
        if seconds <= 0.0 or now.joules <= 0.0:
            return EnergyReport(now.joules, idle_watts=self._idle_watts)
        above = None if self._idle_watts is None else max(0.0, joules - self._idle_watts * seconds)
        tokens, vectors = now.work.tokens - first.work.tokens, now.work.vectors - first.work.vectors
        return EnergyReport(
            joules=now.joules,
            watts=joules / seconds,
            idle_watts=self._idle_watts,
            per_token=_per_unit(joules, tokens),
            per_vector=_per_unit(joules, vectors),
            above_idle_per_token=_per_unit(above, tokens),
            above_idle_per_vector=_per_unit(above, vectors),
        )


def _per_unit(joules: float | None, number: int) -> float | None:
    return joules / number if joules is not None and number else None
