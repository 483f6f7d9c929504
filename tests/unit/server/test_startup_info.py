"""The gauge `info` names the processor's best instructions for products, or the kind of GPU that serves."""

from __future__ import annotations

import dataclasses

import pytest

from app.hardware.facts import CudaDevice, Facts
from app.server.startup import isa_label
from planned_machines import GIB, ON_GPUS, machine, plan

L4 = CudaDevice(0, "NVIDIA L4", (8, 9), 24 * GIB, 23 * GIB, "GPU-1")
MAC = machine(os="macos", architecture="arm64", mps=True, isa=frozenset({"neon", "lse", "bf16"}))


@pytest.mark.parametrize(
    ("facts", "asked", "word"),
    [
        (machine(), "auto", "avx512_bf16"),
        (machine(isa=frozenset()), "auto", ""),
        (machine(cuda=(L4,)), "auto", "sm_89"),
        (machine(cuda=(dataclasses.replace(L4, capability=(12, 1)),)), "auto", "sm_121"),
        (machine(cuda=(L4,)), "cpu", "avx512_bf16"),
        (MAC, "auto", "metal"),
        (MAC, "cpu", "neon"),
    ],
)
def test_what_multiplies(facts: Facts, asked: str, word: str) -> None:
    assert isa_label(facts, plan(facts, recipes=ON_GPUS, device=asked)) == word
