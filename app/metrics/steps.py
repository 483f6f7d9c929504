"""Steps of one engine: statistics of each, the log of the last ones, and the live model of their times.

The model is the measured table, corrected by every step that was computed; without a table, the times are learned. All
users of step times read it. Drift compares the last 128 steps with the measured times.
"""

from __future__ import annotations

import logging
import math
from array import array
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Final, Literal, get_args

from app.hardware.step_times import MIN_PREFILL_TOKENS, StepTimes, StepTimeTable

log = logging.getLogger(__name__)

Phase = Literal["prefill", "decode", "encode"]
# The phase, and `mixed` for prefill next to streams that need their next token. Steps of one kind have similar costs.
StepKind = Literal["prefill", "decode", "encode", "mixed"]
# The cause of a slow step: it took longer than similar steps, or delayed running streams beyond their decodes.
Cause = Literal[
    "prefill", "page_fault", "garbage_collection", "throttled", "compiled", "preempted", "descheduled", "unknown",
    "thermal", "frequency",
]  # fmt: skip

# Steps in a correction factor, and recent steps that are kept for each number of rows. Four outliers do not change a
# median of nine, and a wrong table is corrected within five steps.
RECENT_STEPS = 9
FACTOR_LIMITS = 0.25, 4.0  # limits of a correction factor; larger deviations come from something other than the step
ESTIMATE_LIMITS = 1 / 32, 32.0  # the same if the table was estimated, and may be wrong by more
# Steps in the median of the speed drift, and the number of them that it needs. It is long, because a drift discards
# the measurements.
WINDOW_STEPS, MIN_WINDOW_STEPS = 128, 50
_KNOWN_STEPS = 16  # steps of a size that must be seen before their usual time is known, without a table
_LEARNING_GAIN, _STEADY_GAIN = 0.10, 0.02  # step size of the usual time: while learning, and then
_SIZES_PER_DOUBLING = 4
_AS_MEASURED, _UNKNOWN = (1.0, 0), (0.0, 0)  # usual time, and number of steps
# weight of a new step in the running means of draft tokens, and the mean that counts as none
_DRAFT_GAIN, _MIN_DRAFT_TOKENS = 0.1, 0.01
FIRST_PREFILL_TOKENS = 32  # used while the price of a prefill token is unknown
# Steps in the learned medians. They are fewer than `RECENT_STEPS`, because only one step in sixteen decodes alone while
# prompts never end. Two outliers (a page fault storm, another process) change nothing.
_RECENT_STEPS = 5
_PRICE_GAIN = 0.3  # weight of a new measurement in the learned price
_MAX_CHANGE = 2.0  # a measurement counts as at most this factor, so that one outlier moves the price by 30%
_TABLE_TOKENS = 1024  # length at which the learned line is sampled for a table
# Relative times of decode steps without a table. Weights are read once for all rows of a step, so a few more rows
# are nearly free.
DEFAULT_STEP_TIMES = StepTimeTable(((1, 1.0), (2, 1.02), (4, 1.06), (8, 1.5), (64, 10.0)), ((1, 1.0),))
_MIN_STEPS = 5  # steps needed before they count; the first few are slow because they allocate memory and are recorded
_TYPICAL_INDEX = 1  # index of the typical step: the second fastest, because slower ones are slowed down by other causes
# A number of rows that no step had for this many steps is forgotten. Otherwise a few slow steps could keep it from
# ever being tried again.
FORGOTTEN_AFTER = 500
# Drift begins beyond the first factor and ends within the second: the gap avoids flapping.
DRIFT_BEGINS, DRIFT_ENDS = 1.20, 1.10
CAPACITY_STEPS = 65_536  # a minute of a small encoder's steps, an hour of a large decoder's
MAX_STEPS = 2048  # steps in one response: as JSON a few milliseconds of the event loop
_PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
_CAUSES: Final[tuple[Cause | None, ...]] = (None, *get_args(Cause))
_PHASE_NUMBERS = {phase: number for number, phase in enumerate(_PHASES)}
_CAUSE_NUMBERS = {cause: number for number, cause in enumerate(_CAUSES)}
_NOT_IN_INFO = frozenset(["added_seconds"])  # of a table that was learned, whose times the points describe as well
# Fields that were renamed, and their keys in `GET /info`, which are a contract.
_INFO_KEYS = {"step_times": "tempo", "draft_tokens": "guesses", "tokens_per_step": "tokens_made"}


