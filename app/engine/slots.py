"""Slots of KV memory as counts: which positions of which slot are accounted for, who leans on whom, what is evicted when room is wanted.

A slot is free, running (a sequence owns it) or cached (a finished sequence's keys and values; the least recently used goes first).
What tokens a slot could serve is `prefix.py`'s business, which sequence lives where is `tenants.py`'s; no tensor is seen here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

# Fewer shared tokens than this are computed again: they ride along in a step that reads all weights anyway
# (facts: a product of 16 rows costs about what one of 8 rows does), and a lean would pin a slot for them.
MIN_SHARED_TOKENS = 16

Range = tuple[int, int]
_EMPTY: Range = (0, 0)


@dataclass(slots=True, eq=False)
class Slot:
    """One long region of KV memory. Positions `[0, num_tokens)` of `token_ids` are computed: those below `prefix_tokens` in `prefix_slot`.

    Invariant: a slot that is leaned on leans on none, so a context has at most two segments.
    """

    index: int
    running: bool = False
    token_ids: list[int] = field(default_factory=list)  # while running, the sequence's own list, which grows
    num_tokens: int = 0
    prefix_slot: int | None = None
    prefix_tokens: int = 0
    reserved: int = 0  # positions [prefix_tokens, reserved) are accounted for
    leaners: set[int] = field(default_factory=set)
    touched: Range = _EMPTY  # pages that may hold memory: what is accounted for, and what is not given back yet
    used_at: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a sequence could live: in slot `adopt`, or in a new one that leans on `prefix_slot` and is given `copies` (source, start, end).

    The first `cached` of its tokens need not be computed.
    """

    cached: int = 0
    adopt: int | None = None
    prefix_slot: int | None = None
    prefix_tokens: int = 0
    copies: tuple[tuple[int, int, int], ...] = ()


