"""How much prefill a step may carry so that the streams which decode beside it keep their pace; learned from the steps' own seconds.

A step is taken as `decode seconds + seconds per token × prefill tokens`. Where weights are read once for all rows
the second term comes late, so this errs on the side of the streams.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from app.messages import StepStats

MIN_PREFILL_TOKENS = 8  # a long prompt gets on even where the target is missed already
# Reach: p99 of running streams at most 3 × their p50 while a long prompt arrives. What was predicted wrongly needs room: at 2.5 a p99 of
# 2.99 was measured (two Zen 5 cores, llama-1b, `armature bench itl`).
MIXED_TO_DECODE_RATIO = 2.2
PROBE_EVERY_STEPS = (
    16  # of an unbroken row of mixed steps one carries no prefill, so that the decode pace stays measured; costs 6%
)
_RECENT_DECODES = 5  # their median: two outliers (a page fault storm, another process) change nothing
_FIRST_PREFILL_TOKENS = 32  # while the price of a prefill token is unknown
_GAIN = 0.3  # of a new measurement in the running price
_MAX_CHANGE = 2.0  # a measurement counts at most as this factor, so that one outlier moves the price by 30%
_DECAY = 0.95  # of tokens and seconds per step: speeds look back about 20 steps


class Speed:
    """Tokens a second over recent steps, weighted by how long they took; 0 where nothing was measured."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        if tokens:
            self._tokens = self._tokens * _DECAY + tokens
            self._seconds = self._seconds * _DECAY + seconds

    @property
    def tokens_per_second(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else 0.0


class StepPace:
    """Learns from each step; says how many prefill tokens the next may carry. An explicit target replaces the ratio."""

    def __init__(self, max_batch_tokens: int, itl_target_seconds: float | None = None) -> None:
        self._max_tokens = max_batch_tokens
        self._target_seconds = itl_target_seconds
        self._decodes: deque[float] = deque(maxlen=_RECENT_DECODES)
        self._token_seconds: float | None = None
        self._mixed_in_a_row = 0
        self.prefill = Speed()
        self.decode = Speed()

    def observe(self, step: StepStats) -> None:
        """What a step did and took."""
        self.prefill.observe(step.prefill_tokens, step.seconds)
        self.decode.observe(step.decode_tokens, step.seconds)
        if step.decode_tokens and not step.prefill_tokens:
            self._decodes.append(step.seconds)
        elif step.prefill_tokens >= (MIN_PREFILL_TOKENS if step.decode_tokens else _FIRST_PREFILL_TOKENS):
            self._learn_price(step)
        self._mixed_in_a_row = self._mixed_in_a_row + 1 if step.decode_tokens and step.prefill_tokens else 0

    def prefill_budget(self, num_decodes: int) -> int:
        """Prefill tokens that the next step may carry beside `num_decodes` decodes; 0 where the decodes alone are to be measured."""
        if num_decodes == 0:
            return self._max_tokens
        alone = self.decode_step_seconds
        if alone is None or self._mixed_in_a_row >= PROBE_EVERY_STEPS:
            return 0
        if self._token_seconds is None:
            tokens = _FIRST_PREFILL_TOKENS
        else:
            target = self._target_seconds or MIXED_TO_DECODE_RATIO * alone
            tokens = int(min((target - alone) / self._token_seconds, self._max_tokens))
        return min(max(tokens, MIN_PREFILL_TOKENS), self._max_tokens)

    @property
    def decode_step_seconds(self) -> float | None:
        """A recent step of decodes alone; None before the first."""
        return median(self._decodes) if self._decodes else None

    def _learn_price(self, step: StepStats) -> None:
        """Seconds that one more prefill token costs: of a mixed step what it took longer than its decodes alone, else the whole."""
        alone = self.decode_step_seconds if step.decode_tokens else 0.0
        if alone is None:
            return
        price = max(step.seconds - alone, 0.0) / step.prefill_tokens
        known = self._token_seconds
        if known is None:
            self._token_seconds = price or None
        elif step.decode_tokens or price < known:  # a step of prefill alone carries the fixed cost too: an upper bound
            price = min(max(price, known / _MAX_CHANGE), known * _MAX_CHANGE)
            self._token_seconds = known + _GAIN * (price - known)
