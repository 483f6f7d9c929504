"""State of a request inside the engine: its tokens, the number that is computed, and the location of their KV.

It is owned by the worker thread. One `Sequence` is one choice of a request, or one beam. The scheduler decides
when it runs.
"""

from __future__ import annotations

import secrets
from dataclasses import (
    dataclass,
    field,
)

from app.messages import (
    Generate,
    SamplingParams,
    TokenLogprob,
)

_SEED_MASK = 2**63 - 1
# increment of SplitMix64: Steele et al., "Fast splittable pseudorandom number generators", 2014
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request, or one beam.

    `token_ids` is the prompt followed by the completion. The first `num_computed` tokens have keys and
    values. Those of position p are stored at offset p: in `prefix_slot` for p < `prefix_tokens`, else in `slot` (None
    while waiting).
    """

    request_id: str
    choice: int
    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    seed: int = 0  # resolved, in [0, 2^63); random numbers depend only on it and on the position
    # each of these ids ends the sequence and is not part of the text
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    arrived_at: float = 0.0
    arrival_order: int = 0  # unique arrival index; the oldest sequence goes first and is preempted last
    max_length: int = 0  # maximum length of `token_ids`; set by max_tokens, the context length or the KV cache
    num_computed: int = 0
    slot: int | None = None
    prefix_slot: int | None = None
    prefix_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the KV cache at the first admission
    num_admitted: int = 0  # number of admissions; if it is more than 1, earlier tokens are computed again
    scheduled_at: float | None = None
    first_token_at: float | None = None
    beam_logprob: float = 0.0  # cumulative log-probability of a beam's completion
    beam_token_logprobs: tuple[TokenLogprob, ...] = ()  # one per token of a beam's completion, if requested

    @property
    def num_completion_tokens(self) -> int:
        """Number of completion tokens so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens to compute before the next one can be sampled; 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """True if the sequence has its first completion token and waits for the next one."""
        return self.num_uncomputed == 1 and self.num_completion_tokens > 0

    @property
    def is_beam(self) -> bool:
        """True if the request is a beam search."""
        return self.params.beam_width > 1

    @property
    def num_candidates(self) -> int:
        """Number of most likely tokens that the sampler returns; 1 if this is not a beam.

        A beam needs `beam_width` continuations even if every stop id is among its candidates.
        """
        width = self.params.beam_width
        return max(2 * width, width + len(self.stop_ids)) if width > 1 else 1


def make_sequence(request: Generate, choice: int = 0, eos_token_ids: frozenset[int] = frozenset()) -> Sequence:
    """Return the sequence of one choice of a request, with its seed and its stop ids resolved."""
    params = request.params
    return Sequence(
        request_id=request.request_id,
        choice=choice,
        params=params,
        token_ids=list(request.token_ids),
        num_prompt_tokens=len(request.token_ids),
        seed=resolve_seed(params.seed, choice),
        stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids),
        arrived_at=request.arrived_at,
    )


def resolve_seed(seed: int | None, choice: int) -> int:
    """Return the seed of a choice, in [0, 2^63).

    It is the request's seed for choice 0, the seed mixed with the choice for others, and random if none was given.
    """
    if seed is None:
        return secrets.randbits(63)
    return (seed + choice * _GOLDEN) & _SEED_MASK
