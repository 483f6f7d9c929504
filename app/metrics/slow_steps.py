"""Detection of slow steps and of their causes.

The worker thread calls this before and after each step; expensive sources are read only after a slow step. The usual
time of a step comes from the step time model. A cause is reported only if there is evidence for it, else `unknown`.
"""

from __future__ import annotations

import mmap
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

from app.metrics.stats import (
    Cause,
    StepStats,
)
from app.metrics.step_time_model import StepTimeModel

SLOW_FACTOR = 1.5  # times the usual time of similar steps
CAUSE_SHARE = 0.5  # share of the excess time that makes something the cause
_PROBED_PAGES, _PROBES = 256, 3


@dataclass(frozen=True, slots=True)
class ProcessCounters:
    """Events of the process during a step.

    These are page faults without and with a disk read, involuntary context switches, and seconds of garbage
    collection. All threads count together, since several compute.
    """

    minor_faults: int = 0
    major_faults: int = 0
    switches: int = 0
    garbage_seconds: float = 0.0

    @classmethod
    def between(
        cls, before: resource.struct_rusage, after: resource.struct_rusage, garbage_seconds: float
    ) -> ProcessCounters:
        """Return the differences of two `getrusage` results."""
        return cls(
            after.ru_minflt - before.ru_minflt,
            after.ru_majflt - before.ru_majflt,
            after.ru_nivcsw - before.ru_nivcsw,
            garbage_seconds,
        )


@dataclass(frozen=True, slots=True)
class SlowStep:
    """A slow step: its seconds beyond the usual time, and what happened meanwhile.

    `throttled_seconds` is how long the CPU quota stopped the control group.
    """

    step: StepStats
    excess_seconds: float
    during: ProcessCounters
    throttled_seconds: float = 0.0
    fault_seconds: float = 0.0  # seconds of one page fault on this machine

    def cause(self) -> Cause:
        """Return the most likely cause.

        It is what took at least half of the excess; else a property of the step; else other evidence. The side
        effects of a first step of its shape or of a recomputation, such as page faults, are attributed to that
        step's property.
        """
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
        if self.during.switches:
            return "descheduled"
        return "prefill" if self.step.kind == "mixed" else "unknown"


class SlowStepDetector:
    """Detects slow steps; call `begin` and `end` around each step.

    `model` has observed the step when `end` is called.
    `garbage_seconds` and `throttled_seconds` return running totals; the latter returns None if it cannot be read.
    """

    def __init__(
        self,
        model: StepTimeModel,
        garbage_seconds: Callable[[], float] = lambda: 0.0,
        throttled_seconds: Callable[[], float | None] = lambda: None,
        fault_seconds: float = 0.0,
    ) -> None:
        self._model, self._fault_seconds = model, fault_seconds
        self._garbage_seconds, self._throttled_seconds = garbage_seconds, throttled_seconds
        self._usage, self._garbage = resource.getrusage(resource.RUSAGE_SELF), garbage_seconds()
        self._throttled = 0.0
        self.update_throttled()

    def update_throttled(self) -> None:
        """Read the throttled time up to now as the base for later steps; it reads a file, so not at every step."""
        self._throttled = self._throttled_seconds() or 0.0

    def begin(self) -> None:
        """Record the counters before a step: one system call of one to two microseconds."""
        self._usage, self._garbage = resource.getrusage(resource.RUSAGE_SELF), self._garbage_seconds()

    def end(self, step: StepStats) -> Cause | None:
        """Return the cause if the step was slow, else None; call it right after the step.

        A step is slow if it took over 1.5 times the usual time of similar steps, or of the decodes that waited for
        its prompts.
        """
        usual = self._model.usual_seconds
        if usual is not None and step.seconds > SLOW_FACTOR * usual:
            return self._find_cause(step, step.seconds - usual)
        if step.kind == "mixed" or step.recomputed_tokens:
            alone = self._model.predict_without_prefill(step)
            if alone is not None and step.seconds > SLOW_FACTOR * alone:
                return "preempted" if step.recomputed_tokens else "prefill"
        return None

    def _find_cause(self, step: StepStats, excess_seconds: float) -> Cause:
        garbage = self._garbage_seconds() - self._garbage
        during = ProcessCounters.between(self._usage, resource.getrusage(resource.RUSAGE_SELF), garbage)
        before = self._throttled
        self.update_throttled()
        return SlowStep(step, excess_seconds, during, self._throttled - before, self._fault_seconds).cause()


def first_touch_seconds() -> float:
    """Measure the seconds of a page's first write, when the system finds and zeroes it."""
    tries = [_first_and_second_touch_seconds() for _ in range(_PROBES)]
    return max(min(new for new, _ in tries) - min(again for _, again in tries), 0.0) / _PROBED_PAGES


def _first_and_second_touch_seconds() -> tuple[float, float]:
    """Return the seconds to write all pages of new memory, and to write them again."""
    with mmap.mmap(-1, _PROBED_PAGES * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        if (small_pages := getattr(mmap, "MADV_NOHUGEPAGE", None)) is not None:  # Linux could use huge pages otherwise
            memory.madvise(small_pages)
        return _touch_seconds(memory), _touch_seconds(memory)


def _touch_seconds(memory: mmap.mmap) -> float:
    began = time.perf_counter()
    for place in range(0, len(memory), mmap.PAGESIZE):
        memory[place] = 1
    return time.perf_counter() - began
