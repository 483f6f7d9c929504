"""Monitoring of the worker's loop: each step is logged with its time and, if it was slow, its cause.

The usual time of a step comes from the step time model. Expensive sources are read only after a slow step. A cause is
reported only if there is evidence for it, else `unknown`.

`GcControl` runs garbage collection between two steps when it is due; reference counting still frees most objects at
once. Other work between steps, such as updating the speed drift, runs once a second.
"""

from __future__ import annotations

import gc
import mmap
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from prometheus_client import Counter
from prometheus_client.metrics_core import Metric

from app.hardware.kernel_advice import advise
from app.metrics.gauges import gauge_family, speed_gauges
from app.metrics.instruments import Metrics
from app.metrics.steps import Cause, SpeedDrift, SpeedState, StepStats, StepTimeModel

SLOW_FACTOR = 1.5  # times the usual time of similar steps
CAUSE_SHARE = 0.5  # share of the excess time that makes something the cause
_PROBED_PAGES, _PROBES = 256, 3
_NO_USAGE = resource.struct_rusage((0.0,) * 16)
# Container objects allocated minus freed since the last collection: traversing these takes about a millisecond.
MAX_NEW_OBJECTS = 10_000
MAX_SECONDS = 1.0  # longest work without a collection, however few objects: a cycle may hold a large request body
FULL_COLLECTION_SECONDS = 60.0  # between two collections of the oldest generation
UPDATE_SECONDS = 1.0
_STEPS_HELP = (
    "Engine steps that one native call or graph replayed, and steps whose operations the interpreter called one by one."
)
_SLOW_STEPS_HELP = (
    "Slow steps by cause: over 1.5 times the time of similar steps, or of the decodes that waited for a prompt."
)
_PATHS = {True: "native", False: "interpreter"}


@dataclass(frozen=True, slots=True)
class ProcessCounters:
    """Events of the process during a step, of all threads, page faults with and without a disk read among them."""

    minor_faults: int = 0
    major_faults: int = 0
    switches: int = 0
    garbage_seconds: float = 0.0

    @classmethod
    def between(
        cls, before: resource.struct_rusage, after: resource.struct_rusage, garbage_seconds: float
    ) -> ProcessCounters:
        return cls(
            after.ru_minflt - before.ru_minflt,
            after.ru_majflt - before.ru_majflt,
            after.ru_nivcsw - before.ru_nivcsw,
            garbage_seconds,
        )


def process_usage() -> resource.struct_rusage:
    """Return the counters of this process (man 2 getrusage), or zeros where a sandbox refuses them."""
    try:
        return resource.getrusage(resource.RUSAGE_SELF)
    except (OSError, ValueError):  # Python turns EINVAL into a ValueError
        return _NO_USAGE


@dataclass(frozen=True, slots=True)
class SlowStep:
    """A slow step: its seconds beyond the usual time, and what happened meanwhile.

    `throttled_seconds` is how long the CPU quota stopped the control group. `slowed_by` is heat or a low frequency.
    """

    step: StepStats
    excess_seconds: float
    during: ProcessCounters
    throttled_seconds: float = 0.0
    fault_seconds: float = 0.0  # seconds of one page fault on this machine
    slowed_by: Cause | None = None

    def cause(self) -> Cause:
        """Return what took at least half of the excess, else a property of the step, else other evidence."""
        enough = CAUSE_SHARE * self.excess_seconds
        if self.during.garbage_seconds >= enough:
            return "garbage_collection"
        if self.throttled_seconds >= enough:
            return "throttled"
        if self.step.is_first:
            return "compiled"
        if self.step.preempted or self.step.recomputed_tokens:
            return "preempted"
        if self.during.major_faults or self.during.minor_faults * self.fault_seconds >= enough:
            return "page_fault"
        if self.slowed_by is not None:
            return self.slowed_by
        if self.during.switches:
            return "descheduled"
        return "prefill" if self.step.kind == "mixed" else "unknown"


