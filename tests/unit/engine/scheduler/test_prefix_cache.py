"""The cached or running slot that serves a prompt best, and how it is used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.scheduler import kv_allocator
from app.engine.scheduler.batch import PrefixScope
from app.engine.scheduler.kv_allocator import KvSlot, Placement, longest_match, shared_prefix_length
from app.messages import LoadedAdapter
from engine_simulation import EngineLimits, Simulation

NOTHING = Placement()
PLAIN = PrefixScope()


def placements(
    slots: list[KvSlot], token_ids: list[int], alone: bool = False, minimum: int = 16, scope: PrefixScope = PLAIN
) -> Iterator[Placement]:
    return kv_allocator.placements(longest_match(slots, token_ids, len(token_ids) - 1, scope), alone, minimum)


def slot(
    index: int, token_ids: list[int], running: bool = False, base: KvSlot | None = None, shared: int = 0
) -> KvSlot:
    made = KvSlot(index, running, token_ids, len(token_ids), base.index if base else None, shared, len(token_ids))
    if base is not None:
        base.sharers.add(index)
    return made


def prompt(length: int, *tail: int) -> list[int]:
    return [*range(100, 100 + length), *tail]


@given(
    st.lists(st.integers(0, 1), max_size=300), st.integers(0, 300), st.lists(st.integers(0, 1), max_size=9), st.data()
)
def test_the_common_prefix_is_what_comparing_one_by_one_finds(
    first: list[int], shared: int, tail: list[int], data: st.DataObject
) -> None:
    second = first[:shared] + tail
    end = min(len(first), len(second))
    plain = next((at for at in range(end) if first[at] != second[at]), end)
    start = data.draw(st.integers(0, plain))
    assert shared_prefix_length(first, second, start, end) == plain


def test_one_token_is_always_left_to_compute() -> None:
    cached = slot(0, prompt(40))
    assert next(placements([cached], prompt(40))).cached == 39


def test_a_running_slot_counts_as_far_as_it_is_computed() -> None:
    source = slot(0, prompt(40), running=True)
    source.num_tokens = 30
    assert next(placements([source], prompt(40))) == Placement(30, prefix_slot=0, prefix_tokens=30)


def test_too_little_is_not_shared_unless_it_was_made_for_it() -> None:
    source = slot(0, prompt(15), running=True)
    assert list(placements([source], prompt(20))) == [NOTHING]
    assert next(placements([source], prompt(15), minimum=1)) == Placement(14, prefix_slot=0, prefix_tokens=14)


def test_a_continuation_takes_its_own_slot_over() -> None:
    cached = slot(0, prompt(100, 7, 7))
    assert next(placements([cached], prompt(100, 8, 8, 8))) == Placement(100, reused_slot=0)


def test_a_long_cached_slot_is_not_destroyed_for_a_short_common_prefix() -> None:
    cached = slot(0, prompt(100))
    options = list(placements([cached], prompt(40, 8)))
    assert options == [Placement(40, prefix_slot=0, prefix_tokens=40), Placement(40, reused_slot=0), NOTHING]


def test_a_leaning_source_is_shared_up_to_its_base_and_copied_beyond() -> None:
    base = slot(0, prompt(40))
    source = slot(1, prompt(60), running=True, base=base, shared=40)
    options = list(placements([base, source], prompt(50, 8)))
    assert options[0] == Placement(50, prefix_slot=0, prefix_tokens=40, copies=((1, 40, 50),))
    assert next(placements([base, source], prompt(30, 8))) == Placement(30, prefix_slot=0, prefix_tokens=30)


def test_a_leaning_source_is_passed_over_where_its_shared_part_differs() -> None:
    base = slot(0, [*prompt(30), *[9] * 30])
    source = slot(1, [*prompt(30), *[9] * 60], base=base, shared=60)
    assert next(placements([base, source], prompt(50))).prefix_slot == 0


def test_of_equals_the_one_that_loses_nothing_is_taken_then_the_one_without_a_copy() -> None:
    base = slot(0, prompt(40))
    running = slot(1, prompt(80), running=True, base=base, shared=40)
    plain = slot(2, prompt(80), running=True)
    cached = slot(3, prompt(80))
    assert next(placements([base, running, plain, cached], prompt(80, 8))) == Placement(80, reused_slot=3)
    assert next(placements([base, running, plain], prompt(80, 8))).prefix_slot == 2


def test_alone_means_leaning_on_none() -> None:
    base = slot(0, prompt(40))
    source = slot(1, prompt(60), base=base, shared=40)
    options = list(placements([base, source], prompt(60, 8), alone=True))
    assert options == [Placement(60, copies=((0, 0, 40), (1, 40, 60))), NOTHING]


@pytest.mark.parametrize("token_ids", [[5], prompt(1)])
def test_a_prompt_of_one_token_shares_nothing(token_ids: list[int]) -> None:
    assert list(placements([slot(0, token_ids * 1)], token_ids, minimum=1)) == [NOTHING]


# ---- scopes --------------------------------------------------------------------------------------------------------

SCOPES = [
    PrefixScope(), PrefixScope(salt="a"), PrefixScope(salt="b"), PrefixScope(LoadedAdapter(0, 1)),
    PrefixScope(LoadedAdapter(0, 2)), PrefixScope(LoadedAdapter(0, 1), "a"),
]  # fmt: skip


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("mine", SCOPES)
@pytest.mark.parametrize("theirs", SCOPES)
def test_a_prefix_is_found_in_its_scope_only(mine: PrefixScope, theirs: PrefixScope, running: bool) -> None:
    kept = slot(0, prompt(40), running)
    kept.scope = theirs
    found = next(placements([kept], prompt(40), scope=mine))
    assert found.cached == (39 if mine == theirs else 0)
    leaner = slot(1, prompt(60), base=kept, shared=40)
    leaner.scope = theirs
    found = next(placements([kept, leaner], prompt(60, 8), scope=mine))
    assert found.cached == (60 if mine == theirs else 0)


def common(first: list[int], second: list[int]) -> int:
    return shared_prefix_length(first, second, 0, min(len(first), len(second)))


@given(
    asked=st.lists(
        st.tuples(
            st.sampled_from([None, "a", "b"]), st.integers(0, 60), st.lists(st.integers(1, 2), min_size=1, max_size=3),
            st.sampled_from([1, 1, 3]), st.integers(0, 4),
        ),
        min_size=2, max_size=7,
    ),
    capacity=st.sampled_from([180, 1000]),
)  # fmt: skip
def test_nobody_reads_what_was_said_with_another_salt(
    asked: list[tuple[str | None, int, list[int], int, int]], capacity: int
) -> None:
    """Also with several choices, and where sequences are preempted for lack of room."""
    limits = EngineLimits(max_model_len=100, max_running_seqs=4, max_batch_tokens=64)
    sim = Simulation(num_slots=8, capacity=capacity, limits=limits)
    said: list[tuple[str | None, list[int]]] = []
    for number, (salt, shared, own, n, steps) in enumerate(asked):
        said.append((salt, prompt(shared, *own)))
        sim.add(str(number), said[-1][1], cache_salt=salt, n=n, max_tokens=3, seed=0)
        for _ in range(steps):
            sim.step()
    sim.finish()
    texts = [  # one that ends with its first token has no completion
        (int(name), said[int(name)][0], said[int(name)][1] + sim.completions.get((name, choice), []))
        for name, choice in sim.endings
    ]
    for number, (salt, token_ids) in enumerate(said):
        cached = sim.endings[str(number), 0].timings.cached_tokens
        others = [common(token_ids, text) for other, its, text in texts if other != number and its == salt]
        assert cached <= max(others, default=0)


def test_the_same_salt_is_found_again() -> None:
    sim = Simulation()
    for name, salt in [("0", "a"), ("1", "b"), ("2", None), ("3", "a"), ("4", "b"), ("5", None)]:
        sim.add(name, prompt(50), cache_salt=salt, max_tokens=1)
        sim.finish()
    assert [sim.endings[str(number), 0].timings.cached_tokens for number in range(6)] == [0, 0, 0, 49, 49, 49]
