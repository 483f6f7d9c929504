"""Stands beside the worker's loop: each step is logged with its time and, where it took too long, the cause; garbage waits for its end.

What is not of a single step, such as how fast the machine is now, is looked at once a second, between two steps.
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
    """All on the worker thread, in the worker's words: `begin`, `end`, `rest`, `idle`, `close`. `stalls` is set once it is known what steps
    take."""

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
        self._step_began: float | None = None  # written by the worker thread, read by any

    def begin(self) -> None:
        """The next thing is a step."""
        self._step_began = self._clock()
        self.garbage.hold()
        if self.stalls is not None:
            self.stalls.begin()

    def end(self, step: StepStats) -> None:
        """The last thing was this one."""
        self._step_began = None
        cause = None if self.stalls is None else self.stalls.end(step)
        self._log.add(time.time() - step.seconds, step, cause)
        if cause is not None:
            self._on_stall(cause)

    def rest(self) -> None:
        """Its clients were told: there is a moment for what must be done some time."""
        self.garbage.tidy()
        self._look()

    def idle(self) -> None:
        """There is nothing to compute until somebody asks."""
        self._step_began = None
        self.garbage.release()
        self._look()

    def step_age_seconds(self) -> float:
        """How long the step under way has taken so far, from any thread: one that never ends is seen here alone."""
        began = self._step_began
        return 0.0 if began is None else max(0.0, self._clock() - began)

    def close(self) -> None:
        self.garbage.close()

    def _look(self) -> None:
        now = self._clock()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        if self.stalls is not None:
            self.stalls.look()
        self._on_look()