@dataclass(frozen=True, slots=True)
class StepStats:
    seconds: float
    prefill_tokens: int = 0
    decode_tokens: int = 0
    num_sequences: int = 0
    num_prefill_sequences: int = 0
    num_decode_sequences: int = 0
    cached_tokens: int = 0
    preempted: int = 0
    model_seconds: float = 0.0  # the part of `seconds` spent in the model's forward pass
    context_tokens: int = 0  # tokens that the decoding sequences attend to, summed
    prefill_pairs: int = 0  # pairs of a prompt's token and a token computed before its chunk
    draft_tokens: int = 0  # draft tokens that speculation computed in this step, in addition to `decode_tokens`
    accepted_tokens: int = 0  # draft tokens that equal the tokens the model sampled
    encode_tokens: int = 0  # tokens of texts, or rows of an exported program's batch
    num_encode_sequences: int = 0
    encode_pairs: int = 0  # pairs of tokens of the same text: the sum of the squared text lengths
    recomputed_tokens: int = 0  # the part of `prefill_tokens` that is recomputed after a preemption
    # Average time of such a step over `seconds`: not 1 if a CPU quota stops it at times
    throttle_correction: float = 1.0
    is_first: bool = False  # first step of its shape: repeated shapes replay a recording, made now or later
    is_native: bool = False  # one native call or one graph replayed it, without the interpreter between operations
    scored_tokens: int = 0  # prompt tokens whose log-probabilities were computed too

    @property
    def phase(self) -> Phase:
        """Phase of the step; any prefill makes it `prefill`."""
        return "encode" if self.encode_tokens else "prefill" if self.prefill_tokens else "decode"

    @property
    def kind(self) -> StepKind:
        """Kind of the step; a step that does nothing is `decode`."""
        if self.encode_tokens:
            return "encode"
        if self.prefill_tokens:
            return "mixed" if self.num_decode_sequences else "prefill"
        return "decode"

    @property
    def num_rows(self) -> int:
        return self.num_decode_sequences + self.draft_tokens

    @property
    def corrected_seconds(self) -> float:
        """Throttle-corrected seconds: under a CPU quota, a single step's time is off by whole quota periods."""
        return self.seconds * self.throttle_correction

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all phases, including accepted draft tokens."""
        return self.prefill_tokens + self.decode_tokens + self.encode_tokens

    def expected_seconds(self, steps: StepTimeTable) -> float:
        """Return the seconds that a step time table gives for such a step; 0 if it has no such steps."""
        if self.encode_tokens:
            return steps.encode(self.encode_tokens, self.encode_pairs)
        behind = self.prefill_pairs // self.prefill_tokens if self.prefill_tokens else 0
        return steps.mixed(self.num_rows, self.prefill_tokens, self.context_tokens, behind)


@dataclass(frozen=True, slots=True)
class StateUsage:
    """Recurrent states: the bytes and number of those that are kept now, and since the start the prefixes that went on from one.

    `recomputed_tokens` of known prefixes were computed again, as no state after them was kept.
    """

    bytes: int
    checkpoints: int
    hits: int
    recomputed_tokens: int


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The worker's state after a step, replaced as a whole, so that any thread reads one consistent value.

    `stepped_at` is its `time.monotonic()`. `rows` are the decoding sequences, as (tokens generated, most tokens still
    to come), `prompts` the sequences in prefill, as (tokens computed, tokens to compute). `queue` has the tokens of
    each sequence that waits for a slot, and of texts and program batches. All are in order.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0
    stepped_at: float = 0.0
    rows: tuple[tuple[int, int], ...] = ()
    context_tokens: int = 0  # tokens that the rows attend to, summed
    prompts: tuple[tuple[int, int], ...] = ()
    queue: tuple[int, ...] = ()
    step_times: StepTimes | None = None  # step times; None while unknown
    states: StateUsage | None = None  # None for models without recurrent states

    @property
    def kv_usage_ratio(self) -> float:
        """Used KV memory over its capacity, 0 to 1."""
        return self.kv_used_tokens / self.kv_capacity_tokens if self.kv_capacity_tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        def renamed(items: list[tuple[str, Any]]) -> dict[str, Any]:
            return {_INFO_KEYS.get(name, name): value for name, value in items if name not in _NOT_IN_INFO}

        return asdict(self, dict_factory=renamed) | {"kv_usage_ratio": self.kv_usage_ratio}


class StepLog:
    """A ring of the last `capacity` steps in plain columns: one thread adds, any thread reads.

    65,536 steps take 2 MB, and adding a row allocates no lasting object.
    """

    def __init__(self, capacity: int = CAPACITY_STEPS) -> None:
        self._capacity = capacity
        self._at, self._seconds = array("d", bytes(8 * capacity)), array("d", bytes(8 * capacity))
        self._phase, self._cause = array("B", bytes(capacity)), array("B", bytes(capacity))
        self._tokens = array("l", bytes(array("l").itemsize * capacity))
        self.num_steps = 0  # written last: a row is complete before it is counted

    def add(self, began_at: float, step: StepStats, cause: Cause | None) -> None:
        """Add a step that began at this Unix time; `cause` if it was slow."""
        place = self.num_steps % self._capacity
        self._at[place] = began_at
        self._seconds[place] = step.seconds
        self._phase[place] = _PHASE_NUMBERS[step.phase]
        self._cause[place] = _CAUSE_NUMBERS[cause]
        self._tokens[place] = step.num_tokens
        self.num_steps += 1

    def since(self, after: int) -> dict[str, Any]:
        """Return at most `MAX_STEPS` steps from number `after` on, oldest first.

        `next` is the number to request next, `dropped` how many of the requested steps were overwritten.
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