class SlotPool:
    """All slots and one budget. `num_slots` should be twice the running sequences: each owns one and leans on at most one other."""

    def __init__(self, num_slots: int, capacity_tokens: int, tokens_per_page: int = 1) -> None:
        self.slots = [Slot(index) for index in range(num_slots)]
        self.tokens_per_page = tokens_per_page
        self.capacity_tokens = capacity_tokens // tokens_per_page * tokens_per_page
        self.used_tokens = 0  # of whole pages
        self._shrunk: set[int] = set()
        self._ticks = 0

    def place(self, placement: Placement, token_ids: list[int]) -> int | None:
        """The slot that now runs these tokens, with room for all of them; None, and nothing has changed, where there is no room."""
        if not self.fits(placement, len(token_ids)):
            return None
        slot = self._take(placement) if placement.adopt is None else self.slots[placement.adopt]
        for source in self._sources(placement):
            self._tick(self.slots[source])
        slot.running, slot.token_ids, slot.num_tokens = True, token_ids, placement.cached
        self._set(slot, placement.prefix_slot, placement.prefix_tokens, min(slot.reserved, placement.cached))
        has_room = self.reserve(slot.index, len(token_ids))
        assert has_room, "a placement that fits must find room"
        return slot.index

    def reserve(self, index: int, end: int) -> bool:
        """Accounts for positions up to `end`, evicting cached slots for it; False where running ones leave no room."""
        slot = self.slots[index]
        page = self.tokens_per_page
        if slot.prefix_tokens < slot.reserved <= end and (slot.reserved - 1) // page == (end - 1) // page:
            slot.reserved = end  # on a page that is accounted for: most steps of most sequences
            return True
        growth = self._pages(slot.prefix_tokens, end) - self._pages(slot.prefix_tokens, slot.reserved)
        if growth > 0 and not self._make_room(growth):
            return False
        self._set(slot, slot.prefix_slot, slot.prefix_tokens, max(end, slot.reserved))
        return True

    def trim(self, index: int, end: int) -> None:
        """Accounts for nothing beyond `end` any more, of a slot that runs."""
        slot = self.slots[index]
        self._set(slot, slot.prefix_slot, slot.prefix_tokens, min(slot.reserved, end))

    def computed(self, index: int, num_tokens: int) -> None:
        """The step has written keys and values up to `num_tokens`."""
        self.slots[index].num_tokens = num_tokens

    def release(self, index: int, keep: int) -> None:
        """The sequence has left; its first `keep` computed tokens, and what others lean on, stay cached."""
        slot = self.slots[index]
        slot.running = False
        slot.token_ids = slot.token_ids[: slot.num_tokens]
        self._tick(slot)
        self._shrink(slot, max(min(keep, slot.num_tokens), self._pinned(slot)))

    def take_released(self) -> tuple[tuple[int, int, int], ...]:
        """Pages that nothing is accounted for any more, as (slot, from, to), each told once."""
        released = []
        for index in sorted(self._shrunk):
            slot = self.slots[index]
            low, high = self._range(slot)
            for start, end in ((slot.touched[0], min(low, slot.touched[1])), (max(high, slot.touched[0]), slot.touched[1])):
                if start < end:
                    released.append((index, start, end))
            slot.touched = (low, high)
        self._shrunk.clear()
        return tuple(released)

    def in_use_tokens(self, placement: Placement | None = None) -> int:
        """Tokens that cannot be evicted: what runs and what running ones lean on, after `placement` too, but for its own room."""
        total, page = 0, self.tokens_per_page
        for slot in self.slots:
            if slot.running:  # as `_size` has it: a call each would cost more than all else that is asked after a step
                low, high = slot.prefix_tokens, slot.reserved
                total += -(-high // page) * page - low // page * page if low < high else 0
                continue
            leans_now = placement is not None and placement.prefix_slot == slot.index
            if not slot.leaners and not leans_now:  # most slots, at every step
                continue
            pins = [self.slots[leaner].prefix_tokens for leaner in slot.leaners if self.slots[leaner].running]
            if placement is not None and leans_now:
                pins.append(placement.prefix_tokens)
            total += self._pages(0, max(pins, default=0))
        return total

    def fits(self, placement: Placement, num_tokens: int) -> bool:
        """Whether so many tokens could be placed so; all that nobody runs on can be evicted."""
        if placement.adopt is None and not any(self._takeable(placement)):
            return False
        room = self._pages(placement.prefix_tokens, num_tokens)
        return self.in_use_tokens(placement) + room <= self.capacity_tokens

    def _takeable(self, placement: Placement) -> Iterable[Slot]:
        sources = self._sources(placement)
        return (slot for slot in self.slots if not slot.running and not slot.leaners and slot.index not in sources)

    def _take(self, placement: Placement) -> Slot:
        """A free slot, else the least recently used cached one, emptied."""
        slot = min(self._takeable(placement), key=lambda slot: (slot.num_tokens > 0, slot.used_at))
        self._shrink(slot, 0)
        return slot

    def _make_room(self, tokens: int) -> bool:
        """Trims cached slots from their ends, least recently used first, as far as needed."""
        while (missing := self.used_tokens + tokens - self.capacity_tokens) > 0:
            cached = [slot for slot in self.slots if not slot.running and self._trimmable(slot) > 0]
            if not cached:
                return False
            slot = min(cached, key=lambda slot: slot.used_at)
            self._shrink(slot, max(self._pinned(slot), self._range(slot)[1] - missing))
        return True

    def _shrink(self, slot: Slot, end: int) -> None:
        """Cuts a slot that is not running down to `end`; what is left too short to be of use goes altogether."""
        if end <= slot.prefix_tokens or (end < MIN_SHARED_TOKENS and not slot.leaners):
            end = 0
        del slot.token_ids[end:]
        slot.num_tokens = min(slot.num_tokens, end)
        prefix = (slot.prefix_slot, slot.prefix_tokens) if end else (None, 0)
        self._set(slot, *prefix, slot.num_tokens)

    def _set(self, slot: Slot, prefix_slot: int | None, prefix_tokens: int, reserved: int) -> None:
        """The only place where accounts, leaners and touched pages change, so that they change together."""
        self.used_tokens -= self._size(slot)
        if slot.prefix_slot is not None:
            self.slots[slot.prefix_slot].leaners.discard(slot.index)
        slot.prefix_slot, slot.prefix_tokens, slot.reserved = prefix_slot, prefix_tokens, reserved
        if prefix_slot is not None:
            self.slots[prefix_slot].leaners.add(slot.index)
        self.used_tokens += self._size(slot)
        held = self._range(slot)
        slot.touched = _hull(slot.touched, held)
        if slot.touched != held:
            self._shrunk.add(slot.index)

    def _sources(self, placement: Placement) -> set[int]:
        sources = {source for source, _, _ in placement.copies}
        return sources if placement.prefix_slot is None else sources | {placement.prefix_slot}

    def _tick(self, slot: Slot) -> None:
        self._ticks += 1
        slot.used_at = self._ticks

    def _pinned(self, slot: Slot) -> int:
        """How far others lean on this slot."""
        return max((self.slots[leaner].prefix_tokens for leaner in slot.leaners), default=0)

    def _trimmable(self, slot: Slot) -> int:
        return self._size(slot) - self._pages(slot.prefix_tokens, self._pinned(slot))

    def _size(self, slot: Slot) -> int:
        return self._pages(slot.prefix_tokens, slot.reserved)

    def _pages(self, start: int, end: int) -> int:
        """Tokens of the whole pages that positions `[start, end)` lie on."""
        low, high = self._aligned(start, end)
        return high - low

    def _range(self, slot: Slot) -> Range:
        return self._aligned(slot.prefix_tokens, slot.reserved)

    def _aligned(self, start: int, end: int) -> Range:
        page = self.tokens_per_page
        return (start // page * page, -(-end // page) * page) if start < end else _EMPTY


def _hull(first: Range, second: Range) -> Range:
    if _EMPTY in (first, second):
        return second if first == _EMPTY else first
    return (min(first[0], second[0]), max(first[1], second[1]))