class SlowStepDetector:
    """Detects slow steps; call `begin` and `end` around each step.

    `model` has observed the step when `end` is called. `throttled_seconds` returns a running total, None if it cannot
    be read. `slowed_by` returns what recent sensor readings show.
    """

    def __init__(
        self,
        model: StepTimeModel,
        garbage: GcControl,
        throttled_seconds: Callable[[], float | None] = lambda: None,
        fault_seconds: float = 0.0,
        slowed_by: Callable[[], Cause | None] = lambda: None,
    ) -> None:
        self._model, self._fault_seconds, self._slowed_by = model, fault_seconds, slowed_by
        self._gc_control, self._throttled_seconds = garbage, throttled_seconds
        self._usage, self._garbage = process_usage(), garbage.seconds
        self._throttled = 0.0
        self.update_throttled()

    def update_throttled(self) -> None:
        """Read the throttled time up to now as the base for later steps; it reads a file, so not at every step."""
        self._throttled = self._throttled_seconds() or 0.0

    def begin(self) -> None:
        self._usage, self._garbage = process_usage(), self._gc_control.seconds

    def end(self, step: StepStats) -> Cause | None:
        """Return the cause if the step took over 1.5 times the usual time of similar steps, or of its decodes alone."""
        usual = self._model.usual_seconds
        if usual is not None and step.seconds > SLOW_FACTOR * usual:
            return self._find_cause(step, step.seconds - usual)
        if step.kind == "mixed" or step.recomputed_tokens:
            alone = self._model.predict_without_prefill(step)
            if alone is not None and step.seconds > SLOW_FACTOR * alone:
                return "preempted" if step.recomputed_tokens else "prefill"
        return None

    def _find_cause(self, step: StepStats, excess_seconds: float) -> Cause:
        garbage = self._gc_control.seconds - self._garbage
        during = ProcessCounters.between(self._usage, process_usage(), garbage)
        before = self._throttled
        self.update_throttled()
        throttled, slowed_by = self._throttled - before, self._slowed_by()
        return SlowStep(step, excess_seconds, during, throttled, self._fault_seconds, slowed_by).cause()


def first_touch_seconds() -> float:
    """Measure the seconds of a page's first write, when the system finds and zeroes it."""
    tries = [_first_and_second_touch_seconds() for _ in range(_PROBES)]
    return max(min(new for new, _ in tries) - min(again for _, again in tries), 0.0) / _PROBED_PAGES


