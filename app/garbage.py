"""Garbage collection between steps instead of within them.

Collection is disabled during a step and runs between two steps when it is due. Reference counting still frees most
objects at once; only reference cycles wait. While the engine is idle, Python's automatic collection is enabled.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

# Container objects allocated minus freed since the last collection: traversing these takes about a millisecond.
MOST_NEW_OBJECTS = 10_000
MOST_SECONDS = 1.0  # longest work without a collection, however few objects: a cycle may hold a large request body
WHOLE_SECONDS = 60.0  # between two collections of the oldest generation


class Garbage:
    """Control over Python's garbage collector; used by the thread that steps only.

    `seconds` and `collections` count the collections since `freeze`, by any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self.collections = 0.0, 0
        self._clock = clock
        self._began = self._tidied = self._whole = clock()

    def settle(self) -> None:
        """Freeze all loaded objects, so that no collection traverses them again, and start counting collections."""
        gc.collect()
        gc.freeze()
        self._tidied = self._whole = self._clock()
        gc.callbacks.append(self._hear)

    def close(self) -> None:
        """Restore Python's automatic collection and stop counting."""
        gc.enable()
        if self._hear in gc.callbacks:
            gc.callbacks.remove(self._hear)

    def hold(self) -> None:
        """Disable collection for a step, until `collect_if_due` or `enable`."""
        gc.disable()

    def release(self) -> None:
        """Enable automatic collection, as no step is running."""
        gc.enable()

    def tidy(self) -> None:
        """Collect between two steps if enough objects were allocated or enough time has passed."""
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
