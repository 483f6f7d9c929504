"""Which page holds which of a slot's positions, as counts: what pages are free, who leans on whose, and what rows a batch's copies move.

What a slot may hold is `slots.py`'s decision; here a page is taken when it is first written. Tensors are `paged_kv.py`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items

from app.engine.batch import Copy, Span
from app.engine.sequence import Sequence
from app.kernels.paged import PAGE_TOKENS as PAGE

NOBODYS = 0  # the page that no slot owns: what only fills a bucket is written there

Moves = tuple[list[int], list[int]]  # rows to read, and where each goes
Piece = tuple[int, int, int]  # positions of a slot: slot, start, end


class Pages:
    """Each slot's pages: its own, and in front of them the whole pages of the prefix that it leans on.

    The page where a prefix ends inside is the slot's own, and holds the prefix's last tokens once more. Invariants: a page that is not free
    has one owner; own pages are never more than `SlotPool` accounts for, since both count in whole pages.
    """

    def __init__(self, num_slots: int, max_len: int, num_pages: int) -> None:
        """`num_pages` that slots may own, numbered from 1."""
        self.most_pages = -(-max_len // PAGE)  # of one slot
        self._max_len = max_len
        self._own: list[dict[int, int]] = [{} for _ in range(num_slots)]  # of each slot: place among its pages -> page
        self._tables = [[NOBODYS] * self.most_pages for _ in range(num_slots)]
        self._tenants: list[tuple[Sequence, int] | None] = [
            None
        ] * num_slots  # for whom a table was made, and which stay of theirs
        self._changed: set[int] = set()
        self._free = deque(range(num_pages, 0, -1))
        self._carried: Items[Copy] = ()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def row(self, slot: int, position: int) -> int:
        page = self._tables[slot][position // PAGE]
        assert page != NOBODYS, "only what was written has a row"
        return page * PAGE + position % PAGE

    def carry(self, copies: Items[Copy], released: Iterable[Piece]) -> Moves:
        """Rows that a batch's copies move, all read before one is written; then released pages are free, and may be where a copy goes.

        A step that is tried again may tell both once more.
        """
        if copies and copies is self._carried:
            copies = ()
        self._carried = copies or self._carried
        sources = [self._rows_before(copies[:at], (copy.source, copy.start, copy.end)) for at, copy in enumerate(copies)]
        self._give_back(released, {row // PAGE for rows in sources for row in rows})
        moves: dict[int, int] = {}  # by target: a later copy to the same row is the one that counts
        for copy, rows in zip(copies, sources, strict=True):
            moves.update(zip(self._own_rows(copy.target, copy.start, copy.end, take=True), rows, strict=True))
        return list(moves.values()), list(moves)

    def settle(self, spans: Iterable[Span]) -> Moves:
        """Makes the tables of slots that have a new sequence; what of its prefix is to be copied to the page where it ends."""
        sources: list[int] = []
        targets: list[int] = []
        for span in spans:
            tenant = (span.sequence, span.sequence.num_admitted)
            if self._tenants[span.slot] == tenant:  # sequences are equal only to themselves
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
        """The rows of all tokens that these spans compute, in batch order, on pages that are taken now where they were not."""
        rows: list[int] = []
        for span in spans:
            assert span.start >= span.prefix_tokens, "a step never writes into a prefix that others share"
            rows += self._own_rows(span.slot, span.start, span.end, take=True)
        return rows

    def pages(self, slot: int, end: int) -> list[int]:
        """The pages of a slot's positions `[0, end)`, its prefix's among them."""
        return self._tables[slot][: -(-end // PAGE)]

    def take_updates(self) -> tuple[list[int], list[int]]:
        """What is new in the tables, written one after the other, since the last call: where, and which page (`NOBODYS`: given back)."""
        changed = sorted(self._changed)
        self._changed.clear()
        return changed, [self._tables[at // self.most_pages][at % self.most_pages] for at in changed]

    def _own_rows(self, slot: int, start: int, end: int, take: bool = False) -> list[int]:
        """Rows of positions `[start, end)`, all on pages of the slot's own. `take`: those that are missing are taken."""
        own = self._own[slot]
        rows: list[int] = []
        for at in range(start // PAGE, -(-end // PAGE)):
            if at not in own:
                assert take, "what is read was written"
                self._take(slot, at)
            first = own[at] * PAGE
            rows += range(first + max(start - at * PAGE, 0), first + min(end - at * PAGE, PAGE))
        return rows

    def _take(self, slot: int, at: int) -> None:
        assert self._free, "the pool accounts for every page that is taken"
        self._own[slot][at] = page = self._free.pop()
        self._enter(slot, at, page)

    def _enter(self, slot: int, at: int, page: int) -> None:
        self._tables[slot][at] = page
        self._changed.add(slot * self.most_pages + at)

    def _make_table(self, span: Span, shared: int) -> None:
        """All of a slot's table, of which the first `shared` pages are the prefix's."""
        own = self._own[span.slot]
        prefix = self._own[span.prefix_slot] if span.prefix_slot is not None else {}
        table = [prefix[at] if at < shared else own.get(at, NOBODYS) for at in range(self.most_pages)]
        before, self._tables[span.slot] = self._tables[span.slot], table
        first = span.slot * self.most_pages
        self._changed.update(first + at for at, (old, new) in enumerate(zip(before, table, strict=True)) if old != new)
        assert NOBODYS not in self.pages(span.slot, span.start), "what need not be computed lies on pages"

    def _give_back(self, released: Iterable[Piece], read: set[int]) -> None:
        """Frees the whole pages of these ranges. Those still to be `read` are the last that are taken again."""
        for slot, start, end in released:
            own = self._own[slot]
            last = self.most_pages if end >= self._max_len else end // PAGE
            for at in [at for at in own if -(-start // PAGE) <= at < last]:
                page = own.pop(at)
                self._free.appendleft(page) if page in read else self._free.append(page)
                if self._tables[slot][at] == page:
                    self._enter(slot, at, NOBODYS)

    def _rows_before(self, earlier: Items[Copy], piece: Piece) -> list[int]:
        """The rows where, before any copy of a batch, that lies which these positions hold after the `earlier` ones."""
        return [row for slot, start, end in _origins(earlier, piece) for row in self._own_rows(slot, start, end)]


def _origins(earlier: Items[Copy], piece: Piece) -> Iterator[Piece]:
    """A piece as pieces of what there was before the copies, in order."""
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
