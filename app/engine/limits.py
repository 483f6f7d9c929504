"""What a request may ask of the engine: refused at once where it could never be served, and how long it may become where it can."""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.engine.slots import SlotPool
from app.errors import ContextLengthExceeded, InvalidRequest, RequestError
from app.messages import Generate


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_model_len` is prompt and completion together; `max_running_seqs` and `max_batch_tokens` bound a step."""

    max_model_len: int
    max_running_seqs: int
    max_batch_tokens: int

    def within(self, pool: SlotPool) -> Limits:
        """Narrowed to what can be kept: one sequence alone fits the pool, and every decode fits a step."""
        return replace(
            self,
            max_model_len=min(self.max_model_len, pool.capacity_tokens),
            max_running_seqs=min(self.max_running_seqs, self.max_batch_tokens, len(pool.slots)),
        )


def refusal(request: Generate, limits: Limits, pool: SlotPool) -> RequestError | None:
    """Why this request can never be served; None where it can."""
    num_prompt, width = len(request.token_ids), request.params.beam_width
    if num_prompt == 0:
        return InvalidRequest("The prompt has no tokens.", field="prompt")
    if num_prompt >= limits.max_model_len:
        return ContextLengthExceeded(
            f"The prompt has {num_prompt} tokens; with at least one of completion the context holds {limits.max_model_len}.",
            field="prompt",
        )
    widest = min(limits.max_running_seqs, len(pool.slots) - 1)  # one more slot holds the prompt that the beams share
    if width > max(widest, 1):
        return InvalidRequest(f"beam_width is at most {max(widest, 1)} on this server, not {width}.", field="beam_width")
    if longest(request, limits, pool) <= num_prompt:
        return ContextLengthExceeded(
            f"A prompt of {num_prompt} tokens with beam_width {width} does not fit the KV cache of {pool.capacity_tokens} tokens.",
            field="prompt",
        )
    return None


def longest(request: Generate, limits: Limits, pool: SlotPool) -> int:
    """How long its sequences may become. Alone in the pool they fit, so that the oldest request always gets on."""
    num_prompt, params = len(request.token_ids), request.params
    bound = limits.max_model_len if params.max_tokens is None else min(limits.max_model_len, num_prompt + params.max_tokens)
    if params.beam_width == 1:
        return bound
    # The prompt once; a completion for it and for each beam; the ends of each on pages of their own.
    room = pool.capacity_tokens - num_prompt - (2 * params.beam_width + 1) * pool.tokens_per_page
    return min(bound, num_prompt + room // (params.beam_width + 1))
