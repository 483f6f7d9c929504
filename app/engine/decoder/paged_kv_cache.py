"""KV cache of a device with its own memory: pages are allocated when they are first written.

`KvSlots` decides how much a slot may hold, `PageTables` which page belongs to which slot, as counts. `PagedKvCache`
holds the tensors: memory, page tables that kernels read, and copies within the memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from app.engine.decoder.device_states import DeviceStates
from app.engine.decoder.kv_cache import KvShape
from app.engine.scheduler.batch import KvCopy, ScheduledSpan, Sequence
from armature_kernels.attention.attention import KvSegment, token_bytes, view_kv_rows
from armature_kernels.attention.paged import PAGE_TOKENS

PADDING_PAGE = 0  # the page that no slot owns; padding rows are written to it

RowMoves = tuple[list[int], list[int]]  # rows to read, and the row that each is copied to
SlotRange = tuple[int, int, int]  # positions of a slot: (slot, start, end)
_MAX_MOVED_ROWS = (
    4096  # rows of one layer that are read before they are written; this bounds the memory that a move takes
)


class PageTables:
    """The pages of each slot: first the whole pages of the prefix that it shares, then the slot's private pages.

    The page in which a shared prefix ends is private and holds a copy of the prefix's last tokens. Invariants: a page
    that is not free has exactly one owner; private pages never exceed what `KvSlots` accounts for.
    """

    def __init__(self, num_slots: int, max_len: int, num_pages: int) -> None:
        """Create empty tables over `num_pages` pages that slots may own, numbered from 1."""
        self.max_pages = -(-max_len // PAGE_TOKENS)  # pages per slot
        self._max_len = max_len
        self._own: list[dict[int, int]] = [{} for _ in range(num_slots)]  # per slot: index in its table -> page
        self._tables = [[PADDING_PAGE] * self.max_pages for _ in range(num_slots)]
        self._owners: list[tuple[Sequence, int] | None] = [
            None
        ] * num_slots  # sequence that each table was made for, and its admission count
        self._changed: set[int] = set()
        self._free = deque(range(num_pages, 0, -1))
        self._applied_copies: Items[KvCopy] = ()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def row(self, slot: int, position: int) -> int:
        page = self._tables[slot][position // PAGE_TOKENS]
        assert page != PADDING_PAGE, "only a written position has a row"
        return page * PAGE_TOKENS + position % PAGE_TOKENS

    def apply_copies(self, copies: Items[KvCopy], released: Iterable[SlotRange]) -> RowMoves:
        """Return the rows that a batch's copies move, then free the released pages.

        All source rows are read before any row is written. A step that is tried again may pass the same copies and
        releases once more.
        """
        if copies and copies is self._applied_copies:
            copies = ()
        self._applied_copies = copies or self._applied_copies
        sources = [
            self._rows_before(copies[:at], (copy.source, copy.start, copy.end)) for at, copy in enumerate(copies)
        ]
        self._release(released, {row // PAGE_TOKENS for rows in sources for row in rows})
        moves: dict[int, int] = {}  # keyed by target, because a later copy to the same row replaces an earlier one
        for copy, rows in zip(copies, sources, strict=True):
            moves.update(zip(self.own_rows(copy.target, copy.start, copy.end, allocate=True), rows, strict=True))
        return list(moves.values()), list(moves)

    def prepare_tables(self, spans: Iterable[ScheduledSpan]) -> RowMoves:
        """Make the page tables of new sequences. Returns the moves that copy the end of shared prefixes."""
        sources: list[int] = []
        targets: list[int] = []
        for span in spans:
            owner = (span.sequence, span.sequence.num_admitted)
            if self._owners[span.slot] == owner:  # sequences compare by identity
                continue
            shared = span.prefix_tokens if span.prefix_slot is not None else 0
            whole = shared // PAGE_TOKENS * PAGE_TOKENS
            if whole < shared and span.prefix_slot is not None:
                sources += self.own_rows(span.prefix_slot, whole, shared)
                targets += self.own_rows(span.slot, whole, shared, allocate=True)
            self._make_table(span, shared // PAGE_TOKENS)
            self._owners[span.slot] = owner
        return sources, targets

    def written_rows(self, spans: Iterable[ScheduledSpan]) -> list[int]:
        """Return the rows of all tokens that these spans compute, in batch order. Missing pages are allocated."""
        rows: list[int] = []
        for span in spans:
            assert span.start >= span.prefix_tokens, "a step never writes into a prefix that others share"
            rows += self.own_rows(span.slot, span.start, span.end, allocate=True)
        return rows

    def pages(self, slot: int, end: int) -> list[int]:
        return self._tables[slot][: -(-end // PAGE_TOKENS)]

    def take_updates(self) -> tuple[list[int], list[int]]:
        """Return the changes of all tables since the last call: flat indices and pages (`PADDING_PAGE`: released)."""
        changed = sorted(self._changed)
        self._changed.clear()
        return changed, [self._tables[at // self.max_pages][at % self.max_pages] for at in changed]

    def own_rows(self, slot: int, start: int, end: int, allocate: bool = False) -> list[int]:
        """Return the rows of positions `[start, end)`, all on private pages. `allocate` adds missing pages."""
        own = self._own[slot]
        rows: list[int] = []
        for at in range(start // PAGE_TOKENS, -(-end // PAGE_TOKENS)):
            if at not in own:
                assert allocate, "only written positions are read"
                self._allocate(slot, at)
            first = own[at] * PAGE_TOKENS
            rows += range(first + max(start - at * PAGE_TOKENS, 0), first + min(end - at * PAGE_TOKENS, PAGE_TOKENS))
        return rows

    def _allocate(self, slot: int, at: int) -> None:
        assert self._free, "the slot pool must account for every allocated page"
        self._own[slot][at] = page = self._free.pop()
        self._set_entry(slot, at, page)

    def _set_entry(self, slot: int, at: int, page: int) -> None:
        self._tables[slot][at] = page
        self._changed.add(slot * self.max_pages + at)

    def _make_table(self, span: ScheduledSpan, shared: int) -> None:
        own = self._own[span.slot]
        prefix = self._own[span.prefix_slot] if span.prefix_slot is not None else {}
        table = [prefix[at] if at < shared else own.get(at, PADDING_PAGE) for at in range(self.max_pages)]
        before, self._tables[span.slot] = self._tables[span.slot], table
        first = span.slot * self.max_pages
        self._changed.update(first + at for at, (old, new) in enumerate(zip(before, table, strict=True)) if old != new)
        assert PADDING_PAGE not in self.pages(span.slot, span.start), (
            "positions that are already computed must have pages"
        )

    def _release(self, released: Iterable[SlotRange], read: set[int]) -> None:
        """Free the whole pages of these ranges. Pages that are still to be `read` are the last to be reused."""
        for slot, start, end in released:
            own = self._own[slot]
            last = self.max_pages if end >= self._max_len else end // PAGE_TOKENS
            for at in [at for at in own if -(-start // PAGE_TOKENS) <= at < last]:
                page = own.pop(at)
                self._free.appendleft(page) if page in read else self._free.append(page)
                if self._tables[slot][at] == page:
                    self._set_entry(slot, at, PADDING_PAGE)

    def _rows_before(self, earlier: Items[KvCopy], positions: SlotRange) -> list[int]:
        """Return the rows that hold these positions before any copy of the batch; they exist after `earlier`."""
        return [
            row for slot, start, end in _original_ranges(earlier, positions) for row in self.own_rows(slot, start, end)
        ]


def _original_ranges(earlier: Items[KvCopy], positions: SlotRange) -> Iterator[SlotRange]:
    """Yield the ranges that hold this range's content before the copies, in order."""
    slot, start, end = positions
    for at in range(len(earlier) - 1, -1, -1):
        copy = earlier[at]
        low, high = max(start, copy.start), min(end, copy.end)
        if copy.target == slot and low < high:
            for part in ((slot, start, low), (copy.source, low, high), (slot, high, end)):
                if part[1] < part[2]:
                    yield from _original_ranges(earlier[:at], part)
            return
    yield positions


