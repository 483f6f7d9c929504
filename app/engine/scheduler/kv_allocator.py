"""KV allocation as counts: slots, shared prefixes, and eviction of cached slots when capacity is needed.

A slot is free, running (a sequence owns it) or cached (it holds the KV of a finished sequence; the least recently used
slot is evicted first). `longest_match` finds the longest cached prefix of a prompt, `KvSlots` decides which placement
fits, and `KvAllocator` gives each sequence a slot and takes it back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Protocol

from app.engine.scheduler.batch import KvCopy, PrefixScope, ScheduledSpan, Sequence, StateCopy
from app.metrics.steps import StateUsage

# If fewer tokens than this are shared, they are computed again. They are part of a step that reads all weights
# anyway (measured: a product of 16 rows costs about as much as one of 8 rows), and sharing would pin a slot for
# them.
MIN_SHARED_TOKENS = 16

PositionRange = tuple[int, int]
_EMPTY_RANGE: PositionRange = (0, 0)
_PLAIN = PrefixScope()
# tokens compared at once by list equality, which runs in C; only a block that differs is compared token by token
_COMPARED_TOKENS = 128
_MIN_REUSE_RATIO = (
    4  # a cached slot is reused in place if at most a quarter of the reused length would be lost with its end
)
# Time that a step may spend on reading prefixes: while other sequences decode, and while none does.
READ_SECONDS_BESIDE_DECODES, READ_SECONDS_ALONE = 0.03, 1.0
# A prompt of so many tokens has a checkpoint before its end, from which the same prompt goes on, and the next turn of its
# conversation, which may not share the last tokens: those with which a template begins an answer.
MIN_CHECKPOINT_TOKENS, _UNSHARED_TOKENS = 64, 16


@dataclass(slots=True, eq=False)
class KvSlot:
    """One long region of KV memory.

    Positions `[0, num_tokens)` of `token_ids` are computed, in `scope`; below `prefix_tokens` they are stored in
    `prefix_slot`. Invariant: a slot whose prefix is shared does not share a prefix itself. If `has_state`, the slot's own
    recurrent state is that after `state_tokens`, and `checkpoints` has the row of the one after each position.
    """

    index: int
    running: bool = False
    token_ids: list[int] = field(default_factory=list)  # while running, this is the sequence's list, which grows
    num_tokens: int = 0
    prefix_slot: int | None = None
    prefix_tokens: int = 0
    reserved: int = 0  # the positions [prefix_tokens, reserved) count against the budget
    sharers: set[int] = field(default_factory=set)
    # Positions whose pages may use memory: those accounted for, and those not given back yet
    resident: PositionRange = _EMPTY_RANGE
    used_at: int = 0
    scope: PrefixScope = _PLAIN
    has_state: bool = False
    state_tokens: int = 0
    checkpoints: dict[int, int] = field(default_factory=dict)

    def last_state(self, limit: int) -> int:
        """Return the last position, at most `limit`, after which a state is kept that no step changes; 0 without one."""
        return max((one for one in self.states() if one <= limit), default=0) if self.has_state else limit

    def states(self) -> set[int]:
        """Return the positions after which a state is kept that no step changes."""
        end = {self.state_tokens} if not self.running and 0 < self.state_tokens <= self.num_tokens else set()
        return end.union(self.checkpoints)

    def state_row(self, position: int) -> int | None:
        """Return the row of the state after `last_state`'s position; None if there are no states."""
        return self.checkpoints.get(position, self.index) if self.has_state else None


@dataclass(frozen=True, slots=True)
class Placement:
    """A possible location of a sequence, whose first `cached` tokens need not be computed.

    Either the cached slot `reused_slot`, or a new slot that shares the prefix in `prefix_slot` and gets `copies`
    (source, start, end). `state`: the row of the recurrent state after these tokens, if it has to be copied. `recomputed`:
    the tokens of the longest known prefix that are computed again, since no state after them is kept.
    """

    cached: int = 0
    reused_slot: int | None = None
    prefix_slot: int | None = None
    prefix_tokens: int = 0
    copies: tuple[tuple[int, int, int], ...] = ()
    state: int | None = None
    recomputed: int = 0


