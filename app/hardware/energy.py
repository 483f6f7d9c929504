"""What a machine's joules were spent on: tokens and vectors of the last minute, with what it takes when idle and without.

Read by the event loop's timer and by scrapes; no step waits for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from app.hardware.meters import Meter

WINDOW_SECONDS = 60.0
KEPT_EVERY_SECONDS = 1.0
FRESH_SECONDS = 0.1  # a scrape after so short a time is told what the last one was: endpoint pickers ask every 50 ms
IDLE_SECONDS = 10.0
LOOK_EVERY_SECONDS = 5.0  # of the timer, for when nobody scrapes: counters begin anew after a minute at the earliest


@dataclass(frozen=True, slots=True)
class Work:
    """What was done since the start; `idle`: ready, and nobody's request is open."""

    busy_seconds: float = 0.0
    tokens: int = 0
    vectors: int = 0
    idle: bool = False


@dataclass(frozen=True, slots=True)
class Spent:
    """`joules` since the start; all else of the last minute, but `idle_watts`, the least seen. What is None is not known, or not yet."""

    joules: float
    watts: float | None = None
    idle_watts: float | None = None
    per_token: float | None = None
    per_vector: float | None = None
    above_idle_per_token: float | None = None
    above_idle_per_vector: float | None = None


@dataclass(frozen=True, slots=True)
class _Reading:
    at: float
    joules: float
    work: Work


class Energy:
    """One meter's account. Not thread-safe: the event loop's."""

    def __init__(self, meter: Meter, work: Callable[[], Work], clock: Callable[[], float] = time.monotonic) -> None:
        self.source = meter.source
        self.close = meter.close
        self._meter, self._work, self._clock = meter, work, clock
        first = _Reading(clock(), meter.joules(), work())
        self._recent: deque[_Reading] = deque([first])
        self._latest = self._idle_since = first
        self._idle_watts: float | None = None

    def look(self) -> Spent:
        """The account as it stands; to be asked for at least every minute, or a counter that begins anew is misread."""
        if self._clock() - self._latest.at >= FRESH_SECONDS:
            self._latest = _Reading(self._clock(), self._meter.joules(), self._work())
            self._watch_idling(self._latest)
            self._keep(self._latest)
        return self._spent(self._recent[0], self._latest)

    def _keep(self, now: _Reading) -> None:
        """The oldest that is kept is a minute old, or nearly."""
        if now.at - self._recent[-1].at >= KEPT_EVERY_SECONDS:
            self._recent.append(now)
        while len(self._recent) > 1 and self._recent[1].at <= now.at - WINDOW_SECONDS:
            self._recent.popleft()

    def _watch_idling(self, now: _Reading) -> None:
        """Ten seconds without a step are told apart from others by their least power: whatever else runs there only adds to it."""
        since = self._idle_since
        if not (since.work.idle and now.work.idle and since.work.busy_seconds == now.work.busy_seconds):
            self._idle_since = now
        elif now.at - since.at >= IDLE_SECONDS:
            watts = (now.joules - since.joules) / (now.at - since.at)
            if watts > 0.0:
                self._idle_watts = watts if self._idle_watts is None else min(watts, self._idle_watts)
            self._idle_since = now

    def _spent(self, first: _Reading, now: _Reading) -> Spent:
        seconds, joules = now.at - first.at, now.joules - first.joules
        if seconds <= 0.0 or now.joules <= 0.0:
            return Spent(now.joules, idle_watts=self._idle_watts)
        above = None if self._idle_watts is None else max(0.0, joules - self._idle_watts * seconds)
        tokens, vectors = now.work.tokens - first.work.tokens, now.work.vectors - first.work.vectors
        return Spent(
            joules=now.joules,
            watts=joules / seconds,
            idle_watts=self._idle_watts,
            per_token=_each(joules, tokens),
            per_vector=_each(joules, vectors),
            above_idle_per_token=_each(above, tokens),
            above_idle_per_vector=_each(above, vectors),
        )


def _each(joules: float | None, number: int) -> float | None:
    return joules / number if joules is not None and number else None
