"""Speculative decoding: draft tokens from n-gram lookup or a draft model, as many as maximize tokens per second.

N-gram lookup finds an earlier occurrence of the last tokens and proposes what followed it. The number of draft tokens
depends on the acceptance rate, of this sequence and of all, and on the cost of a step by number of rows. If draft
tokens do not pay off, drafting pauses. After the pause it tries a single draft token; the pause doubles after each
failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol

from app.engine.scheduler.batch import ScheduledSpan, Sequence
from app.messages import FIRST_VECTOR_ID

MIN_SPEEDUP = (
    1.03  # required gain in tokens per second over no draft tokens; the gain must cover the cost of drafting too
)
MIN_PAUSE_STEPS, MAX_PAUSE_STEPS = 4, 32  # steps
DECAY = 0.9  # decay of earlier observations at each new one: about the last ten count
SHARED_DECAY = 0.99
PRIOR_WEIGHT = 2.0  # number of observations that the rate of all sequences counts for in a sequence's estimate
NGRAM_SIZES = (3, 2)  # lengths of the n-grams to match; the longest match is used
# Number of tokens whose n-grams are indexed per step, which takes 0.3 ms. A long prompt is indexed from its end
# over many steps, so that no step waits for it.
MAX_INDEXED_PER_STEP = 512
# maximum rows of a step with draft tokens; larger products are compute-bound, and each step size is recorded
MAX_SPECULATIVE_ROWS = 64
_QUIET_STEPS = 3  # that a device launches ahead of the tokens before a sequence is looked up again
MAX_DRAFT_TOKENS = 7  # per sequence and step
# Per sequence and step: draft tokens that a grammar forces. One more are a chunk of a recurrent layer.
MAX_FORCED_TOKENS = 31
_METHODS = ("ngram", "grammar", "draft_model")  # of drafting, as `GET /info` names them
_FORCED_ACCEPTED = 19.0  # initial observations of forced tokens; only another split of the same text is rejected
# reserves capacity for draft tokens in a sequence's slot; returns False if there is none
ReserveDraftTokens = Callable[[Sequence, int], bool]
DraftProposal = tuple[ScheduledSpan, tuple[int, ...]]  # a decoding span and its proposed draft tokens


class DecodeCostModel(Protocol):
    def decode(self, rows: int, context_tokens: int = 0) -> float: ...


@dataclass(slots=True)
class AcceptanceRate:
    """Decaying estimate of the probability that a draft token is accepted, given that the ones before were."""

    decay: float
    accepted: float = 1.0
    rejected: float = 1.0

    def observe(self, drafted: int, accepted: int) -> None:
        """Record a result. Draft tokens after the first rejected one carry no information."""
        self.accepted = self.accepted * self.decay + accepted
        self.rejected = self.rejected * self.decay + (accepted < drafted)

    def value(self, prior: float = 0.5, prior_weight: float = 0.0) -> float:
        """Return the estimate, combined with a prior that counts as `prior_weight` observations."""
        return (self.accepted + prior_weight * prior) / (self.accepted + self.rejected + prior_weight)


@dataclass(slots=True)
class DraftHistory:
    """What became of one sequence's draft tokens. `is_probe`: the present draft is a single trial token."""

    rate: AcceptanceRate = field(default_factory=lambda: AcceptanceRate(DECAY, 0.0, 0.0))
    pause: int = 0
    next_pause: int = MIN_PAUSE_STEPS
    is_probe: bool = False

    def acceptance(self, shared: AcceptanceRate) -> float:
        return self.rate.value(shared.value(), PRIOR_WEIGHT)

    def observe(self, drafted: int, accepted: int, shared: AcceptanceRate) -> None:
        """Record a result, also in the rate of all sequences. A trial token that is rejected doubles the next pause."""
        self.rate.observe(drafted, accepted)
        shared.observe(drafted, accepted)
        if accepted:
            self.next_pause = MIN_PAUSE_STEPS
        elif self.is_probe:
            self.next_pause = min(2 * self.next_pause, MAX_PAUSE_STEPS)


