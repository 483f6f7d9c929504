"""Garbage collection beside the steps, not in them: off while the engine works, done between two steps where it is due.

What Python counts references of goes at once as ever; only circles wait. While the engine is idle Python collects as it always does.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

MOST_NEW_OBJECTS = (
    10_000  # more containers made than gone since the last collection: looking through them takes about a millisecond
)
MOST_SECONDS = 1.0  # of work without a collection, however few objects: a circle may hold a large body
WHOLE_SECONDS = 60.0  # between two that look at everything that has outlived one


class Garbage:
    """Belongs to the thread that steps; `seconds` and `collections` count what was collected since `settle`, by whichever thread."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self.collections = 0.0, 0
        self._clock = clock
        self._began = self._tidied = self._whole = clock()

    def settle(self) -> None:
        """What is loaded stays: no collection looks through it again. From now on those that happen are counted."""
        gc.collect()
        gc.freeze()
        self._tidied = self._whole = self._clock()
        gc.callbacks.append(self._hear)

    def close(self) -> None:
        """As Python does it, and nobody listens."""
        gc.enable()
        if self._hear in gc.callbacks:
            gc.callbacks.remove(self._hear)

    def hold(self) -> None:
        """A step begins: nothing is collected until `tidy` or `release`."""
        gc.disable()

    def release(self) -> None:
        """There is no step to disturb."""
        gc.enable()

    def tidy(self) -> None:
        """Between two steps: collects where enough has come together, or long enough nothing was collected."""
        now = self._clock()
        if gc.get_count()[0] < MOST_NEW_OBJECTS and now - self._tidied < MOST_SECONDS:
            return
        whole = now - self._whole >= WHOLE_SECONDS
        gc.collect(2 if whole else 1)
        self._tidied = self._clock()
        self._whole = self._tidied if whole else self._whole

    def _hear(self, phase: str, info: Mapping[str, Any]) -> None:
        if phase == "start":
            self._began = self._clock()
        else:
            self.seconds += self._clock() - self._began
            self.collections += 1
