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

from app.hardware.step_seconds import StepSeconds
from app.measured import Cause, StepStats

STALLED = 1.5  # times the usual time of similar steps
PART = 0.5  # share of the excess time that makes something the cause
_KNOWN_STEPS = 16  # steps of a size that must be seen before their usual time is known
_QUICK, _STEADY = 0.10, 0.02  # step size of the median of a shape: while learning, and then
_SIZES_PER_DOUBLING = 4
_PROBED_PAGES, _PROBES = 256, 3
_AS_MEASURED, _UNKNOWN = (1.0, 0), (0.0, 0)  # median, and number of steps


class Like(NamedTuple):
    """The kind and size of similar steps, and the seconds by which their times are divided."""

    key: tuple[str, int]
    expected: float


class Usual:
    """Recent median step times, by shape.

    With a table, the shape is the kind of step, and the median is of the time over the table's. Without one, the
    shape is the kind and the size, and the median is of seconds.
    """

    def __init__(self, table: StepSeconds | None = None) -> None:
        self._table = table
        self._middles: dict[tuple[str, int], tuple[float, int]] = {}  # median and number of steps, by kind and size

    def like(self, step: StepStats) -> Like:
        """Return the shape of a step; `expected_seconds` is the table's time, or 1 second without a table."""
        kind = "mixed" if _joined(step) else step.phase
        if self._table is not None:
            return Like((kind, 0), step.expected_seconds(self._table))
        rows = step.num_decode_sequences + step.drafted_tokens + step.prefill_tokens + step.encode_tokens
        return Like((kind, _size(rows)), 1.0)

    def decodes_of(self, step: StepStats) -> Like:
        """Return the shape of the same step without its prompts.

        A step that only recomputes preempted sequences counts as one decode row.
        """
        rows = max(step.num_decode_sequences, 1)
        if self._table is not None:
            return Like(("decode", 0), self._table.decode(rows, step.context_tokens))
        return Like(("decode", _size(rows)), 1.0)

    def seconds(self, like: Like) -> float | None:
        """Return the usual seconds of such a step, or None while they are not known."""
        if self._table is not None:
            return self._middles.get(like.key, _AS_MEASURED)[0] * like.expected or None
        middle, seen = self._middles.get(like.key, _UNKNOWN)
        return middle if seen >= _KNOWN_STEPS else None

    def learn(self, like: Like, seconds: float) -> None:
        """Update the median with a step of this shape that took `seconds`."""
        if like.expected <= 0.0 or seconds <= 0.0:
            return
        now = seconds / like.expected
        middle, seen = self._middles.get(like.key, _AS_MEASURED if self._table is not None else (now, 0))
        pull = _QUICK if seen < _KNOWN_STEPS else _STEADY
        middle = min(middle * (1 + pull), now) if now > middle else max(middle / (1 + pull), now)
        self._middles[like.key] = (middle, seen + 1)


@dataclass(frozen=True, slots=True)
class Counters:
    """Events of the process during a step.

    These are page faults without and with a disk read, involuntary context switches, and seconds of garbage
    collection. All threads count together, since several compute.
    """

    minor_faults: int = 0
    major_faults: int = 0
    switches: int = 0
    garbage_seconds: float = 0.0

    @classmethod
    def between(cls, before: resource.struct_rusage, after: resource.struct_rusage, garbage_seconds: float) -> Counters:
        """Return the differences of two `getrusage` results."""
        return cls(
            after.ru_minflt - before.ru_minflt,
            after.ru_majflt - before.ru_majflt,
            after.ru_nivcsw - before.ru_nivcsw,
            garbage_seconds,
        )


@dataclass(frozen=True, slots=True)
class Stall:
    """A slow step: its seconds beyond the usual time, and what happened meanwhile.

    `throttled_seconds` is how long the CPU quota stopped the control group.
    """

    step: StepStats
    excess_seconds: float
    during: Counters
    throttled_seconds: float = 0.0
    fault_seconds: float = 0.0  # seconds of one page fault on this machine

    def cause(self) -> Cause:
        """Return the most likely cause.

        It is what took at least half of the excess; else a property of the step; else other evidence. The side
        effects of a first step of its shape or of a recomputation, such as page faults, are attributed to that
        step's property.
        """
        enough = PART * self.excess_seconds
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
        return "prefill" if _joined(self.step) else "unknown"


class Stalls:
    """Detects slow steps; call `begin` and `end` around each step.

    `garbage_seconds` and `throttled_seconds` return running totals; the latter returns None if it cannot be read.
    """

    def __init__(
        self,
        usual: Usual,
        garbage_seconds: Callable[[], float] = lambda: 0.0,
        throttled_seconds: Callable[[], float | None] = lambda: None,
        fault_seconds: float = 0.0,
    ) -> None:
        self._usual, self._fault_seconds = usual, fault_seconds
        self._garbage_seconds, self._throttled_seconds = garbage_seconds, throttled_seconds
        self._usage, self._garbage = resource.getrusage(resource.RUSAGE_SELF), garbage_seconds()
        self._throttled = 0.0
        self.look()

    def look(self) -> None:
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
        like = self._usual.like(step)
        usual = self._usual.seconds(like)
        cause: Cause | None = None
        if usual is not None and step.seconds > STALLED * usual:
            cause = self._judge(step, step.seconds - usual)
        elif _joined(step) or step.recomputed_tokens:
            alone = self._usual.seconds(self._usual.decodes_of(step))
            if alone is not None and step.seconds > STALLED * alone:
                cause = "preempted" if step.recomputed_tokens else "prefill"
        self._usual.learn(like, step.seconds)
        return cause

    def _judge(self, step: StepStats, excess_seconds: float) -> Cause:
        garbage = self._garbage_seconds() - self._garbage
        during = Counters.between(self._usage, resource.getrusage(resource.RUSAGE_SELF), garbage)
        before = self._throttled
        self.look()
        return Stall(step, excess_seconds, during, self._throttled - before, self._fault_seconds).cause()


def first_touch_seconds() -> float:
    """Measure the seconds of a page's first write, when the system finds and zeroes it."""
    tries = [_touched() for _ in range(_PROBES)]
    return max(min(new for new, _ in tries) - min(again for _, again in tries), 0.0) / _PROBED_PAGES


def _touched() -> tuple[float, float]:
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


def _joined(step: StepStats) -> bool:
    """Return True if streams that needed their next token waited for a prompt in this step."""
    return step.prefill_tokens > 0 and step.num_decode_sequences > 0


def _size(rows: int) -> int:
    """Return the size class of a step; steps of one class differ by less than a fifth in rows."""
    return round(math.log2(max(rows, 1)) * _SIZES_PER_DOUBLING)
