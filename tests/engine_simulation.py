"""An engine without tensors: KV memory is a dictionary that remembers of which tokens each entry was computed, the model is a hash.

Whatever the scheduler does, a wrong or missing entry is found in the step that reads it, and every completion must equal the plain loop's.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from itertools import count

from app.engine.batch import Batch, Picked, Span
from app.engine.decoder import DecoderEngine
from app.engine.limits import Limits
from app.engine.pace import StepPace
from app.engine.scheduler import Scheduler
from app.engine.sequence import Sequence
from app.engine.slots import SlotPool
from app.engine.speculation import Speculation
from app.measured import StepStats
from app.messages import Event, Generate, RequestFailed, SamplingParams, SequenceFinished, TokensReady
from at_once import AtOnce

VOCABULARY = 7
EOS = 0


class DeviceBroke(Exception):
    """What the fake runner raises when told to."""


def fingerprints(token_ids: Iterable[int]) -> list[int]:
    """Per position one number that stands for all tokens up to it: what its keys and values depend on."""
    found, last = [], 17
    for token_id in token_ids:
        last = hash((last, token_id))
        found.append(last)
    return found


def log_probabilities(fingerprint: int) -> list[float]:
    """The model: one distribution per context."""
    logits = [(hash((fingerprint, token)) % 1000) / 250 for token in range(VOCABULARY)]
    total = math.log(sum(math.exp(logit) for logit in logits))
    return [logit - total for logit in logits]


def drawn(fingerprint: int, seed: int) -> int:
    """The sampler of a plain choice: depends on seed and context alone; one in `VOCABULARY` ends it."""
    return hash((fingerprint, seed)) % VOCABULARY


def candidates(fingerprint: int, number: int) -> Picked:
    """The sampler of a beam."""
    best = sorted(enumerate(log_probabilities(fingerprint)), key=lambda pair: -pair[1])[:number]
    return Picked(tuple(token for token, _ in best), tuple(logprob for _, logprob in best))


class RememberingRunner:
    """Carries out batches on the dictionary and holds them against what they must be. `broken` makes it raise."""

    model_seconds = 0.0

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self.memory: dict[tuple[int, int], int] = {}
        self.broken = False
        self.computed_tokens = 0
        self.batches: list[Batch] = []

    def run(self, batch: Batch) -> list[Picked]:
        self.batches.append(batch)
        for copy in batch.copies:
            assert copy.source != copy.target and copy.start < copy.end
            for position in range(copy.start, copy.end):
                self.memory[copy.target, position] = self.memory[copy.source, position]
        for slot, start, end in batch.released:
            for position in range(start, end):
                self.memory.pop((slot, position), None)
        if self.broken:
            raise DeviceBroke
        marks = {id(span): fingerprints([*span.sequence.token_ids[: span.own_end], *span.draft_ids]) for span in batch.spans}
        self._write(batch, marks)
        for span in batch.spans:
            self._read(span, marks[id(span)])
        self._count_pages()
        return [
            self._pick(span.sequence, marks[id(span)][position])
            for span in batch.spans
            for position in range(span.end - span.num_picks, span.end)
        ]

    def _write(self, batch: Batch, marks: dict[int, list[int]]) -> None:
        written = set()
        for span in batch.spans:
            assert span.prefix_tokens <= span.start, "a shared prefix is never written"
            for position in range(span.start, span.end):
                assert (span.slot, position) not in written, "two sequences write to one place"
                written.add((span.slot, position))
                self.memory[span.slot, position] = marks[id(span)][position]
        self.computed_tokens += batch.num_tokens

    def _read(self, span: Span, marks: list[int]) -> None:
        for position in range(span.end):
            slot = span.prefix_slot if position < span.prefix_tokens else span.slot
            assert slot is not None
            assert self.memory.get((slot, position)) == marks[position], f"slot {slot} holds something else at {position}"

    def _count_pages(self) -> None:
        page = self.pool.tokens_per_page
        pages = {(slot, position // page) for slot, position in self.memory}
        assert len(pages) * page <= self.pool.capacity_tokens, "more memory is touched than there is"

    def _pick(self, sequence: Sequence, mark: int) -> Picked:
        return candidates(mark, sequence.num_candidates) if sequence.is_beam else Picked((drawn(mark, sequence.seed),))


class Oracle:
    """Guesses what the sampler will draw, each right so often."""

    def __init__(self, sequence: Sequence, dice: random.Random, chance: float) -> None:
        self._seed, self._dice, self._chance = sequence.seed, dice, chance

    def propose(self, token_ids: list[int], most: int) -> tuple[int, ...]:
        tokens = list(token_ids)
        for _ in range(most):
            right = drawn(fingerprints(tokens)[-1], self._seed)
            tokens.append(right if self._dice.random() < self._chance else (right + 1) % VOCABULARY)
        return tuple(tokens[len(token_ids) :])


class FreeRows:
    """Steps that take no longer for more rows, so that every guess pays."""

    def decode(self, rows: int, context_tokens: int = 0) -> float:
        return 1.0

    def observe(self, step: StepStats) -> None:
        pass


def oracular(chance: float) -> Speculation:
    dice = random.Random(0)
    return Speculation(lambda sequence: Oracle(sequence, dice, chance), FreeRows(), 4)


def experienced_pace(max_batch_tokens: int) -> StepPace:
    """A pace that knows its decode steps, and that prefill is as good as free: it never holds anyone back."""
    pace = StepPace(max_batch_tokens)
    pace.observe(StepStats(seconds=1.0, decode_tokens=1))
    pace.observe(StepStats(seconds=1e-6, prefill_tokens=64))
    return pace


class Simulation:
    """A decoder engine on the fake runner, and everything that its clients were told."""

    def __init__(
        self, num_slots: int = 8, capacity: int = 1000, page: int = 1, limits: Limits | None = None, pace: StepPace | None = None
    ) -> None:
        limits = limits or Limits(max_model_len=200, max_running_seqs=4, max_batch_tokens=64)
        self.pool = SlotPool(num_slots, capacity, page)
        self.runner = RememberingRunner(self.pool)
        self.pace = pace or experienced_pace(limits.max_batch_tokens)
        ticks = count()
        self.scheduler = Scheduler(self.pool, self.pace, limits, {EOS}, clock=lambda: float(next(ticks)))
        self.engine = DecoderEngine(self.scheduler, AtOnce(self.runner), clock=lambda: float(next(ticks)))
        self.completions: dict[tuple[str, int], list[int]] = {}
        self.endings: dict[tuple[str, int], SequenceFinished] = {}
        self.failures: dict[str, RequestFailed] = {}
        self.steps_without_the_oldest = 0

    def with_guesses(self, chance: float) -> Simulation:
        """Each of its guesses is right so often."""
        self.scheduler.speculation = oracular(chance)
        return self

    def add(self, request_id: str, token_ids: Iterable[int], **params: object) -> None:
        request = Generate(request_id, tuple(token_ids), SamplingParams(**params), arrived_at=0.0)  # type: ignore[arg-type]
        self.hear(self.engine.add(request))

    def step(self) -> Batch | None:
        """One step; the batch that was computed."""
        before = len(self.runner.batches)
        # A choice that was held for its prompt may be older than what runs, and waits for a place like any other.
        queue = self.scheduler.roster.running or self.scheduler.roster.waiting
        oldest = queue[0].order if queue else None
        try:
            events = self.engine.step()
        except DeviceBroke:
            events = self.engine.fail()
        self.hear(events)
        check_pool(self.pool, self.scheduler)
        if len(self.runner.batches) == before:
            assert oldest is None, "there was work and nothing was done"
            return None
        batch = self.runner.batches[-1]
        has_oldest = any(span.sequence.order == oldest for span in batch.spans)
        self.steps_without_the_oldest = 0 if has_oldest else self.steps_without_the_oldest + 1
        assert self.steps_without_the_oldest < 3, "the oldest is passed over, for longer than the pace takes to be measured"
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
            key = (event.request_id, event.choice)
            assert key not in self.endings, "something was told after the end"
            if isinstance(event, TokensReady):
                self.completions.setdefault(key, []).extend(event.token_ids)
            else:
                self.endings[key] = event


def check_pool(pool: SlotPool, scheduler: Scheduler) -> None:
    """What must be true of the slots between any two steps."""
    running = [slot for slot in pool.slots if slot.running]
    owners = {sequence.slot: sequence for sequence in scheduler.roster.running}
    assert len(owners) == len(scheduler.roster.running), "two running sequences own one slot"
    assert {slot.index for slot in running} == set(owners)
    sizes = 0
    for slot in pool.slots:
        sizes += pool._pages(slot.prefix_tokens, slot.reserved)
        assert slot.num_tokens <= len(slot.token_ids)
        assert slot.num_tokens <= max(slot.reserved, slot.prefix_tokens)
        if slot.running:
            owner = owners[slot.index]
            assert slot.token_ids is owner.token_ids
            assert slot.reserved <= len(slot.token_ids), "room is kept for guesses that were wrong"
            assert (owner.num_computed, owner.prefix_slot, owner.prefix_tokens) == (
                slot.num_tokens,
                slot.prefix_slot,
                slot.prefix_tokens,
            )
        for leaner in slot.leaners:
            assert pool.slots[leaner].prefix_slot == slot.index
            assert slot.prefix_slot is None, "what is leaned on leans on none"
            assert pool.slots[leaner].prefix_tokens <= slot.num_tokens, "others lean on what is not there"
        if slot.prefix_slot is not None:
            assert slot.index in pool.slots[slot.prefix_slot].leaners
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


def plain_beam_search(token_ids: Iterable[int], width: int, limit: int, eos: int | None = EOS) -> list[int]:
    """Beam search as it is taught: no slots, no steps, all continuations looked at; scores are mean log-probabilities."""
    prompt = list(token_ids)
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    while beams:
        grown = []
        for total, tokens in beams:
            logprobs = log_probabilities(fingerprints(prompt + tokens)[-1])
            grown += [(total + logprob, [*tokens, token]) for token, logprob in enumerate(logprobs)]
        beams = []
        for total, tokens in sorted(grown, key=lambda beam: -beam[0]):
            if len(beams) == width:
                break
            (ended if tokens[-1] == eos else beams).append((total, tokens))
        if beams and len(prompt) + len(beams[0][1]) >= limit:
            ended += beams
            beams = []
        ended = sorted(ended, key=lambda beam: -beam[0] / len(beam[1]))[:width]
        if len(ended) == width and beams and beams[0][0] / len(beams[0][1]) <= ended[-1][0] / len(ended[-1][1]):
            break
    best = ended[0][1]
    return best[:-1] if best[-1] == eos else best
