"""Slots that are found by hashes of blocks are those that a comparison with all slots finds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.scheduler import kv_allocator
from app.engine.scheduler.batch import PrefixScope
from app.engine.scheduler.kv_allocator import KvSlot, PrefixIndex, longest_match, placements
from engine_simulation import Simulation
from hypothesis_examples import examples

SCOPES = (PrefixScope(), PrefixScope(salt="mine"))


class Prompts:
    """Prompts that share some of one text, and go on differently."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.text = [self.random.randrange(1000) for _ in range(400)]

    def one(self) -> list[int]:
        shared, more = self.random.choice((0, 3, 15, 16, 63, 64, 100, 128, 300)), self.random.randrange(1, 100)
        return [*self.text[:shared], *(self.random.randrange(1000, 1003) for _ in range(more))]


def change(slots: list[KvSlot], prompts: Prompts) -> None:
    """Another sequence, maybe with another slot's prefix, more or fewer of its tokens, or their copy, as when it ends."""
    slot, what = prompts.random.choice(slots), prompts.random.randrange(5)
    if slot.sharers:
        return
    base = prompts.random.choice(slots)
    if what == 4 and base is not slot and base.prefix_slot is None and base.num_tokens:
        leave(slot, slots)
        shared = prompts.random.randrange(1, base.num_tokens + 1)
        slot.token_ids, slot.scope = [*base.token_ids[:shared], *prompts.one()], base.scope
        slot.num_tokens, slot.prefix_slot, slot.prefix_tokens = len(slot.token_ids), base.index, shared
        base.sharers.add(slot.index)
        return
    if slot.prefix_slot is not None and what == 2:
        return
    if what == 0 or not slot.token_ids:
        leave(slot, slots)
        slot.token_ids, slot.scope = prompts.one(), prompts.random.choice(SCOPES)
        slot.num_tokens = len(slot.token_ids)
    elif what == 1:
        slot.token_ids += prompts.one()[:70]
        slot.num_tokens = len(slot.token_ids)
    elif what == 2:
        slot.num_tokens = prompts.random.randrange(slot.num_tokens + 1)
        del slot.token_ids[slot.num_tokens :]
    else:
        slot.token_ids = slot.token_ids[: slot.num_tokens]


def leave(slot: KvSlot, slots: list[KvSlot]) -> None:
    if slot.prefix_slot is not None:
        slots[slot.prefix_slot].sharers.discard(slot.index)
    slot.prefix_slot, slot.prefix_tokens = None, 0


@given(st.integers(0, 10**6))
@settings(max_examples=examples(100))
def test_what_is_found_by_hashes_is_what_comparing_finds(seed: int) -> None:
    prompts, slots, index = Prompts(seed), [KvSlot(number) for number in range(6)], PrefixIndex(6)
    for _ in range(12):
        change(slots, prompts)
        token_ids, scope = prompts.one(), prompts.random.choice(SCOPES)
        limit = prompts.random.choice((len(token_ids) - 1, 40))
        among = index.candidates(slots, token_ids, limit, scope)
        found = longest_match(slots, token_ids, limit, scope, among)
        assert list(placements(found)) == list(placements(longest_match(slots, token_ids, limit, scope)))


def test_a_prompt_is_not_compared_with_slots_that_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, plain = list[int](), kv_allocator.shared_prefix_length

    def counted(first: list[int], second: list[int], start: int, end: int) -> int:
        compared.append(len(first))
        return plain(first, second, start, end)

    monkeypatch.setattr(kv_allocator, "shared_prefix_length", counted)
    sim = Simulation()
    for number in range(8):
        sim.add(f"r{number}", [number] * 40, max_tokens=2)
    sim.finish()
    assert compared == []
    sim.add("again", [3] * 40, max_tokens=2)
    sim.finish()
    assert len(compared) == 1


def test_nothing_is_left_of_slots_that_hold_nothing() -> None:
    index, slot = PrefixIndex(1), KvSlot(0, token_ids=list(range(200)), num_tokens=200)
    assert index.candidates([slot], list(range(200)), 199, PrefixScope()) == {0}
    slot.token_ids, slot.num_tokens = [], 0
    assert not index.candidates([slot], list(range(200)), 199, PrefixScope()) and not index._slots
