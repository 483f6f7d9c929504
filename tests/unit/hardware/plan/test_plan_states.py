"""Recurrent states in a plan: memory for each sequence at a time, and what cannot be reused."""

from __future__ import annotations

import dataclasses

import pytest

from app.errors import PlanImpossible
from app.hardware.facts import CudaDevice, Needs
from app.hardware.plan.memory_budget import DRAFT_SEQS, MemoryDemand
from planned_machines import GIB, ON_GPUS, machine, plan

MIB = 2**20
GPU = CudaDevice(0, "NVIDIA H200", (9, 0), 141 * GIB, 140 * GIB, "GPU-1", "580.65.06")
NEEDS = Needs(
    kind="decoder",
    architecture="Qwen3_5ForCausalLM",
    num_parameters=800_000_000,
    weight_bytes=1_600_000_000,
    bytes_by_precision={"fp32": 3_200_000_000, "bf16": 1_600_000_000, "int8": 900_000_000, "int4": 500_000_000},
    kv_elements_per_token=12_288,
    max_model_len=32_768,
    num_layers=24,
    hidden_size=1024,
    vocab_size=248_320,
    stored_dtype="bf16",
    num_kv_heads=2,
    num_kv_layers=6,
    state_bytes=20 * MIB,
)


def test_the_states_of_the_sequences_at_a_time_are_counted() -> None:
    made = plan(machine(), NEEDS)
    running = made.memory.max_running_seqs
    assert made.memory.state_bytes == 3 * running * 20 * MIB  # as many of finished ones, and of checkpoints
    reason = made.decisions["state_bytes"].reason
    assert "20 MiB for each sequence" in reason and f"each of {2 * running} prefixes" in reason
    without = plan(machine(), dataclasses.replace(NEEDS, state_bytes=0))
    assert without.memory.state_bytes == 0 and without.memory.kv_cache_bytes > made.memory.kv_cache_bytes


def test_small_states_have_more_checkpoints() -> None:
    made = plan(machine(), dataclasses.replace(NEEDS, state_bytes=160 * 2**10))
    assert made.memory.state_bytes > 3 * made.memory.max_running_seqs * 160 * 2**10
    assert made.memory.state_bytes < 2**30


def test_few_sequences_run_where_their_states_are_large() -> None:
    small = machine(memory=4 * GIB)
    made = plan(small, dataclasses.replace(NEEDS, state_bytes=200 * MIB), precision="int4")
    assert 1 <= made.memory.max_running_seqs < 10
    assert "Half of the memory" in made.decisions["max_running_seqs"].reason
    with pytest.raises(PlanImpossible, match="state of one sequence takes 200"):
        plan(small, dataclasses.replace(NEEDS, state_bytes=200 * MIB), precision="int4", max_running_seqs=32)


def test_a_device_has_two_rows_for_each_slot() -> None:
    made = plan(machine(cuda=(GPU,)), NEEDS, ON_GPUS, device="cuda")
    running = made.memory.max_running_seqs
    assert running > 64 and made.memory.state_bytes >= 5 * running * 20 * MIB  # running, finished, and checkpoints


def test_drafts_are_verified_and_made_with_a_state() -> None:
    plain = dataclasses.replace(NEEDS, state_bytes=0)
    with_state, without = (
        MemoryDemand(dataclasses.replace(NEEDS, draft=one), "int8", "bf16") for one in (NEEDS, plain)
    )
    assert with_state.draft_bytes() - without.draft_bytes() == 2 * DRAFT_SEQS * 20 * MIB
    assert plan(machine(), NEEDS).steps.speculation
    assert plan(machine(), dataclasses.replace(NEEDS, draft=plain), draft_model="/nowhere").steps.draft_model
    assert plan(machine(), dataclasses.replace(NEEDS, draft=NEEDS), draft_model="/nowhere").steps.draft_model


def test_the_plan_says_what_of_a_state_is_not_rounded() -> None:
    def reason(precision: str, **fields: int) -> str:
        made = plan(machine(), dataclasses.replace(NEEDS, **fields), precision=precision)
        return made.decisions["keep_layers"].reason

    assert "decays" in reason("int4") and "decays" in reason("int8")
    assert "decays" not in reason("bf16") and "decays" not in reason("int4", state_bytes=0)
