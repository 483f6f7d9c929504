"""Monitoring of the worker's loop: each step is logged with its time and, if it was slow, its cause.

Garbage collection waits for the end of a step. Work that does not belong to one step, such as updating the speed
drift, runs once a second between two steps.

Garbage collection between steps instead of within them.

Collection is disabled during a step and runs between two steps when it is due. Reference counting still frees most
objects at once; only reference cycles wait. While the engine is idle, Python's automatic collection is enabled.

A log of the last steps in plain columns, for timelines of the engine rather than histograms.

One thread adds, any thread reads. 65,536 steps take 2 MB, and adding a row allocates no lasting object.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from typing import (
    Any,
    Final,
    get_args,
)

from app.metrics.slow_steps import SlowStepDetector
from app.metrics.stats import (
    Cause,
    Phase,
    StepStats,
)

# Container objects allocated minus freed since the last collection: traversing these takes about a millisecond.
MAX_NEW_OBJECTS = 10_000
MAX_SECONDS = 1.0  # longest work without a collection, however few objects: a cycle may hold a large request body
FULL_COLLECTION_SECONDS = 60.0  # between two collections of the oldest generation


class GcControl:
    """Control over Python's garbage collector; used by the thread that steps only.

    `seconds` and `collections` count the collections since `freeze`, by any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self.collections = 0.0, 0
        self._clock = clock
        self._began = self._collected_at = self._full_collection_at = clock()

    def freeze(self) -> None:
        """Freeze all loaded objects, so that no collection traverses them again, and start counting collections."""
        gc.collect()
        gc.freeze()
        self._collected_at = self._full_collection_at = self._clock()
        gc.callbacks.append(self._on_gc_event)

    def close(self) -> None:
        """Restore Python's automatic collection and stop counting."""
        gc.enable()
        if self._on_gc_event in gc.callbacks:
            gc.callbacks.remove(self._on_gc_event)

    def disable(self) -> None:
        """Disable collection for a step, until `collect_if_due` or `enable`."""
        gc.disable()

    def enable(self) -> None:
        """Enable automatic collection, as no step is running."""
        gc.enable()

    def collect_if_due(self) -> None:
        """Collect between two steps if enough objects were allocated or enough time has passed."""
        now = self._clock()
        if gc.get_count()[0] < MAX_NEW_OBJECTS and now - self._collected_at < MAX_SECONDS:
            return
        whole = now - self._full_collection_at >= FULL_COLLECTION_SECONDS
        gc.collect(2 if whole else 1)
        self._collected_at = self._clock()
        self._full_collection_at = self._collected_at if whole else self._full_collection_at

    def _on_gc_event(self, phase: str, info: Mapping[str, Any]) -> None:
        if phase == "start":
            self._began = self._clock()
        else:
            self.seconds += self._clock() - self._began
            self.collections += 1


CAPACITY_STEPS = 65_536  # a minute of a small encoder's steps, an hour of a large decoder's
MAX_STEPS = 2048  # steps in one response: as JSON a few milliseconds of the event loop

_PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
_CAUSES: Final[tuple[Cause | None, ...]] = (None, *get_args(Cause))
_PHASE_NUMBERS = {phase: number for number, phase in enumerate(_PHASES)}
_CAUSE_NUMBERS = {cause: number for number, cause in enumerate(_CAUSES)}


