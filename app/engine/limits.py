"""Limits of a request: reject one that can never be served, and compute the maximum length of one that can."""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.engine.slots import SlotPool
from app.errors import ContextLengthExceeded, InvalidRequest, RequestError
from app.messages import Generate


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the engine.

    `max_model_len` counts prompt and completion together. `max_running_seqs` and `max_batch_tokens` bound a step.
    """

    max_model_len: int
    max_running_seqs: int
    max_batch_tokens: int

    def within(self, pool: SlotPool) -> Limits:
        """Return these limits, reduced to the capacity of the KV pool.

        One sequence alone then fits the pool, and all decodes fit one step.
        """
        return replace(
            self,
            max_model_len=min(self.max_model_len, pool.capacity_tokens),
            max_running_seqs=min(self.max_running_seqs, self.max_batch_tokens, len(pool.slots)),
        )


def refusal(request: Generate, limits: Limits, pool: SlotPool) -> RequestError | None:
    """Return the error for a request that can never be served; None if it can be served."""
    num_prompt, width = len(request.token_ids), request.params.beam_width
    if num_prompt == 0:
        return InvalidRequest("The prompt has no tokens.", field="prompt")
    if num_prompt >= limits.max_model_len:
        return ContextLengthExceeded(
            f"The prompt has {num_prompt} tokens; with at least one of completion the context holds {limits.max_model_len}.",
            field="prompt",
        )
    # one slot is needed for the prompt that the beams share
    widest = min(limits.max_running_seqs, len(pool.slots) - 1)
    if width > max(widest, 1):
        return InvalidRequest(f"beam_width is at most {max(widest, 1)} on this server, not {width}.", field="beam_width")
    if longest(request, limits, pool) <= num_prompt:
        return ContextLengthExceeded(
            f"A prompt of {num_prompt} tokens with beam_width {width} does not fit the KV cache of {pool.capacity_tokens} tokens.",
            field="prompt",
        )
    return None


def longest(request: Generate, limits: Limits, pool: SlotPool) -> int:
    """Return the maximum length of the request's sequences, in tokens.

    A request that is alone in the pool always fits with this length, so the oldest request always makes progress.
    """
    num_prompt, params = len(request.token_ids), request.params
    bound = limits.max_model_len if params.max_tokens is None else min(limits.max_model_len, num_prompt + params.max_tokens)
    if params.beam_width == 1:
        return bound
    # The prompt is stored once. The root and each beam store a completion, and each end needs a separate page.
    room = pool.capacity_tokens - num_prompt - (2 * params.beam_width + 1) * pool.tokens_per_page
    return min(bound, num_prompt + room // (params.beam_width + 1))
