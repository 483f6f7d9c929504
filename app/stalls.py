"""Why a step took longer than such steps do. The worker thread asks before and after each; what costs much is read only after a slow one.

What steps take is the measured table's word, corrected by what they have taken lately; where nothing was measured, that of steps of the
same size. A cause is named where there is evidence of it, and where there is none that is said.
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

STALLED = 1.5  # times what such steps take
PART = 0.5  # of the time beyond that: what took so much of it is the cause
_KNOWN_STEPS = 16  # of a size, before it is known what they take
_QUICK, _STEADY = 0.10, 0.02  # how far one step moves the middle of its like: at first, and then
_SIZES_PER_DOUBLING = 4
_PROBED_PAGES, _PROBES = 256, 3
_AS_MEASURED, _UNKNOWN = (1.0, 0), (0.0, 0)  # the middle, and of how many steps


class Like(NamedTuple):
    """What makes steps alike: what they carry and how large they are; and the seconds that the middle of their kind is a multiple of."""

    key: tuple[str, int]
    expected: float


class Usual:
    """What steps take lately: half of those of a kind were quicker, half slower.

    With a table the kind is what a step carries, and the middle is of seconds over the table's; without, the kind is that and the size.
    """

    def __init__(self, table: StepSeconds | None = None) -> None:
        self._table = table
        self._middles: dict[tuple[str, int], tuple[float, int]] = {}  # by kind and size: the middle, and of how many steps

    def like(self, step: StepStats) -> Like:
        """The kind of a step; its size, and a second, where there is no table, or else what that says."""
        kind = "mixed" if _joined(step) else step.phase
        if self._table is not None:
            return Like((kind, 0), step.expected_seconds(self._table))
        rows = step.num_decode_sequences + step.drafted_tokens + step.prefill_tokens + step.encode_tokens
        return Like((kind, _size(rows)), 1.0)

    def decodes_of(self, step: StepStats) -> Like:
        """What it would have been without prompts: for one that only computes again, one sequence's next token."""
        rows = max(step.num_decode_sequences, 1)
        if self._table is not None:
            return Like(("decode", 0), self._table.decode(rows, step.context_tokens))
        return Like(("decode", _size(rows)), 1.0)

    def seconds(self, like: Like) -> float | None:
        """For a step like this; None while that is not known."""
        if self._table is not None:
            return self._middles.get(like.key, _AS_MEASURED)[0] * like.expected or None
        middle, seen = self._middles.get(like.key, _UNKNOWN)
        return middle if seen >= _KNOWN_STEPS else None

    def learn(self, like: Like, seconds: float) -> None:
        """One that took so long."""
        if like.expected <= 0.0 or seconds <= 0.0:
            return
        now = seconds / like.expected
        middle, seen = self._middles.get(like.key, _AS_MEASURED if self._table is not None else (now, 0))
        pull = _QUICK if seen < _KNOWN_STEPS else _STEADY
        middle = min(middle * (1 + pull), now) if now > middle else max(middle / (1 + pull), now)
        self._middles[like.key] = (middle, seen + 1)


@dataclass(frozen=True, slots=True)
class Counters:
    """What the process suffered meanwhile: page faults without and with reading from a disk, switches away from a thread that would have
    gone on, and seconds of collecting garbage. Of all threads together, since those that compute are several."""

    minor_faults: int = 0
    major_faults: int = 0
    switches: int = 0
    garbage_seconds: float = 0.0

    @classmethod
    def between(cls, before: resource.struct_rusage, after: resource.struct_rusage, garbage_seconds: float) -> Counters:
        return cls(
            after.ru_minflt - before.ru_minflt,
            after.ru_majflt - before.ru_majflt,
            after.ru_nivcsw - before.ru_nivcsw,
            garbage_seconds,
        )


@dataclass(frozen=True, slots=True)
class Stall:
    """A slow step: the seconds beyond what such steps take, what happened meanwhile, how long the control group was kept off the CPU."""

    step: StepStats
    excess_seconds: float
    during: Counters
    throttled_seconds: float = 0.0
    fault_seconds: float = 0.0  # of one page, on this machine

    def cause(self) -> Cause:
        """What took the greater part of the excess; else what the step was that others are not; else what else is known of it.

        What a first step of its shape or one that computes again does besides, such as touching new memory, is a consequence of that.
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
    """`begin` and `end` around each step. `garbage_seconds` and `throttled_seconds` read what has come together so far (None: nothing to
    read)."""

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
        """How long it was throttled until now: what comes is held against that. A file is read, so not at every step."""
        self._throttled = self._throttled_seconds() or 0.0

    def begin(self) -> None:
        """A microsecond or two: one call of the system."""
        self._usage, self._garbage = resource.getrusage(resource.RUSAGE_SELF), self._garbage_seconds()

    def end(self, step: StepStats) -> Cause | None:
        """Right after it. None: it took what such steps take, and kept nobody waiting who only wanted the next token."""
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
    """What a page costs that was never written before, on this machine: the system finds one and fills it with zeros."""
    tries = [_touched() for _ in range(_PROBES)]
    return max(min(new for new, _ in tries) - min(again for _, again in tries), 0.0) / _PROBED_PAGES


def _touched() -> tuple[float, float]:
    """Seconds for all pages of new memory, and for the same once more."""
    with mmap.mmap(-1, _PROBED_PAGES * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        if (small_pages := getattr(mmap, "MADV_NOHUGEPAGE", None)) is not None:  # Linux has them larger too
            memory.madvise(small_pages)
        return _touch_seconds(memory), _touch_seconds(memory)


def _touch_seconds(memory: mmap.mmap) -> float:
    began = time.perf_counter()
    for place in range(0, len(memory), mmap.PAGESIZE):
        memory[place] = 1
    return time.perf_counter() - began


def _joined(step: StepStats) -> bool:
    """Streams that wanted their next token waited for a prompt."""
    return step.prefill_tokens > 0 and step.num_decode_sequences > 0


def _size(rows: int) -> int:
    """Steps of one size differ by less than a fifth in rows."""
    return round(math.log2(max(rows, 1)) * _SIZES_PER_DOUBLING)
