"""An engine without tensors, on a runner that remembers (tracking_runner.py).

Whatever the scheduler does, a wrong or missing entry is found in the step that reads it, and every completion must equal the plain loop's.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import count

from app.engine.decoder.engine import DecoderEngine
from app.engine.scheduler.batch import Batch, Sequence
from app.engine.scheduler.kv_allocator import KvSlots, StateCheckpoints
from app.engine.scheduler.policy import PrefillBudget
from app.engine.scheduler.scheduler import EngineLimits, Scheduler
from app.engine.scheduler.speculation import Speculation
from app.messages import (
    Event,
    Generate,
    PromptScored,
    RequestFailed,
    SamplingParams,
    SequenceFinished,
    TokenScore,
    TokensReady,
)
from app.metrics.steps import StepStats
from tracking_runner import (
    EOS,
    VOCABULARY,
    DeviceBroke,
    MemoryWanting,
    RememberingRunner,
    drawn,
    fingerprints,
    log_probabilities,
    score,
)


class Oracle:
    """Guesses what the sampler will draw, each right so often."""

    def __init__(self, sequence: Sequence, dice: random.Random, chance: float) -> None:
        self._seed, self._rng, self._chance = sequence.seed, dice, chance

    def propose(self, token_ids: list[int], most: int) -> tuple[int, ...]:
        tokens = list(token_ids)
        for _ in range(most):
            right = drawn(fingerprints(tokens)[-1], self._seed)
            tokens.append(right if self._rng.random() < self._chance else (right + 1) % VOCABULARY)
        return tuple(tokens[len(token_ids) :])


class FreeRows:
    """Steps that take no longer for more rows, so that every guess pays."""

    def decode(self, rows: int, context_tokens: int = 0) -> float:
        return 1.0


def oracular(chance: float) -> Speculation:
    dice = random.Random(0)
    return Speculation(lambda sequence: Oracle(sequence, dice, chance), FreeRows(), 4)


def experienced_pace(max_batch_tokens: int) -> PrefillBudget:
    """A pace that knows its decode steps, and that prefill is as good as free: it never holds anyone back."""
    pace = PrefillBudget(max_batch_tokens)
    pace.observe(StepStats(seconds=1.0, decode_tokens=1))
    pace.observe(StepStats(seconds=1e-6, prefill_tokens=64))
    return pace


class Simulation:
    """A decoder engine on the fake runner, and everything that its clients were told."""

    def __init__(
        self,
        num_slots: int = 8,
        capacity: int = 1000,
        page: int = 1,
        limits: EngineLimits | None = None,
        pace: PrefillBudget | None = None,
        checkpoints: StateCheckpoints | None = None,
    ) -> None:
        limits = limits or EngineLimits(max_model_len=200, max_running_seqs=4, max_batch_tokens=64)
        self.pool = KvSlots(num_slots, capacity, page, checkpoints=checkpoints)
        self.runner = RememberingRunner(self.pool)
        self.pace = pace or experienced_pace(limits.max_batch_tokens)
        ticks = count()
        self.scheduler = Scheduler(self.pool, self.pace, limits, {EOS}, clock=lambda: float(next(ticks)))
        self.engine = DecoderEngine(self.scheduler, self.runner, clock=lambda: float(next(ticks)))
        self.completions: dict[tuple[str, int], list[int]] = {}
        self.endings: dict[tuple[str, int], SequenceFinished] = {}
        self.failures: dict[str, RequestFailed] = {}
        self.scores: dict[str, list[TokenScore]] = {}
        self.steps_without_the_oldest = 0

    def flying(self, chance: float = 1.0) -> Simulation:
        """Its steps are launched ahead, where that can be, so often."""
        self.runner._chance = chance
        return self

    def with_guesses(self, chance: float) -> Simulation:
        """Each of its guesses is right so often."""
        self.scheduler.speculation = oracular(chance)
        return self

    def add(self, request_id: str, token_ids: Iterable[int], cache_salt: str | None = None, **params: object) -> None:
        chosen = SamplingParams(**params)  # type: ignore[arg-type]
        request = Generate(request_id, tuple(token_ids), chosen, arrived_at=0.0, cache_salt=cache_salt)
        self.hear(self.engine.add(request))

    def step(self) -> Batch | None:
        """One step; the batch that was computed, or that broke."""
        launched, waited = len(self.runner.batches), len(self.runner.wait_measured)
        # A choice that was held for its prompt may be older than what runs, and waits for a place like any other.
        queue = self.scheduler.queues.running or self.scheduler.queues.waiting
        oldest = queue[0].arrival_order if queue else None
        try:
            events = self.engine.step()
        except (DeviceBroke, MemoryWanting):
            events = self.engine.fail()
        self.hear(events)
        check_pool(self.pool, self.scheduler)
        check_flight(self.engine)
        if len(self.runner.batches) == launched and len(self.runner.wait_measured) == waited:
            assert oldest is None, "there was work and nothing was done"
            return None
        batch = self.runner.wait_measured[-1] if len(self.runner.wait_measured) > waited else self.runner.batches[-1]
        has_oldest = any(span.sequence.arrival_order == oldest for span in batch.spans)
        is_small = (
            self.scheduler._token_budget.tokens < self.scheduler._limits.max_batch_tokens
        )  # then decodes go first for longer
        self.steps_without_the_oldest = 0 if has_oldest or is_small else self.steps_without_the_oldest + 1
        assert self.steps_without_the_oldest < 3, (
            "the oldest is passed over, for longer than the pace takes to be measured"
        )
        return batch

    def finish(self, max_steps: int = 5000) -> None:
        """Steps until there is nothing left to do."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("somebody waits for ever")

    def hear(self, events: list[Event]) -> None:
        """Keeps what clients were told; nothing may come after the end."""
        for event in events:
            assert event.request_id not in self.failures, "something was told after the failure"
            if isinstance(event, RequestFailed):
                self.failures[event.request_id] = event
                continue
            if isinstance(event, PromptScored):
                assert all(name != event.request_id for name, _ in self.completions), "scores come before tokens"
                self.scores.setdefault(event.request_id, []).extend(event.scores)
                continue
            key = (event.request_id, event.choice)
            assert key not in self.endings, "something was told after the end"
            if isinstance(event, TokensReady):
                self.completions.setdefault(key, []).extend(event.token_ids)
            else:
                self.endings[key] = event