class PagedKvCache:
    """Slots of up to `max_len` tokens over `num_pages` pages, plus page 0, which no slot owns.

    A batch is prepared in this order, each part once: `apply_copies`, `written_rows`, `take_updates`.
    """

    def __init__(self, shape: KvShape, dtype: torch.dtype, num_pages: int, device: torch.device) -> None:
        """Allocate memory for `num_pages` pages of `tokens_per_page` tokens and the page tables on the device."""
        self.shape = shape
        self.dtype = dtype
        self.token_bytes = token_bytes(shape.num_kv_heads, shape.head_dim, dtype)  # bytes of one layer
        self.bytes_per_token = shape.num_layers * self.token_bytes
        self.tokens_per_page = PAGE_TOKENS
        self.capacity_tokens = num_pages * PAGE_TOKENS
        self.reserved_bytes = (num_pages + 1) * PAGE_TOKENS * self.bytes_per_token
        self._pages = PageTables(shape.num_slots, shape.max_len, num_pages)
        self.stride = self._pages.max_pages * PAGE_TOKENS
        # The memory is zeroed, because a kernel may multiply masked values by zero, and zero times NaN is NaN.
        size = ((num_pages + 1) * PAGE_TOKENS, self.token_bytes)
        self._memory = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(shape.num_layers)]
        self.layers = [view_kv_rows(one, shape.num_kv_heads, shape.head_dim, dtype) for one in self._memory]
        # The table has one more row than there are slots. A padding sequence has slot `num_slots`, whose entries
        # are all page 0.
        self.tables = torch.zeros((shape.num_slots + 1, self._pages.max_pages), dtype=torch.int32, device=device)
        self.states = DeviceStates(shape, device)
        self._requested_moves: list[RowMoves] = []  # row moves that were requested and are not yet expanded to layers
        self.moved: Callable[[list[int], list[int]], None] = lambda sources, targets: None  # called before each move
        # moves that are not yet done: memory of a layer, rows to read, rows to write
        self._moves: list[tuple[Tensor, Tensor, Tensor]] = []

    @property
    def num_free_pages(self) -> int:
        return self._pages.num_free

    def row(self, slot: int, position: int) -> int:
        return self._pages.row(slot, position)

    def apply_copies(self, copies: Items[KvCopy], released: Iterable[tuple[int, int, int]]) -> None:
        """Do the copies, as if one after the other, and then the releases of a batch, before its spans."""
        self.move_rows(self._pages.apply_copies(copies, released))

    def read_block(self, rows: Tensor, slot: int, prefix_slot: int | None, prefix_tokens: int, start: int) -> None:
        """Copy the tokens from position `start` on of a slot to `rows`, as many as fit.

        `rows` is uint8 [layers * tokens * token_bytes] in host memory. Positions below `prefix_tokens` are in `prefix_slot`.
        """
        block = rows.view(self.shape.num_layers, -1, self.token_bytes)
        end = start + block.shape[1]
        border = start if prefix_slot is None else min(max(prefix_tokens, start), end)
        shared = [] if prefix_slot is None else self._pages.own_rows(prefix_slot, start, border)
        read = torch.tensor([*shared, *self._pages.own_rows(slot, border, end)]).to(self.tables.device)
        for layer, memory in enumerate(self._memory):
            block[layer].copy_(memory.index_select(0, read))

    def write_block(self, rows: Tensor, slot: int, start: int, first: int, end: int) -> None:
        block = rows.view(self.shape.num_layers, -1, self.token_bytes)[:, first - start : end - start]
        written = torch.tensor(self._pages.own_rows(slot, first, end, allocate=True)).to(self.tables.device)
        for memory, part in zip(self._memory, block, strict=True):
            memory.index_copy_(0, written, part.to(memory.device))

    def written_rows(self, spans: Items[ScheduledSpan]) -> list[int]:
        self.move_rows(self._pages.prepare_tables(spans))
        return self._pages.written_rows(spans)

    def take_updates(self) -> tuple[list[int], list[int]]:
        """Return the changes of the page tables since the last call: flat indices into `tables`, and pages."""
        return self._pages.take_updates()

    def write(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        self.layers[layer].write(rows, key, value)

    def kv_segments(self, span: ScheduledSpan) -> tuple[KvSegment, ...]:
        pages = enumerate(self._pages.pages(span.slot, span.end))
        return tuple(
            KvSegment(page * PAGE_TOKENS, min(PAGE_TOKENS, span.end - at * PAGE_TOKENS), at * PAGE_TOKENS)
            for at, page in pages
        )

    def copy(self, copy: KvCopy) -> None:
        self.apply_copies((copy,), ())

    def release(self, slot: int, start: int, end: int) -> None:
        """Give back the whole pages among positions `[start, end)`; the last one too if `end` is `max_len`."""
        self.apply_copies((), ((slot, start, end),))

    def move_rows(self, moves: RowMoves) -> None:
        """Do row moves in every layer; moves that failed for lack of memory are done first in the next call."""
        if moves[0]:
            self.moved(*moves)
            self._requested_moves.append(moves)
        while self._requested_moves:
            self._moves += self._layer_moves(*self._requested_moves[0])
            del self._requested_moves[0]
        while self._moves:
            memory, sources, targets = self._moves[0]
            memory.index_copy_(0, targets, memory.index_select(0, sources))
            del self._moves[0]

    def _layer_moves(self, sources: list[int], targets: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
        # This copy waits for the device. That is acceptable: moves come with new sequences and beams, and then no
        # step is launched ahead.
        rows = torch.tensor([sources, targets]).to(self.tables.device)
        # Split the moves into parts, but only if no part writes rows that a later part reads.
        together = len(sources) if _pages_of_rows(sources) & _pages_of_rows(targets) else _MAX_MOVED_ROWS
        return [(memory, read, written) for memory in self._memory for read, written in torch.split(rows, together, 1)]


def _pages_of_rows(rows: list[int]) -> set[int]:
    return {row // PAGE_TOKENS for row in rows}
