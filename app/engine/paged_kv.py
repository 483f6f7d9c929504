"""Keys and values on a device with memory of its own: pages that are taken when they are first written, behind the same slots.

Which page is whose is `pages.py`'s business; here are the tensors: memory, the tables that kernels read, and what is moved within them.
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

_MOVED = 4096  # rows that are read before they are written, of one layer: what bounds the memory that moving takes


class PagedKVCache:
    """Slots of up to `max_len` tokens over `num_pages` pages. Page 0, nobody's, comes on top.

    A batch is prepared in this order, each part once before the step runs: `carry`, `written_rows`, `take_updates`.
    """

    def __init__(self, shape: KVShape, dtype: torch.dtype, num_pages: int, device: torch.device) -> None:
        """`num_pages`: so many tokens of `tokens_per_page` may the pool account for."""
        assert dtype.is_floating_point, "pages hold keys and values as they are, not as codes"
        self.shape = shape
        self.dtype = dtype
        self.token_bytes = token_bytes(shape.num_kv_heads, shape.head_dim, dtype)  # of one layer
        self.bytes_per_token = shape.num_layers * self.token_bytes
        self.tokens_per_page = PAGE
        self.capacity_tokens = num_pages * PAGE
        self.reserved_bytes = (num_pages + 1) * PAGE * self.bytes_per_token
        self._pages = Pages(shape.num_slots, shape.max_len, num_pages)
        self.stride = self._pages.most_pages * PAGE
        # Zeros, since a kernel may multiply what it must not see by nothing, and nothing times NaN is NaN.
        size = ((num_pages + 1) * PAGE, 2 * shape.num_kv_heads * shape.head_dim)
        self._memory = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_layers)]
        self.layers = [_layer(memory, shape, self.token_bytes) for memory in self._memory]
        # A row more than slots: a sequence that only fills a bucket has slot `num_slots`, of whom all is page 0.
        self.tables = torch.zeros((shape.num_slots + 1, self._pages.most_pages), dtype=torch.int32, device=device)
        self._told: list[Moves] = []  # not done yet
        self._moves: list[tuple[Tensor, Tensor, Tensor]] = []  # nor these: memory of a layer, rows to read, rows to write

    @property
    def num_free_pages(self) -> int:
        return self._pages.num_free

    def row(self, slot: int, position: int) -> int:
        """Where a token lies among a layer's flat rows."""
        return self._pages.row(slot, position)

    def carry(self, copies: Items[Copy], released: Iterable[tuple[int, int, int]]) -> None:
        """Does what comes before a batch's spans: copies, as if one after the other, and then what is released is free."""
        self._move(self._pages.carry(copies, released))

    def written_rows(self, spans: Items[Span]) -> list[int]:
        """The flat rows of all tokens that these spans compute, in batch order. A new sequence's slot is made ready for it."""
        self._move(self._pages.settle(spans))
        return self._pages.written_rows(spans)

    def take_updates(self) -> tuple[list[int], list[int]]:
        """Flat indices into `tables` and their pages, changed since the last call; whoever took them writes them before the step runs."""
        return self._pages.take_updates()

    def write(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores key, value [tokens, kv_heads, head_dim] (any strides) at `rows` [tokens] int64."""
        self.layers[layer].write(rows, key, value)

    def runs(self, span: Span) -> tuple[Run, ...]:
        """Where a span's context `[0, end)` lies, page by page. The same for every layer."""
        pages = enumerate(self._pages.pages(span.slot, span.end))
        return tuple(Run(page * PAGE, min(PAGE, span.end - at * PAGE), at * PAGE) for at, page in pages)

    def copy(self, copy: Copy) -> None:
        """Carries out one copy, in all layers."""
        self.carry((copy,), ())

    def release(self, slot: int, start: int, end: int) -> None:
        """Gives the whole pages among positions `[start, end)` of a slot back; `end` at `max_len` takes its last page too."""
        self.carry((), ((slot, start, end),))

    def _move(self, moves: Moves) -> None:
        """In every layer. What want of memory kept from being done is done first the next time: the tables count on it already."""
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
        # This copy waits for the device: moves come with new sequences and beams, and then nothing runs ahead.
        rows = torch.tensor([sources, targets]).to(self.tables.device)
        # In parts, but only where no part writes what a later one reads.
        together = len(sources) if _pages_of(sources) & _pages_of(targets) else _MOVED
        return [(memory, read, written) for memory in self._memory for read, written in torch.split(rows, together, 1)]


def _layer(memory: Tensor, shape: KVShape, token_bytes: int) -> KVRows:
    rows = memory.view(-1, 2, shape.num_kv_heads, shape.head_dim)
    return KVRows(rows[:, 0], rows[:, 1], token_bytes)


def _pages_of(rows: list[int]) -> set[int]:
    return {row // PAGE for row in rows}