class Drafter(Protocol):
    """Proposes draft tokens for one sequence. The tokens of the sequence only grow."""

    def propose(self, token_ids: list[int], max_tokens: int) -> tuple[int, ...]:
        """Return at most `max_tokens` draft tokens that may follow `token_ids`, in order."""


class NgramDrafter:
    """Index of the last position of each n-gram in prompt and completion, made on the first `propose`."""

    def __init__(self) -> None:
        # Maps an n-gram to the end of its latest occurrence. The n-grams at the end of the tokens are not
        # included.
        self._last_ends: dict[tuple[int, ...], int] = {}
        self._first = self._last = 0  # occurrences that end in (first, last] are indexed

    def propose(self, token_ids: list[int], max_tokens: int) -> tuple[int, ...]:
        """Return at most `max_tokens` tokens that followed the latest earlier occurrence of the last n-gram."""
        self._index(token_ids)
        after = next(
            (self._last_ends[gram] for size in NGRAM_SIZES if (gram := tuple(token_ids[-size:])) in self._last_ends),
            None,
        )
        if after is None:
            return ()
        period = len(token_ids) - after  # the draft repeats with this period once it reaches the end of the tokens
        return tuple(token_ids[after + place % period] for place in range(max_tokens))

    def _index(self, token_ids: list[int]) -> None:
        """Index the newest tokens first, then older ones: recent occurrences take precedence."""
        newest = len(token_ids) - 1
        if self._last == 0:
            self._first = self._last = newest
        end = min(newest, self._last + MAX_INDEXED_PER_STEP)
        for at in range(self._last + 1, end + 1):
            for size in NGRAM_SIZES:
                if at >= size:
                    self._last_ends[tuple(token_ids[at - size : at])] = at
        begin = max(0, self._first - (MAX_INDEXED_PER_STEP - (end - self._last)))
        for at in range(self._first, begin, -1):
            for size in NGRAM_SIZES:
                if at >= size:
                    self._last_ends.setdefault(tuple(token_ids[at - size : at]), at)
        self._first, self._last = begin, end


class NoDrafter:
    def propose(self, token_ids: list[int], max_tokens: int) -> tuple[int, ...]:
        return ()


def ngram_drafter(sequence: Sequence) -> NgramDrafter:
    return NgramDrafter()


@dataclass(slots=True)
class DraftState:
    drafter: Drafter
    history: DraftHistory = field(default_factory=DraftHistory)
    has_paused: bool = False
    quiet: int = 0  # steps that may be launched ahead, since the last look-up found nothing
    is_forced: bool = False  # a grammar forces the text of the current draft


