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

from app.hardware.step_seconds import StepSeconds
from app.measured import Cause, StepStats

STALLED = 1.5  # times what such steps take
PART = 0.5  # of the time beyond that: what took so much of it is the cause
_KNOWN_STEPS = 16  # of a size, before it is known what they take
_QUICK, _STEADY = 0.10, 0.02  # how far one step moves the middle of its like: at first, and then
_SIZES_PER_DOUBLING = 4
_PROBED_PAGES, _PROBES = 256, 3


class Usual:
    """What steps take lately: half of those of a kind were quicker, half slower.

    With a table the kind is what a step carries, and the middle is of seconds over the table's; without, the kind is that and the size.
    """

    def __init__(self, table: StepSeconds | None = None) -> None:
        self._table = table
        self._middles: dict[tuple[str, int], tuple[float, int]] = {}  # by kind and size: the middle, and of how many steps

    def seconds(self, step: StepStats) -> float | None:
        """For a step like this; None while that is not known."""
        if self._table is not None:
            middle, _ = self._middles.get((_kind(step), 0), (1.0, 0))
            return middle * step.expected_seconds(self._table) or None
        middle, seen = self._middles.get((_kind(step), _size(step)), (0.0, 0))
        return middle if seen >= _KNOWN_STEPS else None

    def learn(self, step: StepStats) -> None:
        expected, size = (1.0, _size(step)) if self._table is None else (step.expected_seconds(self._table), 0)
        if expected <= 0.0 or step.seconds <= 0.0:
            return
        now, key = step.seconds / expected, (_kind(step), size)
        middle, seen = self._middles.get(key, (now if self._table is None else 1.0, 0))
        pull = _QUICK if seen < _KNOWN_STEPS else _STEADY
        self._middles[key] = (min(middle * (1 + pull), now) if now > middle else max(middle / (1 + pull), now), seen + 1)


@dataclass(frozen=True, slots=True)
class Counters:
    """What the process had suffered by some moment: page faults with and without reading from a disk, switches away from a thread that
    would have gone on, and seconds of collecting garbage."""

    minor_faults: int = 0
    major_faults: int = 0
    switches: int = 0
    garbage_seconds: float = 0.0

    @classmethod
    def now(cls, garbage_seconds: float) -> Counters:
        """Of all threads together, since those that compute are several: a microsecond or two."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return cls(usage.ru_minflt, usage.ru_majflt, usage.ru_nivcsw, garbage_seconds)

    def since(self, before: Counters) -> Counters:
        return Counters(
            self.minor_faults - before.minor_faults,
            self.major_faults - before.major_faults,
            self.switches - before.switches,
            self.garbage_seconds - before.garbage_seconds,
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
        self._before = Counters()
        self._throttled = 0.0
        self.look()

    def look(self) -> None:
        """How long it was throttled until now: what comes is held against that. A file is read, so not at every step."""
        self._throttled = self._throttled_seconds() or 0.0

    def begin(self) -> None:
        self._before = Counters.now(self._garbage_seconds())

    def end(self, step: StepStats) -> Cause | None:
        """Right after it. None: it took what such steps take, and kept nobody waiting who only wanted the next token."""
        usual = self._usual.seconds(step)
        cause: Cause | None = None
        if usual is not None and step.seconds > STALLED * usual:
            cause = self._judge(step, step.seconds - usual)
        elif _joined(step) or step.recomputed_tokens:
            alone = self._usual.seconds(_decodes_of(step))
            if alone is not None and step.seconds > STALLED * alone:
                cause = "preempted" if step.recomputed_tokens else "prefill"
        self._usual.learn(step)
        return cause

    def _judge(self, step: StepStats, excess_seconds: float) -> Cause:
        during = Counters.now(self._garbage_seconds()).since(self._before)
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


def _decodes_of(step: StepStats) -> StepStats:
    """What the step would have been without prompts: for one that only computes again, one sequence's next token."""
    rows = max(step.num_decode_sequences, 1)
    return StepStats(0.0, decode_tokens=rows, num_decode_sequences=rows, context_tokens=step.context_tokens)


def _kind(step: StepStats) -> str:
    return "mixed" if _joined(step) else step.phase


def _size(step: StepStats) -> int:
    """Steps of one size differ by less than a fifth in tokens."""
    rows = step.num_decode_sequences + step.drafted_tokens + step.prefill_tokens + step.encode_tokens
    return round(math.log2(max(rows, 1)) * _SIZES_PER_DOUBLING)
