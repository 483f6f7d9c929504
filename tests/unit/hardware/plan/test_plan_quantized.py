"""Plans with 8-bit and 4-bit weights: bytes, activations, an int8 copy, and the folder of packed weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.errors import NoRecipe, PlanImpossible
from app.hardware.facts import Needs
from planned_machines import GIB, RECIPES, machine, plan

FORCED: list[tuple[dict[str, Any], str, Any]] = [
    ({"precision": "int4"}, "precision", "int4"),
    ({"precision": "int4"}, "dtype", "bfloat16"),
    ({"precision": "int4"}, "kv_precision", "bf16"),
    ({"precision": "int4"}, "weight_bytes", 660 * 10**6),
    ({"precision": "int4"}, "int8_copy", False),
    ({"precision": "int4", "int8_copy": "off"}, "int8_copy", False),
    ({"precision": "int4", "int8_copy": "on"}, "int8_copy", True),
    ({"precision": "int4", "int8_copy": "on"}, "weight_bytes", 1640 * 10**6),
    ({"precision": "int8", "cache_dir": "/somewhere"}, "pack_folder", "/somewhere"),
    ({"precision": "bf16", "cache_dir": "/somewhere"}, "pack_folder", None),
]


@pytest.mark.parametrize(("settings", "field", "value"), FORCED)
def test_what_is_asked_for_is_decided(llama_1b: Needs, settings: dict[str, Any], field: str, value: Any) -> None:
    assert plan(machine(), llama_1b, **settings).decisions[field].value == value


def test_an_int8_copy_belongs_to_int4(llama_1b: Needs) -> None:
    with pytest.raises(PlanImpossible, match="int8_copy is on, but precision is int8"):
        plan(machine(), llama_1b, precision="int8", int8_copy="on")


def test_the_plan_says_what_an_int8_copy_costs(llama_1b: Needs) -> None:
    lean, fast = (
        plan(machine(), llama_1b, precision="int4", int8_copy=choice).decisions["int8_copy"].reason
        for choice in ("auto", "on")
    )
    assert (
        "935 MiB more; whether it makes prompts faster was not measured" in lean
        and "for 935 MiB more of memory" in fast
    )


def test_a_missing_precision_lists_what_exists(llama_1b: Needs) -> None:
    exact = [row for row in RECIPES if row[2] == "bf16"]
    with pytest.raises(
        NoRecipe, match=r"int8 on cpu \(x86_64\) is not supported yet. Supported: bf16 on cpu \(arm64\)"
    ):
        plan(machine(), llama_1b, exact, precision="int8")


def test_four_bits_are_never_chosen_unasked(llama_1b: Needs) -> None:
    """Until their quality and speed are measured on the node."""
    assert plan(machine(), llama_1b).weights.precision == "bf16"
    assert plan(machine(isa=frozenset({"avx", "avx2", "sse4_2", "popcnt"})), llama_1b).weights.precision == "fp32"


def test_integers_need_no_bf16_instructions(llama_1b: Needs) -> None:
    old = machine(isa=frozenset({"avx", "avx2", "sse4_2", "popcnt"}))
    dtype = plan(old, llama_1b, precision="int4").decisions["dtype"]
    assert dtype.value == "bfloat16" and "no BF16 instructions" in dtype.reason


def test_an_int8_copy_that_does_not_fit_is_refused(llama_1b: Needs) -> None:
    tight = machine(memory=2 * GIB)
    assert plan(tight, llama_1b, precision="int4").memory.weight_bytes == 660 * 10**6
    with pytest.raises(PlanImpossible, match=r"1.5 GiB of weights in int4 with an int8 copy, .* available"):
        plan(tight, llama_1b, precision="int4", int8_copy="on")


def test_without_a_home_packed_weights_are_not_kept(llama_1b: Needs, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    folder = plan(machine(), llama_1b, precision="int4").decisions["pack_folder"]
    assert folder.value is None and "has no home" in folder.reason
