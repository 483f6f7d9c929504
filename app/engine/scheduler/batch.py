"""Sequences, and the batch of one step: the tokens to compute for each sequence and where their KV is stored.

A `Sequence` is one choice of a request, or one beam; the worker thread owns it. The module also makes the events for
clients about a sequence. It contains no tensors.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Protocol

from msgspec import structs

from app.messages import (
    Event,
    FinishReason,
    Generate,
    GrammarSource,
    LoadedAdapter,
    PromptVectors,
    SamplingParams,
    SequenceFinished,
    ThinkingLimit,
    Timings,
    TokenLogprob,
    TokensReady,
)

NOT_FINITE = -1  # in place of a sampled token's id if the row's logits have a NaN or +inf, or are all -inf
_SEED_MASK = 2**63 - 1
# increment of SplitMix64: Steele et al., "Fast splittable pseudorandom number generators", 2014
_GOLDEN = 0x9E3779B97F4A7C15
_NEAR = 64  # tokens: more than a step drafts, and than a device is launched ahead
_MOST_BEFORE = 4  # tokens of a completion before its reasoning begins


class ThinkingState:
    """The reasoning of one sequence, as far as it is written: at its limit the end is forced, token by token."""

    __slots__ = ("_begins_by", "_closing", "_count", "_limit", "_longest", "_recent", "is_over")

    def __init__(self, limit: ThinkingLimit) -> None:
        self._limit, self.is_over = limit, False
        self._recent: list[int] = []
        self._count = 0 if limit.is_open else None  # tokens of reasoning, once it has begun
        self._closing: int | None = None  # the next of the forced tokens
        self._longest = max(map(len, (*limit.starts, *limit.ends)))
        self._begins_by = self._longest + _MOST_BEFORE
        self._close_if_full()

    @property
    def forced_id(self) -> int | None:
        """The only token that may follow; None: any may."""
        return None if self._closing is None or self.is_over else self._limit.closing[self._closing]

    @property
    def is_near(self) -> bool:
        """True if the next step may reach the limit."""
        return not self.is_over and self._limit.budget - (self._count or 0) <= _NEAR

    def advance(self, token_id: int) -> None:
        if self.is_over:
            return
        if self._closing is not None:
            self._closing += 1
            self.is_over = self._closing == len(self._limit.closing)
            return
        self._recent = [*self._recent[1 - self._longest :], token_id] if self._longest > 1 else [token_id]
        if self._count is None:
            self._begins_by -= 1
            begins = self._ends_with(self._limit.starts)
            self._count = 0 if begins else None
            self.is_over = self._begins_by <= 0 and not begins
        else:
            self._count += 1
            self.is_over = self._ends_with(self._limit.ends)
        self._close_if_full()

    def after(self, token_ids: Iterable[int]) -> ThinkingState:
        """Return the state after further tokens, which this one does not take."""
        other = ThinkingState(self._limit)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        for token_id in token_ids:
            other.advance(token_id)
        return other

    def _ends_with(self, markers: Iterable[tuple[int, ...]]) -> bool:
        return any(tuple(self._recent[-len(one) :]) == one for one in markers)

    def _close_if_full(self) -> None:
        """Begin to close the reasoning at the limit, after the part of the end that is there."""
        if self.is_over or self._count is None or self._count < self._limit.budget:
            return
        closing, known = self._limit.closing, len(self._recent)
        recent = tuple(self._recent[known - min(self._count, known) :])
        self._closing = next(
            size for size in range(len(closing) - 1, -1, -1) if not size or recent[-size:] == closing[:size]
        )


class GrammarState(Protocol):
    """The place in a grammar that one sequence has reached. It is used on the worker thread only."""

    @property
    def finished(self) -> bool:
        """True if the text is complete and no token but an end token may follow."""

    @property
    def error(self) -> str:
        """The reason why the grammar cannot be followed further; empty if it can."""

    @property
    def field(self) -> str:
        """The client's name for the grammar, used in error messages."""

    def fill_masks(self, address: int, row_bytes: int, draft_ids: Items[int]) -> None:
        """Write one row of `row_bytes` bytes for the next token, and one for the token after each draft token.

        Bit t % 32 of the little-endian 32-bit word t // 32 says whether token t is allowed. The draft tokens must be
        valid (`count_valid`); they do not advance the state.
        """

    def advance(self, token_id: int) -> None:
        """Take a sampled token. After an invalid one `error` is set."""

    def count_valid(self, token_ids: Items[int]) -> int:
        """Return how many of these tokens may follow in order and leave the text unfinished."""

    def forced_tokens(self) -> Items[int]:
        """Return the tokens of the text that must follow; empty if several texts are possible."""


