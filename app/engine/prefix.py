"""Prefix cache lookup: find the longest cached prefix of a prompt, and the placements that can use it.

The lookup only reads slots. `KvSlots` decides which placement fits and makes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items

from app.engine.slots import MIN_SHARED_TOKENS, Placement, Slot

# tokens compared at once by list equality, which runs in C; only a block that differs is compared token by token
_BLOCK = 128
_SPARED = 4  # a cached slot is reused in place if at most a quarter of the reused length would be lost with its end


def placements(
    slots: Items[Slot], token_ids: list[int], alone: bool = False, minimum: int = MIN_SHARED_TOKENS
) -> Iterator[Placement]:
    """Yield the possible placements of a sequence, best first. The last one always computes all tokens.

    At least one token is always left to compute, because its logits are needed.

    Args:
        slots: All slots.
        token_ids: Tokens of the sequence.
        alone: The placement may not share another slot's prefix.
        minimum: Shortest prefix that is reused, in tokens.
    """
    best = _best(slots, token_ids)
    if best is not None and best[1] >= minimum:
        source, length = best
        adoptable = not source.running and not source.leaners and not (alone and source.prefix_slot is not None)
        if adoptable and (source.num_tokens - length) * _SPARED <= length:
            yield _adopted(source, length)
        yield copied(source, length) if alone else leaning(source, length)
        if adoptable:
            yield _adopted(source, length)
    yield Placement()


def leaning(source: Slot, length: int) -> Placement:
    """Return a placement in a new slot that shares the first `length` tokens of `source`.

    If `source` itself shares a prefix, the new slot shares the same one and gets a copy of the tail of `source`.
    """
    if source.prefix_slot is None:
        return Placement(length, prefix_slot=source.index, prefix_tokens=length)
    shared = min(length, source.prefix_tokens)
    tail = ((source.index, shared, length),) if shared < length else ()
    return Placement(length, prefix_slot=source.prefix_slot, prefix_tokens=shared, copies=tail)


def copied(source: Slot, length: int) -> Placement:
    """Return a placement in a new slot with a private copy of the first `length` tokens."""
    shared = min(length, source.prefix_tokens)
    parts = ((source.prefix_slot, 0, shared), (source.index, shared, length))
    return Placement(length, copies=tuple((slot, start, end) for slot, start, end in parts if slot is not None and start < end))


def _adopted(source: Slot, length: int) -> Placement:
    """Return a placement that reuses the cached slot itself, truncated to the common prefix."""
    shared = min(length, source.prefix_tokens)
    return Placement(length, adopt=source.index, prefix_slot=source.prefix_slot, prefix_tokens=shared)


def _best(slots: Items[Slot], token_ids: list[int]) -> tuple[Slot, int] | None:
    """Return the slot with the longest common prefix, and its length.

    Among equals, a slot that can be reused in place comes first, then one that can be shared, then the one with
    the shortest tail to copy.
    """
    limit = len(token_ids) - 1
    found: dict[int, int] = {}
    for slot in slots:
        if slot.prefix_slot is None and slot.num_tokens:
            found[slot.index] = common_prefix(slot.token_ids, token_ids, 0, min(slot.num_tokens, limit))
    bases = dict(found)
    for slot in slots:  # a sharing slot can be longer than its base only if the whole shared part matches
        if (
            slot.prefix_slot is not None
            and bases.get(slot.prefix_slot, 0) >= slot.prefix_tokens
            and slot.num_tokens > slot.prefix_tokens
        ):
            found[slot.index] = common_prefix(slot.token_ids, token_ids, slot.prefix_tokens, min(slot.num_tokens, limit))

    def worth(index: int) -> tuple[int, bool, int]:
        slot, length = slots[index], found[index]
        whole = not slot.running and not slot.leaners and (slot.num_tokens - length) * _SPARED <= length
        return length, whole, slot.prefix_tokens if slot.prefix_slot is not None else length

    best = max(found, key=worth, default=None)
    return None if best is None else (slots[best], found[best])


def common_prefix(first: list[int], second: list[int], start: int, end: int) -> int:
    """Return the length of the common prefix of two lists.

    Items below `start` are known to be equal, and only those below `end` count.
    """
    while start < end:
        stop = min(start + _BLOCK, end)
        if first[start:stop] != second[start:stop]:
            return next(at for at in range(start, stop) if first[at] != second[at])
        start = stop
    return start
