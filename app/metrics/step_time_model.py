"""Live model of the step times of one engine: the measured table, corrected by every step that was computed.

All users of step times read this model. Without a table, the times are learned.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from app.hardware.step_times import MIN_PREFILL_TOKENS, StepTimes, StepTimeTable
from app.metrics.stats import Phase, StepKind, StepStats

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
        """Update the running means of draft tokens and tokens per step; nothing changes while there are none."""
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
        """Return the usual seconds; None while they are unknown."""
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
