"""Decides who is computed next and how many tokens of each, and what the picked tokens mean for them. Counts only, never a tensor.

The oldest goes first and is preempted last: nobody waits for ever. Slots are `tenants.py`'s, beams `beams.py`'s, words `outcome.py`'s.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from itertools import count

from app.engine.batch import Batch, Picked, Span, by_span, next_span
from app.engine.beams import BeamGroup, Continuation
from app.engine.limits import Limits, longest, refusal
from app.engine.outcome import finished, search_finished, token_events
from app.engine.pace import StepPace
from app.engine.sequence import Sequence, sequence_of
from app.engine.slots import SlotPool
from app.engine.speculation import Speculation
from app.engine.standing import standing
from app.engine.tenants import Tenants
from app.errors import RequestError
from app.measured import Snapshot, StepStats
from app.messages import Abort, Event, Generate, RequestFailed, SequenceFinished


@dataclass(slots=True)
class Request:
    """What is alive of a request. Further choices are held until the prompt is computed once, then they share it; beams are one choice."""

    alive: list[Sequence]
    held: list[Sequence] = field(default_factory=list)
    group: BeamGroup | None = None


class Scheduler:
    """Waiting and running sequences, each list oldest first. `schedule` and `update` alternate; `add` and `abort` come between steps.

    `speculation`: where given, steps that only decode carry guesses where they pay.
    """

    speculation: Speculation | None = None

    def __init__(
        self,
        pool: SlotPool,
        pace: StepPace,
        limits: Limits,
        eos_token_ids: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tenants = Tenants(pool)
        self.pool = pool
        self._pace = pace
        self._limits = limits.within(pool)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._orders = count()
        self._requests: dict[str, Request] = {}
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._num_preempted = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: Generate) -> list[Event]:
        """Queues a request; one that can never be served is refused at once."""
        assert request.request_id not in self._requests, "the service gives each request an id of its own"
        error = refusal(request, self._limits, self.pool)
        if error is not None:
            return [RequestFailed(request.request_id, error)]
        choices = [sequence_of(request, choice, self._eos_token_ids) for choice in range(request.params.n)]
        for sequence in choices:
            sequence.order, sequence.limit = next(self._orders), longest(request, self._limits, self.pool)
        group = BeamGroup(choices[0]) if choices[0].is_beam else None
        self._requests[request.request_id] = Request(choices, choices[1:], group)
        self._waiting.append(choices[0])
        return []

    def abort(self, command: Abort) -> list[Event]:
        """Ends a request, or one choice of it, wherever it stands. What it computed stays cached."""
        request = self._requests.get(command.request_id)
        leaving = [one for one in request.alive if command.choice in (None, one.choice)] if request else []
        events: list[Event] = [finished(sequence, command.reason, self._clock()) for sequence in leaving]
        for sequence in leaving:
            self._end(sequence)
        return events

    def schedule(self) -> Batch | None:
        """The next step's work: every decode, then prefill of running sequences, then new ones, within the budgets; None when idle."""
        self._num_preempted = 0
        self._grow_decodes()
        spans = [next_span(sequence, 1) for sequence in self._running if sequence.num_uncomputed == 1]
        left = self._prefill_budget(len(spans))
        for sequence in self._running:
            if left > 0 and sequence.num_uncomputed > 1:
                spans.append(next_span(sequence, min(sequence.num_uncomputed, left)))
                left -= spans[-1].num_tokens
        admitted = self._admit(left)
        spans += admitted
        if not spans:
            assert not self._waiting, "an idle engine admits the oldest request"
            return None
        spans.sort(key=lambda span: not span.is_decode)
        if self.speculation is not None and all(span.is_decode for span in spans):
            spans = self.speculation.guess(spans, self._limits.max_batch_tokens, self._tenants.grow)
        cached = sum(self._greet(span.sequence) for span in admitted)
        copies = self._tenants.take_copies()
        return Batch(tuple(spans), copies, self.pool.take_released(), cached, self._num_preempted)

    def update(self, batch: Batch, picked: Items[Picked]) -> list[Event]:
        """What the step's result means: one `Picked` for each row that samples, in order."""
        now = self._clock()
        events: list[Event] = []
        searches: dict[str, list[tuple[Sequence, Picked]]] = {}
        for span, stands in by_span(batch, picked):
            sequence = span.sequence
            self._tenants.computed(sequence, span.own_end + max(len(stands) - 1, 0))
            if span.end >= sequence.num_prompt_tokens:
                self._let_in_choices(sequence)
            if not span.samples:
                continue
            sequence.first_token_at = now if sequence.first_token_at is None else sequence.first_token_at
            if sequence.is_beam:
                searches.setdefault(sequence.request_id, []).append((sequence, stands[0]))
            else:
                events += self._append(span, stands, now)
        for request_id, results_of_beams in searches.items():
            events += self._advance_search(request_id, results_of_beams, now)
        return events

    def fail(self, batch: Batch, error: RequestError) -> list[Event]:
        """The step raised: every request of its batch ends with this error, the others go on."""
        return self._fail(dict.fromkeys(span.sequence.request_id for span in batch.spans), error)

    def fail_all(self, error: RequestError) -> list[Event]:
        """Every request ends with this error."""
        return self._fail(list(self._requests), error)

    def observe(self, step: StepStats) -> None:
        """What the step took, for the pace."""
        self._pace.observe(step)
        if self.speculation is not None:
            self.speculation.observe(step)

    def snapshot(self) -> Snapshot:
        """Requests are counted, not choices."""
        now = standing(self._running, self._waiting, self.pool)
        return replace(now, num_waiting=len(self._requests) - now.num_running, stepped_at=self._clock(), tempo=self._pace.tempo)

    # ---- schedule --------------------------------------------------------------------------------------------------

    def _grow_decodes(self) -> None:
        """Room for the token that each decode computes; where there is none the youngest lose theirs."""
        for sequence in list(self._running):
            while sequence.slot is not None and sequence.num_uncomputed == 1 and not self._tenants.grow(sequence):
                self._preempt(self._running[-1])

    def _prefill_budget(self, num_ready: int) -> int:
        """Only where there is a prompt to read: what fits beside the decodes is worked out for nobody else."""
        reading = [one.num_computed for one in self._running if one.num_uncomputed > 1]
        if not (num_prompts := len(reading) + len(self._waiting)):
            return 0
        decoding = [len(one.token_ids) for one in self._running if one.is_decoding]
        beside = self._pace.prefill_budget(len(decoding), sum(decoding), (*reading, 0)[0], num_prompts)
        return min(beside, self._limits.max_batch_tokens - num_ready)

    def _admit(self, left: int) -> list[Span]:
        """First in, first out: where the oldest finds no room nobody overtakes it."""
        spans: list[Span] = []
        places = self._limits.max_running_seqs - self._occupied()
        while left > 0 and self._waiting and self._waiting[0].params.beam_width <= places:
            sequence = self._waiting[0]
            if not self._tenants.admit(sequence):
                break
            insort(self._running, self._waiting.pop(0), key=_age)
            spans.append(next_span(sequence, min(sequence.num_uncomputed, left)))
            left -= spans[-1].num_tokens
            places -= sequence.params.beam_width
        return spans

    def _occupied(self) -> int:
        """Running sequences, with the places that a beam search may still grow into."""
        growing = {one.request_id: one.params.beam_width for one in self._running if one.is_beam}
        return sum(growing.values()) + sum(not one.is_beam for one in self._running)

    def _greet(self, sequence: Sequence) -> int:
        """Notes a sequence's first step; returns how much of a request's prompt was cached (further choices always find it)."""
        if sequence.scheduled_at is not None:
            return 0
        sequence.scheduled_at = self._clock()
        sequence.cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
        return sequence.cached_tokens if sequence.choice == 0 else 0

    def _preempt(self, victim: Sequence) -> None:
        """Takes a sequence's slot, or a whole search's; it waits for its turn with its tokens and computes them again."""
        group = self._requests[victim.request_id].group
        for sequence in list(group.beams) if group else [victim]:
            self._vacate(sequence)
        insort(self._waiting, group.restart() if group else victim, key=_age)
        self._num_preempted += 1

    def _vacate(self, sequence: Sequence, keep_tokens: bool = True) -> None:
        """Out of its slot. What stays cached is what others may ask for: all it computed, of beams the prompt alone."""
        if sequence.slot is None:
            return
        keep = sequence.num_prompt_tokens if sequence.is_beam else len(sequence.token_ids)
        self._running.remove(sequence)
        self._tenants.leave(sequence, keep if keep_tokens else 0)

    # ---- update ----------------------------------------------------------------------------------------------------

    def _let_in_choices(self, sequence: Sequence) -> None:
        """The prompt is computed: the choices that were held for it wait for their turn, and will find it."""
        request = self._requests[sequence.request_id]
        for choice in request.held:
            insort(self._waiting, choice, key=_age)
        request.held.clear()

    def _append(self, span: Span, stands: Items[Picked], now: float) -> list[Event]:
        sequence = span.sequence
        sequence.token_ids += [one.token_ids[0] for one in stands]
        if self.speculation is not None and span.draft_ids:
            self._tenants.trim(sequence)
            self.speculation.learn(sequence, len(span.draft_ids), len(stands) - 1)
        events = token_events(sequence, stands, now)
        if isinstance(events[-1], SequenceFinished):
            self._end(sequence)
        return events

    def _advance_search(self, request_id: str, picked: list[tuple[Sequence, Picked]], now: float) -> list[Event]:
        group = self._requests[request_id].group
        assert group is not None, "only a search has beams"
        if picked[0][0].slot is None:  # another search took its memory a moment ago
            return []
        assert len(picked) == len(group.beams), "all beams of a search are computed in the same step"
        chosen = group.select(picked)
        if chosen:
            self._branch(group, chosen)
            return []
        told = search_finished(group.root, group.best(), now)
        self._end(group.root)
        return [told]

    def _branch(self, group: BeamGroup, chosen: list[Continuation]) -> None:
        """Each parent goes on as its best continuation, the others get slots of their own; parents without one leave first."""
        best = {one.parent: one for one in reversed(chosen)}
        for beam in group.beams:
            if beam not in best:
                self._vacate(beam)
        group.beams = list(best)
        for one in chosen:
            if best[one.parent] is not one:
                child = one.child()
                while one.parent.slot is not None and not self._tenants.fork(one.parent, child):
                    self._preempt(self._running[-1])
                if one.parent.slot is None:  # the search itself was the youngest, and begins again
                    return
                insort(self._running, child, key=_age)
                group.beams.append(child)
        for one in best.values():
            one.grow_parent()

    # ---- endings ---------------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, keep_tokens: bool = True) -> None:
        """A choice is over and forgotten. If the others waited for the prompt that it was computing, the next one takes over."""
        request = self._requests[sequence.request_id]
        for one in list(request.group.beams) if request.group else [sequence]:
            self._vacate(one, keep_tokens)
        if self.speculation is not None:
            self.speculation.forget(sequence)
        request.alive.remove(sequence)
        was_held = sequence in request.held
        if was_held:
            request.held.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        if request.held and not was_held:
            insort(self._waiting, request.held.pop(0), key=_age)
        if not request.alive:
            del self._requests[sequence.request_id]

    def _fail(self, request_ids: Iterable[str], error: RequestError) -> list[Event]:
        events: list[Event] = []
        for request_id in request_ids:
            request = self._requests.get(request_id)  # None where a step that broke had ended it without telling
            for sequence in list(request.alive) if request else []:
                self._end(sequence, keep_tokens=False)
            events.append(RequestFailed(request_id, error))
        return events


def _age(sequence: Sequence) -> int:
    return sequence.order
