"""Division of the memory among several models."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import PlanImpossible
from app.hardware.facts import Needs
from app.hardware.plan.shares import MemoryWish, divide_memory, memory_wish
from app.settings import Settings
from hypothesis_examples import examples
from planned_machines import GIB, machine, plan

# Keys and values of a token take 128 KiB, so that 64 sequences of 16,384 tokens want much more than the machine has.
DECODER = Needs(
    "decoder", "X", 10**9, 2 * 10**9, {"bf16": 2 * 10**9, "fp32": 4 * 10**9}, 16384, 2048, 16, 65536, 32_000, "bfloat16"
)
ENCODER = Needs(
    "encoder", "Y", 10**8, 2 * 10**8, {"bf16": 2 * 10**8, "fp32": 4 * 10**8}, 512, 768, 12, 0, 30_000, "bfloat16"
)


def wish(fixed: int, flexible: int, available: int = 0) -> MemoryWish:
    return MemoryWish("cpu", available, fixed, fixed, fixed + flexible)


def test_without_shortage_each_model_has_its_own_plan() -> None:
    assert divide_memory({"a": wish(2, 3), "b": wish(1, 0)}, 6) == {}


def test_the_rest_is_divided_by_the_keys_and_values_that_each_would_keep() -> None:
    shares = divide_memory({"a": wish(20, 300), "b": wish(10, 100), "c": wish(30, 0)}, 160)
    assert shares == {"a": 95, "b": 35, "c": 30}


def test_models_that_do_not_fit_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        PlanImpossible, match=r"a 3\.0 GiB, b 2\.0 GiB are needed, and 4\.0 GiB are available.*on demand"
    ):
        divide_memory({"a": wish(3 * GIB, 0), "b": wish(2 * GIB, 5)}, 4 * GIB)


@settings(max_examples=examples(100))
@given(
    st.dictionaries(
        st.text(max_size=3), st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)), min_size=1, max_size=5
    ),
    st.integers(0, 2**43),
)
def test_each_gets_what_it_needs_and_all_together_no_more_than_there_is(
    given_wishes: dict[str, tuple[int, int]], available: int
) -> None:
    wishes = {name: wish(*sizes) for name, sizes in given_wishes.items()}
    try:
        shares = divide_memory(wishes, available)
    except PlanImpossible:
        assert sum(each.fixed for each in wishes.values()) > available
        return
    taken = {name: shares.get(name, each.total) for name, each in wishes.items()}
    assert sum(taken.values()) <= available
    assert all(each.fixed <= taken[name] <= each.total for name, each in wishes.items())


@pytest.mark.parametrize("memory", [12 * GIB, 24 * GIB])
def test_plans_with_their_shares_take_no_more_than_the_machine_has(memory: int) -> None:
    facts, needs = machine(memory=memory), {"chat": DECODER, "embed": ENCODER, "draft": DECODER}
    wishes = {name: memory_wish(facts, Settings(), plan(facts, each), each) for name, each in needs.items()}
    shares = divide_memory(wishes, memory)
    plans = {name: plan(facts, each, memory_bytes=shares[name]) for name, each in needs.items()}
    again = {
        name: memory_wish(facts, Settings(memory_bytes=shares[name]), plans[name], each) for name, each in needs.items()
    }
    assert sum(each.total for each in again.values()) <= 1.02 * memory
    assert plans["embed"].memory.weight_bytes == 2 * 10**8
    assert plans["chat"].memory.kv_cache_bytes == plans["draft"].memory.kv_cache_bytes > 0
    assert "memory_bytes" in plans["chat"].decisions["kv_cache_bytes"].reason


def test_a_share_is_a_limit_that_is_named() -> None:
    with pytest.raises(PlanImpossible, match=r"only 1\.0 GiB are available \(this model's share, memory_bytes\)"):
        plan(machine(), DECODER, memory_bytes=GIB)