def _first_and_second_touch_seconds() -> tuple[float, float]:
    """Return the seconds to write all pages of new memory, and to write them again."""
    with mmap.mmap(-1, _PROBED_PAGES * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        advise(memory, "MADV_NOHUGEPAGE")  # Linux could use huge pages otherwise
        return _touch_seconds(memory), _touch_seconds(memory)


def _touch_seconds(memory: mmap.mmap) -> float:
    began = time.perf_counter()
    for place in range(0, len(memory), mmap.PAGESIZE):
        memory[place] = 1
    return time.perf_counter() - began


class GcControl:
    """Control over Python's garbage collector for the stepping thread; counts collections since `freeze`."""

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
        gc.disable()

    def enable(self) -> None:
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


class StepRecorder:
    """The step log, the metrics of steps and the present speeds, in the process that serves.

    `record` and `speed` are written by one thread and read by any.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self.speed: SpeedState | None = None
        self.began = [StepBegin()]  # of each engine; the first one is in this process
        self._log, self._clock = metrics.step_log, clock
        counter = metrics.counter("step_stalls", _SLOW_STEPS_HELP, "cause")
        self._counters: dict[Cause, Counter] = {cause: counter.labels(cause) for cause in get_args(Cause)}
        paths = metrics.counter("engine_steps", _STEPS_HELP, "path")
        self._paths = {is_native: paths.labels(_PATHS[is_native]) for is_native in _PATHS}
        self._num_steps = dict.fromkeys(_PATHS, 0)
        metrics.gauges(self._gauges)

    def record(self, ended_at: float, step: StepStats, cause: Cause | None) -> None:
        """Record a step that ended at this Unix time; `cause` if it was slow."""
        self._log.add(ended_at - step.seconds, step, cause)
        self._paths[step.is_native].inc()
        self._num_steps[step.is_native] += 1
        if cause is not None:
            self._counters[cause].inc()

    def capacity(self) -> Mapping[str, Mapping[int, float]]:
        """Return tokens per second by phase and number of rows; empty while step times are unknown."""
        return {} if self.speed is None else self.speed.capacity()

    def step_age_seconds(self) -> float:
        """Return how long the running step has taken so far, the oldest of several, from any thread."""
        began = min((each for each in (one.read() for one in self.began) if each), default=0.0)
        return 0.0 if began == 0.0 else max(0.0, self._clock() - began)

    def steps_json(self) -> dict[str, int]:
        """Return the `steps` object of `GET /info`: the number of steps on each path, from any thread."""
        return {name: self._num_steps[is_native] for is_native, name in _PATHS.items()}

    def _gauges(self) -> Iterator[Metric]:
        age_help = "Seconds that the running step has taken so far; 0 if no step is running."
        yield gauge_family("armature_step_age_seconds", age_help, self.step_age_seconds())
        if self.speed is not None:
            yield from speed_gauges(self.speed)


class StepBegin:
    """When the running step began, by `time.monotonic`; 0 if none runs. Another process may share the `memory`."""

    def __init__(self, memory: memoryview | mmap.mmap | None = None) -> None:
        self._value = memoryview(memory or bytearray(8)).cast("d")

    def read(self) -> float:
        return self._value[0]

    def write(self, began: float) -> None:
        self._value[0] = began


class StepMonitor:
    """The worker's step hooks, called on the worker thread, in the process that computes.

    Slow steps are detected after `watch_slow_steps`, and drift after `watch_drift`: both need step times that are known
    only when the machine is calibrated. `record` gets each step, and `on_update` is called about once a second while
    steps run, and whenever there is nothing more to compute.
    """

    def __init__(
        self,
        record: Callable[[float, StepStats, Cause | None], None],
        began: StepBegin,
        on_update: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gc_control = GcControl()
        self.drift: SpeedDrift | None = None
        self._slow_steps: SlowStepDetector | None = None
        self._record, self._began, self._on_update, self._clock = record, began, on_update, clock
        self._updated_at = clock()

    def watch_drift(self, drift: SpeedDrift) -> None:
        self.drift = drift

    def watch_slow_steps(self, detector: SlowStepDetector) -> None:
        """Detect slow steps from now on. The model is loaded: its objects are frozen for the garbage collector."""
        self.gc_control.freeze()
        self._slow_steps = detector

    def begin(self) -> None:
        self._began.write(self._clock())
        self.gc_control.disable()
        if self._slow_steps is not None:
            self._slow_steps.begin()

    def end(self, step: StepStats) -> None:
        self._began.write(0.0)
        self._record(time.time(), step, None if self._slow_steps is None else self._slow_steps.end(step))

    def events_sent(self) -> None:
        """Do due maintenance after a step's results were sent to the clients."""
        self.gc_control.collect_if_due()
        if self._update():
            self._on_update()

    def idle(self) -> None:
        self._began.write(0.0)
        self.gc_control.enable()
        self._update()
        self._on_update()

    def close(self) -> None:
        self.gc_control.close()

    def _update(self) -> bool:
        now = self._clock()
        if now - self._updated_at < UPDATE_SECONDS:
            return False
        self._updated_at = now
        if self._slow_steps is not None:
            self._slow_steps.update_throttled()
        if self.drift is not None:
            self.drift.update()
        return True
