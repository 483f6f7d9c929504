"""KV cache of a device with its own memory: pages are allocated when they are first written.

The slots are the same as on the CPU. `PageTables` decides which page belongs to which slot. This module holds the
tensors: the memory, the page tables that kernels read, and the copies within the memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from app.engine.batch import Copy, Span
from app.engine.kv_cache import KVShape
from app.engine.pages import Moves, Pages
from app.kernels.attention import Run
from app.kernels.kv_rows import KVRows, token_bytes
from app.kernels.paged import PAGE_TOKENS as PAGE

_MOVED = 4096  # rows of one layer that are read before they are written; this bounds the memory that a move takes


class PagedKVCache:
    """Slots of up to `max_len` tokens over `num_pages` pages, plus page 0, which no slot owns.

    A batch is prepared in this order, each part once before the step runs: `apply_copies`, `written_rows`,
    `take_updates`.
    """

    def __init__(self, shape: KVShape, dtype: torch.dtype, num_pages: int, device: torch.device) -> None:
        """Allocate the memory and the page tables on the device.

        Args:
            shape: Capacity of the cache and shape of a token's KV.
            dtype: Floating-point dtype of keys and values.
            num_pages: Pages of `tokens_per_page` tokens that the slot pool may account for.
            device: Device that holds the memory.
        """
        assert dtype.is_floating_point, "pages hold floating-point keys and values, not quantized ones"
        self.shape = shape
        self.dtype = dtype
        self.token_bytes = token_bytes(shape.num_kv_heads, shape.head_dim, dtype)  # bytes of one layer
        self.bytes_per_token = shape.num_layers * self.token_bytes
        self.tokens_per_page = PAGE
        self.capacity_tokens = num_pages * PAGE
        self.reserved_bytes = (num_pages + 1) * PAGE * self.bytes_per_token
        self._pages = Pages(shape.num_slots, shape.max_len, num_pages)
        self.stride = self._pages.most_pages * PAGE
        # The memory is zeroed, because a kernel may multiply masked values by zero, and zero times NaN is NaN.
        size = ((num_pages + 1) * PAGE, 2 * shape.num_kv_heads * shape.head_dim)
        self._memory = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_layers)]
        self.layers = [_layer(memory, shape, self.token_bytes) for memory in self._memory]
        # The table has one more row than there are slots. A padding sequence has slot `num_slots`, whose entries
        # are all page 0.
        self.tables = torch.zeros((shape.num_slots + 1, self._pages.most_pages), dtype=torch.int32, device=device)
        self._told: list[Moves] = []  # row moves that were requested and are not yet expanded to layers
        # moves that are not yet done: memory of a layer, rows to read, rows to write
        self._moves: list[tuple[Tensor, Tensor, Tensor]] = []

    @property
    def num_free_pages(self) -> int:
        """Number of pages that no slot owns, page 0 excluded."""
        return self._pages.num_free

    def row(self, slot: int, position: int) -> int:
        """Return the index of a token among the flat rows of a layer."""
        return self._pages.row(slot, position)

    def carry(self, copies: Items[Copy], released: Iterable[tuple[int, int, int]]) -> None:
        """Do the copies and releases of a batch, which must precede its spans.

        The result is that of doing the copies one after the other. The released pages are free after them.
        """
        self._move(self._pages.carry(copies, released))

    def written_rows(self, spans: Items[Span]) -> list[int]:
        """Return the flat rows of all tokens that these spans compute, in batch order.

        The slot of a new sequence is prepared first.
        """
        self._move(self._pages.settle(spans))
        return self._pages.written_rows(spans)

    def take_updates(self) -> tuple[list[int], list[int]]:
        """Return the changes of the page tables since the last call: flat indices into `tables`, and their pages.

        The caller must write them to `tables` before the step runs.
        """
        return self._pages.take_updates()

    def write(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Store `key` and `value` [tokens, kv_heads, head_dim] (any strides) at `rows` [tokens] int64."""
        self.layers[layer].write(rows, key, value)

    def runs(self, span: Span) -> tuple[Run, ...]:
        """Return the runs that hold a span's context `[0, end)`, one per page; they are the same for every layer."""
        pages = enumerate(self._pages.pages(span.slot, span.end))
        return tuple(Run(page * PAGE, min(PAGE, span.end - at * PAGE), at * PAGE) for at, page in pages)

    def copy(self, copy: Copy) -> None:
        """Do one copy, in all layers."""
        self.carry((copy,), ())

    def release(self, slot: int, start: int, end: int) -> None:
        """Give back the whole pages among positions `[start, end)` of a slot.

        If `end` is `max_len`, the slot's last page is released too.
        """
        self.carry((), ((slot, start, end),))

    def _move(self, moves: Moves) -> None:
        """Do row moves in every layer.

        Moves that failed for lack of memory are done first in the next call, because the page tables already rely
        on them.
        """
        if moves[0]:
            self._told.append(moves)
        while self._told:
            self._moves += self._of_each_layer(*self._told[0])
            del self._told[0]
        while self._moves:
            memory, sources, targets = self._moves[0]
            memory.index_copy_(0, targets, memory.index_select(0, sources))
            del self._moves[0]

    def _of_each_layer(self, sources: list[int], targets: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
        # This copy waits for the device. That is acceptable: moves come with new sequences and beams, and then no
        # step is launched ahead.
        rows = torch.tensor([sources, targets]).to(self.tables.device)
        # Split the moves into parts, but only if no part writes rows that a later part reads.
        together = len(sources) if _pages_of(sources) & _pages_of(targets) else _MOVED
        return [(memory, read, written) for memory in self._memory for read, written in torch.split(rows, together, 1)]


def _layer(memory: Tensor, shape: KVShape, token_bytes: int) -> KVRows:
    rows = memory.view(-1, 2, shape.num_kv_heads, shape.head_dim)
    return KVRows(rows[:, 0], rows[:, 1], token_bytes)


def _pages_of(rows: list[int]) -> set[int]:
    return {row // PAGE for row in rows}