class StepTimeModel:
    """Step times of one engine, for the worker thread; other threads get the immutable `StepTimes`.

    A table that was not measured has the right proportions at best: then a step's usual time is known only after some
    steps. `usual_seconds` is the usual time of the last observed step, as known before it.
    """

    def __init__(self, table: StepTimeTable | None = None, is_measured: bool = True) -> None:
        self.draft_tokens, self.tokens_per_step = 0.0, 1.0  # running means, for each sequence of a decode step
        self.use_table(table, is_measured)

    def use_table(self, table: StepTimeTable | None, is_measured: bool = True) -> None:
        """Use this table from now on, and forget what steps took in proportion to an earlier one."""
        self.table = table
        self.is_measured = is_measured and table is not None
        self.usual_seconds: float | None = None
        self._recent: dict[StepKind, deque[float]] = {}
        self._factors: dict[StepKind, float] = {}
        self._windows: dict[Phase, deque[float]] = {}
        self._model_window: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._usual = _UsualTimes(self.is_measured)
        self._rows = _RowFactors()
        self._learned = _LearnedTimes()

    # ---- observe ---------------------------------------------------------------------------------------------------

    def observe(self, step: StepStats) -> None:
        kind, table = step.kind, self.table
        expected = 1.0 if table is None else step.expected_seconds(table)
        if expected <= 0.0 or step.scored_tokens:  # scores of prompts take time that no table knows
            self.usual_seconds = None
            return
        # The usual time is of the wall clock, which is what streams wait for; everything else is throttle-corrected.
        key = kind, 0 if table is not None else _size_class(step)
        self.usual_seconds = self._usual.observe(key, step.seconds, expected)
        corrected = step.corrected_seconds
        if table is None:
            self._learned.observe(step)
            if kind == "decode" and step.num_rows:
                default = DEFAULT_STEP_TIMES.decode(step.num_rows, step.context_tokens)
                self._rows.observe(step.num_rows, corrected / default)
            return
        ratio = corrected / expected
        self._observe_ratio(kind, ratio)
        if kind == "decode":
            self._rows.observe(step.num_rows, ratio)
            self._observe_draft_tokens(step)
        if step.model_seconds and not step.prefill_tokens:
            self._model_window.append(step.model_seconds * step.throttle_correction / expected)

    def _observe_ratio(self, kind: StepKind, ratio: float) -> None:
        recent = self._recent.get(kind)
        if recent is None:
            recent = self._recent[kind] = deque(maxlen=RECENT_STEPS)
        recent.append(ratio)
        ordered, middle = sorted(recent), len(recent) // 2  # faster than `statistics.median`
        factor = ordered[middle] if len(recent) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
        least, most = FACTOR_LIMITS if self.is_measured else ESTIMATE_LIMITS
        self._factors[kind] = min(max(factor, least), most)
        phase: Phase = "prefill" if kind == "mixed" else kind
        window = self._windows.get(phase)
        if window is None:
            window = self._windows[phase] = deque(maxlen=WINDOW_STEPS)
        window.append(ratio)

    def _observe_draft_tokens(self, step: StepStats) -> None:
        if not (step.draft_tokens or self.draft_tokens):
            return
        drafted, made = step.draft_tokens / step.num_decode_sequences, step.decode_tokens / step.num_decode_sequences
        draft_tokens = self.draft_tokens + _DRAFT_GAIN * (drafted - self.draft_tokens)
        self.draft_tokens = draft_tokens if draft_tokens > _MIN_DRAFT_TOKENS else 0.0
        self.tokens_per_step += _DRAFT_GAIN * (made - self.tokens_per_step)

    # ---- predict ---------------------------------------------------------------------------------------------------

    def step_times(
        self, max_tokens: int, target_seconds: float | None = None, oldest_first: bool = False
    ) -> StepTimes | None:
        """Return the current step times for any thread; None if there is no table and too few steps have been seen.

        The arguments are the limits of a step. Without a table, the result is a straight line. While the price of a
        prefill token is unknown, only the first few prefill tokens fit.
        """
        if self.table is None:
            table = self._learned.table()
            if table is None:
                return None
            most = max_tokens if self._learned.token_seconds is not None else min(FIRST_PREFILL_TOKENS, max_tokens)
            return StepTimes(table, most, target_seconds, oldest_first=oldest_first)
        # A kind of step that was not seen yet gets the factor of the kind that is most like it.
        factors = self._factors
        decode = factors.get("decode", 1.0)
        mixed = factors.get("mixed", max(decode, factors.get("prefill", decode)))
        return StepTimes(
            self.table,
            max_tokens,
            target_seconds,
            decode,
            mixed,
            factors.get("prefill", mixed),
            factors.get("encode", 1.0),
            self.draft_tokens,
            self.tokens_per_step,
            oldest_first,
        )

    def predict(self, step: StepStats) -> float | None:
        """Return the usual seconds of a step with the same work as `step`; None if they are unknown."""
        if self.table is not None:
            return self._usual.seconds((step.kind, 0), step.expected_seconds(self.table))
        return self._usual.seconds((step.kind, _size_class(step)), 1.0)

    def predict_without_prefill(self, step: StepStats) -> float | None:
        """Return the usual seconds of the decodes of `step` alone, one row at least; None if they are unknown."""
        rows = max(step.num_decode_sequences, 1)
        return self.predict(StepStats(0.0, num_decode_sequences=rows, context_tokens=step.context_tokens))

    def decode(self, rows: int, context_tokens: int = 0) -> float:
        """Return the typical cost of a decode step with this many rows and this total context.

        Only proportions matter: without a table it has no unit until steps have been seen.
        """
        table = DEFAULT_STEP_TIMES if self.table is None else self.table
        return table.decode(rows, context_tokens) * self._rows.factor(rows)

    def window_factors(self) -> dict[Phase, float]:
        """Return the median step time over the table's in the long window, for each phase with enough steps."""
        return {phase: median(ratios) for phase, ratios in self._windows.items() if len(ratios) >= MIN_WINDOW_STEPS}

    def window_model_factor(self) -> float | None:
        """Return the same for the model's part of the steps without prefill, which vary least; None while unknown."""
        return median(self._model_window) if len(self._model_window) >= MIN_WINDOW_STEPS else None


