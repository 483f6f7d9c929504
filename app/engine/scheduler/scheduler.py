"""Scheduler: decides how many tokens of each sequence the next step computes, and processes the sampled tokens.

It works on counts. The oldest request goes first and is preempted last, so no request starves.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from itertools import chain, count
from operator import attrgetter

from app.engine.scheduler.batch import (
    Batch,
    Grammar,
    PromptScoring,
    SampledTokens,
    ScheduledSpan,
    ScoredSpan,
    Sequence,
    accepted_by_span,
    choices_finished,
    make_sequence,
    next_span,
    scored_spans,
    token_events,
    tokens_in_whole_blocks,
)
from app.engine.scheduler.beam_search import BeamGroup, Continuation, beam_search_finished
from app.engine.scheduler.kv_allocator import (
    READ_SECONDS_ALONE,
    READ_SECONDS_BESIDE_DECODES,
    KvAllocator,
    KvSlots,
    PrefixStore,
)
from app.engine.scheduler.policy import PrefillBudget, TokenBudget, admit_oldest, before_long_ones, share_prompts
from app.engine.scheduler.speculation import Speculation
from app.errors import ContextLengthExceeded, InvalidRequest, RequestError, StepFailed
from app.messages import Abort, Event, Generate, PromptScored, RequestFailed, SequenceFinished, TokenScore
from app.metrics.steps import EngineSnapshot, StepStats

_num_uncomputed = attrgetter("num_uncomputed")
_NOT_FINITE_MESSAGE = (
    "The model's logits for this request are not finite, so no token can be sampled. The weights of the model, or of its "
    "adapter, do not suit a token of this text; other requests are not affected."
)


@dataclass(slots=True)
class ActiveRequest:
    """The active sequences of a request; its held choices wait for the prompt. A search's beams are one choice."""

    active: list[Sequence]
    held: list[Sequence] = field(default_factory=list)
    group: BeamGroup | None = None


