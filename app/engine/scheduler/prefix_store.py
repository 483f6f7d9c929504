"""Prefixes that are kept outside the KV cache, as the scheduler sees them: without files and without tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import Protocol

from app.engine.scheduler.batch import KvCopy, Sequence
from app.engine.scheduler.kv_allocator import KvSlot

# Time that a step may spend on reading prefixes: while other sequences decode, and while none does.
READ_SECONDS_BESIDE_DECODES, READ_SECONDS_ALONE = 0.03, 1.0


class PrefixStore(Protocol):
    """Keys and values of prefixes that were computed earlier, also by other processes. It is used between steps."""

    def move(self, copies: Items[KvCopy], released: Items[tuple[int, int, int]]) -> None:
        """Do these copies and releases of `Batch` now, before anything is read into the slots."""
        ...

    def read(self, sequence: Sequence, max_seconds: float) -> tuple[int, bool]:
        """Read keys and values that follow the computed tokens of a running sequence into its slot.

        Returns the number of tokens that are computed now, and True if more could be read, but the time is over. At
        least one block is read if there is one.
        """
        ...

    def save(self, slots: Iterable[KvSlot], is_wanted: Callable[[], bool]) -> None:
        """Keep the prefixes of the cached slots, until `is_wanted` returns True."""
        ...
