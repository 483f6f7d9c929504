"""Settings of the operator are honoured or refused with a sentence; threads stay within any quota."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import NoRecipe, PlanImpossible
from app.hardware.decision import Measurements
from app.hardware.facts import Cgroup, Facts, Needs
from app.hardware.plan.memory_budget import kv_bytes_per_token
from app.hardware.plan.plan import make_plan
from app.settings import Settings
from planned_machines import GIB, RECIPES, machine, plan

Recorded = Callable[[str], Facts]
FORCED: list[tuple[dict[str, Any], str, Any]] = [
    ({"device": "cpu"}, "device", "cpu"),
    ({"precision": "fp32"}, "precision", "fp32"),
    ({"precision": "fp32"}, "dtype", "float32"),
    ({"precision": "fp32"}, "kv_precision", "fp32"),
    ({"kv_precision": "bf16"}, "kv_precision", "bf16"),
    ({"kv_precision": "int8"}, "kv_precision", "int8"),
    ({"kv_precision": "int8", "precision": "int4"}, "kv_precision", "int8"),
    ({"threads": 3}, "threads", 3),
    ({"max_model_len": 1000}, "max_model_len", 1000),
    ({"max_running_seqs": 5}, "max_running_seqs", 5),
    ({"max_running_seqs": 5}, "max_waiting_requests", 20),
    ({"max_running_seqs": 1000}, "max_batch_tokens", 1000),
    ({"max_batch_tokens": 40}, "max_running_seqs", 40),
    ({"max_waiting_requests": 7}, "max_waiting_requests", 7),
    ({"kv_cache_bytes": GIB}, "kv_cache_bytes", GIB),
    ({"itl_target_ms": 50}, "itl_target_seconds", 0.05),
    ({"compile": "off"}, "compile", False),
    ({"calibrate": "off"}, "calibrate", False),
    ({"calibrate": "on"}, "calibrate", True),
    ({"speculation": "off"}, "speculation", False),
    ({}, "prompt_cache", None),
    ({"prompt_cache": "/kept"}, "prompt_cache", "/kept"),
    ({"prompt_cache_bytes": GIB}, "prompt_cache_bytes", GIB),
    ({}, "api_processes", 1),
    ({"api_processes": 1}, "engine_process", False),
    ({"api_processes": 3}, "engine_process", True),
]

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"device": "cuda"}, PlanImpossible, "neither nvidia-smi"),
    ({"api_processes": 2, "engine_process": "off"}, PlanImpossible, "engine_process must not be off"),
    ({"device": "mps"}, PlanImpossible, "no Apple silicon Mac"),
    ({"compile": "on"}, PlanImpossible, "compile is on"),
    ({"int8_copy": "on"}, PlanImpossible, "int8_copy is on, but precision is bf16"),
    ({"deterministic": "on"}, PlanImpossible, "deterministic is on, but the native kernels cannot run"),
    ({"kv_precision": "int8", "precision": "fp32"}, PlanImpossible, "kv_precision is int8"),
    ({"kv_precision": "bf16", "precision": "fp32"}, PlanImpossible, r"dtype \(fp32\)"),
    ({"threads": 9}, PlanImpossible, "threads is 9, but this process may use only 8 logical CPUs"),
    ({"numa_node": 4}, PlanImpossible, "numa_node is 4, .* on: 0"),
    ({"max_model_len": 200_000}, PlanImpossible, "max_model_len is 200000, but the model supports at most 131072"),
    ({"max_model_len": 130_000, "kv_cache_bytes": GIB}, PlanImpossible, "130000 tokens needs 4.0 GiB .* 1.0 GiB"),
    ({"kv_cache_bytes": 100 * GIB}, PlanImpossible, "kv_cache_bytes is 100.0 GiB, but only .* are available"),
    ({"kv_cache_bytes": 1000}, PlanImpossible, "A context of 16 tokens needs"),
    ({"max_running_seqs": 30, "max_batch_tokens": 20}, PlanImpossible, "max_running_seqs is 30"),
]


@pytest.mark.parametrize(("settings", "field", "value"), FORCED)
def test_forced_values_are_honoured(llama_1b: Needs, settings: dict[str, Any], field: str, value: Any) -> None:
    assert plan(machine(), llama_1b, **settings).decisions[field].value == value


@pytest.mark.parametrize(("settings", "error", "words"), REFUSED)
def test_forced_impossibilities_are_refused(
    llama_1b: Needs, settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        plan(machine(), llama_1b, **settings)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"os": "win32", "architecture": "unknown"}, "win32 is not supported: use Linux or macOS"),
        ({"architecture": "riscv64"}, "no torch for linux on riscv64"),
        ({"os": "macos"}, "the last version for Intel Macs"),
    ],
)
def test_machines_without_a_torch(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanImpossible, match=words):
        plan(machine(**changes))


def test_a_kernel_that_states_no_features_refuses_nothing() -> None:
    assert plan(machine(isa=frozenset())).weights.precision == "fp32"


def test_machines_without_recipes() -> None:
    with pytest.raises(NoRecipe, match="There are no recipes"):
        plan(machine(), recipes=[])


def test_bf16_that_is_forced_where_it_is_slow_says_so() -> None:
    host = machine(isa=frozenset({"sse4_2", "popcnt", "avx", "avx2"}))
    assert plan(host).weights.precision == "fp32"
    forced = plan(host, precision="bf16").decisions["precision"]
    assert (forced.value, "slow" in forced.reason) == ("bf16", True)


def test_siblings_are_used_only_where_they_are_forced() -> None:
    host = machine(cores=4, siblings=2)
    auto = plan(host)
    assert (auto.cpu.threads, auto.cpu.cpu_ids) == (4, (0, 2, 4, 6))
    forced = plan(host, threads=6)
    assert (forced.cpu.threads, forced.cpu.cpu_ids, forced.cpu.wait_policy) == (6, (), "passive")
    assert "4 physical cores" in forced.decisions["threads"].reason


def test_memory_nodes() -> None:
    host = machine(cores=8, nodes=2)
    assert (plan(host).cpu.numa_node, plan(host).cpu.threads, plan(host).cpu.cpu_ids) == (0, 4, (0, 1, 2, 3))
    assert plan(host, numa_node=1).cpu.cpu_ids == (4, 5, 6, 7)
    wide = plan(host, threads=6)
    assert (wide.cpu.numa_node, wide.cpu.threads, wide.cpu.cpu_ids) == (None, 6, ())
    with pytest.raises(PlanImpossible, match="memory node 1 has 4 logical CPUs"):
        plan(host, threads=6, numa_node=1)
    fuller = dataclasses.replace(host.numa_nodes[0], available_bytes=GIB)
    assert plan(dataclasses.replace(host, numa_nodes=(fuller, host.numa_nodes[1]))).cpu.numa_node == 1
    assert plan(dataclasses.replace(host, affinity=(0, 1, 2, 3, 4))).cpu.numa_node == 0, "cores come before memory"


def test_the_budget_of_one_memory_node(llama_1b: Needs) -> None:
    whole, half = plan(machine(nodes=1, memory=16 * GIB), llama_1b), plan(machine(nodes=2, memory=16 * GIB), llama_1b)
    assert whole.memory.kv_cache_bytes > 10 * GIB
    assert half.memory.kv_cache_bytes < 6 * GIB


def test_nodes_that_give_no_memory() -> None:
    """A cpuset may allow all CPUs and the memory of one node alone (man 7 cpuset, mems)."""
    host = machine(cores=8, nodes=2, memory=16 * GIB, memory_node_ids=(1,))
    assert plan(host).cpu.numa_node == 1
    spread = plan(host, threads=6)
    assert spread.cpu.numa_node is None and spread.memory.kv_cache_bytes < 8 * GIB
    assert "memory nodes 1, as the cpuset allows" in spread.decisions["kv_cache_bytes"].reason
    assert (
        plan(machine(cores=8, nodes=2, memory=16 * GIB, memory_node_ids=(0, 1)), threads=6).memory.kv_cache_bytes
        > 12 * GIB
    )


def test_where_every_reservation_counts(llama_1b: Needs) -> None:
    strict = plan(machine(commit_left_bytes=16 * GIB), llama_1b, max_model_len=8192)
    sequences = 2 * strict.memory.max_running_seqs * 8192 * llama_1b.kv_elements_per_token * 2
    assert strict.memory.weight_bytes + sequences < 16 * GIB
    assert "vm.overcommit_memory=2" in strict.decisions["max_running_seqs"].reason
    assert plan(machine(), llama_1b, max_model_len=8192).memory.max_running_seqs == 64
    assert plan(machine(commit_left_bytes=16 * GIB), llama_1b, max_model_len=100).memory.max_running_seqs == 64


def test_a_quota_that_is_shared_is_not_bound_to_cpus() -> None:
    host = machine(cgroup=Cgroup(2, quota_cores=3.7))
    found = plan(host)
    assert (found.cpu.threads, found.cpu.cpu_ids, found.cpu.wait_policy, found.cpu.tokenizer_threads) == (
        3,
        (),
        "active",
        3,
    )
    on_a_node = plan(machine(nodes=2, siblings=2, cgroup=Cgroup(2, quota_cores=3.7)))
    assert (on_a_node.cpu.threads, on_a_node.cpu.cpu_ids) == (3, tuple(range(8)))
    forced = plan(host, threads=5)
    assert (forced.cpu.threads, forced.cpu.wait_policy) == (5, "passive")
    assert "throttled" in forced.decisions["threads"].reason


def test_no_cpu_in_common() -> None:
    with pytest.raises(PlanImpossible, match="no CPU in common"):
        plan(machine(cgroup=Cgroup(2, cpuset=(100,))))


def test_a_context_that_the_memory_shortens(llama_1b: Needs) -> None:
    length = plan(machine(memory=5 * GIB), llama_1b).decisions["max_model_len"]
    assert 16 <= length.value < 131_072
    assert "supports 131072 tokens" in length.reason
    assert plan(machine(memory=64 * GIB), llama_1b).memory.max_model_len == 131_072


def test_kv_memory_is_no_more_than_could_be_used(llama_1b: Needs) -> None:
    small = dataclasses.replace(llama_1b, max_model_len=100)
    found = plan(machine(), small)
    assert found.memory.kv_cache_bytes == 2 * 64 * 100 * small.kv_elements_per_token * 2
    encoder = dataclasses.replace(llama_1b, kind="encoder", kv_elements_per_token=0)
    assert plan(machine(), encoder).memory.kv_cache_bytes == 0


def test_weights_and_kv_stay_within_what_is_available(llama_1b: Needs) -> None:
    for memory in (4 * GIB, 6 * GIB, 12 * GIB):
        found = plan(machine(memory=memory), llama_1b)
        assert found.memory.kv_cache_bytes + found.memory.weight_bytes < memory - 400 * 2**20


def test_predictions_come_from_measurements(llama_1b: Needs) -> None:
    measured = Measurements(read_bytes_per_second=50e9, products_per_second={"bf16": 850e9})
    found = make_plan(machine(), measured, Settings(), llama_1b, RECIPES)
    assert found.speed.decode_tokens_per_second == pytest.approx(50e9 / 2_471_628_800)
    assert found.speed.prefill_tokens_per_second == pytest.approx(850e9 / (2 * 1_235_814_400))
    assert plan(machine(), llama_1b).speed.decode_tokens_per_second is None


def test_the_environment_of_the_pools() -> None:
    spinning = plan(machine()).environment()
    assert (spinning["OMP_NUM_THREADS"], spinning["OMP_WAIT_POLICY"], spinning["TOKENIZERS_PARALLELISM"]) == (
        "8",
        "active",
        "false",
    )
    assert int(spinning["GOMP_SPINCOUNT"]) < 10**5, (
        "for minutes, active alone; and a partner that lost its core wants one"
    )
    quiet = plan(machine(cgroup=Cgroup(2, quota_cores=0.5))).environment()
    assert (quiet["OMP_NUM_THREADS"], quiet["OMP_WAIT_POLICY"], "GOMP_SPINCOUNT" in quiet) == ("1", "passive", False)


@given(
    cores=st.integers(1, 64),
    siblings=st.integers(1, 2),
    nodes=st.integers(1, 4),
    quota=st.none() | st.floats(0.01, 200),
    allowed=st.none() | st.sets(st.integers(0, 127), min_size=1),
)
def test_threads_never_exceed_what_may_run(
    cores: int, siblings: int, nodes: int, quota: float | None, allowed: set[int] | None
) -> None:
    host = machine(
        cores,
        siblings,
        min(nodes, cores),
        cgroup=Cgroup(2, quota_cores=quota, cpuset=tuple(sorted(allowed)) if allowed else None),
    )
    if not host.allowed_cpus:
        with pytest.raises(PlanImpossible):
            plan(host)
        return
    found = plan(host)
    threads = found.cpu.threads
    usable = [core for core in host.cores if set(core.cpu_ids) & host.allowed_cpus]
    assert 1 <= threads <= len(usable)
    assert quota is None or threads == 1 or threads <= math.floor(quota)
    assert set(found.cpu.cpu_ids) <= host.allowed_cpus
    assert not found.cpu.cpu_ids or len(found.cpu.cpu_ids) >= threads
    assert (found.cpu.wait_policy == "active") == (quota is None or quota >= threads)
    assert 1 <= found.cpu.tokenizer_threads <= 4


@given(memory=st.integers(GIB, 64 * GIB), limit=st.none() | st.integers(GIB, 64 * GIB))
def test_no_memory_limit_is_ever_overrun(memory: int, limit: int | None) -> None:
    needs = Needs("decoder", "X", 10**9, 2 * 10**9, {"bf16": 2 * 10**9}, 16384, 8192, 16, 2048, 32_000, "bfloat16")
    group = Cgroup(2, memory_limit_bytes=limit, memory_available_bytes=limit) if limit else Cgroup()
    try:
        found = plan(machine(memory=memory, cgroup=group), needs)
    except PlanImpossible as refusal:
        assert "GiB" in refusal.message
        return
    assert found.memory.weight_bytes + found.memory.kv_cache_bytes < min(memory, limit or memory)
    assert (
        found.memory.max_model_len * kv_bytes_per_token(needs, found.weights.kv_precision)
        <= found.memory.kv_cache_bytes
    )
