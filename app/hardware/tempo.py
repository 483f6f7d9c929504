"""What steps take as the machine is now, and so how many tokens of prompts one may carry beside streams that want their next token.

The pace on the worker thread and whoever foretells a wait reckon with the same value; it is replaced, never changed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from app.hardware.step_seconds import StepSeconds

# A step is run again from a recording where one of its size was recorded, so parts of prompts have few sizes. The least is read even
# where the target is missed already: a long prompt gets on.
CHUNKS = tuple(size for power in range(3, 14) for size in (2**power, 3 * 2 ** (power - 1)))
MIN_PREFILL_TOKENS = CHUNKS[0]
# Reach: p99 of running streams at most 3 × their p50 while a long prompt arrives, and steps of which the p99 may be 1.5 × the p50.
MIXED_TO_DECODE_RATIO = 2.0
SHORTEST_TARGET_SECONDS = 0.010  # nobody reads a hundred tokens a second: below, prompts get on and nobody is kept waiting


@dataclass(frozen=True, slots=True)
class Tempo:
    """`steps` as measured before, and what recent steps took over that, by what they carried. A step has room for `max_tokens` of prompts,
    or puts texts together up to so many.

    Without `target_seconds` steps may take so many times what the decodes alone would. A step that only decodes carries so many
    guesses a sequence, and makes so many tokens of it; beside prompts nothing is guessed. `oldest_first`: what is done in one step goes
    as it came, whatever its size.
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
        """A step of so many decoding rows over their context, and tokens of a prompt behind what is computed of it."""
        factor = self.mixed_factor if rows and tokens else self.prefill_factor if tokens else self.decode_factor
        return factor * self.steps.mixed(rows, tokens, context_tokens, prompt_context_tokens)

    def encode(self, tokens: int, pairs: int = 0) -> float:
        """A step of an encoder: texts of so many tokens, and pairs of a token with one of its own text."""
        return self.encode_factor * self.steps.encode(tokens, pairs)

    def target(self, rows: int, context_tokens: int = 0, num_prompts: int = 1) -> float:
        """The longest that a step may take while so many rows decode and so many prompts are not read.

        Where more wait for their first token than have theirs, a step may be as many times longer: few streams do not hold up a crowd.
        """
        if self.target_seconds is not None:
            return self.target_seconds
        crowd = max(1.0, num_prompts / rows)
        return max(crowd * MIXED_TO_DECODE_RATIO * self.seconds(rows, 0, context_tokens), SHORTEST_TARGET_SECONDS)

    def chunk(self, rows: int, context_tokens: int = 0, prompt_context_tokens: int = 0, num_prompts: int = 1) -> int:
        """The most tokens of prompts that keep a step within the target; a few where nothing does."""
        if not rows:
            return self.max_tokens
        target = self.target(rows, context_tokens, num_prompts)
        sizes: tuple[int, ...] = (*CHUNKS[: bisect_left(CHUNKS, self.max_tokens)], self.max_tokens)
        fitting = bisect_right(sizes, target, key=lambda size: self.seconds(rows, size, context_tokens, prompt_context_tokens))
        return sizes[max(fitting - 1, 0)]