class RequestQueues:
    """The active requests, and their sequences: held, waiting (no slot) or running (a slot)."""

    def __init__(self, allocator: KvAllocator) -> None:
        self.requests: dict[str, ActiveRequest] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._allocator = allocator

    def add(self, choices: list[Sequence]) -> None:
        """Add a new request, the youngest of its priority. Its first choice waits for a slot."""
        group = BeamGroup(choices[0]) if choices[0].is_beam else None
        self.requests[choices[0].request_id] = ActiveRequest(choices, choices[1:], group)
        insort(self.waiting, choices[0], key=attrgetter("order"))

    def start(self, sequence: Sequence) -> None:
        insort(self.running, sequence, key=attrgetter("order"))

    def admit(self, sequence: Sequence | None = None) -> Sequence | None:
        """Move a waiting sequence, by default the oldest, to the running list; None if there is no capacity for it."""
        sequence = sequence or self.waiting[0]
        if not self._allocator.admit(sequence):
            return None
        self.waiting.remove(sequence)
        self.start(sequence)
        return sequence

    def oldest_width(self) -> int:
        return self.waiting[0].params.beam_width if self.waiting else 0

    def num_occupied(self) -> int:
        """Return the occupied places: running sequences, and places into which a beam search may still grow."""
        growing = {one.request_id: one.params.beam_width for one in self.running if one.is_beam}
        return sum(growing.values()) + sum(not one.is_beam for one in self.running)

    def preempt(self) -> None:
        """Take the slot of the youngest running sequence, or its search's slots. It waits and computes again."""
        victim = self.running[-1]
        group = self.requests[victim.request_id].group
        for sequence in list(group.beams) if group else [victim]:
            self.release_slot(sequence)
        insort(self.waiting, group.restart() if group else victim, key=attrgetter("order"))

    def release_slot(self, sequence: Sequence, keep_tokens: bool = True) -> None:
        """Take a sequence out of its slot. Its computed tokens stay cached; of a beam only the prompt does."""
        if sequence.slot is None:
            return
        keep = sequence.num_prompt_tokens if sequence.is_beam else len(sequence.token_ids)
        self.running.remove(sequence)
        self._allocator.release(sequence, keep if keep_tokens else 0)

    def enqueue_held_choices(self, sequence: Sequence) -> None:
        """Move the held choices of a request to the waiting list, once its prompt is computed and can be shared."""
        request = self.requests[sequence.request_id]
        for choice in request.held:
            insort(self.waiting, choice, key=attrgetter("order"))
        request.held.clear()

    def remove(self, sequence: Sequence, keep_tokens: bool = True) -> None:
        """Remove a finished choice. If others were held until it computed the prompt, the next one takes over."""
        request = self.requests[sequence.request_id]
        leaving = request.group.beams if request.group else [sequence]
        for one in sorted(leaving, key=lambda beam: beam.prefix_slot is None):  # nothing is kept because it is shared
            self.release_slot(one, keep_tokens)
        request.active.remove(sequence)
        was_held = sequence in request.held
        if was_held:
            request.held.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if request.held and not was_held:
            insort(self.waiting, request.held.pop(0), key=attrgetter("order"))
        if not request.active:
            del self.requests[sequence.request_id]

    def snapshot(self) -> EngineSnapshot:
        """Return the counts of running and waiting sequences. Cached slots do not count as used."""
        pool = self._allocator.pool
        rows: list[tuple[int, int]] = []
        prompts: list[tuple[int, int]] = []
        context = 0
        for sequence in self.running:  # a single pass, because this runs after every step
            length = len(sequence.token_ids)
            num_completion_tokens, uncomputed = length - sequence.num_prompt_tokens, length - sequence.num_computed
            if uncomputed == 1 and num_completion_tokens > 0:
                rows.append((num_completion_tokens, sequence.max_length - length))
                context += length
            else:
                prompts.append((sequence.num_computed, uncomputed))
        return EngineSnapshot(
            num_running=len({sequence.request_id for sequence in self.running}),
            kv_used_tokens=pool.in_use_tokens(),
            kv_capacity_tokens=pool.capacity_tokens,
            rows=tuple(rows),
            context_tokens=context,
            prompts=tuple(prompts),
            queue=tuple([len(sequence.token_ids) for sequence in self.waiting]),
            states=None if pool.checkpoints is None else pool.checkpoints.usage(pool.slots),
        )


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of the engine; `max_model_len` counts prompt and completion together."""

    max_model_len: int
    max_running_seqs: int
    max_batch_tokens: int

    def limited_by(self, pool: KvSlots) -> EngineLimits:
        """Return these limits, reduced so that one sequence alone fits the pool and all decodes fit one step."""
        return replace(
            self,
            max_model_len=min(self.max_model_len, pool.capacity_tokens),
            max_running_seqs=min(self.max_running_seqs, self.max_batch_tokens, len(pool.slots)),
        )


def request_error(request: Generate, limits: EngineLimits, pool: KvSlots) -> RequestError | None:
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
        return InvalidRequest(
            f"beam_width is at most {max(widest, 1)} on this server, not {width}.", field="beam_width"
        )
    if width > 1 and request.grammar is not None:
        return InvalidRequest("beam_width cannot be combined with structured output.", field="beam_width")
    if max_sequence_tokens(request, limits, pool) < num_prompt + (request.params.max_tokens != 0):
        return ContextLengthExceeded(
            f"A prompt of {num_prompt} tokens with beam_width {width} does not fit the KV cache of {pool.capacity_tokens} tokens.",
            field="prompt",
        )
    return None


def max_sequence_tokens(request: Generate, limits: EngineLimits, pool: KvSlots) -> int:
    """Return the most tokens of the request's sequences, with which it fits if it is alone in the pool."""
    num_prompt, params = len(request.token_ids), request.params
    bound = (
        limits.max_model_len if params.max_tokens is None else min(limits.max_model_len, num_prompt + params.max_tokens)
    )
    if params.beam_width == 1:
        return bound
    if pool.copies_forks:
        return min(bound, pool.capacity_tokens // params.beam_width)
    # The prompt is stored once. The root and each beam store a completion, and each end needs a separate page.
    capacity = pool.capacity_tokens - num_prompt - (2 * params.beam_width + 1) * pool.tokens_per_page
    return min(bound, num_prompt + capacity // (params.beam_width + 1))


class Scheduler:
    """The scheduler of one engine.

    `schedule` and `update` alternate; `schedule_ahead` may come between them, `add` and `abort` come between steps.
    Steps that only decode carry draft tokens of `speculation` if they pay off. Prefixes in `prefix_store` are read in
    place of being computed.
    """

    def __init__(
        self,
        pool: KvSlots,
        prefill_budget: PrefillBudget,
        limits: EngineLimits,
        eos_token_ids: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
        speculation: Speculation | None = None,
    ) -> None:
        self.speculation = speculation
        self.prefix_store: PrefixStore | None = None
        self._allocator = KvAllocator(pool)
        self.pool = pool
        self._prefill = prefill_budget
        self._limits = limits.limited_by(pool)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._token_budget = TokenBudget(self._limits.max_batch_tokens)
        self._arrivals = count()
        self.queues = RequestQueues(self._allocator)
        self._num_preempted = 0
        self._not_finite: dict[str, None] = {}  # requests of this step with a row or a score that is not finite

    @property
    def has_work(self) -> bool:
        return bool(self.queues.requests)

    def add(self, request: Generate, grammar: Grammar | None = None) -> list[Event]:
        assert request.request_id not in self.queues.requests, "request ids must be unique"
        error = request_error(request, self._limits, self.pool)
        if error is not None:
            return [RequestFailed(request.request_id, error)]
        numbers = range(request.params.num_sequences)
        choices = [make_sequence(request, choice, self._eos_token_ids, grammar) for choice in numbers]
        num_top = request.params.prompt_logprobs
        scoring = None if num_top is None else PromptScoring(num_top, len(request.token_ids) - 1)
        for sequence in choices:
            sequence.scoring = scoring
            sequence.arrival_order, sequence.max_length = (
                next(self._arrivals),
                max_sequence_tokens(request, self._limits, self.pool),
            )
        self.queues.add(choices)
        return []

    def abort(self, command: Abort) -> list[Event]:
        """End a request, or one choice of it, in any state. Its computed tokens stay cached."""
        request = self.queues.requests.get(command.request_id)
        leaving = [one for one in request.active if command.choice in (None, one.choice)] if request else []
        events: list[Event] = []
        for sequence in leaving:
            events += choices_finished(sequence, command.reason, self._clock())
            self._end(sequence)
        return events

    def schedule(self) -> Batch | None:
        """Return the next step's batch: decodes, then running prefills, then admitted ones; None if there is no work."""
        self._num_preempted = 0
        self._grow_decodes()
        spans = [next_span(sequence, 1) for sequence in self._ready()]
        prompts = [sequence for sequence in self.queues.running if sequence.num_uncomputed > 1]
        prefills: list[ScheduledSpan] = []
        cached = 0
        if prompts or self.queues.waiting:
            admitted = admit_oldest(self._free_places(), self.queues.oldest_width, self.queues.admit)
            tokens = self._prefill_tokens(prompts, len(spans))
            shares = share_prompts(
                chain(prompts, admitted), tokens, _num_uncomputed, lambda oldest: self._smaller(prompts, oldest, tokens)
            )
            if self.prefix_store is not None:
                shares, cached = self._read_prefixes(self.prefix_store, list(shares), bool(spans))
            prefills = self._prefill_spans(shares)
            spans += prefills
        if not spans:
            assert not self.queues.waiting, "an idle engine admits the oldest request"
            return None
        spans.sort(key=lambda span: not span.is_decode)
        if self.speculation is not None and all(span.is_decode for span in spans):
            spans = self.speculation.add_draft_tokens(spans, self._token_budget.tokens, self._allocator.grow)
        if self.pool.checkpoints is not None:
            self._allocator.save_states(spans)
        cached += sum(self._record_first_step(span.sequence) for span in prefills)
        copies = self._allocator.take_copies()
        released, scored = self.pool.take_released(), scored_spans(prefills) if prefills else ()
        states = self.pool.take_state_copies()
        return Batch(tuple(spans), copies, released, cached, self._num_preempted, scored=scored, state_copies=states)

    def _prefill_spans(self, shares: Iterable[tuple[Sequence, int]]) -> list[ScheduledSpan]:
        """Return the spans of prompts with their tokens. One of them may have more, to the end of a block."""
        spans: list[ScheduledSpan] = []
        exceeds = False
        for sequence, tokens in shares:
            whole = tokens_in_whole_blocks(sequence, tokens) if sequence.vectors else tokens
            if whole <= tokens or not exceeds:
                exceeds |= whole > tokens
                spans.append(next_span(sequence, whole))
        return spans

    def schedule_ahead(self, batch: Batch) -> Batch | None:
        """Return the batch that follows `batch`, which is in flight: the same sequences, one position further.

        Sequences that reach their maximum length in `batch` are left out; one that ends for another reason has a
        finished row. `batch` must contain no finished rows. None: the next step has to do something else.
        """
        spans = batch.spans
        if (
            not (batch.ahead or all(map(_can_run_ahead, spans)))
            or len(spans) < len(self.queues.running)
            or (self.speculation is not None and self.speculation.expects_drafts(spans))
        ):
            return None
        lasting = [span for span in spans if span.start + 2 < span.sequence.max_length]
        if self.queues.waiting and (len(lasting) < len(spans) or self._would_admit()):
            return None
        checkpoints = self.pool.checkpoints  # only a step that is scheduled saves states
        if checkpoints is not None and any(checkpoints.positions(span.sequence, span.start + 2) for span in lasting):
            return None
        if not lasting or not all(self.pool.reserve(span.slot, span.start + 2) for span in lasting):
            return None
        return Batch(tuple([span.next_position() for span in lasting]), (), self.pool.take_released(), ahead=True)

    def shrink(self, batch: Batch) -> bool:
        """Give up a step that ran out of memory, and make the next ones smaller; False if that is not possible."""
        for span in batch.spans:
            self._allocator.trim(span.sequence)
        return self._token_budget.shrink(batch)

    def update_scores(self, scored: Items[ScoredSpan], scores: Items[tuple[TokenScore, ...]]) -> list[Event]:
        """Process the scores of a step's prompts, given for each of `scored`, before `update`."""
        events: list[Event] = []
        for part, own in zip(scored, scores, strict=True):
            scoring = part.span.sequence.scoring
            assert scoring is not None and scoring.num_done == part.start, "positions are scored in order"
            if not own:
                self._not_finite[part.span.sequence.request_id] = None
                continue
            scoring.num_done = part.end
            events.append(PromptScored(part.span.sequence.request_id, own))
        return events

    def update(self, batch: Batch, sampled: Items[SampledTokens]) -> list[Event]:
        """Process the samples of each row, in order; a request with a row that is not finite fails alone."""
        now = self._clock()
        events: list[Event] = []
        searches: dict[str, list[tuple[Sequence, SampledTokens]]] = {}
        failed: dict[str, InvalidRequest] = {}
        for span, accepted in accepted_by_span(batch, sampled):
            sequence = span.sequence
            self._allocator.set_computed(sequence, span.known_end + len(accepted) - 1 if span.draft_ids else span.end)
            if span.start < sequence.num_prompt_tokens <= span.end:
                self.queues.enqueue_held_choices(sequence)
            if not span.samples or not self._is_finite(sequence, accepted):
                continue
            sequence.first_token_at = now if sequence.first_token_at is None else sequence.first_token_at
            if sequence.params.max_tokens == 0:
                events += choices_finished(sequence, "length", now)
                self._end(sequence)
            elif sequence.is_beam:
                searches.setdefault(sequence.request_id, []).append((sequence, accepted[0]))
            else:
                events += self._append(span, accepted, now)
                if sequence.grammar is not None and sequence.grammar.error:
                    message = f"The structured output could not be followed to its end: {sequence.grammar.error}"
                    failed[sequence.request_id] = InvalidRequest(message, field=sequence.grammar.field)
        for request_id, error in failed.items():
            events += self._fail([request_id], error)
        for request_id, results_of_beams in searches.items():
            if request_id not in self._not_finite:
                events += self._advance_search(request_id, results_of_beams, now)
        return events + self._fail_not_finite()

    def fail(self, batch: Batch, error: RequestError) -> list[Event]:
        return self._fail(dict.fromkeys(span.sequence.request_id for span in batch.spans), error)

    def fail_all(self, error: RequestError) -> list[Event]:
        return self._fail(list(self.queues.requests), error)

    def observe(self, step: StepStats) -> None:
        self._token_budget.grow()
        self._prefill.observe(step)

    def snapshot(self) -> EngineSnapshot:
        """Return a snapshot of the scheduler. It counts requests, not choices."""
        now = self.queues.snapshot()
        return replace(
            now,
            num_waiting=len(self.queues.requests) - now.num_running,
            stepped_at=self._clock(),
            step_times=self._prefill.step_times,
        )

    # ---- schedule --------------------------------------------------------------------------------------------------

    def _grow_decodes(self) -> None:
        """Reserve memory for each decode's token, preempting the youngest sequences if there is none left."""
        for sequence in list(self.queues.running):
            while sequence.slot is not None and sequence.num_uncomputed == 1 and not self._allocator.grow(sequence):
                self._preempt()

    def _ready(self) -> list[Sequence]:
        """Return the running sequences with one token to compute, within the budget; beams are never split."""
        ready = [sequence for sequence in self.queues.running if sequence.num_uncomputed == 1]
        end = max_tokens = self._token_budget.tokens
        if len(ready) <= max_tokens:
            return ready
        while end > 0 and ready[end].is_beam and ready[end].request_id == ready[end - 1].request_id:
            end -= 1
        return ready[:end] or [one for one in ready if one.request_id == ready[0].request_id]

    def _prefill_tokens(self, prompts: Items[Sequence], num_ready: int) -> int:
        num_computed = prompts[0].num_computed if prompts else 0
        num_prompts = len(prompts) + len(self.queues.waiting)
        decoding = [len(one.token_ids) for one in self.queues.running if one.is_decoding]
        beside = self._prefill.max_prefill_tokens(len(decoding), sum(decoding), num_computed, num_prompts)
        return min(beside, self._token_budget.tokens - num_ready)

    def _free_places(self) -> int:
        return self._limits.max_running_seqs - self.queues.num_occupied() if self.queues.waiting else 0

    def _smaller(self, prompts: list[Sequence], oldest: Sequence, tokens: int) -> Iterator[Sequence]:
        """Yield the prompts that go before the rest of the oldest one, which could fill a step of `tokens` tokens.

        Prompts before it in `prompts` have their share already. A waiting one is admitted when it is taken. None
        overtakes the first that waits unless that one fits too. Only prompts of the same priority overtake.
        """
        queues, later = self.queues, prompts[prompts.index(oldest) + 1 :] if oldest in prompts else []
        others = (one for one in chain(later, queues.waiting) if one.params.priority == oldest.params.priority)
        for sequence in before_long_ones(others, oldest.num_uncomputed, tokens, _num_uncomputed):
            if sequence.slot is None and not (
                self._would_admit()
                and sequence.params.beam_width <= self._free_places()
                and queues.admit(sequence) is not None
            ):
                continue
            yield sequence

    def _would_admit(self) -> bool:
        fits = 0 < self.queues.oldest_width() <= self._free_places()
        return fits and self._allocator.can_admit(self.queues.waiting[0])

    def _read_prefixes(
        self, store: PrefixStore, shares: Items[tuple[Sequence, int]], beside_decodes: bool
    ) -> tuple[Iterator[tuple[Sequence, int]], int]:
        """Read stored prefixes of the sequences that prefill now.

        Returns the tokens that each of them still computes, and the number of cached tokens of prompts whose first step
        was an earlier one.
        """
        store.move(self._allocator.take_copies(), self.pool.take_released(), self.pool.take_state_copies())
        max_seconds = READ_SECONDS_BESIDE_DECODES if beside_decodes else READ_SECONDS_ALONE
        left: list[tuple[Sequence, int]] = []
        cached = 0
        for sequence, tokens in shares:
            before = sequence.num_computed
            end, has_more = store.read(sequence, max_seconds)
            if end > before:
                self._allocator.set_computed(sequence, end)
                if self.pool.checkpoints is not None:
                    self.pool.checkpoints.hits += 1
                if sequence.scheduled_at is not None and sequence.num_admitted == 1:
                    sequence.cached_tokens += end - before
                    cached += end - before
            left.append((sequence, 1 if has_more else min(tokens, sequence.num_uncomputed)))
        return iter(left), cached

    def _record_first_step(self, sequence: Sequence) -> int:
        """Record a sequence's first step; return its prompt's cached tokens, 0 for later steps and further choices."""
        if sequence.scheduled_at is not None:
            return 0
        sequence.scheduled_at = self._clock()
        sequence.cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
        return sequence.cached_tokens if sequence.choice == 0 else 0

    def _preempt(self) -> None:
        self.queues.preempt()
        self._num_preempted += 1

    # ---- update ----------------------------------------------------------------------------------------------------

    def _append(self, span: ScheduledSpan, accepted: Items[SampledTokens], now: float) -> list[Event]:
        sequence = span.sequence
        for one in accepted:
            sequence.append(one.token_ids[0])
        if self.speculation is not None and span.draft_ids:
            self._allocator.trim(sequence)
            self.speculation.observe_acceptance(sequence, len(span.draft_ids), len(accepted) - 1)
        events = token_events(sequence, accepted, now)
        if isinstance(events[-1], SequenceFinished):
            self._end(sequence)
        return events

    def _advance_search(
        self, request_id: str, sampled: list[tuple[Sequence, SampledTokens]], now: float
    ) -> list[Event]:
        group = self.queues.requests[request_id].group
        assert group is not None, "only a beam search has beams"
        if sampled[0][0].slot is None:  # another search has just preempted it
            return []
        assert len(sampled) == len(group.beams), "all beams of a search are computed in the same step"
        chosen = group.select(sampled)
        if chosen:
            self._fork_beams(group, chosen)
            return []
        events: list[Event] = [
            beam_search_finished(group.root, choice, best, now) for choice, best in enumerate(group.best())
        ]
        self._end(group.root)
        return events

    def _fork_beams(self, group: BeamGroup, chosen: list[Continuation]) -> None:
        """Continue each parent with its best continuation, and fork new beams for the others."""
        best = {one.parent: one for one in reversed(chosen)}
        for beam in group.beams:
            if beam not in best:
                self.queues.release_slot(beam)
        group.beams = list(best)
        for one in chosen:
            if best[one.parent] is not one:
                child = one.child()
                while one.parent.slot is not None and not self._allocator.fork(one.parent, child):
                    self._preempt()
                if one.parent.slot is None:  # the search itself was the youngest; it was preempted and starts again
                    return
                self.queues.start(child)
                group.beams.append(child)
        for one in best.values():
            one.extend_parent()

    def _is_finite(self, sequence: Sequence, accepted: Items[SampledTokens]) -> bool:
        """Return False, and note the request, if the logits of its last accepted row are not finite."""
        if not accepted[-1].is_finite:
            self._not_finite[sequence.request_id] = None
        return sequence.request_id not in self._not_finite

    def _fail_not_finite(self) -> list[Event]:
        if not self._not_finite:
            return []
        failed, self._not_finite = [one for one in self._not_finite if one in self.queues.requests], {}
        return self._fail(failed, StepFailed(_NOT_FINITE_MESSAGE))

    # ---- endings ---------------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, keep_tokens: bool = True) -> None:
        self.queues.remove(sequence, keep_tokens)
        if self.speculation is not None:
            self.speculation.forget(sequence)

    def _fail(self, request_ids: Iterable[str], error: RequestError) -> list[Event]:
        events: list[Event] = []
        for request_id in request_ids:
            # None if the failed step had already ended it without an event
            request = self.queues.requests.get(request_id)
            for sequence in request.active[::-1] if request else []:  # the last share what the first one computed
                self._end(sequence, keep_tokens=False)
            events.append(RequestFailed(request_id, error))
        return events


def _can_run_ahead(span: ScheduledSpan) -> bool:
    return span.is_decode and span.num_samples == 1 and not span.sequence.is_beam
