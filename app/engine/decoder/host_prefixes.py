"""Prefixes that had to leave a device's memory, kept in the host's, up to a bound.

When a cached slot is cut, the blocks of its end are copied to the host. When a prompt begins with them, they are copied
back, as far as that takes less time than computing them. `prompt_cache.py` does the same with files.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from app.engine.decoder.paged_kv_cache import PagedKvCache
from app.engine.scheduler.batch import KvCopy, Sequence, StateCopy
from app.engine.scheduler.kv_allocator import KvSlot, block_hashes
from app.metrics.steps import StepTimeModel

Moves = tuple[Items[KvCopy], Items[tuple[int, int, int]]]
_GAIN = 0.3  # weight of a new measurement in the time of reading a token
_FORGET_FACTOR = 0.95  # of that time, whenever computing is preferred


class HostPrefixes:
    """The `PrefixStore` of a device. It is used on the worker thread only.

    `take_moves` returns the copies and releases that the scheduler has asked for and no step has done yet.
    """

    def __init__(
        self, kv_cache: PagedKvCache, step_times: StepTimeModel, max_bytes: int, take_moves: Callable[[], Moves]
    ) -> None:
        self._kv_cache, self._step_times, self._max_bytes = kv_cache, step_times, max_bytes
        self._take_moves = take_moves
        self._blocks: OrderedDict[int, tuple[list[int], Tensor]] = OrderedDict()  # the least recently used one first
        self.num_bytes = 0
        self.read_seconds = 0.0  # usual time of reading a token; 0: not measured yet

    def move(self, copies: Items[KvCopy], released: Items[tuple[int, int, int]], states: Items[StateCopy]) -> None:
        assert not states, "the plan refuses models with recurrent states"
        self._kv_cache.apply_copies(copies, released)

    def save(self, slots: Iterable[KvSlot], is_wanted: Callable[[], bool]) -> None:
        """Do nothing: what is in the device's memory is found there."""

    def spill(self, slot: KvSlot, end: int) -> None:
        """Keep the whole blocks of a cached slot that has tokens behind `end`, before it is cut there."""
        start, is_settled = 0, False
        for stop, name in block_hashes(slot.token_ids, slot.num_tokens, slot.scope):
            if stop > end and name not in self._blocks:
                if not is_settled:
                    self._kv_cache.apply_copies(*self._take_moves())
                    is_settled = True
                self._keep(name, slot, start, stop)
            start = stop

    def _keep(self, name: int, slot: KvSlot, start: int, stop: int) -> None:
        size = (stop - start) * self._kv_cache.bytes_per_token
        if size > self._max_bytes:
            return
        while self.num_bytes + size > self._max_bytes:
            _, (_, rows) = self._blocks.popitem(last=False)
            self.num_bytes -= rows.nbytes
        rows = torch.empty(size, dtype=torch.uint8)
        self._kv_cache.read_block(rows, slot.index, slot.prefix_slot, slot.prefix_tokens, start)
        self._blocks[name] = slot.token_ids[:stop], rows
        self.num_bytes += size

    def read(self, sequence: Sequence, max_seconds: float) -> tuple[int, bool]:
        """Copy blocks that follow a sequence's computed tokens back (`PrefixStore.read`)."""
        assert sequence.slot is not None, "only a running sequence reads a prefix"
        computed, limit, start, began = sequence.num_computed, sequence.max_cached_tokens, 0, time.perf_counter()
        for stop, name in block_hashes(sequence.token_ids, limit, sequence.prefix_scope):
            begin, start = start, stop
            if stop <= computed:
                continue
            known, rows = self._blocks.get(name, (None, None))
            if rows is None or known != sequence.token_ids[:stop] or not self._is_worth(computed, stop - computed):
                break
            before = time.perf_counter()
            if before - began > max_seconds:
                return computed, True
            self._kv_cache.write_block(rows, sequence.slot, begin, computed, stop)
            self._blocks.move_to_end(name)
            seconds = (time.perf_counter() - before) / (stop - computed)
            self.read_seconds += (_GAIN if self.read_seconds else 1.0) * (seconds - self.read_seconds)
            computed = stop
        return computed, False

    def _is_worth(self, computed: int, tokens: int) -> bool:
        times = self._step_times.step_times(tokens)
        if times is None or tokens * self.read_seconds <= times.seconds(0, tokens, 0, computed):
            return True
        self.read_seconds *= _FORGET_FACTOR
        return False
