"""Index of the prefixes in KV slots by hashes of their blocks, so that a prompt is compared with few slots.

The hash of a block includes that of the block before it. Slots that are found are compared token by token, so a collision
only costs time. The reference is the comparison with all slots (`longest_match` without `among`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Items
from typing import Protocol

from app.engine.scheduler.batch import PrefixScope

FIRST_TOKENS, BLOCK_TOKENS = 16, 64  # the first block is shorter: prefixes of fewer tokens are not shared


class IndexedSlot(Protocol):
    index: int
    token_ids: list[int]
    num_tokens: int
    scope: PrefixScope


class PrefixIndex:
    """The slots by the hashes of their blocks. It is brought up to date before each look-up."""

    def __init__(self, num_slots: int) -> None:
        self._slots: dict[int, set[int]] = {}
        self._hashes: list[list[int]] = [[] for _ in range(num_slots)]
        self._hashed: list[tuple[list[int], PrefixScope] | None] = [None] * num_slots  # which list the hashes are of

    def candidates(
        self, slots: Items[IndexedSlot], token_ids: list[int], limit: int, scope: PrefixScope
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

    def _update(self, slots: Items[IndexedSlot]) -> None:
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

    def _extend(self, slot: IndexedSlot, hashes: list[int]) -> None:
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
