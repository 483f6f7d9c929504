"""A prefix store without files: what the fake runner (tracking_runner.py) remembers, by the tokens before it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from app.engine.scheduler.batch import Batch, KvCopy, PrefixScope, Sequence, StateCopy
from app.engine.scheduler.kv_allocator import KvSlot
from tracking_runner import RememberingRunner

BLOCK = 8


class KeptPrefixes:
    """Its reads end for lack of time so often."""

    def __init__(self, runner: RememberingRunner, chance: float) -> None:
        self._runner, self._chance, self._rng = runner, chance, random.Random(0)
        self._marks: dict[tuple[PrefixScope, tuple[int, ...]], list[int]] = {}
        self._states: dict[tuple[PrefixScope, tuple[int, ...]], list[int]] = {}  # the marks of all tokens before one
        self.num_read = 0

    def move(
        self, copies: Iterable[KvCopy], released: Iterable[tuple[int, int, int]], states: Iterable[StateCopy]
    ) -> None:
        self._runner._carry(Batch((), tuple(copies), tuple(released), state_copies=tuple(states)))

    def read(self, sequence: Sequence, max_seconds: float) -> tuple[int, bool]:
        computed, memory = sequence.num_computed, self._runner.memory
        if self._runner.pool.checkpoints is not None:
            return self._read_state(sequence)
        while True:
            end = (computed // BLOCK + 1) * BLOCK
            marks = self._marks.get((sequence.prefix_scope, tuple(sequence.token_ids[:end])))
            stop = min(end, sequence.max_cached_tokens)
            if marks is None or stop <= computed or end > len(sequence.token_ids):
                return computed, False
            if computed > sequence.num_computed and self._rng.random() < self._chance:
                return computed, True
            for position in range(computed, stop):
                assert position >= sequence.prefix_tokens and sequence.slot is not None
                memory[sequence.slot, position] = marks[position - end]
            self.num_read += stop - computed
            computed = stop

    def _read_state(self, sequence: Sequence) -> tuple[int, bool]:
        computed, slot = sequence.num_computed, sequence.slot
        assert slot is not None
        for end in range(sequence.max_cached_tokens, computed, -1):
            marks = self._states.get((sequence.prefix_scope, tuple(sequence.token_ids[:end])))
            if marks is None:
                continue
            if self._rng.random() < self._chance:
                return computed, True
            for position in range(computed, end):
                self._runner.memory[slot, position] = marks[position]
            self._runner.states[slot] = marks[-1]
            self.num_read += end - computed
            return end, False
        return computed, False

    def save(self, slots: Iterable[KvSlot], is_wanted: Callable[[], bool]) -> None:
        for slot in slots:
            for end in range(BLOCK, slot.num_tokens + 1, BLOCK) if not slot.running else ():
                homes = [
                    slot.prefix_slot if slot.prefix_slot is not None and position < slot.prefix_tokens else slot.index
                    for position in range(end - BLOCK, end)
                ]
                marks = [self._runner.memory[home, end - BLOCK + place] for place, home in enumerate(homes)]
                self._marks[slot.scope, tuple(slot.token_ids[:end])] = marks
            for end in slot.states() if self._runner.pool.checkpoints is not None and not slot.running else ():
                homes = [
                    slot.prefix_slot if slot.prefix_slot is not None and place < slot.prefix_tokens else slot.index
                    for place in range(end)
                ]
                marks = [self._runner.memory[home, place] for place, home in enumerate(homes)]
                row = slot.state_row(end)
                assert row is not None and self._runner.states[row] == marks[-1], "a state is kept for other tokens"
                self._states[slot.scope, tuple(slot.token_ids[:end])] = marks
