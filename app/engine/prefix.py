"""Finds what of a prompt is in the KV cache already: the longest common prefix by token, and the ways a sequence could use it, best first.

Pure reading of slots; `slots.py` decides what fits and does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items

from app.engine.slots import MIN_SHARED_TOKENS, Placement, Slot

_BLOCK = 128  # tokens compared at once by list equality, which runs in C; only a block that differs is looked at token by token
_SPARED = 4  # a cached slot is taken over in place where at most a quarter of what is reused would be lost with its end


def placements(
    slots: Items[Slot], token_ids: list[int], alone: bool = False, minimum: int = MIN_SHARED_TOKENS
) -> Iterator[Placement]:
    """Ways to place a sequence, best first; the last one always computes everything. `alone`: it may not lean on another slot.

    At least one token is always left to compute, since its logits are wanted.
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
    """A new slot that shares the first `length` tokens of `source`: leans on it, or on what it leans on with a copy of its own tail."""
    if source.prefix_slot is None:
        return Placement(length, prefix_slot=source.index, prefix_tokens=length)
    shared = min(length, source.prefix_tokens)
    tail = ((source.index, shared, length),) if shared < length else ()
    return Placement(length, prefix_slot=source.prefix_slot, prefix_tokens=shared, copies=tail)


def copied(source: Slot, length: int) -> Placement:
    """A new slot of its own with a copy of the first `length` tokens."""
    shared = min(length, source.prefix_tokens)
    parts = ((source.prefix_slot, 0, shared), (source.index, shared, length))
    return Placement(length, copies=tuple((slot, start, end) for slot, start, end in parts if slot is not None and start < end))


def _adopted(source: Slot, length: int) -> Placement:
    """The cached slot itself, cut down to the common prefix."""
    shared = min(length, source.prefix_tokens)
    return Placement(length, adopt=source.index, prefix_slot=source.prefix_slot, prefix_tokens=shared)


def _best(slots: Items[Slot], token_ids: list[int]) -> tuple[Slot, int] | None:
    """The slot with the longest common prefix; of equals one to take over, then one to lean on, then the shortest tail to copy."""
    limit = len(token_ids) - 1
    found: dict[int, int] = {}
    for slot in slots:
        if slot.prefix_slot is None and slot.num_tokens:
            found[slot.index] = common_prefix(slot.token_ids, token_ids, 0, min(slot.num_tokens, limit))
    bases = dict(found)
    for slot in slots:  # a slot that leans can only be better than its base where the whole shared part matches
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
    """How many leading items are equal, given that those below `start` are and that only those below `end` count."""
    while start < end:
        stop = min(start + _BLOCK, end)
        if first[start:stop] != second[start:stop]:
            return next(at for at in range(start, stop) if first[at] != second[at])
        start = stop
    return start
