"""Monitoring of the worker's loop: each step is logged with its time and, if it was slow, its cause.

Garbage collection waits for the end of a step. Work that does not belong to one step, such as updating the speed
drift, runs once a second between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from app.garbage import Garbage
from app.measured import Cause, StepStats
from app.stalls import Stalls
from app.step_log import StepLog

LOOK_SECONDS = 1.0


class StepWatch:
    """The worker's step hooks, all called on the worker thread: `begin`, `end`, `events_sent`, `idle`, `close`.

    `slow_steps` is set once step times are known.
    """

    def __init__(
        self,
        log: StepLog,
        on_stall: Callable[[Cause], None] = lambda cause: None,
        on_look: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.garbage = Garbage()
        self.stalls: Stalls | None = None
        self._log, self._on_stall, self._on_look, self._clock = log, on_stall, on_look, clock
        self._looked = clock()
        self._step_began: float | None = None  # written by the worker thread, read by any thread

    def begin(self) -> None:
        """Mark the start of a step."""
        self._step_began = self._clock()
        self.garbage.hold()
        if self.stalls is not None:
            self.stalls.begin()

    def end(self, step: StepStats) -> None:
        """Mark the end of a step and log it."""
        self._step_began = None
        cause = None if self.stalls is None else self.stalls.end(step)
        self._log.add(time.time() - step.seconds, step, cause)
        if cause is not None:
            self._on_stall(cause)

    def rest(self) -> None:
        """Do due maintenance after a step's results were sent to the clients."""
        self.garbage.tidy()
        self._look()

    def idle(self) -> None:
        """Mark that there is nothing to compute until the next request."""
        self._step_began = None
        self.garbage.release()
        self._look()

    def step_age_seconds(self) -> float:
        """Return how long the running step has taken so far, from any thread.

        A step that never ends is visible only here.
        """
        began = self._step_began
        return 0.0 if began is None else max(0.0, self._clock() - began)

    def close(self) -> None:
        """Restore Python's automatic garbage collection."""
        self.garbage.close()

    def _look(self) -> None:
        now = self._clock()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        if self.stalls is not None:
            self.stalls.look()
        self._on_look()
