"""How much prefill a step may carry so that the streams which decode beside it keep their pace.

Where calibration has timed steps, the table says it from the first step on, and recent steps correct the table. Else it is learned:
a step is taken as `decode seconds + seconds per token × prefill tokens`, which errs on the side of the streams.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median
from typing import Protocol

from app.hardware.step_seconds import StepSeconds
from app.hardware.tempo import MIN_PREFILL_TOKENS, Tempo
from app.measured import StepStats

# Of an unbroken row of mixed steps one carries no prefill, so that the decode pace stays measured: where the price of a token is all that
# is known, often (it costs 6%), and where a table is, so seldom that a prompt of a few thousand tokens meets one or none.
PROBE_EVERY_STEPS, PROBE_EVERY_STEPS_OF_TABLE = 16, 48
FIRST_PREFILL_TOKENS = 32  # while the price of a prefill token is unknown
_RECENT_DECODES = 5  # their median: two outliers (a page fault storm, another process) change nothing
_RECENT_RATIOS = 9  # the same for four; a table that is wrong is noticed within five steps
_BOUNDS = 0.25, 4.0  # what measured steps can change of the table: further off, it is not steps that they measure
_GAIN = 0.3  # of a new measurement in the running price
_MAX_CHANGE = 2.0  # a measurement counts at most as this factor, so that one outlier moves the price by 30%
_GUESS_GAIN, _FEW_GUESSES = 0.1, 0.01  # of a new step in the running means of guesses, and what counts as none
_LINE_TOKENS = 1024  # where the learned line is written down as a table


class _Knowledge(Protocol):
    """What is known of steps: a tempo, None while it is too little, and what the next measurement adds."""

    probe_every_steps: int

    @property
    def tempo(self) -> Tempo | None: ...
    def observe(self, step: StepStats) -> None: ...


class StepPace:
    """Learns from each step; says how many prefill tokens the next may carry. An explicit target replaces the ratio to decode steps."""

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
        """What steps take now; None where neither a table nor enough steps say it."""
        return self._known.tempo

    def observe(self, step: StepStats) -> None:
        """What a step did and took."""
        self._known.observe(step)
        self._mixed_in_a_row = self._mixed_in_a_row + 1 if step.decode_tokens and step.prefill_tokens else 0

    def prefill_budget(
        self, num_decodes: int, context_tokens: int = 0, prompt_context_tokens: int = 0, num_prompts: int = 1
    ) -> int:
        """Prefill tokens that the next step may carry beside `num_decodes` rows; 0 where the decodes alone are to be measured.

        The rows attend to `context_tokens`; of the first of `num_prompts` in line `prompt_context_tokens` are computed.
        """
        if num_decodes == 0:
            return self._max_tokens
        tempo = self._known.tempo
        if tempo is None or self._mixed_in_a_row >= self._known.probe_every_steps:
            return 0
        return tempo.chunk(num_decodes, context_tokens, prompt_context_tokens, num_prompts)


class _Corrected:
    """A table, and for each kind of step the median of what recent ones took over it."""

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
        """Running means; nothing to do while nothing is guessed."""
        now = self.tempo
        if now is None or not (step.drafted_tokens or now.guesses):
            return
        drafted, made = step.drafted_tokens / step.num_decode_sequences, step.decode_tokens / step.num_decode_sequences
        guesses = now.guesses + _GUESS_GAIN * (drafted - now.guesses)
        tokens_made = now.tokens_made + _GUESS_GAIN * (made - now.tokens_made)
        self.tempo = replace(now, guesses=guesses if guesses > _FEW_GUESSES else 0.0, tokens_made=tokens_made)

    def _factor(self, kind: str, otherwise: float) -> float:
        """A kind of step that was not seen yet is as far off as its kin."""
        ratios = self._ratios[kind]
        return min(max(median(ratios), _BOUNDS[0]), _BOUNDS[1]) if ratios else otherwise


class _Learned:
    """Nothing was measured before: the decode steps are, and the price of a prefill token beside them."""

    probe_every_steps = PROBE_EVERY_STEPS

    def __init__(self, max_tokens: int, target_seconds: float | None) -> None:
        self._max_tokens, self._target_seconds = max_tokens, target_seconds
        self._decodes: deque[float] = deque(maxlen=_RECENT_DECODES)
        self._token_seconds: float | None = None

    @property
    def tempo(self) -> Tempo | None:
        """A step as a line. While the price is unknown, one at which the first few tokens are all that fits."""
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
        """Seconds that one more prefill token costs: of a mixed step what it took longer than its decodes alone, else the whole."""
        if step.decode_tokens and not self._decodes:
            return
        alone = median(self._decodes) if step.decode_tokens else 0.0
        price = max(step.usual_seconds - alone, 0.0) / step.prefill_tokens
        known = self._token_seconds
        if known is None:
            self._token_seconds = price or None
        elif step.decode_tokens or price < known:  # a step of prefill alone carries the fixed cost too: an upper bound
            price = min(max(price, known / _MAX_CHANGE), known * _MAX_CHANGE)
            self._token_seconds = known + _GAIN * (price - known)