class StepLog:
    """A ring of the last `kept` steps, which are numbered from 0."""

    def __init__(self, capacity: int = CAPACITY_STEPS) -> None:
        self._capacity = capacity
        self._at, self._seconds = array("d", bytes(8 * capacity)), array("d", bytes(8 * capacity))
        self._phase, self._cause = array("B", bytes(capacity)), array("B", bytes(capacity))
        self._tokens = array("l", bytes(array("l").itemsize * capacity))
        self.num_steps = 0  # written last: a row is complete before it is counted

    def add(self, began_at: float, step: StepStats, cause: Cause | None) -> None:
        """Add a step.

        Args:
            began_at: Start of the step in seconds since 1970.
            step: Its statistics.
            cause: The cause if the step was slow.
        """
        place = self.num_steps % self._capacity
        self._at[place] = began_at
        self._seconds[place] = step.seconds
        self._phase[place] = _PHASE_NUMBERS[step.phase]
        self._cause[place] = _CAUSE_NUMBERS[cause]
        self._tokens[place] = step.num_tokens
        self.num_steps += 1

    def since(self, after: int) -> dict[str, Any]:
        """Return the steps from number `after` on, oldest first and at most `MAX_STEPS`.

        Returns:
            `next`, the number to request next; `dropped`, how many of the requested steps were overwritten; and
            `steps`, the columns.
        """
        first = min(max(after, self.num_steps - self._capacity), self.num_steps)
        following = min(first + MAX_STEPS, self.num_steps)
        columns = [
            self._slice_ring(column, first, following)
            for column in (self._at, self._seconds, self._phase, self._tokens, self._cause)
        ]
        lost = min(
            max(self.num_steps - self._capacity - first, 0), following - first
        )  # overwritten while they were read
        at, seconds, phases, tokens, causes = (column[lost:] for column in columns)
        steps = {
            "at": [round(moment, 6) for moment in at],
            "seconds": [round(one, 7) for one in seconds],
            "phase": [_PHASES[number] for number in phases],
            "tokens": list(tokens),
            "cause": [_CAUSES[number] or "" for number in causes],
        }
        return {"next": following, "dropped": max(first + lost - after, 0), "steps": steps}

    def _slice_ring(self, column: Sequence[Any], first: int, following: int) -> list[Any]:
        begin, count = first % self._capacity, following - first
        around = max(begin + count - self._capacity, 0)
        return [*column[begin : begin + count], *column[:around]]


UPDATE_SECONDS = 1.0


class StepMonitor:
    """The worker's step hooks, all called on the worker thread: `begin`, `end`, `events_sent`, `idle`, `close`.

    `slow_steps` is set once step times are known.
    """

    def __init__(
        self,
        log: StepLog,
        on_slow_step: Callable[[Cause], None] = lambda cause: None,
        on_update: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gc_control = GcControl()
        self.slow_steps: SlowStepDetector | None = None
        self._log, self._on_slow_step, self._on_update, self._clock = log, on_slow_step, on_update, clock
        self._updated_at = clock()
        self._step_began: float | None = None  # written by the worker thread, read by any thread

    def begin(self) -> None:
        """Mark the start of a step."""
        self._step_began = self._clock()
        self.gc_control.disable()
        if self.slow_steps is not None:
            self.slow_steps.begin()

    def end(self, step: StepStats) -> None:
        """Mark the end of a step and log it."""
        self._step_began = None
        cause = None if self.slow_steps is None else self.slow_steps.end(step)
        self._log.add(time.time() - step.seconds, step, cause)
        if cause is not None:
            self._on_slow_step(cause)

    def events_sent(self) -> None:
        """Do due maintenance after a step's results were sent to the clients."""
        self.gc_control.collect_if_due()
        self._update()

    def idle(self) -> None:
        """Mark that there is nothing to compute until the next request."""
        self._step_began = None
        self.gc_control.enable()
        self._update()

    def step_age_seconds(self) -> float:
        """Return how long the running step has taken so far, from any thread.

        A step that never ends is visible only here.
        """
        began = self._step_began
        return 0.0 if began is None else max(0.0, self._clock() - began)

    def close(self) -> None:
        """Restore Python's automatic garbage collection."""
        self.gc_control.close()

    def _update(self) -> None:
        now = self._clock()
        if now - self._updated_at < UPDATE_SECONDS:
            return
        self._updated_at = now
        if self.slow_steps is not None:
            self.slow_steps.update_throttled()
        self._on_update()