class StateCheckpoints:
    """Copies of recurrent states, in rows from `first_row` on. The least recently used one is dropped for another.

    They are made after every `interval` tokens, and shortly before the end of a prompt that is long or has several choices.
    """

    def __init__(self, first_row: int, num_rows: int, interval: int, row_bytes: int = 0) -> None:
        self.num_rows, self.interval, self._row_bytes = num_rows, interval, row_bytes
        self.hits = self.recomputed_tokens = 0  # since the start, as in `StateUsage`
        self._free = list(range(first_row, first_row + num_rows))
        self._used: OrderedDict[int, tuple[KvSlot, int]] = OrderedDict()  # by row; the most recently used one is last
        self._copies: list[StateCopy] = []

    @property
    def num_used(self) -> int:
        return len(self._used)

    def positions(self, sequence: Sequence, end: int) -> list[int]:
        """Return the positions, after the computed tokens and up to `end`, at which the state of a sequence is saved."""
        if not self.num_rows:
            return []
        computed, prompt = sequence.num_computed, sequence.num_prompt_tokens
        found = range((computed // self.interval + 1) * self.interval, end + 1, self.interval)
        last = 0
        if sequence.params.num_sequences > 1:
            last = prompt - 1
        elif prompt >= MIN_CHECKPOINT_TOKENS:
            last = prompt - _UNSHARED_TOKENS
        return sorted({*found, last}) if computed < last <= end else list(found)

    def save(self, slot: KvSlot) -> None:
        """Copy the state of a running slot before the next step."""
        self._copies.append((slot.index, self.reserve(slot, slot.state_tokens), slot.state_tokens))

    def reserve(self, slot: KvSlot, position: int) -> int:
        """Return the row of a checkpoint, to which the caller has the state after this position copied."""
        if position in slot.checkpoints:
            return slot.checkpoints[position]
        if not self._free:
            row, (other, end) = self._used.popitem(last=False)
            del other.checkpoints[end]
            self._free.append(row)
        row = self._free.pop()
        slot.checkpoints[position] = row
        self._used[row] = (slot, position)
        return row

    def restore(self, row: int, slot: KvSlot) -> None:
        """Copy the state of a row, or of another slot, into a slot before the next step."""
        if row in self._used:
            self._used.move_to_end(row)
        self._copies.append((row, slot.index, slot.state_tokens))

    def drop(self, slot: KvSlot, end: int) -> None:
        """Drop a slot's checkpoints after position `end`."""
        for position in [one for one in slot.checkpoints if one > end]:
            row = slot.checkpoints.pop(position)
            del self._used[row]
            self._free.append(row)

    def take_copies(self) -> tuple[StateCopy, ...]:
        copies, self._copies = tuple(self._copies), []
        return copies

    def usage(self, slots: Iterable[KvSlot]) -> StateUsage:
        """Return what states of these slots and checkpoints take, and what they saved."""
        rows = self.num_used + sum(slot.num_tokens > 0 for slot in slots)
        return StateUsage(rows * self._row_bytes, self.num_used, self.hits, self.recomputed_tokens)


class KvSlots:
    """All slots and their common token budget; `num_slots` should be twice the number of running sequences.

    `shares` False: nothing that a sequence computed is read by another one. With `checkpoints` a slot also holds the recurrent
    state after the sequence's last computed token, so a prefix can only end there or at a checkpoint.
    """

    def __init__(
        self,
        num_slots: int,
        capacity_tokens: int,
        tokens_per_page: int = 1,
        *,
        shares: bool = True,
        checkpoints: StateCheckpoints | None = None,
    ) -> None:
        self.shares, self.checkpoints = shares, checkpoints
        self.copies_forks = not shares  # a fork has a copy of its own of all that it continues
        self.slots = [KvSlot(index, has_state=checkpoints is not None) for index in range(num_slots)]
        self.tokens_per_page = tokens_per_page
        self.capacity_tokens = capacity_tokens // tokens_per_page * tokens_per_page
        self.used_tokens = 0  # tokens of whole pages
        self.on_cut: Callable[[KvSlot, int], None] = lambda slot, end: (
            None
        )  # before a cached slot loses what follows `end`
        self._shrunk: set[int] = set()
        self._ticks = 0

    def allocate(self, placement: Placement, token_ids: list[int], scope: PrefixScope = _PLAIN) -> int | None:
        """Return the slot that now runs these tokens, with capacity for all; None, with nothing changed, without it."""
        if not self.fits(placement, len(token_ids)):
            return None
        slot = self._take_slot(placement) if placement.reused_slot is None else self.slots[placement.reused_slot]
        for source in self._sources(placement):
            self._tick(self.slots[source])
        slot.running, slot.token_ids, slot.num_tokens = True, token_ids, placement.cached
        slot.scope, slot.state_tokens = scope, placement.cached
        if self.checkpoints is not None:
            self.checkpoints.drop(slot, placement.cached)
            if placement.state is not None:
                self.checkpoints.restore(placement.state, slot)
        self._set(slot, placement.prefix_slot, placement.prefix_tokens, min(slot.reserved, placement.cached))
        reserved = self.reserve(slot.index, len(token_ids))
        assert reserved, "a placement that fits must have capacity"
        return slot.index

    def reserve(self, index: int, end: int) -> bool:
        """Account for positions up to `end`, evicting cached slots if needed; False if running slots leave too little."""
        slot = self.slots[index]
        page = self.tokens_per_page
        if slot.prefix_tokens < slot.reserved <= end and (slot.reserved - 1) // page == (end - 1) // page:
            # The last page is accounted for already, which is the case in most steps of most sequences.
            slot.reserved = end
            return True
        growth = self._pages(slot.prefix_tokens, end) - self._pages(slot.prefix_tokens, slot.reserved)
        if growth > 0 and not self._evict(growth):
            return False
        self._set(slot, slot.prefix_slot, slot.prefix_tokens, max(end, slot.reserved))
        return True

    def trim(self, index: int, end: int) -> None:
        """Stop accounting for positions beyond `end` of a running slot."""
        slot = self.slots[index]
        self._set(slot, slot.prefix_slot, slot.prefix_tokens, min(slot.reserved, end))

    def set_computed(self, index: int, num_tokens: int) -> None:
        slot = self.slots[index]
        slot.num_tokens = slot.state_tokens = num_tokens

    def release(self, index: int, keep: int) -> None:
        """Turn the slot of a sequence that has left into a cached one of `keep` tokens, and of shared prefixes."""
        slot = self.slots[index]
        slot.running = False
        slot.token_ids = slot.token_ids[: slot.num_tokens]
        if not keep:  # a step that failed may have changed it
            slot.state_tokens = 0
        self._tick(slot)
        self._shrink(slot, max(min(keep if self.shares else 0, slot.num_tokens), self._pinned(slot)))

    def take_state_copies(self) -> tuple[StateCopy, ...]:
        """Return the copies of recurrent states that the next step begins with."""
        return () if self.checkpoints is None else self.checkpoints.take_copies()

    def take_released(self) -> tuple[tuple[int, int, int], ...]:
        """Return the pages no longer accounted for, once each, as (slot, first position, end position)."""
        released = []
        for index in sorted(self._shrunk):
            slot = self.slots[index]
            low, high = self._range(slot)
            for start, end in (
                (slot.resident[0], min(low, slot.resident[1])),
                (max(high, slot.resident[0]), slot.resident[1]),
            ):
                if start < end:
                    released.append((index, start, end))
            slot.resident = (low, high)
        self._shrunk.clear()
        return tuple(released)

    def in_use_tokens(self, placement: Placement | None = None) -> int:
        """Return the tokens that cannot be evicted: running slots and the prefixes that they, or `placement`, share."""
        total, page = 0, self.tokens_per_page
        for slot in self.slots:
            # `_size` is inlined: one call per slot would cost more than everything else that is computed after a
            # step
            if slot.running:
                low, high = slot.prefix_tokens, slot.reserved
                total += -(-high // page) * page - low // page * page if low < high else 0
                continue
            will_be_shared = placement is not None and placement.prefix_slot == slot.index
            if not slot.sharers and not will_be_shared:  # true for most slots at every step
                continue
            pins = [self.slots[sharer].prefix_tokens for sharer in slot.sharers if self.slots[sharer].running]
            if placement is not None and will_be_shared:
                pins.append(placement.prefix_tokens)
            total += self._pages(0, max(pins, default=0))
        return total

    def fits(self, placement: Placement, num_tokens: int) -> bool:
        """Return True if this number of tokens could be placed so, with all KV that nobody runs evicted."""
        if placement.reused_slot is None and not any(self._available(placement)):
            return False
        needed = self._pages(placement.prefix_tokens, num_tokens)
        return self.in_use_tokens(placement) + needed <= self.capacity_tokens

    def _available(self, placement: Placement) -> Iterable[KvSlot]:
        sources = self._sources(placement)
        return (slot for slot in self.slots if not slot.running and not slot.sharers and slot.index not in sources)

    def _take_slot(self, placement: Placement) -> KvSlot:
        slot = min(self._available(placement), key=lambda slot: (slot.num_tokens > 0, slot.used_at))
        self.on_cut(slot, 0)
        self._shrink(slot, 0)
        return slot

    def _evict(self, tokens: int) -> bool:
        """Trim cached slots from their ends, least recently used first, as far as needed."""
        while (missing := self.used_tokens + tokens - self.capacity_tokens) > 0:
            cached = [slot for slot in self.slots if not slot.running and self._trimmable(slot) > 0]
            if not cached:
                return False
            slot = min(cached, key=lambda slot: slot.used_at)
            end = max(self._pinned(slot), self._range(slot)[1] - missing)
            self.on_cut(slot, end)
            self._shrink(slot, end)
        return True

    def _shrink(self, slot: KvSlot, end: int) -> None:
        """Cut a slot that is not running to `end`, or free it if the rest is too short to be useful."""
        if not slot.sharers:
            end = slot.last_state(end)  # nothing goes on from what is after it
        if end <= slot.prefix_tokens or (end < MIN_SHARED_TOKENS and not slot.sharers):
            end = 0
        del slot.token_ids[end:]
        if self.checkpoints is not None:
            self.checkpoints.drop(slot, end)
        slot.num_tokens = min(slot.num_tokens, end)
        prefix = (slot.prefix_slot, slot.prefix_tokens) if end else (None, 0)
        self._set(slot, *prefix, slot.num_tokens)

    def _set(self, slot: KvSlot, prefix_slot: int | None, prefix_tokens: int, reserved: int) -> None:
        """Change accounting, sharing and touched pages together. This is the only method that changes them."""
        self.used_tokens -= self._size(slot)
        if slot.prefix_slot is not None:
            self.slots[slot.prefix_slot].sharers.discard(slot.index)
        slot.prefix_slot, slot.prefix_tokens, slot.reserved = prefix_slot, prefix_tokens, reserved
        if prefix_slot is not None:
            self.slots[prefix_slot].sharers.add(slot.index)
        self.used_tokens += self._size(slot)
        held = self._range(slot)
        slot.resident = _hull(slot.resident, held)
        if slot.resident != held:
            self._shrunk.add(slot.index)

    def _sources(self, placement: Placement) -> set[int]:
        sources = {source for source, _, _ in placement.copies}
        return sources if placement.prefix_slot is None else sources | {placement.prefix_slot}

    def _tick(self, slot: KvSlot) -> None:
        self._ticks += 1
        slot.used_at = self._ticks

    def _pinned(self, slot: KvSlot) -> int:
        return max((self.slots[sharer].prefix_tokens for sharer in slot.sharers), default=0)

    def _trimmable(self, slot: KvSlot) -> int:
        return self._size(slot) - self._pages(slot.prefix_tokens, self._pinned(slot))

    def _size(self, slot: KvSlot) -> int:
        return self._pages(slot.prefix_tokens, slot.reserved)

    def _pages(self, start: int, end: int) -> int:
        low, high = self._aligned(start, end)
        return high - low

    def _range(self, slot: KvSlot) -> PositionRange:
        return self._aligned(slot.prefix_tokens, slot.reserved)

    def _aligned(self, start: int, end: int) -> PositionRange:
        page = self.tokens_per_page
        return (start // page * page, -(-end // page) * page) if start < end else _EMPTY_RANGE


def _hull(first: PositionRange, second: PositionRange) -> PositionRange:
    if _EMPTY_RANGE in (first, second):
        return second if first == _EMPTY_RANGE else first
    return (min(first[0], second[0]), max(first[1], second[1]))


def placements(
    best: tuple[KvSlot, int, int] | None, alone: bool = False, minimum: int = MIN_SHARED_TOKENS
) -> Iterator[Placement]:
    """Yield the possible placements of a sequence, best first. The last one always computes all tokens.

    `best`: what `longest_match` found, of which less than `minimum` tokens are not reused. `alone`: the placement may not
    share another slot's prefix.
    """
    if best is None:
        yield Placement()
        return
    source, length, known = best
    if length >= minimum:
        for placement in _placements_after(source, length, alone):
            yield replace(placement, recomputed=known - length) if known > length else placement
    yield Placement(recomputed=known if length < minimum and known >= MIN_SHARED_TOKENS else 0)


def _placements_after(source: KvSlot, length: int, alone: bool) -> Iterator[Placement]:
    state = source.state_row(length)
    reusable = not source.running and not source.sharers and not (alone and source.prefix_slot is not None)
    if reusable and (source.num_tokens - length) * _MIN_REUSE_RATIO <= length:
        yield _reused_placement(source, length, state)
    yield copied_placement(source, length, state) if alone else shared_placement(source, length, state)
    if reusable:
        yield _reused_placement(source, length, state)


def shared_placement(source: KvSlot, length: int, state: int | None = None) -> Placement:
    """Return a placement in a new slot that shares `length` tokens of `source`, or its prefix and a copied tail."""
    if source.prefix_slot is None:
        return Placement(length, prefix_slot=source.index, prefix_tokens=length, state=state)
    shared = min(length, source.prefix_tokens)
    tail = ((source.index, shared, length),) if shared < length else ()
    return Placement(length, prefix_slot=source.prefix_slot, prefix_tokens=shared, copies=tail, state=state)


def copied_placement(source: KvSlot, length: int, state: int | None = None) -> Placement:
    shared = min(length, source.prefix_tokens)
    parts = ((source.prefix_slot, 0, shared), (source.index, shared, length))
    copies = tuple((slot, start, end) for slot, start, end in parts if slot is not None and start < end)
    return Placement(length, copies=copies, state=state)


def _reused_placement(source: KvSlot, length: int, state: int | None = None) -> Placement:
    shared = min(length, source.prefix_tokens)
    state = None if source.state_tokens == length else state
    return Placement(
        length, reused_slot=source.index, prefix_slot=source.prefix_slot, prefix_tokens=shared, state=state
    )


def longest_match(
    slots: Items[KvSlot], token_ids: list[int], limit: int, scope: PrefixScope, among: Collection[int] | None = None
) -> tuple[KvSlot, int, int] | None:
    """Return the slot with the longest prefix to go on from, its length, at most `limit`, and that of the longest prefix.

    Slots of another scope are not read, nor those that are not `among` the given numbers and hold none of their prefixes.
    Among equals, a slot that can be reused in place comes first, then one that can be shared, then the shortest tail to
    copy.
    """
    found: dict[int, int] = {}
    compared = slots
    if among is not None:  # and the slots that hold their prefixes
        bases_of = {slots[index].prefix_slot for index in among}
        compared = [slot for slot in slots if slot.index in among or slot.index in bases_of]
    for slot in compared:
        if slot.prefix_slot is None and slot.num_tokens and slot.scope == scope:
            found[slot.index] = shared_prefix_length(slot.token_ids, token_ids, 0, min(slot.num_tokens, limit))
    bases = dict(found)
    for slot in compared:  # a sharing slot can be longer than its base only if the whole shared part matches
        if (
            slot.prefix_slot is not None
            and slot.scope == scope
            and bases.get(slot.prefix_slot, 0) >= slot.prefix_tokens
            and slot.num_tokens > slot.prefix_tokens
        ):
            found[slot.index] = shared_prefix_length(
                slot.token_ids, token_ids, slot.prefix_tokens, min(slot.num_tokens, limit)
            )

    known = max(found.values(), default=0)
    found = {index: slots[index].last_state(length) for index, length in found.items()}

    def worth(index: int) -> tuple[int, bool, int]:
        slot, length = slots[index], found[index]
        whole = not slot.running and not slot.sharers and (slot.num_tokens - length) * _MIN_REUSE_RATIO <= length
        return length, whole, slot.prefix_tokens if slot.prefix_slot is not None else length

    best = max(found, key=worth, default=None)
    return None if best is None else (slots[best], found[best], known)


def shared_prefix_length(first: list[int], second: list[int], start: int, end: int) -> int:
    """Return the length of the common prefix; items below `start` are equal, items from `end` do not count."""
    while start < end:
        stop = min(start + _COMPARED_TOKENS, end)
        if first[start:stop] != second[start:stop]:
            return next(at for at in range(start, stop) if first[at] != second[at])
        start = stop
    return start


class KvAllocator:
    """Allocates slots to sequences. Copies are collected for the next batch, which does them first, in order."""

    def __init__(self, pool: KvSlots) -> None:
        self.pool = pool
        self._copies: list[KvCopy] = []
        # The longest prefix need not be the best one where a prefix can only end at some positions.
        self._index = PrefixIndex(len(pool.slots)) if pool.checkpoints is None else None

    def admit(self, sequence: Sequence) -> bool:
        """Place a waiting sequence with capacity for all its tokens, and reuse cached KV. False if it must wait."""
        for placement in self._placements(sequence):
            if self._allocate(sequence, placement):
                if self.pool.checkpoints is not None:
                    self.pool.checkpoints.hits += placement.cached > 0
                    self.pool.checkpoints.recomputed_tokens += placement.recomputed
                return True
        return False

    def can_admit(self, sequence: Sequence) -> bool:
        """Return True if `admit` would succeed. Nothing changes."""
        return any(self.pool.fits(placement, len(sequence.token_ids)) for placement in self._placements(sequence))

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Place a child that continues its parent's computed tokens. False if there is no capacity."""
        assert parent.slot is not None, "only a running sequence has children"
        end, pool = parent.num_computed, self.pool
        if not pool.copies_forks:
            state = None if pool.checkpoints is None else parent.slot
            return self._allocate(child, shared_placement(pool.slots[parent.slot], end, state))
        if not self._allocate(child, Placement()):
            return False
        assert child.slot is not None, "it has just been allocated"
        self._copies.append(KvCopy(parent.slot, child.slot, 0, end))
        self.set_computed(child, end)
        return True

    def grow(self, sequence: Sequence, num_more: int = 0) -> bool:
        """Reserve capacity for all tokens and `num_more` more; False if this would require a preemption."""
        assert sequence.slot is not None, "a running sequence has a slot"
        return self.pool.reserve(sequence.slot, len(sequence.token_ids) + num_more)

    def trim(self, sequence: Sequence) -> None:
        """Release the capacity that was reserved for rejected draft tokens."""
        assert sequence.slot is not None, "a running sequence has a slot"
        self.pool.trim(sequence.slot, len(sequence.token_ids))

    def set_computed(self, sequence: Sequence, end: int) -> None:
        assert sequence.slot is not None, "a computed sequence has a slot"
        checkpoints, slot = self.pool.checkpoints, self.pool.slots[sequence.slot]
        passed = checkpoints.positions(sequence, end) if checkpoints is not None else []
        sequence.num_computed = end
        self.pool.set_computed(sequence.slot, end)
        if checkpoints is not None and passed and passed[-1] not in slot.checkpoints:  # by drafts, or read from a store
            checkpoints.save(slot)

    def save_states(self, spans: Iterable[ScheduledSpan]) -> None:
        """Let a step save the states of its sequences at checkpoints, except where draft tokens may be rejected."""
        checkpoints = self.pool.checkpoints
        assert checkpoints is not None, "the model has states"
        for span in spans:
            positions = [] if span.draft_ids else checkpoints.positions(span.sequence, span.end)
            slot = self.pool.slots[span.slot]
            span.saves = tuple([(position, checkpoints.reserve(slot, position)) for position in positions])

    def release(self, sequence: Sequence, keep: int) -> None:
        """Take the slot back. The first `keep` computed tokens stay cached."""
        assert sequence.slot is not None, "a running sequence has a slot"
        self._copies = [copy for copy in self._copies if copy.target != sequence.slot]
        self.pool.release(sequence.slot, keep)
        sequence.slot, sequence.prefix_slot, sequence.prefix_tokens, sequence.num_computed = None, None, 0, 0

    def take_copies(self) -> tuple[KvCopy, ...]:
        copies, self._copies = tuple(self._copies), []
        return copies

    def _placements(self, sequence: Sequence) -> Iterator[Placement]:
        if not self.pool.shares:
            return iter((Placement(),))
        # The prompt of a further choice was computed in order to be shared, so any length is reused. A beam search
        # begins in a slot without a shared prefix, because its beams will share that slot.
        minimum, maximum = MIN_SHARED_TOKENS if sequence.choice == 0 else 1, sequence.max_cached_tokens
        token_ids, scope = sequence.token_ids, sequence.prefix_scope
        among = None if self._index is None else self._index.candidates(self.pool.slots, token_ids, maximum, scope)
        if not among and minimum < FIRST_TOKENS:
            among = None
        best = longest_match(self.pool.slots, token_ids, maximum, scope, among)
        return placements(best, sequence.is_beam, minimum)

    def _allocate(self, sequence: Sequence, placement: Placement) -> bool:
        slot = self.pool.allocate(placement, sequence.token_ids, sequence.prefix_scope)
        if slot is None:
            return False
        sequence.slot, sequence.num_computed = slot, placement.cached
        sequence.num_admitted += 1
        sequence.prefix_slot, sequence.prefix_tokens = placement.prefix_slot, placement.prefix_tokens
        self._copies += [KvCopy(source, slot, start, end) for source, start, end in placement.copies]
        return True


class PrefixStore(Protocol):
    """Keys and values of prefixes that were computed earlier, also by other processes. It is used between steps."""

    def move(self, copies: Items[KvCopy], released: Items[tuple[int, int, int]], states: Items[StateCopy]) -> None:
        """Do these copies and releases of `Batch` now, before anything is read into the slots or saved."""

    def read(self, sequence: Sequence, max_seconds: float) -> tuple[int, bool]:
        """Read keys and values that follow the computed tokens of a running sequence into its slot.

        Returns the tokens computed now, and True if time ended before all was read. At least one block is read if there
        is one. If sequences have a recurrent state, it is read too, and the tokens end where one was kept.
        """

    def save(self, slots: Iterable[KvSlot], is_wanted: Callable[[], bool]) -> None:
        """Keep the prefixes of the cached slots, until `is_wanted` returns True."""


# ---- prefixes by hashes -----------------------------------------------------------------------------------------------


FIRST_TOKENS, BLOCK_TOKENS = 16, 64  # the first block is shorter: prefixes of fewer tokens are not shared


class PrefixIndex:
    """The slots by the hashes of their blocks, so that a prompt is compared with few. Each look-up updates it first.

    The hash of a block includes that of the block before it. Slots that are found are compared token by token, so a
    collision only costs time. The reference is the comparison with all slots (`longest_match` without `among`).
    """

    def __init__(self, num_slots: int) -> None:
        self._slots: dict[int, set[int]] = {}
        self._hashes: list[list[int]] = [[] for _ in range(num_slots)]
        self._hashed: list[tuple[list[int], PrefixScope] | None] = [None] * num_slots  # which list the hashes are of

    def candidates(
        self, slots: Items[KvSlot], token_ids: list[int], limit: int, scope: PrefixScope
    ) -> set[int] | frozenset[int]:
        """Return the numbers of the slots of this scope that share most of the first `limit` tokens, and maybe more.

        None of them is missing if that is at least `FIRST_TOKENS` tokens.
        """
        self._update(slots)
        found: set[int] | frozenset[int] = frozenset()
        for _, block in block_hashes(token_ids, limit, scope):
            deeper = self._slots.get(block)
            if not deeper:
                break
            found = deeper
        return found

    def _update(self, slots: Items[KvSlot]) -> None:
        for slot in slots:
            hashes, hashed = self._hashes[slot.index], self._hashed[slot.index]
            count = _count(slot.num_tokens)
            is_same = hashed is not None and hashed[0] is slot.token_ids and hashed[1] == slot.scope
            if not is_same or count < len(hashes):
                self._forget(slot.index, count if is_same else 0)
                self._hashed[slot.index] = (slot.token_ids, slot.scope)
            if count > len(hashes):
                self._extend(slot, hashes)

    def _forget(self, index: int, count: int) -> None:
        hashes = self._hashes[index]
        for one in hashes[count:]:
            slots = self._slots[one]
            slots.discard(index)
            if not slots:
                del self._slots[one]
        del hashes[count:]

    def _extend(self, slot: KvSlot, hashes: list[int]) -> None:
        last = hashes[-1] if hashes else hash(slot.scope)
        at = _end(len(hashes))
        for end in _ends(len(hashes), slot.num_tokens):
            last, at = hash((last, *slot.token_ids[at:end])), end
            hashes.append(last)
            self._slots.setdefault(last, set()).add(slot.index)


def block_hashes(token_ids: Items[int], limit: int, scope: Hashable) -> Iterator[tuple[int, int]]:
    """Yield the end and the hash of each whole block of the first `limit` tokens."""
    last, at = hash(scope), 0
    for end in _ends(0, min(limit, len(token_ids))):
        last, at = hash((last, *token_ids[at:end])), end
        yield end, last


def _count(num_tokens: int) -> int:
    """Return the number of whole blocks."""
    return (num_tokens >= FIRST_TOKENS) + num_tokens // BLOCK_TOKENS


def _end(count: int) -> int:
    """Return the end of the first `count` blocks."""
    return 0 if count == 0 else FIRST_TOKENS if count == 1 else (count - 1) * BLOCK_TOKENS


def _ends(first: int, num_tokens: int) -> list[int]:
    """Return the ends of the whole blocks from block `first` on."""
    return [_end(count + 1) for count in range(first, _count(num_tokens))]
