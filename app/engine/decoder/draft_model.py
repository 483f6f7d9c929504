"""A draft model: a second, smaller decoder that proposes the next tokens, which the served model verifies.

It has its own KV memory, one slot for each sequence that it drafts for, and its own recorded steps. It drafts greedily,
for all sequences of a step together. Nothing is computed for a sequence before it is drafted for: the draft model then
computes the sequence's tokens in chunks, a chunk beside each step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from app.engine.decoder.kv_cache import KvCache
from app.engine.sampling.sampler import Sampler
from app.engine.scheduler.batch import Batch, SampledTokens, ScheduledSpan, Sequence, make_sequence
from app.messages import Generate, SamplingParams

CATCH_UP_TOKENS = 64  # of a sequence that are computed beside a step in order to draft later
_MOST_CATCH_UP = 8  # tokens that are computed for each token that may still be drafted, at most
_MAX_AHEAD = 16  # tokens after the known ones for which there is room, and known ones that a draft may compute
_COST_GAIN = 0.2

ChooseToken = Callable[[Sequence, int, int], int]  # sequence, position, the draft model's token


@dataclass(slots=True, eq=False)
class DraftedSequence:
    """The draft model's copy of a sequence. `own.num_computed` of its tokens have keys and values in `slot`.

    A recurrent state is kept as it is after `kept` tokens, the last that were known.
    """

    own: Sequence
    slot: int
    kept: int = 0


class DraftRunner(Protocol):
    """What a draft model needs of its runner."""

    kv_cache: KvCache
    sampler: Sampler

    @property
    def is_first(self) -> bool: ...

    def run(self, batch: Batch) -> list[SampledTokens]: ...


class DraftModel:
    """Drafts for several sequences at once. It is used on the worker thread only."""

    def __init__(self, runner: DraftRunner, capacity_tokens: int, vocab_size: int | None = None) -> None:
        """Draft with a runner of its own, within `capacity_tokens` of KV memory.

        `vocab_size`: rows of the served model's embedding; None: as many as the draft model has.
        """
        self.seconds = 0.0  # spent since `take_seconds`
        self.choose: ChooseToken | None = None  # replaces draft tokens, for measurements
        self._runner, self._capacity_tokens = runner, capacity_tokens
        self._own_vocab_size = runner.sampler.vocab_size
        self._vocab_size = vocab_size or self._own_vocab_size
        self._free = list(range(runner.kv_cache.shape.num_slots))
        self._drafted: dict[Sequence, DraftedSequence] = {}
        self._step_seconds: dict[int, float] = {}  # by number of sequences

    def is_ready(self, sequence: Sequence) -> bool:
        """Return True if at most a few tokens are missing, else compute some of them and return False."""
        known = self._drafted.get(sequence)
        length = len(sequence.token_ids)
        others = sum(len(one.own.token_ids) for one in self._drafted.values() if one is not known)
        too_long = length + _MAX_AHEAD >= self._runner.kv_cache.shape.max_len
        if too_long or others + length + _MAX_AHEAD > self._capacity_tokens:
            self.forget(sequence)
            return False
        if known is None:
            # What is left of the sequence must be worth computing its tokens.
            if not self._free or length > _MOST_CATCH_UP * (sequence.max_length - length):
                return False
            known = self._drafted[sequence] = self._copy_of(sequence)
        self._follow(known, sequence)
        missing = known.own.num_uncomputed - 1
        if missing <= _MAX_AHEAD:
            return True
        began = time.perf_counter()
        count = min(missing, CATCH_UP_TOKENS)
        span = ScheduledSpan(known.own, known.own.num_computed, count, known.slot, None, 0, samples=False)
        self._runner.run(Batch((span,)))
        known.own.num_computed += count
        self.seconds += time.perf_counter() - began
        return False

    def propose(self, sequences: list[Sequence], num_tokens: int) -> Mapping[Sequence, tuple[int, ...]]:
        """Return `num_tokens` draft tokens for each sequence, fewer where the served model lacks a token."""
        began = time.perf_counter()
        known = [self._drafted[sequence] for sequence in sequences]
        lengths = [len(one.own.token_ids) for one in known]
        for place in range(num_tokens):
            started = time.perf_counter()
            spans = tuple(
                ScheduledSpan(one.own, one.own.num_computed, one.own.num_uncomputed, one.slot, None, 0, samples=True)
                for one in known
            )
            samples = self._runner.run(Batch(spans))
            if place == 0 and self._runner.kv_cache.states:
                self._keep_states(known, lengths)
            for sequence, one, sample in zip(sequences, known, samples, strict=True):
                position, token = len(one.own.token_ids), max(sample.token_ids[0], 0)  # any token, if none is finite
                one.own.num_computed = position
                chosen = token if self.choose is None else self.choose(sequence, position, token)
                one.own.token_ids.append(chosen if chosen < self._own_vocab_size else token)
            if not self._runner.is_first:
                old, now = self._step_seconds.get(len(known)), time.perf_counter() - started
                self._step_seconds[len(known)] = now if old is None else old + _COST_GAIN * (min(now, 2 * old) - old)
        self.seconds += time.perf_counter() - began
        return {
            sequence: tuple(takewhile(lambda token: token < self._vocab_size, one.own.token_ids[length:]))
            for sequence, one, length in zip(sequences, known, lengths, strict=True)
        }

    def step_seconds(self, num_sequences: int) -> float:
        """Return the time of one draft token for this number of sequences, 0 if unknown. Any thread may call it."""
        measured = self._step_seconds.copy()
        if num_sequences in measured or not measured:
            return measured.get(num_sequences, 0.0)
        nearest = min(measured, key=lambda known: abs(known - num_sequences))
        return measured[nearest] * max(1.0, num_sequences / nearest)

    def take_seconds(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def forget(self, sequence: Sequence) -> None:
        known = self._drafted.pop(sequence, None)
        if known is not None:
            self._free.append(known.slot)
            self._runner.kv_cache.release(known.slot, 0, self._runner.kv_cache.shape.max_len)

    def _follow(self, known: DraftedSequence, sequence: Sequence) -> None:
        """Take over a sequence's tokens; those that differ from what was drafted are computed again."""
        own, tokens = known.own, self._known_ids(sequence)
        same, most = own.num_prompt_tokens, min(own.num_computed, len(tokens) - 1)
        same = min(same, most)
        while same < most and own.token_ids[same] == tokens[same]:
            same += 1
        if same < own.num_computed and self._runner.kv_cache.states:  # the state is of tokens that were rejected
            self._runner.kv_cache.copy_states([(self._row(known), known.slot, known.kept)])
            same = known.kept
        own.num_computed = same
        own.token_ids = tokens
        own.num_prompt_tokens = len(tokens)

    def _keep_states(self, known: list[DraftedSequence], lengths: list[int]) -> None:
        for one, length in zip(known, lengths, strict=True):
            one.kept = length
        self._runner.kv_cache.copy_states([(one.slot, self._row(one), one.kept) for one in known])

    def _row(self, known: DraftedSequence) -> int:
        return self._runner.kv_cache.shape.num_slots + known.slot

    def _copy_of(self, sequence: Sequence) -> DraftedSequence:
        ids = tuple(self._known_ids(sequence))
        own = make_sequence(Generate("draft", ids, SamplingParams(temperature=0.0), arrived_at=0.0))
        return DraftedSequence(own, self._free.pop())

    def _known_ids(self, sequence: Sequence) -> list[int]:
        if self._vocab_size <= self._own_vocab_size and not sequence.vectors:
            return list(sequence.token_ids)
        return [token if token < self._own_vocab_size else 0 for token in sequence.token_ids]
