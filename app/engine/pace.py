"""Prefill budget: the number of prefill tokens a step may carry without slowing down the decoding streams too much.

If calibration has measured step times, the table applies from the first step on, and recent steps correct it.
Otherwise the model is learned: a step takes `decode seconds + seconds per token × prefill tokens`. Its errors
favor the streams.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median
from typing import Protocol

from app.hardware.step_seconds import StepSeconds
from app.hardware.tempo import MIN_PREFILL_TOKENS, Tempo
from app.measured import StepStats

# Every n-th step in a run of mixed steps carries no prefill, so that the decode time stays measured. Without a
# table this happens often, because the price of a token is all that is known (it costs 6%). With a table it is so
# rare that a prompt of a few thousand tokens sees at most one such step.
PROBE_EVERY_STEPS, PROBE_EVERY_STEPS_OF_TABLE = 16, 48
FIRST_PREFILL_TOKENS = 32  # used while the price of a prefill token is unknown
_RECENT_DECODES = 5  # number of steps in the median; two outliers (a page fault storm, another process) change nothing
# number of ratios in the median; four outliers change nothing, and a wrong table is corrected within five steps
_RECENT_RATIOS = 9
_BOUNDS = 0.25, 4.0  # limits of the correction factor; larger deviations come from something other than the step
_GAIN = 0.3  # weight of a new measurement in the running price
_MAX_CHANGE = 2.0  # a measurement counts as at most this factor, so that one outlier moves the price by 30%
# weight of a new step in the running means of draft tokens, and the mean that counts as none
_GUESS_GAIN, _FEW_GUESSES = 0.1, 0.01
_LINE_TOKENS = 1024  # length at which the learned line is sampled for a table


class _Knowledge(Protocol):
    """A source of step times: the current `step_times` (None while unknown) and an update from each step."""

    probe_every_steps: int

    @property
    def tempo(self) -> Tempo | None: ...
    def observe(self, step: StepStats) -> None: ...


class StepPace:
    """The prefill budget of each step, learned from the steps.

    An explicit inter-token latency target replaces the ratio to the time of decode steps.
    """

    def __init__(self, max_batch_tokens: int, itl_target_seconds: float | None = None, steps: StepSeconds | None = None) -> None:
        self._max_tokens = max_batch_tokens
        self._mixed_in_a_row = 0
        self._known: _Knowledge
        if steps is None:
            self._known = _Learned(max_batch_tokens, itl_target_seconds)
        else:
            self._known = _Corrected(Tempo(steps, max_batch_tokens, itl_target_seconds))

    @property
    def tempo(self) -> Tempo | None:
        """Current step times; None if there is no table and too few steps have been seen."""
        return self._known.tempo

    def observe(self, step: StepStats) -> None:
        """Record the work and the time of a step."""
        self._known.observe(step)
        self._mixed_in_a_row = self._mixed_in_a_row + 1 if step.decode_tokens and step.prefill_tokens else 0

    def prefill_budget(
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
        tempo = self._known.tempo
        if tempo is None or self._mixed_in_a_row >= self._known.probe_every_steps:
            return 0
        return tempo.chunk(num_decodes, context_tokens, prompt_context_tokens, num_prompts)


class _Corrected:
    """Step times from a table, and for each phase a correction: the median ratio of recent steps to the table."""

    probe_every_steps = PROBE_EVERY_STEPS_OF_TABLE

    def __init__(self, tempo: Tempo) -> None:
        self.tempo: Tempo | None = tempo
        self._table = tempo.steps
        self._ratios: dict[str, deque[float]] = {kind: deque(maxlen=_RECENT_RATIOS) for kind in ("decode", "mixed", "prefill")}

    def observe(self, step: StepStats) -> None:
        expected = step.expected_seconds(self._table)
        if expected <= 0.0 or self.tempo is None:
            return
        kind = "prefill" if not step.num_decode_sequences else "mixed" if step.prefill_tokens else "decode"
        if kind == "decode":
            self._note_guesses(step)
        self._ratios[kind].append(step.usual_seconds / expected)
        decode = self._factor("decode", 1.0)
        prefill = self._factor("prefill", decode)
        mixed = self._factor("mixed", max(decode, prefill))
        self.tempo = replace(self.tempo, decode_factor=decode, mixed_factor=mixed, prefill_factor=self._factor("prefill", mixed))

    def _note_guesses(self, step: StepStats) -> None:
        """Update the running means of draft tokens and tokens per step.

        Nothing changes while there are no draft tokens.
        """
        now = self.tempo
        if now is None or not (step.drafted_tokens or now.guesses):
            return
        drafted, made = step.drafted_tokens / step.num_decode_sequences, step.decode_tokens / step.num_decode_sequences
        guesses = now.guesses + _GUESS_GAIN * (drafted - now.guesses)
        tokens_made = now.tokens_made + _GUESS_GAIN * (made - now.tokens_made)
        self.tempo = replace(now, guesses=guesses if guesses > _FEW_GUESSES else 0.0, tokens_made=tokens_made)

    def _factor(self, kind: str, otherwise: float) -> float:
        """Return the correction of a phase; `default` if no step of it was seen yet."""
        ratios = self._ratios[kind]
        return min(max(median(ratios), _BOUNDS[0]), _BOUNDS[1]) if ratios else otherwise


class _Learned:
    """Step times without a table: the time of decode steps and the price of a prefill token in addition to them."""

    probe_every_steps = PROBE_EVERY_STEPS

    def __init__(self, max_tokens: int, target_seconds: float | None) -> None:
        self._max_tokens, self._target_seconds = max_tokens, target_seconds
        self._decodes: deque[float] = deque(maxlen=_RECENT_DECODES)
        self._token_seconds: float | None = None

    @property
    def tempo(self) -> Tempo | None:
        """Step times as a straight line; None before the first decode step.

        While the price is unknown, only the first few prefill tokens fit.
        """
        if not self._decodes:
            return None
        alone = median(self._decodes)
        price = self._token_seconds
        most = self._max_tokens if price is not None else min(FIRST_PREFILL_TOKENS, self._max_tokens)
        farthest = alone + (_LINE_TOKENS - 1) * (price or 0.0)
        line = StepSeconds(((1, alone), (_LINE_TOKENS, alone)), ((1, alone), (_LINE_TOKENS, farthest)))
        return Tempo(line, most, self._target_seconds)

    def observe(self, step: StepStats) -> None:
        if step.decode_tokens and not step.prefill_tokens:
            self._decodes.append(step.usual_seconds)
        elif step.prefill_tokens >= (MIN_PREFILL_TOKENS if step.decode_tokens else FIRST_PREFILL_TOKENS):
            self._learn_price(step)

    def _learn_price(self, step: StepStats) -> None:
        """Update the price of a prefill token, in seconds.

        For a mixed step, the price is the time in excess of the decodes alone, per prefill token. For other steps
        it is the whole time per token.
        """
        if step.decode_tokens and not self._decodes:
            return
        alone = median(self._decodes) if step.decode_tokens else 0.0
        price = max(step.usual_seconds - alone, 0.0) / step.prefill_tokens
        known = self._token_seconds
        if known is None:
            self._token_seconds = price or None
        # a prefill-only step includes the fixed cost, so it is an upper bound
        elif step.decode_tokens or price < known:
            price = min(max(price, known / _MAX_CHANGE), known * _MAX_CHANGE)
            self._token_seconds = known + _GAIN * (price - known)
