"""Where the sequences stand, as plain counts for whoever looks from another thread: the larger part of a `Snapshot`."""

from __future__ import annotations

from collections.abc import Sequence as Items

from app.engine.sequence import Sequence
from app.engine.slots import SlotPool
from app.measured import Snapshot


def standing(running: Items[Sequence], waiting: Items[Sequence], pool: SlotPool) -> Snapshot:
    """Running and waiting sequences, oldest first. Cached slots that can be evicted do not count as used."""
    decoding = [one for one in running if one.is_decoding]
    return Snapshot(
        num_running=len({one.request_id for one in running}),
        kv_used_tokens=pool.in_use_tokens(),
        kv_capacity_tokens=pool.capacity_tokens,
        rows=tuple((one.num_completion_tokens, one.limit - len(one.token_ids)) for one in decoding),
        context_tokens=sum(len(one.token_ids) for one in decoding),
        prompts=tuple((one.num_computed, one.num_uncomputed) for one in running if not one.is_decoding),
        queue=tuple(len(one.token_ids) for one in waiting),
    )
