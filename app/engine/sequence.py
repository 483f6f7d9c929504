"""A request's life inside the engine: its tokens, how many of them are computed, and where their keys and values lie.

Owned by the worker thread. One `Sequence` is one choice of a request, or one beam; who runs when is the scheduler's business.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from app.messages import Generate, SamplingParams, TokenLogprob

_SEED_MASK = 2**63 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # Steele et al., "Fast splittable pseudorandom number generators", 2014: the increment of SplitMix64


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. `token_ids` is the prompt, then the completion; the first `num_computed` of them have keys and values.

    Keys and values of position p lie at offset p: of `prefix_slot` for p < `prefix_tokens`, else of `slot` (None while waiting).
    """

    request_id: str
    choice: int
    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    seed: int = 0  # resolved, in [0, 2^63): random numbers depend on it and on the position alone
    stop_ids: frozenset[int] = field(default_factory=frozenset)  # each ends the sequence and is not text
    arrived_at: float = 0.0
    order: int = 0  # of arrival, unique: the oldest goes first and is preempted last
    limit: int = 0  # longest that `token_ids` may become: max_tokens, the context or the KV cache ends it there
    num_computed: int = 0
    slot: int | None = None
    prefix_slot: int | None = None
    prefix_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the KV cache when it was first admitted
    num_admitted: int = 0  # how often it was given a slot: more than once, and what it computed before is computed again
    scheduled_at: float | None = None
    first_token_at: float | None = None
    beam_logprob: float = 0.0  # cumulative, of a beam's completion
    beam_trail: tuple[TokenLogprob, ...] = ()  # of each token of a beam's completion, where asked for

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to be computed before the next one can be picked; 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """A stream that waits for its second token or a later one."""
        return self.num_uncomputed == 1 and self.num_completion_tokens > 0

    @property
    def is_beam(self) -> bool:
        return self.params.beam_width > 1

    @property
    def num_candidates(self) -> int:
        """How many of the likeliest tokens the sampler returns: 1 for a plain choice.

        A beam needs `beam_width` continuations even where every stop id is among its candidates.
        """
        width = self.params.beam_width
        return max(2 * width, width + len(self.stop_ids)) if width > 1 else 1


def sequence_of(request: Generate, choice: int = 0, eos_token_ids: frozenset[int] = frozenset()) -> Sequence:
    """The sequence of one choice of a request, with its seed and what ends it resolved."""
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
    """A choice's own seed in [0, 2^63): the request's for choice 0, mixed with the choice for the others, random where none was given."""
    if seed is None:
        return secrets.randbits(63)
    return (seed + choice * _GOLDEN) & _SEED_MASK
