"""Page tables as counts: the page of each position of a slot, the free pages, and the rows that copies move.

`KvSlots` decides how much a slot may hold. A page is allocated here when it is first written. `PagedKvCache` holds
the tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items

from app.engine.batch import Copy, Span
from app.engine.sequence import Sequence
from app.kernels.paged import PAGE_TOKENS as PAGE

NOBODYS = 0  # the page that no slot owns; padding rows are written to it

Moves = tuple[list[int], list[int]]  # rows to read, and the row that each is copied to
Piece = tuple[int, int, int]  # positions of a slot: (slot, start, end)


class Pages:
    """The pages of each slot: first the whole pages of the prefix that it shares, then the slot's private pages.

    The page in which a shared prefix ends is private and holds a copy of the prefix's last tokens. Invariants: a
    page that is not free has exactly one owner. The private pages never exceed what `KvSlots` accounts for, since
    both count in whole pages.
    """

    def __init__(self, num_slots: int, max_len: int, num_pages: int) -> None:
        """Create empty tables over `num_pages` pages that slots may own, numbered from 1."""
        self.most_pages = -(-max_len // PAGE)  # pages per slot
        self._max_len = max_len
        self._own: list[dict[int, int]] = [{} for _ in range(num_slots)]  # per slot: index in its table -> page
        self._tables = [[NOBODYS] * self.most_pages for _ in range(num_slots)]
        self._tenants: list[tuple[Sequence, int] | None] = [
            None
        ] * num_slots  # sequence that each table was made for, and its admission count
        self._changed: set[int] = set()
        self._free = deque(range(num_pages, 0, -1))
        self._carried: Items[Copy] = ()

    @property
    def num_free(self) -> int:
        """Number of pages that no slot owns."""
        return len(self._free)

    def row(self, slot: int, position: int) -> int:
        """Return the index of a written token among the flat rows."""
        page = self._tables[slot][position // PAGE]
        assert page != NOBODYS, "only a written position has a row"
        return page * PAGE + position % PAGE

    def carry(self, copies: Items[Copy], released: Iterable[Piece]) -> Moves:
        """Return the rows that a batch's copies move, then free the released pages.

        All source rows are read before any row is written. A released page may be reused as the target of a copy.
        A step that is tried again may pass the same copies and releases once more.
        """
        if copies and copies is self._carried:
            copies = ()
        self._carried = copies or self._carried
        sources = [self._rows_before(copies[:at], (copy.source, copy.start, copy.end)) for at, copy in enumerate(copies)]
        self._give_back(released, {row // PAGE for rows in sources for row in rows})
        moves: dict[int, int] = {}  # keyed by target, because a later copy to the same row replaces an earlier one
        for copy, rows in zip(copies, sources, strict=True):
            moves.update(zip(self._own_rows(copy.target, copy.start, copy.end, take=True), rows, strict=True))
        return list(moves.values()), list(moves)

    def settle(self, spans: Iterable[Span]) -> Moves:
        """Make the page tables of slots that have a new sequence.

        Returns the row moves that copy the end of a shared prefix to the private page in which it ends.
        """
        sources: list[int] = []
        targets: list[int] = []
        for span in spans:
            tenant = (span.sequence, span.sequence.num_admitted)
            if self._tenants[span.slot] == tenant:  # sequences compare by identity
                continue
            shared = span.prefix_tokens if span.prefix_slot is not None else 0
            whole = shared // PAGE * PAGE
            if whole < shared and span.prefix_slot is not None:
                sources += self._own_rows(span.prefix_slot, whole, shared)
                targets += self._own_rows(span.slot, whole, shared, take=True)
            self._make_table(span, shared // PAGE)
            self._tenants[span.slot] = tenant
        return sources, targets

    def written_rows(self, spans: Iterable[Span]) -> list[int]:
        """Return the rows of all tokens that these spans compute, in batch order. Missing pages are allocated."""
        rows: list[int] = []
        for span in spans:
            assert span.start >= span.prefix_tokens, "a step never writes into a prefix that others share"
            rows += self._own_rows(span.slot, span.start, span.end, take=True)
        return rows

    def pages(self, slot: int, end: int) -> list[int]:
        """Return the pages of a slot's positions `[0, end)`, shared prefix pages included."""
        return self._tables[slot][: -(-end // PAGE)]

    def take_updates(self) -> tuple[list[int], list[int]]:
        """Return the changes of all tables since the last call: flat indices and pages (`PADDING_PAGE`: released)."""
        changed = sorted(self._changed)
        self._changed.clear()
        return changed, [self._tables[at // self.most_pages][at % self.most_pages] for at in changed]

    def _own_rows(self, slot: int, start: int, end: int, take: bool = False) -> list[int]:
        """Return the rows of positions `[start, end)`, all on private pages of the slot.

        `allocate` adds missing pages.
        """
        own = self._own[slot]
        rows: list[int] = []
        for at in range(start // PAGE, -(-end // PAGE)):
            if at not in own:
                assert take, "only written positions are read"
                self._take(slot, at)
            first = own[at] * PAGE
            rows += range(first + max(start - at * PAGE, 0), first + min(end - at * PAGE, PAGE))
        return rows

    def _take(self, slot: int, at: int) -> None:
        assert self._free, "the slot pool must account for every allocated page"
        self._own[slot][at] = page = self._free.pop()
        self._enter(slot, at, page)

    def _enter(self, slot: int, at: int, page: int) -> None:
        self._tables[slot][at] = page
        self._changed.add(slot * self.most_pages + at)

    def _make_table(self, span: Span, shared: int) -> None:
        """Make the whole table of a slot. Its first `shared` pages are the prefix's."""
        own = self._own[span.slot]
        prefix = self._own[span.prefix_slot] if span.prefix_slot is not None else {}
        table = [prefix[at] if at < shared else own.get(at, NOBODYS) for at in range(self.most_pages)]
        before, self._tables[span.slot] = self._tables[span.slot], table
        first = span.slot * self.most_pages
        self._changed.update(first + at for at, (old, new) in enumerate(zip(before, table, strict=True)) if old != new)
        assert NOBODYS not in self.pages(span.slot, span.start), "positions that are already computed must have pages"

    def _give_back(self, released: Iterable[Piece], read: set[int]) -> None:
        """Free the whole pages of these ranges. Pages that are still to be `read` are the last to be reused."""
        for slot, start, end in released:
            own = self._own[slot]
            last = self.most_pages if end >= self._max_len else end // PAGE
            for at in [at for at in own if -(-start // PAGE) <= at < last]:
                page = own.pop(at)
                self._free.appendleft(page) if page in read else self._free.append(page)
                if self._tables[slot][at] == page:
                    self._enter(slot, at, NOBODYS)

    def _rows_before(self, earlier: Items[Copy], piece: Piece) -> list[int]:
        """Return the rows that hold these positions before any copy of the batch.

        The positions are those that exist after the `earlier` copies.
        """
        return [row for slot, start, end in _origins(earlier, piece) for row in self._own_rows(slot, start, end)]


def _origins(earlier: Items[Copy], piece: Piece) -> Iterator[Piece]:
    """Yield the ranges that hold this range's content before the copies, in order."""
    slot, start, end = piece
    for at in range(len(earlier) - 1, -1, -1):
        copy = earlier[at]
        low, high = max(start, copy.start), min(end, copy.end)
        if copy.target == slot and low < high:
            for part in ((slot, start, low), (copy.source, low, high), (slot, high, end)):
                if part[1] < part[2]:
                    yield from _origins(earlier[:at], part)
            return
    yield piece
