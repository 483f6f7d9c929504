"""Where the sequences stand, as plain counts for whoever looks from another thread: the larger part of a `Snapshot`."""

from __future__ import annotations

from collections.abc import Sequence as Items

from app.engine.sequence import Sequence
from app.engine.slots import SlotPool
from app.measured import Snapshot


def standing(running: Items[Sequence], waiting: Items[Sequence], pool: SlotPool) -> Snapshot:
    """Running and waiting sequences, oldest first. Cached slots that can be evicted do not count as used."""
    rows: list[tuple[int, int]] = []
    prompts: list[tuple[int, int]] = []
    context = 0
    for one in running:  # once through, since it is after every step
        length = len(one.token_ids)
        made, uncomputed = length - one.num_prompt_tokens, length - one.num_computed
        if uncomputed == 1 and made > 0:
            rows.append((made, one.limit - length))
            context += length
        else:
            prompts.append((one.num_computed, uncomputed))
    return Snapshot(
        num_running=len({one.request_id for one in running}),
        kv_used_tokens=pool.in_use_tokens(),
        kv_capacity_tokens=pool.capacity_tokens,
        rows=tuple(rows),
        context_tokens=context,
        prompts=tuple(prompts),
        queue=tuple([len(one.token_ids) for one in waiting]),
    )