class _UsualTimes:
    """Median times of steps, by kind and size; the median moves a little with each step.

    With a measured table, a kind of step that was not seen takes as long as measured. Otherwise usual times are unknown
    until enough steps were seen.
    """

    def __init__(self, is_measured: bool) -> None:
        self._is_measured = is_measured
        self._medians: dict[tuple[StepKind, int], tuple[float, int]] = {}  # median and number of steps

    def observe(self, key: tuple[StepKind, int], seconds: float, expected: float) -> float | None:
        before = self.seconds(key, expected)
        if seconds > 0.0:
            now = seconds / expected
            middle, seen = self._medians.get(key, _AS_MEASURED if self._is_measured else (now, 0))
            pull = _LEARNING_GAIN if seen < _KNOWN_STEPS else _STEADY_GAIN
            middle = min(middle * (1 + pull), now) if now > middle else max(middle / (1 + pull), now)
            self._medians[key] = (middle, seen + 1)
        return before

    def seconds(self, key: tuple[StepKind, int], expected: float) -> float | None:
        if self._is_measured:
            return self._medians.get(key, _AS_MEASURED)[0] * expected or None
        middle, seen = self._medians.get(key, _UNKNOWN)
        return middle * expected if seen >= _KNOWN_STEPS else None


@dataclass(slots=True)
class _ObservedRows:
    """Recent decode steps of one number of rows: their times over the table's, and the representative one."""

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    typical: float = 0.0  # 0 until there are enough steps
    last_step: int = 0  # index of the latest step