class Grammar(Protocol):
    def start(self) -> GrammarState: ...


class Grammars(Protocol):
    def find(self, source: GrammarSource, /) -> Grammar | None: ...


@dataclass(slots=True, eq=False)
class PromptScoring:
    """Progress of the scores of one request's prompt, which all its choices share.

    The logits of position p give the score of token p + 1. `num_done` of `num_positions` were scored.
    """

    num_top: int
    num_positions: int
    num_done: int = 0

    @property
    def is_done(self) -> bool:
        return self.num_done >= self.num_positions


@dataclass(frozen=True, slots=True)
class PrefixScope:
    """What tells keys and values of the same tokens apart; sequences share them within one scope only.

    Another adapter has other ones, even under the same name. Another salt belongs to another tenant, who must not learn
    of them (vLLM's `cache_salt`).
    """

    adapter: LoadedAdapter | None = None
    salt: str | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request, or one beam.

    `token_ids` is the prompt followed by the completion, of which the first `num_computed` have keys and values:
    position p at offset p, in `prefix_slot` for p < `prefix_tokens`, else in `slot` (None while waiting).
    """

    request_id: str
    choice: int
    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    num_source_tokens: int = 0  # of the prompt, read by the encoder if the model has one
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
    grammar: GrammarState | None = None  # after the tokens of `token_ids`
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    scoring: PromptScoring | None = None  # set if the request wants scores of its prompt
    adapter: LoadedAdapter | None = None
    cache_salt: str | None = None
    thinking: ThinkingState | None = None  # after the tokens of `token_ids`; None: without a limit
    vectors: tuple[PromptVectors, ...] = ()  # in the order of their places in the prompt

    @property
    def prefix_scope(self) -> PrefixScope:
        return PrefixScope(self.adapter, self.cache_salt)

    @property
    def num_completion_tokens(self) -> int:
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
        return self.params.beam_width > 1

    @property
    def restricts_tokens(self) -> bool:
        return (
            self.grammar is not None
            or bool(self.bad_word_ids)
            or self.params.allowed_token_ids is not None
            or self.num_completion_tokens < self.params.min_tokens
            or (self.thinking is not None and self.thinking.is_near)
        )

    @property
    def max_cached_tokens(self) -> int:
        """Leading tokens that may be read from the cache: not the last one, and no position still to be scored."""
        limit = len(self.token_ids) - 1
        return limit if self.scoring is None or self.scoring.is_done else min(limit, self.scoring.num_done)

    @property
    def order(self) -> tuple[int, int]:
        """The place among all sequences: the first is admitted first and preempted last."""
        return self.params.priority, self.arrival_order

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if self.grammar is not None:
            self.grammar.advance(token_id)
        if self.thinking is not None:
            self.thinking.advance(token_id)

    @property
    def num_candidates(self) -> int:
        """Number of most likely tokens that the sampler returns: enough for a beam if every stop id is among them."""
        width = self.params.beam_width
        return max(2 * width, width + len(self.stop_ids)) if width > 1 else 1


def make_sequence(
    request: Generate, choice: int = 0, eos_token_ids: frozenset[int] = frozenset(), grammar: Grammar | None = None
) -> Sequence:
    """Return the sequence of one choice of a request, with its seed and its stop ids resolved."""
    params = request.params
    return Sequence(
        request_id=request.request_id,
        choice=choice,
        params=params,
        token_ids=list(request.token_ids),
        num_prompt_tokens=len(request.token_ids),
        num_source_tokens=request.num_source_tokens,
        seed=resolve_seed(params.seed, choice),
        # a grammar allows an end token where the text may end, so it must end the sequence there
        stop_ids=frozenset(params.stop_token_ids)
        | (frozenset() if params.ignore_eos and grammar is None else eos_token_ids),
        arrived_at=request.arrived_at,
        grammar=None if grammar is None else grammar.start(),
        bad_word_ids=request.bad_word_ids,
        adapter=request.adapter,
        cache_salt=request.cache_salt,
        thinking=None if request.thinking is None else ThinkingState(request.thinking),
        vectors=request.vectors,
    )


def resolve_seed(seed: int | None, choice: int) -> int:
    """Return the seed of a choice, in [0, 2^63): the request's for choice 0, mixed for others, else random."""
    if seed is None:
        return secrets.randbits(63)
    return (seed + choice * _GOLDEN) & _SEED_MASK


# ScheduledSpan, LogitRow and SampledTokens are written once, like all other dataclasses here, but they are not
# frozen. A frozen instance takes five times as long to create, and each step creates one for every sequence.


