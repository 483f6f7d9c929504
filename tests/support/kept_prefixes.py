"""A prefix store without files: what the fake runner (tracking_runner.py) remembers, by the tokens before it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from app.engine.scheduler.batch import Batch, KvCopy, PrefixScope, Sequence
from app.engine.scheduler.kv_allocator import KvSlot
from tracking_runner import RememberingRunner

BLOCK = 8


class KeptPrefixes:
    """Its reads end for lack of time so often."""

    def __init__(self, runner: RememberingRunner, chance: float) -> None:
        self._runner, self._chance, self._rng = runner, chance, random.Random(0)
        self._marks: dict[tuple[PrefixScope, tuple[int, ...]], list[int]] = {}
        self.num_read = 0

    def move(self, copies: Iterable[KvCopy], released: Iterable[tuple[int, int, int]]) -> None:
        self._runner._carry(Batch((), tuple(copies), tuple(released)))

    def read(self, sequence: Sequence, max_seconds: float) -> tuple[int, bool]:
        computed, memory = sequence.num_computed, self._runner.memory
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

    def save(self, slots: Iterable[KvSlot], is_wanted: Callable[[], bool]) -> None:
        for slot in slots:
            for end in range(BLOCK, slot.num_tokens + 1, BLOCK) if not slot.running else ():
                homes = [
                    slot.prefix_slot if slot.prefix_slot is not None and position < slot.prefix_tokens else slot.index
                    for position in range(end - BLOCK, end)
                ]
                marks = [self._runner.memory[home, end - BLOCK + place] for place, home in enumerate(homes)]
                self._marks[slot.scope, tuple(slot.token_ids[:end])] = marks
