"""Scheduler state as plain counts that other threads can read. It is the larger part of an `EngineSnapshot`."""

from __future__ import annotations

from collections.abc import Sequence as Items

from app.engine.sequence import Sequence
from app.engine.slots import SlotPool
from app.measured import Snapshot


def standing(running: Items[Sequence], waiting: Items[Sequence], pool: SlotPool) -> Snapshot:
    """Return the counts of running and waiting sequences, which are given oldest first.

    Cached slots that can be evicted do not count as used.
    """
    rows: list[tuple[int, int]] = []
    prompts: list[tuple[int, int]] = []
    context = 0
    for one in running:  # a single pass, because this runs after every step
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
