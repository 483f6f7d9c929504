"""Plans with deterministic on: the reasons name the cost, and refusals name the settings that would work."""

from __future__ import annotations

from typing import Any

import pytest

from app.errors import PlanImpossible
from app.hardware.facts import Facts, NativeLibrary
from app.hardware.plan import precision
from planned_machines import machine, plan

AVX512 = frozenset("sse4_2 popcnt avx avx2 fma avx512f avx512bw avx512dq avx512vl avx512_vnni".split())


def kernels_at(level: str) -> Facts:
    return machine(isa=AVX512 | {"avx512_bf16"}, native=NativeLibrary((level,), None))


@pytest.mark.parametrize(
    ("level", "chosen"),
    [
        ("avx512bf16", "auto"),
        ("avx512bf16", "int4"),
        ("avx512", "int8"),
        ("portable", "int4"),
        ("avx512", "bf16"),
        ("neon", "fp32"),
    ],
)
def test_what_adds_in_one_order_serves(level: str, chosen: str) -> None:
    decision = plan(kernels_at(level), precision=chosen, deterministic="on").decisions["deterministic"]
    assert decision.value
    assert "attention of prompts is slower" in decision.reason


@pytest.mark.parametrize(
    ("level", "settings", "words"),
    [
        (
            "avx512",
            {"quantization": "torchao:Int8WeightOnlyConfig()"},
            "precision is torchao.*: set it to fp32, bf16, int8 or int4",
        ),
        ("avx512", {"precision": "int4", "int8_copy": "on"}, "deterministic and int8_copy are both on"),
    ],
)
def test_what_does_not_is_refused(level: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanImpossible, match=words):
        plan(kernels_at(level), deterministic="on", **settings)


def test_unasked_the_most_exact_precision_that_does_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(precision, "_BATCH_INVARIANT", frozenset({"int8", "int4"}))
        chosen = plan(kernels_at("avx512"), deterministic="on").decisions["precision"]
    assert (
        chosen.value == "int8"
        and "in bf16 do not sum in one order" in chosen.reason
        and "not measured for this model" in chosen.reason
    )
    assert plan(kernels_at("avx512bf16"), deterministic="on").weights.precision == "bf16"
    assert plan(kernels_at("avx512")).weights.precision == "bf16"


def test_torchs_own_products_are_refused() -> None:
    with pytest.raises(PlanImpossible, match="the native kernels cannot run here"):
        plan(machine(), precision="fp32", deterministic="on")


def test_it_is_off_unless_it_is_asked_for() -> None:
    assert not plan(kernels_at("avx512bf16")).steps.deterministic
