"""Monitoring of the worker's loop: each step is logged with its time and, if it was slow, its cause.

`StepLog` keeps the last 65,536 steps in plain columns (2 MB), for timelines of the engine rather than histograms; one
thread adds, any thread reads. `GcControl` disables garbage collection during a step and runs it between two steps when
it is due. Reference counting still frees most objects at once; only reference cycles wait. Work that does not belong
to one step, such as updating the speed drift, runs once a second between two steps.
"""

from __future__ import annotations

import gc
import time
from collections.abc import (
    Callable,
    Iterator,
    Mapping,
)
from typing import (
    Any,
    get_args,
)

from prometheus_client import Counter
from prometheus_client.metrics_core import Metric

from app.metrics.gauges import (
    gauge_family,
    speed_gauges,
)
from app.metrics.instruments import Metrics
from app.metrics.slow_steps import SlowStepDetector
from app.metrics.speed_drift import SpeedDrift
from app.metrics.stats import (
    Cause,
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


UPDATE_SECONDS = 1.0
_SLOW_STEPS_HELP = (
    "Slow steps by cause: over 1.5 times the time of similar steps, or of the decodes that waited for a prompt."
)


class StepMonitor:
    """The worker's step hooks, all called on the worker thread: `begin`, `end`, `events_sent`, `idle`, `close`.

    It logs each step from the start. Slow steps are detected after `watch_slow_steps`, and drift after
    `watch_drift`, since both need step times that are known only when the machine is calibrated.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self.gc_control = GcControl()
        self.drift: SpeedDrift | None = None
        self._slow_steps: SlowStepDetector | None = None
        self._log, self._clock = metrics.step_log, clock
        self._updated_at = clock()
        self._step_began: float | None = None  # written by the worker thread, read by any thread
        counter = metrics.counter("step_stalls", _SLOW_STEPS_HELP, "cause")
        self._counters: dict[Cause, Counter] = {cause: counter.labels(cause) for cause in get_args(Cause)}
        metrics.gauges(self._gauges)

    def watch_drift(self, drift: SpeedDrift) -> None:
        """Update the drift once a second from now on, and report it in the metrics."""
        self.drift = drift

    def watch_slow_steps(self, detector: SlowStepDetector) -> None:
        """Detect slow steps from now on. The model is loaded: its objects are frozen for the garbage collector."""
        self.gc_control.freeze()
        self._slow_steps = detector

    def begin(self) -> None:
        """Mark the start of a step."""
        self._step_began = self._clock()
        self.gc_control.disable()
        if self._slow_steps is not None:
            self._slow_steps.begin()

    def end(self, step: StepStats) -> None:
        """Mark the end of a step, which the engine's step time model has observed, and log it."""
        self._step_began = None
        cause = None if self._slow_steps is None else self._slow_steps.end(step)
        self._log.add(time.time() - step.seconds, step, cause)
        if cause is not None:
            self._counters[cause].inc()

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
        if self._slow_steps is not None:
            self._slow_steps.update_throttled()
        if self.drift is not None:
            self.drift.update()

    def _gauges(self) -> Iterator[Metric]:
        age_help = "Seconds that the running step has taken so far; 0 if no step is running."
        yield gauge_family("armature_step_age_seconds", age_help, self.step_age_seconds())
        if self.drift is not None:
            yield from speed_gauges(self.drift)
