"""Present step times, and the prompt tokens that a step may carry next to streams that need their next token.

The prefill budget on the worker thread and the wait estimate of the service use the same immutable value.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from app.hardware.step_seconds import StepSeconds

# A step is replayed from a recording of its size, so prompt chunks have only these sizes. The smallest is processed even if the target is
# missed already, so that a long prompt makes progress.
CHUNKS = tuple(size for power in range(3, 14) for size in (2**power, 3 * 2 ** (power - 1)))
MIN_PREFILL_TOKENS = CHUNKS[0]
# Goal: the p99 latency of running streams is at most 3 × their p50 while a long prompt arrives, if the p99 of steps is 1.5 × their p50.
MIXED_TO_DECODE_RATIO = 2.0
SHORTEST_TARGET_SECONDS = (
    0.010  # a hundred tokens a second, which is faster than people read; a lower target would only slow prompts
)


@dataclass(frozen=True, slots=True)
class Tempo:
    """Measured step times with correction factors for what recent steps took, by their content.

    A step carries at most `max_tokens` of prompts, or batches texts up to that number. Without `target_seconds`, a
    step may take `MIXED_TO_DECODE_RATIO` times as long as its decodes alone. A step that only decodes verifies
    `draft_tokens` draft tokens for each sequence and yields `tokens_per_step` tokens of it; steps with prompts have no
    draft tokens. With `oldest_first`, requests that fit in one step are processed in their order of arrival,
    whatever their size.
    """

    steps: StepSeconds
    max_tokens: int
    target_seconds: float | None = None
    decode_factor: float = 1.0
    mixed_factor: float = 1.0
    prefill_factor: float = 1.0
    encode_factor: float = 1.0
    guesses: float = 0.0
    tokens_made: float = 1.0
    oldest_first: bool = False

    def seconds(self, rows: int, tokens: int, context_tokens: int = 0, prompt_context_tokens: int = 0) -> float:
        """Return the expected time of a step.

        It has `rows` decoding sequences with `context_tokens` of context in all, and `tokens` of a prompt of which
        `prompt_context_tokens` were computed before.
        """
        factor = self.mixed_factor if rows and tokens else self.prefill_factor if tokens else self.decode_factor
        return factor * self.steps.mixed(rows, tokens, context_tokens, prompt_context_tokens)

    def encode(self, tokens: int, pairs: int = 0) -> float:
        """Return the expected time of an encoder's step.

        It has `tokens` tokens, and `pairs` pairs of tokens of the same text.
        """
        return self.encode_factor * self.steps.encode(tokens, pairs)

    def target(self, rows: int, context_tokens: int = 0, num_prompts: int = 1) -> float:
        """Return the longest time of a step while `rows` sequences decode and `num_prompts` prompts wait.

        If more requests wait for their first token than decode, the target grows by that ratio, so that few
        streams do not delay many requests.
        """
        if self.target_seconds is not None:
            return self.target_seconds
        crowd = max(1.0, num_prompts / rows)
        return max(crowd * MIXED_TO_DECODE_RATIO * self.seconds(rows, 0, context_tokens), SHORTEST_TARGET_SECONDS)

    def chunk(self, rows: int, context_tokens: int = 0, prompt_context_tokens: int = 0, num_prompts: int = 1) -> int:
        """Return the most prompt tokens that keep a step within the target, or the smallest chunk size."""
        if not rows:
            return self.max_tokens
        target = self.target(rows, context_tokens, num_prompts)
        sizes: tuple[int, ...] = (*CHUNKS[: bisect_left(CHUNKS, self.max_tokens)], self.max_tokens)
        fitting = bisect_right(sizes, target, key=lambda size: self.seconds(rows, size, context_tokens, prompt_context_tokens))
        return sizes[max(fitting - 1, 0)]
