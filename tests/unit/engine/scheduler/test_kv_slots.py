"""Slots and their account: what fits, who leans on whom, what is evicted and which pages are given back."""

from __future__ import annotations

from app.engine.scheduler.kv_allocator import KvSlots, Placement


def occupy(pool: KvSlots, token_ids: list[int], placement: Placement = Placement()) -> int:  # noqa: B008
    """A running slot, all computed."""
    index = pool.allocate(placement, token_ids)
    assert index is not None
    pool.set_computed(index, len(token_ids))
    return index


def cache(pool: KvSlots, token_ids: list[int]) -> int:
    index = occupy(pool, token_ids)
    pool.release(index, len(token_ids))
    return index


def test_the_account_is_in_whole_pages() -> None:
    pool = KvSlots(num_slots=2, capacity_tokens=70, tokens_per_page=16)
    assert pool.capacity_tokens == 64
    index = occupy(pool, [1] * 17)
    assert pool.used_tokens == 32
    assert pool.reserve(index, 32) and pool.used_tokens == 32
    assert pool.reserve(index, 33) and pool.used_tokens == 48


def test_a_slot_that_leans_pays_for_its_own_pages_only() -> None:
    pool = KvSlots(num_slots=4, capacity_tokens=400, tokens_per_page=16)
    base = occupy(pool, [1] * 100)
    occupy(pool, [1] * 120, Placement(100, prefix_slot=base, prefix_tokens=100))
    assert pool.used_tokens == 112 + 32  # the second begins within the page of positions 96 to 111


def test_what_does_not_fit_changes_nothing() -> None:
    pool = KvSlots(num_slots=3, capacity_tokens=100)
    occupy(pool, [1] * 60)
    cached = cache(pool, [2] * 30)
    assert pool.allocate(Placement(), [3] * 41) is None
    assert pool.slots[cached].num_tokens == 30 and pool.used_tokens == 90
    assert pool.allocate(Placement(), [3] * 40) is not None


def test_the_least_recently_used_is_trimmed_first_and_from_its_end() -> None:
    pool = KvSlots(num_slots=4, capacity_tokens=120)
    older, newer = cache(pool, [1] * 50), cache(pool, [2] * 50)
    occupy(pool, [3] * 40)
    assert pool.slots[older].num_tokens == 30 and pool.slots[older].token_ids == [1] * 30
    assert pool.slots[newer].num_tokens == 50
    assert pool.take_released() == ((older, 30, 50),)


def test_a_hit_makes_a_cached_slot_recently_used() -> None:
    pool = KvSlots(num_slots=5, capacity_tokens=120)
    older, newer = cache(pool, [1] * 50), cache(pool, [2] * 50)
    leaner = occupy(pool, [1] * 51, Placement(50, prefix_slot=older, prefix_tokens=50))
    pool.release(leaner, 0)
    occupy(pool, [3] * 40)
    assert pool.slots[older].num_tokens == 50
    assert pool.slots[newer].num_tokens == 30


def test_what_running_slots_share_stays() -> None:
    pool = KvSlots(num_slots=4, capacity_tokens=100)
    base = cache(pool, [1] * 60)
    occupy(pool, [1] * 50, Placement(40, prefix_slot=base, prefix_tokens=40))
    assert pool.in_use_tokens() == 50
    assert pool.allocate(Placement(), [2] * 51) is None
    assert pool.allocate(Placement(), [2] * 50) is not None
    assert pool.slots[base].num_tokens == 40


def test_a_leaver_keeps_what_others_share() -> None:
    pool = KvSlots(num_slots=4, capacity_tokens=200)
    base = occupy(pool, [1] * 60)
    leaner = occupy(pool, [1] * 50, Placement(40, prefix_slot=base, prefix_tokens=40))
    pool.release(base, 0)
    assert pool.slots[base].token_ids == [1] * 40 and not pool.slots[base].running
    pool.release(leaner, 50)
    assert pool.in_use_tokens() == 0 and pool.used_tokens == 50


def test_a_remainder_too_short_to_be_of_use_is_freed() -> None:
    pool = KvSlots(num_slots=2, capacity_tokens=100)
    index = occupy(pool, [1] * 60)
    pool.release(index, 15)
    assert pool.used_tokens == 0 and pool.slots[index].num_tokens == 0


def test_free_slots_are_taken_before_cached_ones_and_sources_never() -> None:
    pool = KvSlots(num_slots=3, capacity_tokens=300)
    first, second = cache(pool, [1] * 20), cache(pool, [2] * 20)
    third = occupy(pool, [3] * 20)
    assert third not in (first, second)
    # The oldest is the source of the copy, so the other one goes.
    assert occupy(pool, [1] * 30, Placement(20, copies=((first, 0, 20),))) == second
    assert pool.allocate(Placement(20, copies=((first, 0, 20),)), [1] * 30) is None


def test_pages_taken_again_are_not_given_back() -> None:
    pool = KvSlots(num_slots=1, capacity_tokens=100, tokens_per_page=10)
    index = cache(pool, [1] * 60)
    assert occupy(pool, [2] * 25) == index
    assert pool.take_released() == ((index, 30, 60),)
    assert pool.take_released() == ()


def test_pages_are_given_back_once() -> None:
    pool = KvSlots(num_slots=1, capacity_tokens=100, tokens_per_page=10)
    assert cache(pool, [1] * 60) == occupy(pool, [2] * 25)
    pool.take_released()
    pool.release(0, 0)
    assert pool.take_released() == ((0, 0, 30),)


def test_a_slot_adopted_in_place_is_cut_to_what_is_shared() -> None:
    pool = KvSlots(num_slots=2, capacity_tokens=100)
    index = cache(pool, [1] * 60)
    assert pool.allocate(Placement(40, reused_slot=index), [1] * 40 + [2] * 5) == index
    assert pool.used_tokens == 45 and pool.slots[index].num_tokens == 40
    assert pool.take_released() == ((index, 45, 60),)


def test_an_adopted_slot_that_shares_may_come_to_share_less() -> None:
    pool = KvSlots(num_slots=2, capacity_tokens=200)
    base = occupy(pool, [1] * 60)
    leaner = occupy(pool, [1] * 80, Placement(60, prefix_slot=base, prefix_tokens=60))
    pool.release(leaner, 80)
    assert pool.allocate(Placement(50, reused_slot=leaner, prefix_slot=base, prefix_tokens=50), [1] * 55) == leaner
    assert pool.used_tokens == 60 + 5
    pool.release(base, 0)
    assert pool.slots[base].num_tokens == 50
