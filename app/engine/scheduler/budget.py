"""Prefill budget: the number of prefill tokens a step may carry without slowing down the decoding streams too much.

If calibration has measured step times, the table applies from the first step on, and recent steps correct it.
Otherwise the model is learned: a step takes `decode seconds + seconds per token × prefill tokens`. Its errors
favor the streams.

Token budget of a step. A step that runs out of device memory halves it, and it then grows back slowly.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median
from typing import Protocol

from app.engine.scheduler.batch import Batch
from app.hardware.step_times import (
    MIN_PREFILL_TOKENS,
    StepTimes,
    StepTimeTable,
)
from app.metrics.stats import StepStats

# Every n-th step in a run of mixed steps carries no prefill, so that the decode time stays measured. Without a
# table this happens often, because the price of a token is all that is known (it costs 6%). With a table it is so
# rare that a prompt of a few thousand tokens sees at most one such step.
PROBE_EVERY_STEPS, PROBE_EVERY_STEPS_WITH_TABLE = 16, 48
FIRST_PREFILL_TOKENS = 32  # used while the price of a prefill token is unknown
_RECENT_DECODES = 5  # number of steps in the median; two outliers (a page fault storm, another process) change nothing
# number of ratios in the median; four outliers change nothing, and a wrong table is corrected within five steps
_RECENT_RATIOS = 9
_FACTOR_LIMITS = 0.25, 4.0  # limits of the correction factor; larger deviations come from something other than the step
_GAIN = 0.3  # weight of a new measurement in the running price
_MAX_CHANGE = 2.0  # a measurement counts as at most this factor, so that one outlier moves the price by 30%
# weight of a new step in the running means of draft tokens, and the mean that counts as none
_DRAFT_GAIN, _MIN_DRAFT_TOKENS = 0.1, 0.01
_TABLE_TOKENS = 1024  # length at which the learned line is sampled for a table


class _StepTimeSource(Protocol):
    """A source of step times: the current `step_times` (None while unknown) and an update from each step."""

    probe_every_steps: int

    @property
    def step_times(self) -> StepTimes | None: ...
    def observe(self, step: StepStats) -> None: ...


class PrefillBudget:
    """The prefill budget of each step, learned from the steps.

    An explicit inter-token latency target replaces the ratio to the time of decode steps.
    """

    def __init__(
        self, max_batch_tokens: int, itl_target_seconds: float | None = None, steps: StepTimeTable | None = None
    ) -> None:
        self._max_tokens = max_batch_tokens
        self._mixed_in_a_row = 0
        self._known: _StepTimeSource
        if steps is None:
            self._known = _LearnedStepTimes(max_batch_tokens, itl_target_seconds)
        else:
            self._known = _CorrectedStepTimes(StepTimes(steps, max_batch_tokens, itl_target_seconds))

    @property
    def step_times(self) -> StepTimes | None:
        """Current step times; None if there is no table and too few steps have been seen."""
        return self._known.step_times

    def observe(self, step: StepStats) -> None:
        """Record the work and the time of a step."""
        self._known.observe(step)
        self._mixed_in_a_row = self._mixed_in_a_row + 1 if step.decode_tokens and step.prefill_tokens else 0

    def max_prefill_tokens(
        self, num_decodes: int, context_tokens: int = 0, prompt_context_tokens: int = 0, num_prompts: int = 1
    ) -> int:
        """Return the number of prefill tokens for the next step; 0 if the decodes alone are to be measured.

        Args:
            num_decodes: Decode rows of the step.
            context_tokens: Context of these rows, all together.
            prompt_context_tokens: Tokens of the first prompt that are already computed.
            num_prompts: Prompts that wait or are being computed.
        """
        if num_decodes == 0:
            return self._max_tokens
        step_times = self._known.step_times
        if step_times is None or self._mixed_in_a_row >= self._known.probe_every_steps:
            return 0
        return step_times.prefill_tokens(num_decodes, context_tokens, prompt_context_tokens, num_prompts)


class _CorrectedStepTimes:
    """Step times from a table, and for each phase a correction: the median ratio of recent steps to the table."""

    probe_every_steps = PROBE_EVERY_STEPS_WITH_TABLE

    def __init__(self, step_times: StepTimes) -> None:
        self.step_times: StepTimes | None = step_times
        self._table = step_times.steps
        self._ratios: dict[str, deque[float]] = {
            kind: deque(maxlen=_RECENT_RATIOS) for kind in ("decode", "mixed", "prefill")
        }

    def observe(self, step: StepStats) -> None:
        expected = step.expected_seconds(self._table)
        if expected <= 0.0 or self.step_times is None:
            return
        phase = "prefill" if not step.num_decode_sequences else "mixed" if step.prefill_tokens else "decode"
        if phase == "decode":
            self._observe_draft_tokens(step)
        self._ratios[phase].append(step.corrected_seconds / expected)
        decode = self._factor("decode", 1.0)
        prefill = self._factor("prefill", decode)
        mixed = self._factor("mixed", max(decode, prefill))
        self.step_times = replace(
            self.step_times, decode_factor=decode, mixed_factor=mixed, prefill_factor=self._factor("prefill", mixed)
        )

    def _observe_draft_tokens(self, step: StepStats) -> None:
        """Update the running means of draft tokens and tokens per step.

        Nothing changes while there are no draft tokens.
        """
        step_times = self.step_times
        if step_times is None or not (step.draft_tokens or step_times.draft_tokens):
            return
        drafted_per_row, made = (
            step.draft_tokens / step.num_decode_sequences,
            step.decode_tokens / step.num_decode_sequences,
        )
        draft_tokens = step_times.draft_tokens + _DRAFT_GAIN * (drafted_per_row - step_times.draft_tokens)
        tokens_per_step = step_times.tokens_per_step + _DRAFT_GAIN * (made - step_times.tokens_per_step)
        self.step_times = replace(
            step_times,
            draft_tokens=draft_tokens if draft_tokens > _MIN_DRAFT_TOKENS else 0.0,
            tokens_per_step=tokens_per_step,
        )

    def _factor(self, phase: str, default: float) -> float:
        """Return the correction of a phase; `default` if no step of it was seen yet."""
        ratios = self._ratios[phase]
        return min(max(median(ratios), _FACTOR_LIMITS[0]), _FACTOR_LIMITS[1]) if ratios else default


class _LearnedStepTimes:
    """Step times without a table: the time of decode steps and the price of a prefill token in addition to them."""

    probe_every_steps = PROBE_EVERY_STEPS

    def __init__(self, max_tokens: int, target_seconds: float | None) -> None:
        self._max_tokens, self._target_seconds = max_tokens, target_seconds
        self._decodes: deque[float] = deque(maxlen=_RECENT_DECODES)
        self._token_seconds: float | None = None

    @property
    def step_times(self) -> StepTimes | None:
        """Step times as a straight line; None before the first decode step.

        While the price is unknown, only the first few prefill tokens fit.
        """
        if not self._decodes:
            return None
        decode_seconds = median(self._decodes)
        price = self._token_seconds
        max_prefill = self._max_tokens if price is not None else min(FIRST_PREFILL_TOKENS, self._max_tokens)
        last_seconds = decode_seconds + (_TABLE_TOKENS - 1) * (price or 0.0)
        table = StepTimeTable(
            ((1, decode_seconds), (_TABLE_TOKENS, decode_seconds)), ((1, decode_seconds), (_TABLE_TOKENS, last_seconds))
        )
        return StepTimes(table, max_prefill, self._target_seconds)

    def observe(self, step: StepStats) -> None:
        if step.decode_tokens and not step.prefill_tokens:
            self._decodes.append(step.corrected_seconds)
        elif step.prefill_tokens >= (MIN_PREFILL_TOKENS if step.decode_tokens else FIRST_PREFILL_TOKENS):
            self._learn_price(step)

    def _learn_price(self, step: StepStats) -> None:
        """Update the price of a prefill token, in seconds.

        For a mixed step, the price is the time in excess of the decodes alone, per prefill token. For other steps
        it is the whole time per token.
        """
        if step.decode_tokens and not self._decodes:
            return
        decode_seconds = median(self._decodes) if step.decode_tokens else 0.0
        price = max(step.corrected_seconds - decode_seconds, 0.0) / step.prefill_tokens
        known = self._token_seconds
        if known is None:
            self._token_seconds = price or None
        # a prefill-only step includes the fixed cost, so it is an upper bound
        elif step.decode_tokens or price < known:
            price = min(max(price, known / _MAX_CHANGE), known * _MAX_CHANGE)
            self._token_seconds = known + _GAIN * (price - known)


# The budget grows by 1/64 at each step that was computed, so it doubles after about 45 steps. A size that failed
# once may fit later (for example once a prompt that needed much memory is done), but each failed try costs a step.
# Slow growth makes retries rare enough to be cheap.
_GROWTH_DIVISOR = 64


class TokenBudget:
    """The number of tokens that the next step may compute, decodes and prefill together.

    `tokens` is the current budget. Decodes take their share first, so a smaller budget cuts prefill before
    decodes.
    """

    def __init__(self, max_tokens: int) -> None:
        self.tokens = self._max_tokens = max_tokens

    def shrink(self, batch: Batch) -> bool:
        """Halve the budget after this step ran out of memory.

        Returns False if no smaller step can be made of the batch: it has one token, or only the beams of one
        search. Each call that returns True makes `tokens` smaller, so a caller that retries until False
        terminates.
        """
        first = batch.spans[0].sequence
        beams_alone = first.is_beam and all(
            span.is_decode and span.sequence.request_id == first.request_id for span in batch.spans
        )
        if beams_alone or batch.num_tokens < 2 or self.tokens < 2:
            return False
        self.tokens = min(self.tokens, batch.num_tokens) // 2
        return True

    def grow(self) -> None:
        """Grow the budget a little after a step that was computed."""
        if self.tokens < self._max_tokens:
            self.tokens = min(self._max_tokens, self.tokens + max(1, self.tokens // _GROWTH_DIVISOR))