@dataclass(slots=True)
class ScheduledSpan:
    """One sequence's part of a step: the positions `[start, start + num_tokens)` are computed now.

    KV is located as in `Sequence`. A prefill chunk that does not reach the end of the prompt samples nothing.
    `draft_ids` take the last positions of the span, and each of their logits rows is sampled too. If the step was
    launched ahead, `start` was `len(token_ids)` at that time: its token is not known on the host yet. `saves`: the recurrent
    state after each of these positions is also copied to a row.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    slot: int
    prefix_slot: int | None
    prefix_tokens: int
    samples: bool
    draft_ids: tuple[int, ...] = ()
    saves: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
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
        assert self.samples and not self.draft_ids, "a span that samples no token, or several, has no next position yet"
        return ScheduledSpan(self.sequence, self.start + 1, 1, self.slot, self.prefix_slot, self.prefix_tokens, True)

    def with_drafts(self, draft_ids: tuple[int, ...]) -> ScheduledSpan:
        """Return this span with draft tokens appended, for which the slot has capacity."""
        return replace(self, num_tokens=self.num_tokens + len(draft_ids), draft_ids=draft_ids)


def next_span(sequence: Sequence, num_tokens: int) -> ScheduledSpan:
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


def tokens_in_whole_blocks(sequence: Sequence, num_tokens: int) -> int:
    """Return the tokens to compute next, about so many, that end in no block whose tokens see each other."""
    start = sequence.num_computed
    for block in [part.block for part in sequence.vectors if part.block is not None]:
        if block[0] < start + num_tokens < block[1]:
            return (block[0] if block[0] > start else block[1]) - start
    return num_tokens


@dataclass(frozen=True, slots=True)
class ScoredSpan:
    """The positions `[start, end)` of a span whose logits score the next tokens of its prompt."""

    span: ScheduledSpan
    start: int
    end: int

    @property
    def target_ids(self) -> list[int]:
        return self.span.sequence.token_ids[self.start + 1 : self.end + 1]

    @property
    def num_top(self) -> int:
        assert self.span.sequence.scoring is not None, "the request wants scores"
        return self.span.sequence.scoring.num_top


def scored_spans(spans: Iterable[ScheduledSpan]) -> tuple[ScoredSpan, ...]:
    found: list[ScoredSpan] = []
    for span in spans:
        scoring = span.sequence.scoring
        if scoring is None:
            continue
        start, end = max(span.start, scoring.num_done), min(span.end, scoring.num_positions)
        if start < end:
            found.append(ScoredSpan(span, start, end))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class KvCopy:
    """Copy job for the keys and values of positions `[start, end)` between slots, before the step runs."""

    source: int
    target: int
    start: int
    end: int


StateCopy = tuple[int, int, int]  # of a recurrent state: source row, target row, position after which it is the state


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one step, which `schedule()` returns and the runner computes: decodes first, then prefill chunks.

    The order is binding: `copies` one after the other, then `released` pages are given back, since a copy may read from
    one, then the spans. Copies of recurrent states are done before them too, in order. `ahead`: launched while the
    previous step, which has a row for each sequence, was in flight; then all spans are decodes. `scored` are the parts
    of spans that score their prompts.
    """

    spans: tuple[ScheduledSpan, ...]
    copies: tuple[KvCopy, ...] = ()
    released: tuple[tuple[int, int, int], ...] = ()  # (slot, first position, end position); whole pages
    cached_tokens: int = 0  # prompt tokens of newly admitted sequences that were found in the KV cache
    preempted: int = 0  # number of sequences that lost their KV memory for this step
    ahead: bool = False
    scored: tuple[ScoredSpan, ...] = ()
    state_copies: tuple[StateCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.spans) if self.ahead else sum(span.num_tokens for span in self.spans)

    def active(self) -> Batch:
        """Return this batch without the rows of finished sequences, which only a step ahead can have."""
        if not self.ahead:
            return self
        active = tuple([span for span in self.spans if span.sequence.slot is not None])
        return self if len(active) == len(self.spans) else replace(self, spans=active)


@dataclass(slots=True)
class LogitRow:
    """A row of logits, whose token will be at `position` if all draft tokens before it are accepted."""

    sequence: Sequence
    position: int


def logit_rows_of(spans: Iterable[ScheduledSpan]) -> list[LogitRow]:
    """List the rows of logits to sample, in the order of the spans and of the positions within each span."""
    return [LogitRow(span.sequence, span.known_end + place) for span in spans for place in range(span.num_samples)]