class _RowFactors:
    """Typical time of decode steps over the table's, by number of rows, since kernels have tiles."""

    def __init__(self) -> None:
        self._observed: dict[int, _ObservedRows] = {}
        self._known: list[int] = []  # numbers of rows that were seen often enough, ascending
        self._num_steps = 0

    def observe(self, rows: int, ratio: float) -> None:
        self._num_steps += 1
        if self._num_steps % FORGOTTEN_AFTER == 0:
            self._forget()
        observed = self._observed.get(rows)
        if observed is None:
            observed = self._observed[rows] = _ObservedRows()
        observed.last_step = self._num_steps
        observed.ratios.append(ratio)
        if len(observed.ratios) < _MIN_STEPS:
            return
        if not observed.typical:
            insort(self._known, rows)
        observed.typical = sorted(observed.ratios)[_TYPICAL_INDEX]

    def factor(self, rows: int) -> float:
        """Return the factor; between two known numbers of rows it is interpolated, beyond them the nearest counts."""
        if not self._known:
            return 1.0
        at = bisect_right(self._known, rows)
        low, high = self._known[max(at - 1, 0)], self._known[min(at, len(self._known) - 1)]
        first, second = self._observed[low].typical, self._observed[high].typical
        return first if rows <= low or low == high else first + (second - first) * (rows - low) / (high - low)

    def _forget(self) -> None:
        recent = self._num_steps - FORGOTTEN_AFTER
        self._observed = {rows: seen for rows, seen in self._observed.items() if seen.last_step > recent}
        self._known = [rows for rows in self._known if rows in self._observed]


class _LearnedTimes:
    """Step times without a table: the time of decode steps, and what the tokens of prompts add to it.

    They add `token_seconds` each, which steps without decodes show, and a fixed time, which may be negative.
    """

    def __init__(self) -> None:
        self.token_seconds: float | None = None
        self._decodes: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._added: deque[tuple[int, float]] = deque(maxlen=_RECENT_STEPS)  # by prompts: tokens, and their seconds

    def table(self) -> StepTimeTable | None:
        if not self._decodes:
            return None
        decode_seconds, token_seconds = median(self._decodes), self.token_seconds or 0.0
        last_seconds = decode_seconds + (_TABLE_TOKENS - 1) * token_seconds
        return StepTimeTable(
            ((1, decode_seconds), (_TABLE_TOKENS, decode_seconds)),
            ((1, decode_seconds), (_TABLE_TOKENS, last_seconds)),
            added_seconds=(self._fixed_seconds(), token_seconds),
        )

    def observe(self, step: StepStats) -> None:
        if step.decode_tokens and not step.prefill_tokens:
            self._decodes.append(step.corrected_seconds)
        elif step.prefill_tokens >= (MIN_PREFILL_TOKENS if step.decode_tokens else FIRST_PREFILL_TOKENS):
            self._learn_price(step)

    def _fixed_seconds(self) -> float:
        """Return the time that prompts add to decodes beyond the price of their tokens; 0 if none was seen beside any."""
        price = self.token_seconds or 0.0
        return median(added - tokens * price for tokens, added in self._added) if self._added else 0.0

    def _learn_price(self, step: StepStats) -> None:
        """Update the price of a prefill token, which steps without decodes show, and what prompts add to decodes."""
        tokens, known = step.prefill_tokens, self.token_seconds
        if not step.decode_tokens:
            added = max(step.corrected_seconds - max(self._fixed_seconds(), 0.0), 0.0)
        elif self._decodes:
            added = max(step.corrected_seconds - median(self._decodes), 0.0)
            self._added.append((tokens, added))
        else:
            return
        price = added / tokens
        if known is None or (not step.decode_tokens and 0.0 < price < known):  # nothing makes a step too fast
            self.token_seconds = price or None
        elif price < known or not step.decode_tokens:
            price = min(max(price, known / _MAX_CHANGE), known * _MAX_CHANGE)
            self.token_seconds = known + _PRICE_GAIN * (price - known)


