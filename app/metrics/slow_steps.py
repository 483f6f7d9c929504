"""Detection of slow steps and of their causes.

The worker thread calls this before and after each step; expensive sources are read only after a slow step. The
usual time of a step comes from the measured step time table, corrected by recent steps; without a table, from steps
of the same size. A cause is reported only if there is evidence for it, else `unknown`.
"""

from __future__ import annotations

import math
import mmap
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from app.hardware.step_times import StepTimeTable
from app.metrics.stats import (
    Cause,
    StepStats,
)

SLOW_FACTOR = 1.5  # times the usual time of similar steps
CAUSE_SHARE = 0.5  # share of the excess time that makes something the cause
_KNOWN_STEPS = 16  # steps of a size that must be seen before their usual time is known
_LEARNING_GAIN, _STEADY_GAIN = 0.10, 0.02  # step size of the median of a shape: while learning, and then
_SIZES_PER_DOUBLING = 4
_PROBED_PAGES, _PROBES = 256, 3
_AS_MEASURED, _UNKNOWN = (1.0, 0), (0.0, 0)  # median, and number of steps


class StepKind(NamedTuple):
    """The kind and size of similar steps, and the seconds by which their times are divided."""

    key: tuple[str, int]
    expected_seconds: float


class UsualStepTimes:
    """Recent median step times, by shape.

    With a table, the shape is the kind of step, and the median is of the time over the table's. Without one, the
    shape is the kind and the size, and the median is of seconds.
    """

    def __init__(self, table: StepTimeTable | None = None) -> None:
        self._table = table
        self._medians: dict[tuple[str, int], tuple[float, int]] = {}  # median and number of steps, by kind and size

    def kind_of(self, step: StepStats) -> StepKind:
        """Return the shape of a step; `expected_seconds` is the table's time, or 1 second without a table."""
        kind = "mixed" if _delayed_decodes(step) else step.phase
        if self._table is not None:
            return StepKind((kind, 0), step.expected_seconds(self._table))
        rows = step.num_decode_sequences + step.draft_tokens + step.prefill_tokens + step.encode_tokens
        return StepKind((kind, _size_class(rows)), 1.0)

    def decode_kind_of(self, step: StepStats) -> StepKind:
        """Return the shape of the same step without its prompts.

        A step that only recomputes preempted sequences counts as one decode row.
        """
        rows = max(step.num_decode_sequences, 1)
        if self._table is not None:
            return StepKind(("decode", 0), self._table.decode(rows, step.context_tokens))
        return StepKind(("decode", _size_class(rows)), 1.0)

    def seconds(self, kind: StepKind) -> float | None:
        """Return the usual seconds of such a step, or None while they are not known."""
        if self._table is not None:
            return self._medians.get(kind.key, _AS_MEASURED)[0] * kind.expected_seconds or None
        middle, seen = self._medians.get(kind.key, _UNKNOWN)
        return middle if seen >= _KNOWN_STEPS else None

    def observe(self, kind: StepKind, seconds: float) -> None:
        """Update the median with a step of this shape that took `seconds`."""
        if kind.expected_seconds <= 0.0 or seconds <= 0.0:
            return
        now = seconds / kind.expected_seconds
        middle, seen = self._medians.get(kind.key, _AS_MEASURED if self._table is not None else (now, 0))
        pull = _LEARNING_GAIN if seen < _KNOWN_STEPS else _STEADY_GAIN
        middle = min(middle * (1 + pull), now) if now > middle else max(middle / (1 + pull), now)
        self._medians[kind.key] = (middle, seen + 1)


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
        return "prefill" if _delayed_decodes(self.step) else "unknown"


class SlowStepDetector:
    """Detects slow steps; call `begin` and `end` around each step.

    `garbage_seconds` and `throttled_seconds` return running totals; the latter returns None if it cannot be read.
    """

    def __init__(
        self,
        usual_times: UsualStepTimes,
        garbage_seconds: Callable[[], float] = lambda: 0.0,
        throttled_seconds: Callable[[], float | None] = lambda: None,
        fault_seconds: float = 0.0,
    ) -> None:
        self._usual_times, self._fault_seconds = usual_times, fault_seconds
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
        kind = self._usual_times.kind_of(step)
        usual = self._usual_times.seconds(kind)
        cause: Cause | None = None
        if usual is not None and step.seconds > SLOW_FACTOR * usual:
            cause = self._find_cause(step, step.seconds - usual)
        elif _delayed_decodes(step) or step.recomputed_tokens:
            alone = self._usual_times.seconds(self._usual_times.decode_kind_of(step))
            if alone is not None and step.seconds > SLOW_FACTOR * alone:
                cause = "preempted" if step.recomputed_tokens else "prefill"
        self._usual_times.observe(kind, step.seconds)
        return cause

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


def _delayed_decodes(step: StepStats) -> bool:
    """Return True if streams that needed their next token waited for a prompt in this step."""
    return step.prefill_tokens > 0 and step.num_decode_sequences > 0


def _size_class(rows: int) -> int:
    """Return the size class of a step; steps of one class differ by less than a fifth in rows."""
    return round(math.log2(max(rows, 1)) * _SIZES_PER_DOUBLING)
