"""One step's work as counts and ids: which tokens of which sequences, and where their keys and values lie. No tensors here."""

from __future__ import annotations

from dataclasses import dataclass

from app.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's share of a step: positions `[start, start + num_tokens)` of its tokens are computed now.

    Keys and values of position p lie at offset p: of `prefix_slot` for p < `prefix_tokens`, else of `slot`.
    `samples` says that the last token's logits pick the next token (a prefill chunk that does not reach the end has nothing to pick).
    """

    sequence: Sequence
    start: int
    num_tokens: int
    slot: int
    prefix_slot: int | None
    prefix_tokens: int
    samples: bool

    @property
    def end(self) -> int:
        """Length of the context after this step, tokens."""
        return self.start + self.num_tokens

    @property
    def is_decode(self) -> bool:
        """True where the one token computed is a completion token whose result picks the next."""
        return self.num_tokens == 1 and self.start >= self.sequence.num_prompt_tokens


def next_span(sequence: Sequence, num_tokens: int) -> Span:
    """The next `num_tokens` of a running sequence."""
    assert sequence.slot is not None, "only a running sequence is computed"
    return Span(
        sequence=sequence,
        start=sequence.num_computed,
        num_tokens=num_tokens,
        slot=sequence.slot,
        prefix_slot=sequence.prefix_slot,
        prefix_tokens=sequence.prefix_tokens,
        samples=num_tokens == sequence.num_uncomputed,
    )


@dataclass(frozen=True, slots=True)
class Copy:
    """Keys and values of positions `[start, end)` go from one slot to another before the step runs (a fork's own tail)."""

    source: int
    target: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What `schedule()` hands to `run()`: decodes first, then prefill chunks.

    The order is binding: `copies` one after the other, then `released` pages go back (a copy may read from one), then the spans.
    """

    spans: tuple[Span, ...]
    copies: tuple[Copy, ...] = ()
    released: tuple[tuple[int, int, int], ...] = ()  # slot, from position, to position; whole pages
    cached_tokens: int = 0  # of the prompts that this step begins with, found in the KV cache
    preempted: int = 0  # sequences that lost their memory for this step

    @property
    def num_tokens(self) -> int:
        return sum(span.num_tokens for span in self.spans)


@dataclass(frozen=True, slots=True)
class Picked:
    """What the sampler picked for one span that samples: `token_ids` has one id, or for a beam parent its best candidates, best first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()  # of each of token_ids, where the sequence asked for them or is a beam
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens with their log-probabilities