def _size_class(step: StepStats) -> int:
    """Return the size class of a step; steps of one class differ by less than a fifth in rows."""
    rows = step.num_rows + step.prefill_tokens + step.encode_tokens
    return round(math.log2(max(rows, 1)) * _SIZES_PER_DOUBLING)


@dataclass(frozen=True, slots=True)
class ExpectedSpeed:
    """Speeds that the plan expected before the first request.

    `capacity` is tokens per second by phase and number of rows, and `roofline` the part of the hardware ceiling
    reached, by phase. With `is_estimated` there is nothing to drift from. `spread` is the relative spread of the
    calibration's samples.
    """

    capacity: Mapping[str, Mapping[int, float]]
    roofline: Mapping[str, float]
    is_estimated: bool = False
    spread: float | None = None


@dataclass(frozen=True, slots=True)
class SpeedState:
    """The speeds at one moment: what the plan expected, and what recent steps took over the measured times, by phase.

    `drifted` is True while the measurements do not hold.
    """

    expected: ExpectedSpeed
    factors: Mapping[Phase, float] = field(default_factory=dict)
    drifted: bool = False

    @property
    def is_estimated(self) -> bool:
        return self.expected.is_estimated

    @property
    def spread(self) -> float | None:
        return self.expected.spread

    def factor(self, phase: str) -> float:
        """Return the current step time over the measured one, 1 until enough steps were seen."""
        return next((factor for known, factor in self.factors.items() if phase.startswith(known)), 1.0)

    def capacity(self) -> Mapping[str, Mapping[int, float]]:
        return {
            phase: {rows: speed / self.factor(phase) for rows, speed in by_rows.items()}
            for phase, by_rows in self.expected.capacity.items()
        }

    def roofline(self) -> Mapping[str, float]:
        """Return by phase the part of this machine's ceiling that steps reach now."""
        return {phase: ratio / self.factor(phase) for phase, ratio in self.expected.roofline.items()}

    def to_json(self) -> dict[str, object]:
        factors = {phase: round(factor, 3) for phase, factor in self.factors.items()}
        return {
            "steps_over_measured": factors,
            "drifted": self.drifted,
            "estimated": self.is_estimated,
            "spread": self.spread,
            "capacity_tokens_per_second": self.capacity(),
            "roofline_ratio": self.roofline(),
        }


class SpeedDrift:
    """Updates the speeds by recent steps; `speed` is replaced as a whole, since other threads read it.

    `on_stale` is called once, on the worker thread, when the measurements no longer hold.
    """

    def __init__(
        self, model: StepTimeModel, expected: ExpectedSpeed, on_stale: Callable[[], None] = lambda: None
    ) -> None:
        self.speed = SpeedState(expected)
        self._model, self._on_stale = model, on_stale
        self._reported_stale = False

    def update(self) -> None:
        """Read the factors of the recent steps, which takes a tenth of a millisecond."""
        speed = self.speed
        factor = None if speed.is_estimated else self._model.window_model_factor()
        drifted = speed.drifted if factor is None else self._is_drifted(factor)
        self.speed = SpeedState(speed.expected, self._model.window_factors(), drifted)

    def _is_drifted(self, factor: float) -> bool:
        before = self.speed.drifted
        bound = DRIFT_ENDS if before else DRIFT_BEGINS
        drifted = not 1 / bound <= factor <= bound
        if drifted == before:
            return drifted
        if not drifted:
            log.info("steps take as long as measured again (%.2f times)", factor)
            return drifted
        log.warning(
            "steps take %.2f times as long as measured: the reported capacity is corrected, and the next start measures again",
            factor,
        )
        if not self._reported_stale:
            self._reported_stale = True
            self._on_stale()
        return drifted