def check_flight(engine: DecoderEngine) -> None:
    """What must be true of a step that is under way between any two: somebody lives of it, where he was and one position further."""
    if engine._launched_ahead is None:
        return
    spans = engine._launched_ahead.batch.active().spans
    assert spans and engine._launched_ahead.batch.ahead
    for span in spans:
        sequence = span.sequence
        assert sequence in engine.scheduler.queues.running
        assert (span.slot, span.prefix_slot, span.prefix_tokens) == (
            sequence.slot,
            sequence.prefix_slot,
            sequence.prefix_tokens,
        )
        assert span.end == len(sequence.token_ids) == sequence.num_computed + 1


def check_pool(pool: KvSlots, scheduler: Scheduler) -> None:
    """What must be true of the slots between any two steps."""
    running = [slot for slot in pool.slots if slot.running]
    owners = {sequence.slot: sequence for sequence in scheduler.queues.running}
    assert len(owners) == len(scheduler.queues.running), "two running sequences own one slot"
    assert {slot.index for slot in running} == set(owners)
    sizes = 0
    for slot in pool.slots:
        sizes += pool._pages(slot.prefix_tokens, slot.reserved)
        assert slot.num_tokens <= len(slot.token_ids)
        assert slot.num_tokens <= max(slot.reserved, slot.prefix_tokens)
        if slot.running:
            owner = owners[slot.index]
            assert slot.token_ids is owner.token_ids
            assert slot.scope == owner.prefix_scope
            assert slot.reserved <= len(slot.token_ids), "room is kept for guesses that were wrong"
            assert (owner.num_computed, owner.prefix_slot, owner.prefix_tokens) == (
                slot.num_tokens,
                slot.prefix_slot,
                slot.prefix_tokens,
            )
        for leaner in slot.sharers:
            assert pool.slots[leaner].prefix_slot == slot.index
            assert slot.prefix_slot is None, "what is leaned on leans on none"
            assert pool.slots[leaner].prefix_tokens <= slot.num_tokens, "others lean on what is not there"
        if slot.prefix_slot is not None:
            assert slot.index in pool.slots[slot.prefix_slot].sharers
            assert slot.scope == pool.slots[slot.prefix_slot].scope, "somebody leans on what belongs to another"
    if pool.checkpoints is not None:
        rows = [row for slot in pool.slots for row in slot.checkpoints.values()]
        assert len(rows) == len(set(rows)) == pool.checkpoints.num_used <= pool.checkpoints.num_rows
        assert all(position <= slot.num_tokens for slot in pool.slots for position in slot.checkpoints)
    assert sizes == pool.used_tokens <= pool.capacity_tokens
    assert pool.in_use_tokens() <= pool.used_tokens


def plain_completion(token_ids: Iterable[int], seed: int, limit: int, eos: int | None = EOS) -> list[int]:
    """The loop without any batching: what one choice must say, its stop token not among it."""
    tokens = list(token_ids)
    num_prompt = len(tokens)
    while len(tokens) < limit:
        token = drawn(fingerprints(tokens)[-1], seed)
        if token == eos:
            break
        tokens.append(token)
    return tokens[num_prompt:]


def plain_scores(token_ids: Iterable[int], num_top: int) -> list[TokenScore]:
    """The scores of a prompt, all at once."""
    tokens = list(token_ids)
    marks = fingerprints(tokens)
    return [score(mark, token_id, num_top) for mark, token_id in zip(marks, tokens[1:], strict=False)]


def plain_beam_search(token_ids: Iterable[int], width: int, limit: int, eos: int | None = EOS) -> list[int]:
    """The best beam."""
    return plain_beams(token_ids, width, limit, eos)[0]


def plain_beams(
    token_ids: Iterable[int], width: int, limit: int, eos: int | None = EOS, penalty: float = 1.0
) -> list[list[int]]:
    """Beam search as it is taught: no slots, no steps, all continuations looked at; scores are mean log-probabilities."""

    def worth(beam: tuple[float, list[int]]) -> float:
        return -beam[0] / len(beam[1]) ** penalty

    prompt = list(token_ids)
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    while beams:
        grown = []
        for total, tokens in beams:
            logprobs = log_probabilities(fingerprints(prompt + tokens)[-1])
            grown += [(total + logprob, [*tokens, token]) for token, logprob in enumerate(logprobs)]
        beams = []
        for place, (total, tokens) in enumerate(sorted(grown, key=lambda beam: -beam[0])):
            if tokens[-1] == eos or len(prompt) + len(tokens) >= limit:
                ended += [(total, tokens)] if place < width else []
            elif len(beams) < width:
                beams.append((total, tokens))
        ended = sorted(ended, key=worth)[:width]
        if len(ended) == width and beams and worth(beams[0]) >= worth(ended[-1]):
            break
    return [tokens[:-1] if tokens[-1] == eos else tokens for _, tokens in ended]
