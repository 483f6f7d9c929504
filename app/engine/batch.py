"""One step's work as counts and ids: which tokens of which sequences, and where their keys and values lie. No tensors here."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Protocol

from app.engine.sequence import Sequence

# Span, RowToPick and Picked are written once like all else here, but not frozen: that takes five times as long to make, and there is
# one of each for every sequence at every step.


@dataclass(slots=True)
class Span:
    """One sequence's share of a step: positions `[start, start + num_tokens)` of its tokens are computed now.

    Keys and values of position p lie at offset p: of `prefix_slot` for p < `prefix_tokens`, else of `slot`.
    `samples` says that the last token's logits pick the next token (a prefill chunk that does not reach the end has nothing to pick).
    `draft_ids` are guesses of what comes after it: the last of the positions are theirs, and each of their logits picks a token too.
    Of a step that was launched ahead `start` was `len(token_ids)` then: its one token is what the step before it picks, not known here.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    slot: int
    prefix_slot: int | None
    prefix_tokens: int
    samples: bool
    draft_ids: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Length of the context after this step with all guesses, tokens."""
        return self.start + self.num_tokens

    @property
    def own_end(self) -> int:
        """Where the sequence's own tokens end, and the guesses begin."""
        return self.start + self.num_tokens - len(self.draft_ids)

    @property
    def num_picks(self) -> int:
        """How many of its rows pick a token: the last own one and each guess."""
        return 1 + len(self.draft_ids) if self.samples else 0

    @property
    def is_decode(self) -> bool:
        """True where the one own token computed is a completion token whose result picks the next."""
        return self.num_tokens - len(self.draft_ids) == 1 and self.start >= self.sequence.num_prompt_tokens

    @property
    def is_void(self) -> bool:
        """True where the sequence ended while the step was under way: what its row picks is nobody's."""
        return self.sequence.slot is None

    def one_further(self) -> Span:
        """The next position of a sequence that decodes, whatever its token will be."""
        assert self.samples and not self.draft_ids, "what picks no token, or several, has no next position yet"
        return Span(self.sequence, self.start + 1, 1, self.slot, self.prefix_slot, self.prefix_tokens, True)

    def with_drafts(self, draft_ids: tuple[int, ...]) -> Span:
        """The same with guesses behind it, for which the slot has room."""
        return replace(self, num_tokens=self.num_tokens + len(draft_ids), draft_ids=draft_ids)


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
    `ahead`: launched while the step before it was under way, which has a row for each of these sequences; all are decodes.
    """

    spans: tuple[Span, ...]
    copies: tuple[Copy, ...] = ()
    released: tuple[tuple[int, int, int], ...] = ()  # slot, from position, to position; whole pages
    cached_tokens: int = 0  # of the prompts that this step begins with, found in the KV cache
    preempted: int = 0  # sequences that lost their memory for this step
    ahead: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.spans) if self.ahead else sum(span.num_tokens for span in self.spans)

    def living(self) -> Batch:
        """Without void rows, which only a step that was launched ahead can have."""
        if not self.ahead:
            return self
        living = tuple([span for span in self.spans if span.sequence.slot is not None])
        return self if len(living) == len(self.spans) else replace(self, spans=living)


@dataclass(slots=True)
class RowToPick:
    """A row of logits, and whose token it picks: the one that will stand at `position`, where all guesses before it were right."""

    sequence: Sequence
    position: int


def rows_to_pick(spans: Iterable[Span]) -> list[RowToPick]:
    """In the order of the spans, and of the positions within one."""
    return [RowToPick(span.sequence, span.own_end + place) for span in spans for place in range(span.num_picks)]


@dataclass(slots=True)
class Picked:
    """What the sampler picked from one row: `token_ids` has one id, or for a beam parent its best candidates, best first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()  # of each of token_ids, where the sequence asked for them or is a beam
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens with their log-probabilities


class Flight(Protocol):
    """A step under way."""

    @property
    def batch(self) -> Batch: ...


@dataclass(frozen=True, slots=True)
class Computed:
    """A flight that landed as it was launched: of a processor."""

    batch: Batch
    picked: Items[Picked]


def living_picks(batch: Batch, living: Batch, picked: Items[Picked]) -> Items[Picked]:
    """Of what a step's rows picked, that of the rows which are not void: those of its `living` part."""
    if living is batch:
        return picked
    return [one for span, one in zip(batch.spans, picked, strict=True) if not span.is_void]


def upheld(span: Span, picked: Items[Picked]) -> Items[Picked]:
    """Of what a span's rows picked, that which stands: up to the first token that was not guessed, or that ends the sequence.

    Each row picked as if alone: had its guess been computed a step later, the same numbers would have picked the same token.
    """
    for place, draft_id in enumerate(span.draft_ids):
        if picked[place].token_ids[0] != draft_id or draft_id in span.sequence.stop_ids:
            return picked[: place + 1]
    return picked


def by_span(batch: Batch, picked: Items[Picked]) -> list[tuple[Span, Items[Picked]]]:
    """Each span with what stands of what its rows picked; nothing for one that does not sample."""
    if batch.ahead:  # a pick for each
        return [(span, (one,)) for span, one in zip(batch.spans, picked, strict=True)]
    found, first = [], 0
    for span in batch.spans:
        end = first + span.num_picks
        found.append((span, upheld(span, picked[first:end]) if span.draft_ids else picked[first:end]))
        first = end
    assert first == len(picked), "one pick for each row that samples"
    return found
