"""One step's work as counts and ids: the tokens to compute for each sequence and where their KV is stored.

This module contains no tensors.
"""

from __future__ import annotations

from collections.abc import (
    Iterable,
)
from collections.abc import (
    Sequence as Items,
)
from dataclasses import (
    dataclass,
    replace,
)
from typing import Protocol

from app.engine.scheduler.sequence import Sequence

# ScheduledSpan, LogitRow and SampledTokens are written once, like all other dataclasses here, but they are not
# frozen. A frozen instance takes five times as long to create, and each step creates one for every sequence.


@dataclass(slots=True)
class ScheduledSpan:
    """One sequence's part of a step: the positions `[start, start + num_tokens)` are computed now.

    Keys and values of position p are stored at offset p: in `prefix_slot` for p < `prefix_tokens`, else in `slot`.
    `samples` is True if the logits of the last token are sampled. A prefill chunk that does not reach the end of
    the prompt samples nothing. `draft_ids` are draft tokens that follow the known tokens. They take the last
    positions of the span, and each of their logits rows is sampled too. If the step was launched ahead, `start`
    was `len(token_ids)` at that time: its one token is the one that the previous step samples, which is not known
    on the host yet.
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
        """Length of the context after this step including all draft tokens, in tokens."""
        return self.start + self.num_tokens

    @property
    def known_end(self) -> int:
        """Position at which the sequence's known tokens end and the draft tokens begin."""
        return self.start + self.num_tokens - len(self.draft_ids)

    @property
    def num_samples(self) -> int:
        """Number of rows that are sampled: the last known token and each draft token; 0 if `samples` is False."""
        return 1 + len(self.draft_ids) if self.samples else 0

    @property
    def is_decode(self) -> bool:
        """True if the one known token that is computed is a completion token and its logits give the next token."""
        return self.num_tokens - len(self.draft_ids) == 1 and self.start >= self.sequence.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """True if the sequence finished while the step was in flight. The token sampled for it is dropped."""
        return self.sequence.slot is None

    def next_position(self) -> ScheduledSpan:
        """Return the span of the next position of a decoding sequence. The token there need not be known yet."""
        assert self.samples and not self.draft_ids, "a span that samples no token, or several, has no next position yet"
        return ScheduledSpan(self.sequence, self.start + 1, 1, self.slot, self.prefix_slot, self.prefix_tokens, True)

    def with_drafts(self, draft_ids: tuple[int, ...]) -> ScheduledSpan:
        """Return a copy of this span with draft tokens appended. The slot must already have capacity for them."""
        return replace(self, num_tokens=self.num_tokens + len(draft_ids), draft_ids=draft_ids)


def next_span(sequence: Sequence, num_tokens: int) -> ScheduledSpan:
    """Return the span of the next `num_tokens` uncomputed tokens of a running sequence."""
    assert sequence.slot is not None, "only a running sequence is computed"
    return ScheduledSpan(
        sequence=sequence,
        start=sequence.num_computed,
        num_tokens=num_tokens,
        slot=sequence.slot,
        prefix_slot=sequence.prefix_slot,
        prefix_tokens=sequence.prefix_tokens,
        samples=num_tokens == sequence.num_uncomputed,
    )


@dataclass(frozen=True, slots=True)
class KvCopy:
    """Copy job for the keys and values of positions `[start, end)` from one slot to another.

    It is done before the step runs. Forks use it to get a private copy of their tail.
    """

    source: int
    target: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one step, which `schedule()` returns and the runner computes: decodes first, then prefill chunks.

    The order of operations is binding. The `copies` are done one after the other. Then the `released` pages are
    given back, since a copy may read from one of them. Then the spans are computed. `ahead` is True if the step
    was launched while the previous step was in flight. Then all spans are decodes, and the previous step has a row
    for each of these sequences.
    """

    spans: tuple[ScheduledSpan, ...]
    copies: tuple[KvCopy, ...] = ()
    released: tuple[tuple[int, int, int], ...] = ()  # (slot, first position, end position); whole pages
    cached_tokens: int = 0  # prompt tokens of newly admitted sequences that were found in the KV cache
    preempted: int = 0  # number of sequences that lost their KV memory for this step
    ahead: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes, draft tokens included."""
        return len(self.spans) if self.ahead else sum(span.num_tokens for span in self.spans)

    def active(self) -> Batch:
        """Return this batch without the rows of finished sequences.

        Only a step that was launched ahead can have such rows.
        """
        if not self.ahead:
            return self
        active = tuple([span for span in self.spans if span.sequence.slot is not None])
        return self if len(active) == len(self.spans) else replace(self, spans=active)


@dataclass(slots=True)
class LogitRow:
    """A row of logits, and the sequence whose token it gives.

    The sampled token will be at `position` of the sequence if all draft tokens before it are accepted.
    """

    sequence: Sequence
    position: int


def logit_rows_of(spans: Iterable[ScheduledSpan]) -> list[LogitRow]:
    """List the rows of logits to sample, in the order of the spans and of the positions within each span."""
    return [LogitRow(span.sequence, span.known_end + place) for span in spans for place in range(span.num_samples)]


@dataclass(slots=True)
class SampledTokens:
    """The result of sampling one row of logits.

    `token_ids` has one id, or for a beam parent the ids of its best candidates, best first.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()  # one per token id, if the sequence requests log-probabilities or is a beam
    top: tuple[tuple[int, float], ...] = ()  # the most likely tokens with their log-probabilities


class InFlightStep(Protocol):
    """A step that was launched and not yet waited for."""

    @property
    def batch(self) -> Batch:
        """The batch that was launched."""
        ...


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step that is already complete when `launch` returns, because the CPU computes it at once."""

    batch: Batch
    samples: Items[SampledTokens]


def active_samples(batch: Batch, active: Batch, samples: Items[SampledTokens]) -> Items[SampledTokens]:
    """Return the samples of the rows whose sequences are still active.

    `active` is the active part of `batch`, as `Batch.active` returns it.
    """
    if active is batch:
        return samples
    return [one for span, one in zip(batch.spans, samples, strict=True) if not span.is_finished]


def accepted_prefix(span: ScheduledSpan, samples: Items[SampledTokens]) -> Items[SampledTokens]:
    """Return the accepted samples of a span: up to the first one that differs from its draft or is a stop token.

    Each row is sampled with the random number that belongs to its position. Without drafts, the same token would
    have been sampled one step later.
    """
    for place, draft_id in enumerate(span.draft_ids):
        if samples[place].token_ids[0] != draft_id or draft_id in span.sequence.stop_ids:
            return samples[: place + 1]
    return samples


def accepted_by_span(batch: Batch, samples: Items[SampledTokens]) -> list[tuple[ScheduledSpan, Items[SampledTokens]]]:
    """Pair each span with its accepted samples. A span that does not sample gets an empty sequence."""
    if batch.ahead:  # one sample for each span
        return [(span, (one,)) for span, one in zip(batch.spans, samples, strict=True)]
    pairs, first = [], 0
    for span in batch.spans:
        end = first + span.num_samples
        pairs.append((span, accepted_prefix(span, samples[first:end]) if span.draft_ids else samples[first:end]))
        first = end
    assert first == len(samples), "one sample for each row that samples"
    return pairs
