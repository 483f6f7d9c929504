"""Decides who is computed next and how many tokens of each, and what the picked tokens mean for them. Counts only, never a tensor.

The oldest goes first and is preempted last: nobody waits for ever. Who waits and runs is kept in `roster.py`, slots are `tenants.py`'s,
beams `beams.py`'s, words `outcome.py`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import count

from app.engine.allowance import Allowance
from app.engine.batch import Batch, Picked, Span, by_span, next_span
from app.engine.beams import BeamGroup, Continuation
from app.engine.limits import Limits, longest, refusal
from app.engine.outcome import finished, search_finished, token_events
from app.engine.pace import StepPace
from app.engine.roster import Roster
from app.engine.sequence import Sequence, sequence_of
from app.engine.slots import SlotPool
from app.engine.speculation import Speculation
from app.engine.standing import standing
from app.engine.tenants import Tenants
from app.errors import RequestError
from app.measured import Snapshot, StepStats
from app.messages import Abort, Event, Generate, RequestFailed, SequenceFinished


class Scheduler:
    """`schedule` and `update` alternate; `add` and `abort` come between steps. `follow` may come between a step and its `update`.

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
        self._allowance = Allowance(self._limits.max_batch_tokens)
        self._orders = count()
        self.roster = Roster(self._tenants)
        self._num_preempted = 0

    @property
    def has_work(self) -> bool:
        return bool(self.roster.requests)

    def add(self, request: Generate) -> list[Event]:
        """Queues a request; one that can never be served is refused at once."""
        assert request.request_id not in self.roster.requests, "the service gives each request an id of its own"
        error = refusal(request, self._limits, self.pool)
        if error is not None:
            return [RequestFailed(request.request_id, error)]
        choices = [sequence_of(request, choice, self._eos_token_ids) for choice in range(request.params.n)]
        for sequence in choices:
            sequence.order, sequence.limit = next(self._orders), longest(request, self._limits, self.pool)
        self.roster.add(choices)
        return []

    def abort(self, command: Abort) -> list[Event]:
        """Ends a request, or one choice of it, wherever it stands. What it computed stays cached."""
        request = self.roster.requests.get(command.request_id)
        leaving = [one for one in request.alive if command.choice in (None, one.choice)] if request else []
        events: list[Event] = [finished(sequence, command.reason, self._clock()) for sequence in leaving]
        for sequence in leaving:
            self._end(sequence)
        return events

    def schedule(self) -> Batch | None:
        """The next step's work: every decode, then prefill of running sequences, then new ones, within the budgets; None when idle."""
        self._num_preempted = 0
        self._grow_decodes()
        spans = [next_span(sequence, 1) for sequence in self._ready()]
        left = self._prefill_budget(len(spans))
        for sequence in self.roster.running:
            if left > 0 and sequence.num_uncomputed > 1:
                spans.append(next_span(sequence, min(sequence.num_uncomputed, left)))
                left -= spans[-1].num_tokens
        admitted = self._admit(left)
        spans += admitted
        if not spans:
            assert not self.roster.waiting, "an idle engine admits the oldest request"
            return None
        spans.sort(key=lambda span: not span.is_decode)
        if self.speculation is not None and all(span.is_decode for span in spans):
            spans = self.speculation.guess(spans, self._allowance.tokens, self._tenants.grow)
        cached = sum(self._greet(span.sequence) for span in admitted)
        copies = self._tenants.take_copies()
        return Batch(tuple(spans), copies, self.pool.take_released(), cached, self._num_preempted)

    def follow(self, batch: Batch) -> Batch | None:
        """The step after `batch`, which is under way: the same sequences one position further, but for those that it brings to their limit.

        `batch` comes without void rows. None where a step has anything else to do then than to decode them. Who ends in `batch` for
        another reason has a void row here.
        """
        spans = batch.spans
        if (
            not (batch.ahead or all(map(_could_follow, spans)))
            or len(spans) < len(self.roster.running)
            or self.speculation is not None
        ):
            return None
        lasting = [span for span in spans if span.start + 2 < span.sequence.limit]
        if self.roster.waiting and (len(lasting) < len(spans) or self._could_admit()):
            return None
        if not lasting or not all(self.pool.reserve(span.slot, span.start + 2) for span in lasting):
            return None
        return Batch(tuple([span.one_further() for span in lasting]), (), self.pool.take_released(), ahead=True)

    def shrink(self, batch: Batch) -> bool:
        """This step wanted more memory than there is, and is given up: the next ones are smaller. False where it could not be smaller."""
        for span in batch.spans:
            self._tenants.trim(span.sequence)
        return self._allowance.shrink(batch)

    def update(self, batch: Batch, picked: Items[Picked]) -> list[Event]:
        """What the step's result means: one `Picked` for each row that samples, in order."""
        now = self._clock()
        events: list[Event] = []
        searches: dict[str, list[tuple[Sequence, Picked]]] = {}
        for span, stands in by_span(batch, picked):
            sequence = span.sequence
            self._tenants.computed(sequence, span.own_end + len(stands) - 1 if span.draft_ids else span.end)
            if span.start < sequence.num_prompt_tokens <= span.end:
                self.roster.let_in_choices(sequence)
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
        return self._fail(list(self.roster.requests), error)

    def observe(self, step: StepStats) -> None:
        """A step was computed, and what it took."""
        self._allowance.grow()
        self._pace.observe(step)
        if self.speculation is not None:
            self.speculation.observe(step)

    def snapshot(self) -> Snapshot:
        """Requests are counted, not choices."""
        now = standing(self.roster.running, self.roster.waiting, self.pool)
        return replace(
            now, num_waiting=len(self.roster.requests) - now.num_running, stepped_at=self._clock(), tempo=self._pace.tempo
        )

    # ---- schedule --------------------------------------------------------------------------------------------------

    def _grow_decodes(self) -> None:
        """Room for the token that each decode computes; where there is none the youngest lose theirs."""
        for sequence in list(self.roster.running):
            while sequence.slot is not None and sequence.num_uncomputed == 1 and not self._tenants.grow(sequence):
                self._preempt()

    def _ready(self) -> list[Sequence]:
        """Running sequences that want one token computed, as many as a step may have; beams of a search are never parted."""
        ready = [sequence for sequence in self.roster.running if sequence.num_uncomputed == 1]
        end = most = self._allowance.tokens
        if len(ready) <= most:
            return ready
        while end > 0 and ready[end].is_beam and ready[end].request_id == ready[end - 1].request_id:
            end -= 1
        return ready[:end] or [one for one in ready if one.request_id == ready[0].request_id]

    def _prefill_budget(self, num_ready: int) -> int:
        """Only where there is a prompt to read: what fits beside the decodes is worked out for nobody else."""
        reading = [one.num_computed for one in self.roster.running if one.num_uncomputed > 1]
        if not (num_prompts := len(reading) + len(self.roster.waiting)):
            return 0
        decoding = [len(one.token_ids) for one in self.roster.running if one.is_decoding]
        beside = self._pace.prefill_budget(len(decoding), sum(decoding), (*reading, 0)[0], num_prompts)
        return min(beside, self._allowance.tokens - num_ready)

    def _admit(self, left: int) -> list[Span]:
        """First in, first out: where the oldest finds no room nobody overtakes it."""
        spans: list[Span] = []
        places = self._places()
        while left > 0 and self._fits_in(places) and (sequence := self.roster.admit()) is not None:
            spans.append(next_span(sequence, min(sequence.num_uncomputed, left)))
            left -= spans[-1].num_tokens
            places -= sequence.params.beam_width
        return spans

    def _places(self) -> int:
        return self._limits.max_running_seqs - self.roster.occupied() if self.roster.waiting else 0

    def _fits_in(self, places: int) -> bool:
        """Whether the oldest of those who wait is content with so many places."""
        return bool(self.roster.waiting) and self.roster.waiting[0].params.beam_width <= places

    def _could_admit(self) -> bool:
        """Whether the next step would, as far as is known now."""
        return self._fits_in(self._places()) and self._tenants.has_room(self.roster.waiting[0])

    def _greet(self, sequence: Sequence) -> int:
        """Notes a sequence's first step; returns how much of a request's prompt was cached (further choices always find it)."""
        if sequence.scheduled_at is not None:
            return 0
        sequence.scheduled_at = self._clock()
        sequence.cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
        return sequence.cached_tokens if sequence.choice == 0 else 0

    def _preempt(self) -> None:
        self.roster.preempt()
        self._num_preempted += 1

    # ---- update ----------------------------------------------------------------------------------------------------

    def _append(self, span: Span, stands: Items[Picked], now: float) -> list[Event]:
        sequence = span.sequence
        for one in stands:
            sequence.token_ids.append(one.token_ids[0])
        if self.speculation is not None and span.draft_ids:
            self._tenants.trim(sequence)
            self.speculation.learn(sequence, len(span.draft_ids), len(stands) - 1)
        events = token_events(sequence, stands, now)
        if isinstance(events[-1], SequenceFinished):
            self._end(sequence)
        return events

    def _advance_search(self, request_id: str, picked: list[tuple[Sequence, Picked]], now: float) -> list[Event]:
        group = self.roster.requests[request_id].group
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
                self.roster.vacate(beam)
        group.beams = list(best)
        for one in chosen:
            if best[one.parent] is not one:
                child = one.child()
                while one.parent.slot is not None and not self._tenants.fork(one.parent, child):
                    self._preempt()
                if one.parent.slot is None:  # the search itself was the youngest, and begins again
                    return
                self.roster.run(child)
                group.beams.append(child)
        for one in best.values():
            one.grow_parent()

    # ---- endings ---------------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, keep_tokens: bool = True) -> None:
        self.roster.end(sequence, keep_tokens)
        if self.speculation is not None:
            self.speculation.forget(sequence)

    def _fail(self, request_ids: Iterable[str], error: RequestError) -> list[Event]:
        events: list[Event] = []
        for request_id in request_ids:
            request = self.roster.requests.get(request_id)  # None where a step that broke had ended it without telling
            for sequence in list(request.alive) if request else []:
                self._end(sequence, keep_tokens=False)
            events.append(RequestFailed(request_id, error))
        return events


def _could_follow(span: Span) -> bool:
    return span.is_decode and span.num_picks == 1 and not span.sequence.is_beam
