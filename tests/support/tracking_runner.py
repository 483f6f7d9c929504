"""A runner without tensors: KV memory is a dictionary of the tokens behind each entry, and the model is a hash.

A wrong or missing entry is found in the step that reads it. Steps may be launched ahead; then the sampled tokens are
known only after waiting.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from app.engine.scheduler.batch import (
    NOT_SAMPLED,
    Batch,
    InFlightStep,
    SampledTokens,
    ScheduledSpan,
    Sequence,
    accepted_by_span,
)
from app.engine.scheduler.kv_allocator import KvSlots
from app.messages import TokenScore

VOCABULARY = 7
EOS = 0


class DeviceBroke(Exception):
    """What the fake runner raises when told to."""


class MemoryWanting(RuntimeError):
    """What it raises where a step is too large for the memory that it was told to have."""


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


def candidates(fingerprint: int, number: int) -> SampledTokens:
    """The sampler of a beam."""
    best = sorted(enumerate(log_probabilities(fingerprint)), key=lambda pair: -pair[1])[:number]
    return SampledTokens(tuple(token for token, _ in best), tuple(logprob for _, logprob in best))


def score(fingerprint: int, token_id: int, num_top: int) -> TokenScore:
    """The score of a token of a prompt after the tokens of the fingerprint."""
    logprobs = log_probabilities(fingerprint)
    rank = sum(other > logprobs[token_id] for other in logprobs) + 1
    best = sorted(enumerate(logprobs), key=lambda pair: -pair[1])[:num_top]
    return TokenScore(token_id, logprobs[token_id], rank, tuple(best))


@dataclass(frozen=True, slots=True)
class Flown:
    batch: Batch
    samples: list[SampledTokens]
    scores: list[tuple[TokenScore, ...]]


class RememberingRunner:
    """Carries out batches on the dictionary and holds them against what they must be.

    `broken` makes it raise, as a step is launched or (`broken_late`) waited for; a step of more than `most_tokens` wants too much memory,
    as it is launched or (`wants_late`) waited for. `chance`: of a step being one that another may follow. The logits of the requests in
    `not_finite` are not finite.
    """

    model_seconds = 0.0
    is_first = False
    is_native = False

    def __init__(self, pool: KvSlots, chance: float = 0.0) -> None:
        self.pool = pool
        self.memory: dict[tuple[int, int], int] = {}
        self.states: dict[int, int] = {}
        self.broken = self.broken_late = False
        self.most_tokens: int | None = None
        self.wants_late = False
        self.not_finite: set[str] = set()
        self.computed_tokens = 0
        self.batches: list[Batch] = []  # as they are launched
        self.wait_measured: list[Batch] = []
        self.prompt_scores: list[tuple[TokenScore, ...]] = []
        self._chance, self._rng = chance, random.Random(0)

    def run(self, batch: Batch) -> list[SampledTokens]:
        return self.wait(self.launch(batch))

    def launch(self, batch: Batch, after: InFlightStep | None = None) -> InFlightStep:
        assert batch.ahead == (after is not None)
        self.batches.append(batch)
        self._carry(batch)
        if self.broken:
            raise DeviceBroke
        if not self.wants_late:
            self._want(batch)
        marks = {id(span): fingerprints([*tokens_of(span, after), *span.draft_ids]) for span in batch.spans}
        self._write(batch, marks)
        for span in batch.spans:
            self._read(span, marks[id(span)])
        self._count_pages()
        picked = [
            self._pick(span.sequence, marks[id(span)][position])
            for span in batch.spans
            for position in range(span.end - span.num_samples, span.end)
        ]
        if self.pool.checkpoints is not None:
            for span, accepted in accepted_by_span(batch, picked):
                self._advance(span, marks[id(span)], len(span.draft_ids) + 1 - len(accepted) if accepted else 0)
        scores = [
            ()
            if one.span.sequence.request_id in self.not_finite
            else tuple(
                score(marks[id(one.span)][position], token_id, one.num_top)
                for position, token_id in zip(range(one.start, one.end), one.target_ids, strict=True)
            )
            for one in batch.scored
        ]
        return Flown(batch, picked, scores)

    def wait(self, flight: InFlightStep) -> list[SampledTokens]:
        assert isinstance(flight, Flown)
        if self.broken_late:
            raise DeviceBroke
        if self.wants_late:
            self._want(flight.batch)
        self.wait_measured.append(flight.batch)
        self.prompt_scores = flight.scores
        return flight.samples

    def can_run_ahead(self, batch: Batch) -> bool:
        return self._rng.random() < self._chance

    def survives(self, error: Exception) -> bool:
        return isinstance(error, MemoryWanting)

    def _want(self, batch: Batch) -> None:
        if self.most_tokens is not None and batch.num_tokens > self.most_tokens:
            raise MemoryWanting

    def _carry(self, batch: Batch) -> None:
        for copy in batch.copies:
            assert copy.source != copy.target and copy.start < copy.end
            for position in range(copy.start, copy.end):
                self.memory[copy.target, position] = self.memory[copy.source, position]
        for source, target, _ in batch.state_copies:
            self.states[target] = self.states[source]
        for slot, start, end in batch.released:
            for position in range(start, end):
                self.memory.pop((slot, position), None)

    def _write(self, batch: Batch, marks: dict[int, list[int]]) -> None:
        written = set()
        for span in batch.spans:
            assert span.prefix_tokens <= span.start, "a shared prefix is never written"
            for position in range(span.start, span.end):
                assert (span.slot, position) not in written, "two sequences write to one place"
                written.add((span.slot, position))
                self.memory[span.slot, position] = marks[id(span)][position]
        self.computed_tokens += batch.num_tokens

    def _read(self, span: ScheduledSpan, marks: list[int]) -> None:
        for position in range(span.end):
            slot = span.prefix_slot if position < span.prefix_tokens else span.slot
            assert slot is not None
            assert self.memory.get((slot, position)) == marks[position], (
                f"slot {slot} holds something else at {position}"
            )

    def _advance(self, span: ScheduledSpan, marks: list[int], rejected: int) -> None:
        """The state of a recurrent model stands for all tokens so far but rejected ones, and changes in place."""
        if span.start:
            assert self.states[span.slot] == marks[span.start - 1], f"slot {span.slot} has another state"
        self.states[span.slot] = marks[span.end - rejected - 1]
        for position, row in span.saves:
            assert span.start < position <= span.end and not span.draft_ids
            self.states[row] = marks[position - 1]

    def _count_pages(self) -> None:
        page = self.pool.tokens_per_page
        pages = {(slot, position // page) for slot, position in self.memory}
        assert len(pages) * page <= self.pool.capacity_tokens, "more memory is touched than there is"

    def _pick(self, sequence: Sequence, mark: int) -> SampledTokens:
        if sequence.request_id in self.not_finite:
            return NOT_SAMPLED
        return (
            candidates(mark, sequence.num_candidates)
            if sequence.is_beam
            else SampledTokens((drawn(mark, sequence.seed),))
        )


def tokens_of(span: ScheduledSpan, after: InFlightStep | None) -> list[int]:
    """Its own tokens up to where guesses begin: the last one is what the flight before it picks, where that is not told yet."""
    if after is None:
        assert span.known_end <= len(span.sequence.token_ids)
        return span.sequence.token_ids[: span.known_end]
    assert isinstance(after, Flown) and not span.draft_ids
    assert span.num_tokens == 1 and span.start == len(span.sequence.token_ids), "one token, which nobody knows"
    (row,) = [row for row, before in enumerate(after.batch.spans) if before.sequence is span.sequence]
    before = after.batch.spans[row]
    assert (before.end, before.slot, before.prefix_slot) == (span.start, span.slot, span.prefix_slot)
    return [*span.sequence.token_ids, after.samples[row].token_ids[0]]
