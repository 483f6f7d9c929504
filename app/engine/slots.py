"""KV slots as counts: accounted positions, shared prefixes, and eviction of cached slots when capacity is needed.

A slot is free, running (a sequence owns it) or cached (it holds the KV of a finished sequence; the least recently
used slot is evicted first). `placements` finds reusable prefixes, and `KvAllocator` assigns slots to sequences. No
tensors are used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

# If fewer tokens than this are shared, they are computed again. They are part of a step that reads all weights
# anyway (measured: a product of 16 rows costs about as much as one of 8 rows), and sharing would pin a slot for
# them.
MIN_SHARED_TOKENS = 16

Range = tuple[int, int]
_EMPTY: Range = (0, 0)


@dataclass(slots=True, eq=False)
class Slot:
    """One long region of KV memory.

    Positions `[0, num_tokens)` of `token_ids` are computed; those below `prefix_tokens` are stored in
    `prefix_slot`. Invariant: a slot whose prefix is shared does not share a prefix itself, so a context has at
    most two segments.
    """

    index: int
    running: bool = False
    token_ids: list[int] = field(default_factory=list)  # while running, this is the sequence's list, which grows
    num_tokens: int = 0
    prefix_slot: int | None = None
    prefix_tokens: int = 0
    reserved: int = 0  # the positions [prefix_tokens, reserved) count against the budget
    leaners: set[int] = field(default_factory=set)
    touched: Range = _EMPTY  # positions whose pages may use memory: those accounted for, and those not given back yet
    used_at: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """A possible location of a sequence.

    It is either the cached slot `reused_slot`, or a new slot that shares the prefix in `prefix_slot` and gets
    `copies` (source, start, end). The first `cached` of its tokens need not be computed.
    """

    cached: int = 0
    adopt: int | None = None
    prefix_slot: int | None = None
    prefix_tokens: int = 0
    copies: tuple[tuple[int, int, int], ...] = ()


class SlotPool:
    """All slots and their common token budget.

    `num_slots` should be twice the number of running sequences: each sequence owns one slot and shares the prefix
    of at most one other slot.
    """

    def __init__(self, num_slots: int, capacity_tokens: int, tokens_per_page: int = 1) -> None:
        self.slots = [Slot(index) for index in range(num_slots)]
        self.tokens_per_page = tokens_per_page
        self.capacity_tokens = capacity_tokens // tokens_per_page * tokens_per_page
        self.used_tokens = 0  # tokens of whole pages
        self._shrunk: set[int] = set()
        self._ticks = 0

    def place(self, placement: Placement, token_ids: list[int]) -> int | None:
        """Return the slot that now runs these tokens, with capacity for all of them.

        Returns None, with nothing changed, if there is no capacity.
        """
        if not self.fits(placement, len(token_ids)):
            return None
        slot = self._take(placement) if placement.adopt is None else self.slots[placement.adopt]
        for source in self._sources(placement):
            self._tick(self.slots[source])
        slot.running, slot.token_ids, slot.num_tokens = True, token_ids, placement.cached
        self._set(slot, placement.prefix_slot, placement.prefix_tokens, min(slot.reserved, placement.cached))
        has_room = self.reserve(slot.index, len(token_ids))
        assert has_room, "a placement that fits must have capacity"
        return slot.index

    def reserve(self, index: int, end: int) -> bool:
        """Account for positions up to `end`, and evict cached slots if needed.

        Returns False if the running slots leave too little capacity.
        """
        slot = self.slots[index]
        page = self.tokens_per_page
        if slot.prefix_tokens < slot.reserved <= end and (slot.reserved - 1) // page == (end - 1) // page:
            # The last page is accounted for already, which is the case in most steps of most sequences.
            slot.reserved = end
            return True
        growth = self._pages(slot.prefix_tokens, end) - self._pages(slot.prefix_tokens, slot.reserved)
        if growth > 0 and not self._make_room(growth):
            return False
        self._set(slot, slot.prefix_slot, slot.prefix_tokens, max(end, slot.reserved))
        return True

    def trim(self, index: int, end: int) -> None:
        """Stop accounting for positions beyond `end` of a running slot."""
        slot = self.slots[index]
        self._set(slot, slot.prefix_slot, slot.prefix_tokens, min(slot.reserved, end))

    def computed(self, index: int, num_tokens: int) -> None:
        """Record that keys and values up to `num_tokens` have been written."""
        self.slots[index].num_tokens = num_tokens

    def release(self, index: int, keep: int) -> None:
        """Turn the slot of a sequence that has left into a cached slot.

        Its first `keep` computed tokens stay cached, and so does any prefix that other slots share.
        """
        slot = self.slots[index]
        slot.running = False
        slot.token_ids = slot.token_ids[: slot.num_tokens]
        self._tick(slot)
        self._shrink(slot, max(min(keep, slot.num_tokens), self._pinned(slot)))

    def take_released(self) -> tuple[tuple[int, int, int], ...]:
        """Return the pages that are no longer accounted for, as (slot, first position, end position).

        Each is returned once.
        """
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
        """Return the number of tokens that cannot be evicted: running slots and the prefixes that they share.

        If a placement is given, the prefix that it would share counts too, but not the tokens that it would need
        itself.
        """
        total, page = 0, self.tokens_per_page
        for slot in self.slots:
            # `_size` is inlined: one call per slot would cost more than everything else that is computed after a
            # step
            if slot.running:
                low, high = slot.prefix_tokens, slot.reserved
                total += -(-high // page) * page - low // page * page if low < high else 0
                continue
            leans_now = placement is not None and placement.prefix_slot == slot.index
            if not slot.leaners and not leans_now:  # true for most slots at every step
                continue
            pins = [self.slots[leaner].prefix_tokens for leaner in slot.leaners if self.slots[leaner].running]
            if placement is not None and leans_now:
                pins.append(placement.prefix_tokens)
            total += self._pages(0, max(pins, default=0))
        return total

    def fits(self, placement: Placement, num_tokens: int) -> bool:
        """Return True if this number of tokens could be placed so.

        All KV that no running sequence uses can be evicted.
        """
        if placement.adopt is None and not any(self._takeable(placement)):
            return False
        room = self._pages(placement.prefix_tokens, num_tokens)
        return self.in_use_tokens(placement) + room <= self.capacity_tokens

    def _takeable(self, placement: Placement) -> Iterable[Slot]:
        sources = self._sources(placement)
        return (slot for slot in self.slots if not slot.running and not slot.leaners and slot.index not in sources)

    def _take(self, placement: Placement) -> Slot:
        """Return a free slot, else the least recently used cached one, emptied."""
        slot = min(self._takeable(placement), key=lambda slot: (slot.num_tokens > 0, slot.used_at))
        self._shrink(slot, 0)
        return slot

    def _make_room(self, tokens: int) -> bool:
        """Trim cached slots from their ends, least recently used first, as far as needed."""
        while (missing := self.used_tokens + tokens - self.capacity_tokens) > 0:
            cached = [slot for slot in self.slots if not slot.running and self._trimmable(slot) > 0]
            if not cached:
                return False
            slot = min(cached, key=lambda slot: slot.used_at)
            self._shrink(slot, max(self._pinned(slot), self._range(slot)[1] - missing))
        return True

    def _shrink(self, slot: Slot, end: int) -> None:
        """Cut a slot that is not running to `end`. If the rest is too short to be useful, free the whole slot."""
        if end <= slot.prefix_tokens or (end < MIN_SHARED_TOKENS and not slot.leaners):
            end = 0
        del slot.token_ids[end:]
        slot.num_tokens = min(slot.num_tokens, end)
        prefix = (slot.prefix_slot, slot.prefix_tokens) if end else (None, 0)
        self._set(slot, *prefix, slot.num_tokens)

    def _set(self, slot: Slot, prefix_slot: int | None, prefix_tokens: int, reserved: int) -> None:
        """Change accounting, sharing and touched pages together. This is the only method that changes them."""
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
        """Return the number of leading positions of this slot that other slots share."""
        return max((self.slots[leaner].prefix_tokens for leaner in slot.leaners), default=0)

    def _trimmable(self, slot: Slot) -> int:
        return self._size(slot) - self._pages(slot.prefix_tokens, self._pinned(slot))

    def _size(self, slot: Slot) -> int:
        return self._pages(slot.prefix_tokens, slot.reserved)

    def _pages(self, start: int, end: int) -> int:
        """Return the number of tokens of the whole pages that contain positions `[start, end)`."""
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