@dataclass(slots=True)
class SampledTokens:
    """The result of one row: an id, a beam parent's best candidates, best first, or `NOT_FINITE`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()  # one per token id, if the sequence requests log-probabilities or is a beam
    top: tuple[tuple[int, float], ...] = ()  # the most likely tokens with their log-probabilities

    @property
    def is_finite(self) -> bool:
        return self.token_ids[0] != NOT_FINITE


NOT_SAMPLED = SampledTokens((NOT_FINITE,))  # the result of a row whose logits are not finite


class InFlightStep(Protocol):
    @property
    def batch(self) -> Batch: ...


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step that the CPU has computed when `launch` returns."""

    batch: Batch
    samples: Items[SampledTokens]


class RunsAtOnce:
    """The part of a runner that computes each step when it is launched: the processor has nothing else to do meanwhile."""

    def run(self, batch: Batch) -> Items[SampledTokens]:
        """Compute a batch and return the samples of each row that samples, in order of spans and positions."""
        raise NotImplementedError

    def launch(self, batch: Batch, after: InFlightStep | None = None) -> InFlightStep:
        assert after is None, "no step is launched ahead"
        return CompletedStep(batch, self.run(batch))

    def wait(self, in_flight: InFlightStep) -> Items[SampledTokens]:
        assert isinstance(in_flight, CompletedStep), "the step must come from this runner"
        return in_flight.samples

    def can_run_ahead(self, batch: Batch) -> bool:
        return False

    def use_idle_time(self, is_wanted: Callable[[], bool]) -> bool:
        return True

    def survives(self, error: Exception) -> bool:
        return False


def active_samples(batch: Batch, active: Batch, samples: Items[SampledTokens]) -> Items[SampledTokens]:
    """Return the samples of the rows whose sequences are still `active` (`Batch.active`)."""
    if active is batch:
        return samples
    return [one for span, one in zip(batch.spans, samples, strict=True) if not span.is_finished]


def accepted_prefix(span: ScheduledSpan, samples: Items[SampledTokens]) -> Items[SampledTokens]:
    """Return the accepted samples of a span: up to the first one that differs from its draft or is a stop token.

    Each row is sampled with its position's random number, as it would have been without drafts.
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


def token_events(sequence: Sequence, samples: Items[SampledTokens], now: float) -> list[Event]:
    """Return the events for the tokens just appended, and for the end. A stop token counts, but is no text."""
    count, last_id = len(sequence.token_ids), sequence.token_ids[-1]
    stops = last_id in sequence.stop_ids
    text = samples[:-1] if stops else samples
    events: list[Event] = []
    if text:
        first = count - sequence.num_prompt_tokens == len(samples)
        ready = TokensReady(
            sequence.request_id,
            sequence.choice,
            text[0].token_ids if len(text) == 1 else tuple([one.token_ids[0] for one in text]),
            () if sequence.params.logprobs is None else _token_logprobs(text, sequence.params.num_top_logprobs),
            sequence_timings(sequence, now) if first else None,
        )
        events.append(ready)
    if stops:
        params = sequence.params
        scored = None if params.logprobs is None else _token_logprobs(samples[-1:], params.num_top_logprobs)[0]
        events.append(structs.replace(sequence_finished(sequence, "stop", now, last_id), stop_logprob=scored))
    elif sequence.grammar is not None and sequence.grammar.finished:
        events.append(sequence_finished(sequence, "stop", now))
    elif count >= sequence.max_length:
        events.append(sequence_finished(sequence, "length", now))
    return events


def sequence_finished(
    sequence: Sequence, reason: FinishReason, now: float, stop_token_id: int | None = None
) -> SequenceFinished:
    return SequenceFinished(
        request_id=sequence.request_id,
        choice=sequence.choice,
        reason=reason,
        timings=sequence_timings(sequence, now),
        num_completion_tokens=sequence.num_completion_tokens,
        stop_token_id=stop_token_id,
    )


def choices_finished(sequence: Sequence, reason: FinishReason, now: float) -> list[Event]:
    """Return the events for the end of all choices of a sequence: of a beam search, several."""
    finished = sequence_finished(sequence, reason, now)
    count = sequence.params.n if sequence.is_beam else 1
    return [structs.replace(finished, choice=sequence.choice + place) for place in range(count)]


def sequence_timings(sequence: Sequence, now: float) -> Timings:
    """Return the timings of a sequence: queue until first scheduled, prefill until its first token, decode."""
    scheduled = now if sequence.scheduled_at is None else sequence.scheduled_at
    first_token = now if sequence.first_token_at is None else sequence.first_token_at
    return Timings(scheduled - sequence.arrived_at, first_token - scheduled, now - first_token, sequence.cached_tokens)


def _token_logprobs(samples: Items[SampledTokens], num_top: int) -> tuple[TokenLogprob, ...]:
    assert all(one.logprobs for one in samples), "the sampler returns log-probabilities if they were requested"
    return tuple(TokenLogprob(one.token_ids[0], one.logprobs[0], one.top[:num_top]) for one in samples)
