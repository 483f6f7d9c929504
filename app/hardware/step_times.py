"""Step times of the whole model: the measured table, and its correction by the steps seen while serving.

Times are linear between measured points, proportional beyond the last one, and never fall when work grows.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from app.hardware.decision import TrialTimes

# Share of the cost of a context token for a decoding sequence: the queries of a chunk read keys and values once for
# all of them. Used if the trial did not measure it. The correction factors of `StepTimes` correct it while serving.
_CHUNK_CONTEXT_SHARE = 0.5

TABLE_TEXT_TOKENS = 128  # tokens of each text in an encoder's table, or fewer if the step has fewer

_Points = tuple[tuple[int, float], ...]  # (number of rows, seconds), both rising
# A step is replayed from a recording of its size, so prompt chunks have only these sizes. The smallest is processed
# even if the target is missed already, so that a long prompt makes progress. Without a target that an operator set, a
# larger one is, too, if it takes at most `MISSED_TARGET_RATIO` times as long: steps that are not recorded on a GPU have a
# long fixed time, and their tokens cost little.
PREFILL_CHUNK_SIZES = tuple(size for power in range(2, 14) for size in (2**power, 3 * 2 ** (power - 1)))
MIN_PREFILL_TOKENS = PREFILL_CHUNK_SIZES[0]
# Goal: the p99 latency of running streams is at most 3 × their p50 while a long prompt arrives, if the p99 of steps is
# 1.5 × their p50.
MIXED_TO_DECODE_RATIO = 2.0
MISSED_TARGET_RATIO = 1.1
MIN_TARGET_SECONDS = (
    0.010  # a hundred tokens a second, which is faster than people read; a lower target would only slow prompts
)
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class StepTimeTable:
    """Measured times of the steps of one model, in seconds.

    `decode_points` and `prefill_points` are the measured tables, rising; an encoder has `encode_points`.
    `context_token_seconds` is for each token of context that a decoding sequence attends to, `pair_seconds` for each
    pair of a prompt token and a token computed before its chunk, or of two tokens of a text beyond the pairs of the
    table's texts. `logits_points` is the time that decoding rows take beyond the same number of prompt rows, which have
    no logits. `added_seconds` is what a prompt's tokens add to a step of decodes, if learned: a time for any number of
    them, which may be negative, and one for each.
    """

    decode_points: _Points
    prefill_points: _Points
    context_token_seconds: float = 0.0
    pair_seconds: float = 0.0
    logits_points: _Points = ()
    encode_points: _Points = ()
    added_seconds: tuple[float, float] | None = None

    @classmethod
    def from_trial(cls, trial: TrialTimes) -> StepTimeTable:
        pair = trial.pair_seconds or _CHUNK_CONTEXT_SHARE * trial.context_token_seconds
        decode = _rising_points(trial.decode_seconds)
        bare = cls(decode, _rising_points(trial.prefill_seconds) or decode, trial.context_token_seconds, pair)
        logits = _rising_points({rows: seconds - bare._products(rows) for rows, seconds in decode})
        return replace(bare, logits_points=logits, encode_points=_rising_points(trial.encode_seconds))

    def decode(self, rows: int, context_tokens: int = 0) -> float:
        """Return the time of a step of `rows` decoding sequences with `context_tokens` of context in all."""
        return _interpolate(self.decode_points, rows) + context_tokens * self.context_token_seconds

    def prefill(self, tokens: int, context_tokens: int = 0) -> float:
        """Return the time of a chunk of one prompt, `context_tokens` of which were computed before."""
        return self._products(tokens) + tokens * context_tokens * self.pair_seconds

    def mixed(self, rows: int, tokens: int, context_tokens: int = 0, prompt_context_tokens: int = 0) -> float:
        """Return the time of a step with decoding rows and a prompt chunk, whose products cover all rows at once."""
        if not tokens:
            return self.decode(rows, context_tokens)
        if not rows:
            return self.prefill(tokens, prompt_context_tokens)
        if self.added_seconds is not None:
            fixed, per_token = self.added_seconds
            return self.decode(rows, context_tokens) + max(fixed + tokens * per_token, 0.0)
        products = max(self._products(rows + tokens) + self._logits(rows), _interpolate(self.decode_points, rows))
        attention = context_tokens * self.context_token_seconds + tokens * prompt_context_tokens * self.pair_seconds
        return products + attention

    def encode(self, tokens: int, pairs: int = 0) -> float:
        """Return the time of a step of texts with `pairs` pairs of tokens of the same text, 0 if unknown."""
        more = pairs - tokens * min(tokens, TABLE_TEXT_TOKENS)
        return _interpolate(self.encode_points, tokens) + max(more, 0) * self.pair_seconds

    @property
    def pair_tokens(self) -> float | None:
        """Cost of one pair of tokens of a text, in tokens without pairs; None if it was not measured."""
        if not self.pair_seconds or not self.encode_points:
            return None
        tokens, seconds = self.encode_points[-1]
        alone = seconds / tokens - min(tokens, TABLE_TEXT_TOKENS) * self.pair_seconds
        return self.pair_seconds / alone if alone > 0.0 else None

    def scaled(self, factor: float) -> StepTimeTable:
        """Return the table of a machine that is `factor` times slower."""
        return replace(
            self,
            decode_points=tuple((rows, seconds * factor) for rows, seconds in self.decode_points),
            prefill_points=tuple((tokens, seconds * factor) for tokens, seconds in self.prefill_points),
            context_token_seconds=self.context_token_seconds * factor,
            pair_seconds=self.pair_seconds * factor,
            logits_points=tuple((rows, seconds * factor) for rows, seconds in self.logits_points),
            encode_points=tuple((tokens, seconds * factor) for tokens, seconds in self.encode_points),
            added_seconds=self.added_seconds and (self.added_seconds[0] * factor, self.added_seconds[1] * factor),
        )

    def _logits(self, rows: int) -> float:
        return max(_interpolate(self.logits_points, rows), 0.0) if self.logits_points else 0.0

    def _products(self, tokens: int) -> float:
        """Return the time of a prompt's tokens without context.

        Below the first point it is the time of as many decodes, or a linear estimate if that is less.
        """
        first, seconds = self.prefill_points[0]
        if not 0 < tokens < first:
            return _interpolate(self.prefill_points, tokens)
        one = min(self.decode_points[0][1], seconds)
        interpolated = one + (seconds - one) * (tokens - 1) / max(first - 1, 1)
        return min(interpolated, _interpolate(self.decode_points, tokens))


def _rising_points(table: Mapping[int, float]) -> _Points:
    points: list[tuple[int, float]] = []
    for number, seconds in sorted(table.items()):
        points.append((number, max(seconds, points[-1][1]) if points else seconds))
    return tuple(points)


def _interpolate(points: _Points, number: int) -> float:
    """Interpolate between points; constant below the first one, proportional beyond the last, and 0 for 0 rows."""
    if number <= 0 or not points:
        return 0.0
    at = bisect_right(points, (number, float("inf")))
    if at == 0:
        return points[0][1]
    low, low_seconds = points[at - 1]
    if at == len(points):
        return low_seconds * number / low
    high, high_seconds = points[at]
    if number == low or high_seconds == low_seconds:  # also of steps that never end, whose difference is no number
        return low_seconds
    return low_seconds + (high_seconds - low_seconds) * (number - low) / (high - low)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured step times with correction factors for what recent steps took, by their content.

    A step carries at most `max_tokens` of prompts, or batches texts up to that number. Without `target_seconds`, a step
    may take `MIXED_TO_DECODE_RATIO` times as long as its decodes alone. A step that only decodes verifies
    `draft_tokens` draft tokens for each sequence and yields `tokens_per_step` tokens of it. With `oldest_first`,
    requests that fit in one step are processed in their order of arrival, whatever their size.
    """

    steps: StepTimeTable
    max_tokens: int
    target_seconds: float | None = None
    decode_factor: float = 1.0
    mixed_factor: float = 1.0
    prefill_factor: float = 1.0
    encode_factor: float = 1.0
    draft_tokens: float = 0.0
    tokens_per_step: float = 1.0
    oldest_first: bool = False

    def seconds(self, rows: int, tokens: int, context_tokens: int = 0, prompt_context_tokens: int = 0) -> float:
        """Return the expected time of a step.

        It has `rows` decodes with `context_tokens` of context in all, and `tokens` of a prompt after
        `prompt_context_tokens`.
        """
        factor = self.mixed_factor if rows and tokens else self.prefill_factor if tokens else self.decode_factor
        return factor * self.steps.mixed(rows, tokens, context_tokens, prompt_context_tokens)

    def encode(self, tokens: int, pairs: int = 0) -> float:
        """Return the expected time of an encoder's step, with pairs of tokens of the same text."""
        return self.encode_factor * self.steps.encode(tokens, pairs)

    def target(self, rows: int, context_tokens: int = 0, num_prompts: int = 1) -> float:
        """Return the longest time of a step while `rows` sequences decode and `num_prompts` prompts wait.

        If more requests wait than decode, the target grows by that ratio.
        """
        if self.target_seconds is not None:
            return self.target_seconds
        waiting_ratio = max(1.0, num_prompts / rows)
        return max(waiting_ratio * MIXED_TO_DECODE_RATIO * self.seconds(rows, 0, context_tokens), MIN_TARGET_SECONDS)

    def prefill_tokens(
        self, rows: int, context_tokens: int = 0, prompt_context_tokens: int = 0, num_prompts: int = 1
    ) -> int:
        """Return the most prompt tokens that keep a step within the target, else the smallest chunk size.

        Without `target_seconds`, return then the largest one of at most `MISSED_TARGET_RATIO` times its time.
        """
        if not rows:
            return self.max_tokens
        target = self.target(rows, context_tokens, num_prompts)
        sizes: tuple[int, ...] = (
            *PREFILL_CHUNK_SIZES[: bisect_left(PREFILL_CHUNK_SIZES, self.max_tokens)],
            self.max_tokens,
        )

        def seconds(size: int) -> float:
            return self.seconds(rows, size, context_tokens, prompt_context_tokens)

        fitting = bisect_right(sizes, target, key=seconds)
        if not fitting and self.target_seconds is None:
            fitting = bisect_right(sizes, MISSED_TARGET_RATIO * seconds(sizes[0]), key=seconds)
        return sizes[max(fitting - 1, 0)]


def throttle_corrected_clock(quota_cores: float | None, cpu_seconds: Clock = time.process_time) -> Clock:
    """Return a clock that advances like wall time on average while there is work.

    With a quota that binds it is the CPU time of the whole process over the quota.
    """
    return time.perf_counter if quota_cores is None else lambda: cpu_seconds() / quota_cores


class ThrottleCorrection:
    """Ratio of a step's average time under the quota to its measured time; 1 if no quota binds."""

    def __init__(self, quota_cores: float | None = None, cpu_seconds: Clock = time.process_time) -> None:
        self.quota_cores = quota_cores
        self._clock = None if quota_cores is None else throttle_corrected_clock(quota_cores, cpu_seconds)
        self._began = 0.0

    def begin(self) -> None:
        if self._clock is not None:
            self._began = self._clock()

    def of(self, seconds: float) -> float:
        """Return the ratio for the step that took `seconds` since `begin`."""
        if self._clock is None or seconds <= 0.0:
            return 1.0
        return (self._clock() - self._began) / seconds