class Speculation:
    """The speculative decoding policy of one engine; `drafter` creates the drafter of each sequence."""

    def __init__(
        self, drafter: Callable[[Sequence], Drafter], costs: DecodeCostModel, max_draft_tokens: int = MAX_DRAFT_TOKENS
    ) -> None:
        self._drafter, self._costs, self._max_draft_tokens = drafter, costs, max_draft_tokens
        self._rate = AcceptanceRate(SHARED_DECAY)
        self._forced_rate = AcceptanceRate(SHARED_DECAY, _FORCED_ACCEPTED)
        self._states: dict[Sequence, DraftState] = {}
        self.drafting: ModelDrafting | None = None
        self._by_model: set[Sequence] = set()  # sequences whose present draft tokens are the draft model's
        self._counts = {method: [0, 0] for method in _METHODS}  # draft tokens, and those that were accepted

    def with_draft_model(self, model: DraftProposer) -> Speculation:
        """Return another policy, without acceptance history, in which only this model drafts."""
        speculation = self.with_drafter(lambda sequence: NoDrafter())
        speculation.set_draft_model(model)
        return speculation

    def set_draft_model(self, model: DraftProposer) -> None:
        """Let a draft model draft where it gains more than n-gram lookup."""
        self.drafting = ModelDrafting(model, self._costs, self._max_draft_tokens)

    def with_drafter(self, drafter: Callable[[Sequence], Drafter]) -> Speculation:
        return Speculation(drafter, self._costs, self._max_draft_tokens)

    def add_draft_tokens(
        self, spans: list[ScheduledSpan], max_rows: int, reserve: ReserveDraftTokens
    ) -> list[ScheduledSpan]:
        """Return the decodes with draft tokens where they pay off and `reserve` finds capacity, up to `max_rows` rows."""
        left = min(max_rows, MAX_SPECULATIVE_ROWS) - len(spans)
        could_pay = self._could_pay(spans, left)
        proposals = self._proposals(spans) if could_pay else []
        drafts: dict[Sequence, tuple[int, ...]] = {}
        counts = self._draft_counts(spans, proposals, left) if proposals else []
        for (span, ids), count in zip(proposals, counts, strict=True):
            if count and not self._is_left_to_model(span, spans) and reserve(span.sequence, count):
                drafts[span.sequence] = ids[:count]
        self._by_model.clear()
        if self.drafting is not None and could_pay:
            self._add_model_drafts(self.drafting, spans, drafts, left, reserve)
        return [span.with_drafts(drafts.get(span.sequence, ())) for span in spans] if drafts else spans

    def expects_drafts(self, all_spans: Iterable[ScheduledSpan]) -> bool:
        """Return False if the next step of these sequences may be launched before the host knows their tokens.

        That is where draft tokens would not pay, or none are likely: a sequence pauses, or its last look-up found nothing.
        """
        spans = [span for span in all_spans if _can_have_drafts(span.sequence)]
        if not spans or not self._could_pay(spans, MAX_SPECULATIVE_ROWS - len(spans)):
            return False
        expected = [self._expects_draft(span.sequence) for span in spans]  # each counts its steps
        return True in expected

    def _expects_draft(self, sequence: Sequence) -> bool:
        state = self._states.get(sequence)
        if state is None or self.drafting is not None:
            return True
        if state.history.pause > 0:
            state.history.pause -= 1
            return False
        state.quiet -= 1
        return state.quiet < 0

    def _is_left_to_model(self, span: ScheduledSpan, spans: list[ScheduledSpan]) -> bool:
        state = self._states[span.sequence]
        if self.drafting is None or state.is_forced:
            return False
        return self.drafting.is_better(span.sequence, self._acceptance(state), len(spans), self._seconds(spans)(0))

    def _add_model_drafts(
        self,
        drafting: ModelDrafting,
        spans: list[ScheduledSpan],
        drafts: dict[Sequence, tuple[int, ...]],
        left: int,
        reserve: ReserveDraftTokens,
    ) -> None:
        rest = [
            span
            for span in spans
            if span.sequence not in drafts
            and _can_have_drafts(span.sequence)
            and span.sequence.max_length - len(span.sequence.token_ids) > 1
        ]
        for sequence, ids in drafting.drafts(rest, spans, left - sum(map(len, drafts.values()))).items():
            grammar = sequence.grammar
            valid = ids if grammar is None else ids[: grammar.count_valid(ids)]
            if valid and reserve(sequence, len(valid)):
                drafts[sequence] = valid
                self._by_model.add(sequence)

    def observe_acceptance(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        if sequence in self._by_model and self.drafting is not None:
            self._count("draft_model", drafted, accepted)
            self.drafting.observe(sequence, drafted, accepted)
            return
        state = self._states[sequence]
        self._count("grammar" if state.is_forced else "ngram", drafted, accepted)
        if state.is_forced:
            self._forced_rate.observe(drafted, accepted)
            return
        state.history.observe(drafted, accepted, self._rate)

    def to_json(self) -> dict[str, Any]:
        """Return the `speculation` object of `GET /info`, on any thread."""
        rates = {"ngram": self._rate.value(), "grammar": self._forced_rate.value()}
        if self.drafting is not None:
            rates["draft_model"] = self.drafting.acceptance
        methods: dict[str, dict[str, float]] = {
            method: {"draft_tokens": counts[0], "accepted_tokens": counts[1], "acceptance": round(rates[method], 3)}
            for method, counts in self._counts.items()
            if method in rates
        }
        if self.drafting is not None:
            methods["draft_model"]["seconds_per_token"] = round(self.drafting.model.step_seconds(1), 6)
        return methods

    def _count(self, method: str, drafted: int, accepted: int) -> None:
        counts = self._counts[method]
        counts[0] += drafted
        counts[1] += accepted

    def forget(self, sequence: Sequence) -> None:
        self._states.pop(sequence, None)
        if self.drafting is not None:
            self.drafting.forget(sequence)

    def _seconds(self, spans: list[ScheduledSpan]) -> Callable[[int], float]:
        """Return the cost of the step by number of draft tokens, never less than without any."""
        rows, context = len(spans), sum(span.end for span in spans)
        alone = self._costs.decode(rows, context)
        return lambda drafted: max(alone, self._costs.decode(rows + drafted, context))

    def _could_pay(self, spans: list[ScheduledSpan], left: int) -> bool:
        """Return True if draft tokens would pay off if all of some count were accepted; else no drafter is called."""
        rows, seconds = len(spans), self._seconds(spans)
        return any(
            rows + more > MIN_SPEEDUP * rows * seconds(more) / seconds(0) for more in (1, 2, 4, 8) if more <= left
        )

    def _proposals(self, spans: list[ScheduledSpan]) -> list[DraftProposal]:
        proposals: list[DraftProposal] = []
        for span in spans:
            sequence = span.sequence
            if not _can_have_drafts(sequence):
                continue
            state = self._states.get(sequence)
            if state is None:
                state = self._states[sequence] = DraftState(self._drafter(sequence))
            ids = self._draft(sequence, state)
            if ids:
                proposals.append((span, ids))
        return proposals

    def _draft(self, sequence: Sequence, state: DraftState) -> tuple[int, ...]:
        """Return the tokens that the grammar forces, else the drafter's as far as the grammar allows them."""
        left, grammar = sequence.max_length - len(sequence.token_ids) - 1, sequence.grammar
        state.is_forced = False
        if grammar is not None and left > 0:
            forced = grammar.forced_tokens()[: min(left, MAX_FORCED_TOKENS)]
            ids = tuple(forced[: grammar.count_valid(forced)]) if forced else ()
            state.is_forced = bool(ids)
            if ids:
                return ids
        if state.history.pause > 0:
            state.history.pause -= 1
            return ()
        most = min(self._max_draft_tokens, left)
        ids = state.drafter.propose(sequence.token_ids, most) if most > 0 else ()
        state.quiet = 0 if ids else _QUIET_STEPS
        if sequence.vectors:
            ids = tuple(takewhile(lambda token: token < FIRST_VECTOR_ID, ids))
        return ids if grammar is None or not ids else ids[: grammar.count_valid(ids)]

    def _draft_counts(self, spans: list[ScheduledSpan], proposals: list[DraftProposal], left: int) -> list[int]:
        """Return how many draft tokens of each proposal to use, likely ones first, while tokens per second grow."""
        known = [self._states[span.sequence] for span, _ in proposals]
        probabilities = [
            (self._acceptance(state) ** place, index)
            for index, (state, (_, ids)) in enumerate(zip(known, proposals, strict=True))
            for place in range(1, len(ids) + 1)
        ]
        probabilities.sort(reverse=True)
        rows, seconds = len(spans), self._seconds(spans)
        tokens, worth = float(rows), MIN_SPEEDUP * rows / seconds(0)
        best, taken = worth, 0
        for count, (probability, _) in enumerate(probabilities[:left], 1):
            tokens += probability
            if tokens / seconds(count) > best:
                best, taken = tokens / seconds(count), count
        counts = [0] * len(proposals)
        for _, index in probabilities[:taken]:
            counts[index] += 1
        may_probe = taken < left and (rows + 1) / seconds(1) > worth
        return [_with_pause_rule(number, state, may_probe) for number, state in zip(counts, known, strict=True)]

    def _acceptance(self, state: DraftState) -> float:
        if state.is_forced:
            return self._forced_rate.value()
        return state.history.acceptance(self._rate)


def _can_have_drafts(sequence: Sequence) -> bool:
    """Return False for penalties, which count earlier tokens, and beams, which fork at every token."""
    return not sequence.is_beam and not sequence.params.has_penalties


def _with_pause_rule(count: int, state: DraftState, may_probe: bool) -> int:
    """Return the number of draft tokens after the pause rule: none during a pause, then a single trial token."""
    if state.is_forced:
        return count
    history = state.history
    history.is_probe = count == 0 and state.has_paused and may_probe
    state.has_paused = count == 0 and not history.is_probe
    if state.has_paused:
        history.pause = history.next_pause
    return max(count, int(history.is_probe))


class DraftProposer(Protocol):
    def is_ready(self, sequence: Sequence) -> bool: ...

    def propose(self, sequences: list[Sequence], num_tokens: int) -> Mapping[Sequence, tuple[int, ...]]: ...

    def step_seconds(self, num_sequences: int) -> float:
        """Return the seconds of one draft token for each of so many sequences; 0: not known."""

    def take_seconds(self) -> float: ...

    def forget(self, sequence: Sequence) -> None: ...


class ModelDrafting:
    def __init__(self, model: DraftProposer, costs: DecodeCostModel, max_draft_tokens: int) -> None:
        self.model, self._costs, self._max_draft_tokens = model, costs, max_draft_tokens
        self._rate = AcceptanceRate(SHARED_DECAY)
        self._histories: dict[Sequence, DraftHistory] = {}

    @property
    def acceptance(self) -> float:
        return self._rate.value()

    def drafts(
        self, spans: list[ScheduledSpan], all_spans: list[ScheduledSpan], left: int
    ) -> Mapping[Sequence, tuple[int, ...]]:
        """Return draft tokens for those of `spans` for which they pay off. At most `left` rows may be added."""
        ready: list[Sequence] = []
        for span in spans:
            history = self._histories.setdefault(span.sequence, DraftHistory())
            if history.pause > 0:
                history.pause -= 1
            elif self.model.is_ready(span.sequence):
                ready.append(span.sequence)
        if not ready or left < len(ready):
            return {}
        count = self._count(ready, all_spans, left)
        for sequence in ready:
            history = self._histories[sequence]
            history.is_probe = count == 0
            if count == 0:
                history.pause = history.next_pause
        return self.model.propose(ready, max(count, 1))

    def is_better(self, sequence: Sequence, acceptance: float, num_sequences: int, step_seconds: float) -> bool:
        """Return True if this draft model gains more per draft token than another method with this acceptance."""
        history, each = self._histories.get(sequence), self.model.step_seconds(1)
        if history is None or not each or history.pause > 0:
            return False
        return history.acceptance(self._rate) - num_sequences * each / step_seconds > acceptance

    def observe(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        self._histories[sequence].observe(drafted, accepted, self._rate)

    def forget(self, sequence: Sequence) -> None:
        self._histories.pop(sequence, None)
        self.model.forget(sequence)

    def _count(self, ready: list[Sequence], spans: list[ScheduledSpan], left: int) -> int:
        rows, context = len(spans), sum(span.end for span in spans)
        alone, each = self._costs.decode(rows, context), self.model.step_seconds(len(ready))
        if not each:
            return 0
        rates = [self._histories[one].acceptance(self._rate) for one in ready]
        room = min(sequence.max_length - len(sequence.token_ids) - 1 for sequence in ready)
        best, taken, tokens = MIN_SPEEDUP * rows / alone, 0, float(rows)
        for count in range(1, min(self._max_draft_tokens, room, left // len(ready)) + 1):
            tokens += sum(rate**count for rate in rates)
            verified = max(alone, self._costs.decode(rows + count * len(ready), context))
            if tokens / (verified + count * each) > best:
                best, taken = tokens / (verified + count * each), count
        return taken
