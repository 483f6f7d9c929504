"""Plans for devices: precisions of weights, activations and KV, memory that adds up, and the host's threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import NoRecipe, PlanImpossible
from app.hardware.decision import Measurements, TrialTimes
from app.hardware.facts import Cgroup, CudaDevice, Facts, Needs
from app.hardware.plan import memory_budget
from app.hardware.plan.plan import ServingPlan, make_plan
from app.hardware.plan.shares import divide_machine
from app.settings import Settings
from planned_machines import GIB, ON_GPUS, machine

Recorded = Callable[[str], Facts]
MIB = 2**20


def chosen(facts: Facts, needs: Needs | None = None, **asked: Any) -> ServingPlan:
    return make_plan(facts, None, Settings(**asked), needs, ON_GPUS)


def with_gpu(free: int, memory: int = 80 * GIB, **changes: Any) -> Facts:
    gpu = CudaDevice(0, "NVIDIA A100", (8, 0), memory, free, "GPU-1")
    return machine(cuda=(gpu,), **changes)


@pytest.mark.parametrize(
    ("host", "asked", "held"),
    [
        ("h200", {}, ("bf16", "bfloat16", "bf16")),
        ("h200", {"precision": "fp32"}, ("fp32", "float32", "fp32")),
        ("h200", {"precision": "int4"}, ("int4", "bfloat16", "bf16")),
        ("h200", {"precision": "fp8"}, ("fp8", "bfloat16", "bf16")),
        ("mac-m1", {}, ("fp16", "float16", "fp16")),
        ("mac-m1", {"precision": "int4"}, ("int4", "float16", "fp16")),
        ("mac-m1", {"precision": "bf16"}, ("bf16", "bfloat16", "bf16")),
        ("mac-m4-pro", {}, ("bf16", "bfloat16", "bf16")),
        ("mac-m4-pro", {"precision": "fp16"}, ("fp16", "float16", "fp16")),
        ("mac-m4-pro", {"precision": "int4"}, ("int4", "bfloat16", "bf16")),
        ("dgx-spark", {}, ("bf16", "bfloat16", "bf16")),
    ],
)
def test_in_what_things_are_held(
    recorded: Recorded, llama_1b: Needs, host: str, asked: dict[str, Any], held: tuple[str, str, str]
) -> None:
    plan = chosen(recorded(host), llama_1b, **asked)
    assert (plan.weights.precision, plan.weights.dtype, plan.weights.kv_precision) == held
    assert plan.placement.device == ("mps" if host.startswith("mac") else "cuda")


def test_the_codes_of_a_checkpoint_in_fp8_are_kept_on_an_nvidia_gpu(recorded: Recorded, llama_1b: Needs) -> None:
    held = {"bf16": 2_000_000_000, "fp8": 1_000_000_000}
    needs = dataclasses.replace(llama_1b, stored_quantization="FP8", keeps_fp8=True, device_bytes_by_precision=held)
    plan = chosen(recorded("h200"), needs)
    assert (plan.weights.precision, plan.weights.dtype, plan.memory.weight_bytes) == ("fp8", "bfloat16", held["fp8"])
    assert plan.decisions["precision"].reason == (
        "It keeps the codes and scales of the checkpoint as they are. The checkpoint's weights are FP8."
    )
    assert "more are quantized to FP8 too" in plan.decisions["dtype"].reason
    older = chosen(with_gpu(70 * GIB), needs)  # an A100
    assert older.weights.precision == "fp8" and "need compute capability 8.9" in older.decisions["dtype"].reason
    for asked in ({"quality_budget": 0}, {"precision": "bf16"}):
        assert chosen(recorded("h200"), needs, **asked).weights.precision == "bf16"
    others = chosen(recorded("h200"), dataclasses.replace(needs, keeps_fp8=False), precision="fp8")
    assert others.decisions["precision"].reason.endswith("their values are computed and rounded again.")
    assert chosen(recorded("h200"), needs, device="cpu").weights.precision == "bf16"
    with pytest.raises(NoRecipe, match="Precision fp8 on cpu"):
        chosen(recorded("h200"), needs, device="cpu", precision="fp8")


def test_the_plan_says_why_an_m1_computes_in_fp16(recorded: Recorded, llama_1b: Needs) -> None:
    assert "Apple M1's GPU has FP16 products" in chosen(recorded("mac-m1"), llama_1b).decisions["precision"].reason
    assert "slow" in chosen(recorded("mac-m1"), llama_1b, precision="bf16").decisions["precision"].reason
    with pytest.raises(PlanImpossible, match=r"dtype \(fp16\)"):
        chosen(recorded("mac-m1"), llama_1b, kv_precision="bf16", device="mps")


@pytest.mark.parametrize("host", ["h200", "h100", "h100-mig", "two-gpus", "dgx-spark", "mac-m1", "mac-m4-pro"])
@pytest.mark.parametrize("kind", ["decoder", "encoder", None])
def test_every_decision_says_why(recorded: Recorded, llama_1b: Needs, host: str, kind: Any) -> None:
    needs = (
        dataclasses.replace(llama_1b, kind=kind, kv_elements_per_token=0 if kind == "encoder" else 32768)
        if kind
        else None
    )
    for field, decision in chosen(recorded(host), needs).decisions.items():
        assert decision.reason.endswith("."), f"{field}: {decision.reason!r} is no sentence"
        assert decision.reason[0].isupper() or decision.reason[0].isdigit(), field


# ---- memory --------------------------------------------------------------------------------------------------------------


def test_the_memory_of_an_h200_adds_up(recorded: Recorded, llama_1b: Needs) -> None:
    """Of 124.7 GiB that are free: weights, context, captured steps, 2 GiB of slack, activations, logits, and keys and values."""
    plan = chosen(recorded("h200"), llama_1b)
    free = (143771 - 16057) * MIB
    activations = 8192 * 64 * 2048 + 20 * 256 * 128_256
    taken = memory_budget.CONTEXT_BYTES + memory_budget.GRAPHS_BYTES + 2 * GIB
    assert plan.memory.kv_cache_bytes == free - 2_471_628_800 - taken - activations
    assert (plan.memory.max_batch_tokens, plan.memory.max_running_seqs, plan.memory.max_waiting_requests) == (
        8192,
        256,
        1024,
    )
    assert plan.memory.max_model_len == 131_072
    words = plan.decisions["kv_cache_bytes"].reason
    assert (
        "124.7 GiB available (free of 140.4 GiB on NVIDIA H200) less 2.3 GiB of weights" in words
        and "captured steps" in words
    )
    assert (
        "on the device. The host only maps the files; the process takes about 1.0 GiB of its 18.2 GiB."
        in plan.decisions["weight_bytes"].reason
    )
    eager = chosen(recorded("h200"), llama_1b, compile="off")
    assert eager.memory.kv_cache_bytes - plan.memory.kv_cache_bytes == memory_budget.GRAPHS_BYTES


def test_weights_are_counted_as_the_device_holds_them(recorded: Recorded, llama_1b: Needs) -> None:
    needs = dataclasses.replace(llama_1b, device_bytes_by_precision={"int4": 900_000_000})
    assert chosen(recorded("h200"), needs, precision="int4").memory.weight_bytes == 900_000_000
    assert chosen(recorded("h200"), needs).memory.weight_bytes == needs.bytes_by_precision["bf16"]
    assert chosen(recorded("mac-m1"), needs).memory.weight_bytes == needs.bytes_by_precision["bf16"], "FP16 is as wide"


def test_four_bits_where_sixteen_do_not_fit(llama_1b: Needs) -> None:
    small = chosen(with_gpu(4 * GIB, 6 * GIB), llama_1b)
    assert small.weights.precision == "int4" and "free of 6.0 GiB on NVIDIA A100" in small.decisions["precision"].reason
    assert "not measured for this model" in small.decisions["precision"].reason


def test_prompts_in_smaller_parts_where_memory_is_short(llama_1b: Needs) -> None:
    tight = chosen(with_gpu(int(5.5 * GIB), 6 * GIB), llama_1b, precision="bf16")
    assert (
        256 <= tight.memory.max_batch_tokens < 8192 and "otherwise 8192" in tight.decisions["max_batch_tokens"].reason
    )


def test_a_gpu_that_shares_the_machines_memory(recorded: Recorded, llama_1b: Needs) -> None:
    plan = chosen(recorded("dgx-spark"), llama_1b)
    assert "100.0 GiB available (NVIDIA GB10 shares the machine's memory)" in plan.decisions["kv_cache_bytes"].reason
    assert "Host and GPU share one memory." in plan.decisions["weight_bytes"].reason
    limited = dataclasses.replace(
        recorded("dgx-spark"), cgroup=Cgroup(2, memory_limit_bytes=16 * GIB, memory_available_bytes=12 * GIB)
    )
    assert chosen(limited, llama_1b).memory.kv_cache_bytes < 12 * GIB


@pytest.mark.parametrize(
    ("memory", "limit", "budget"),
    [
        (16 * GIB, None, 16 * GIB * 2 // 3),
        (36 * GIB, None, 24 * GIB),
        (64 * GIB, None, 48 * GIB),
        (16 * GIB, 14 * GIB, 14 * GIB),
    ],
)
def test_what_a_macs_gpu_may_hold(recorded: Recorded, memory: int, limit: int | None, budget: int) -> None:
    facts = dataclasses.replace(
        recorded("mac-m4-pro"), memory_bytes=memory, available_bytes=memory, mps_limit_bytes=limit
    )
    assert memory_budget.mac_gpu_bytes(facts) == budget
    plan = chosen(facts)
    assert plan.memory.kv_cache_bytes < budget and "the GPU may use" in plan.decisions["kv_cache_bytes"].reason
    assert ("iogpu.wired_limit_mb" in plan.decisions["kv_cache_bytes"].reason) == (limit is not None)
    busy = dataclasses.replace(facts, available_bytes=4 * GIB)
    assert chosen(busy).memory.kv_cache_bytes < 4 * GIB, "what others hold of the one memory"


def test_a_host_without_memory_for_the_process(llama_1b: Needs) -> None:
    starved = with_gpu(70 * GIB, cgroup=Cgroup(2, memory_limit_bytes=GIB, memory_available_bytes=800 * MIB))
    with pytest.raises(
        PlanImpossible, match=r"takes about 1\.0 GiB of the host's memory, but only 800 MiB are available of 1\.0 GiB"
    ):
        chosen(starved, llama_1b, device="cuda")


@given(
    free=st.integers(0, 80 * GIB),
    host=st.integers(GIB, 64 * GIB),
    precision=st.sampled_from(["auto", "fp32", "bf16", "int4"]),
)
def test_no_device_is_ever_overrun(free: int, host: int, precision: str) -> None:
    """Weights, keys and values, the widest step and what the driver takes stay within what is free, whatever there is."""
    needs = Needs(
        "decoder", "X", 10**9, 2 * 10**9, {"fp32": 4 * 10**9, "bf16": 2 * 10**9, "int4": 5 * 10**8},
        16384, 8192, 16, 2048, 32_000, "bfloat16", 0, 4,
    )  # fmt: skip
    try:
        plan = chosen(with_gpu(free, memory=host), needs, device="cuda", precision=precision)
    except PlanImpossible as refusal:
        assert "GiB" in refusal.message or "MiB" in refusal.message
        return
    step = plan.memory.max_batch_tokens * 64 * 2048 + 20 * plan.memory.max_running_seqs * 32_000
    held = (
        plan.memory.weight_bytes + plan.memory.kv_cache_bytes + memory_budget.CONTEXT_BYTES + memory_budget.GRAPHS_BYTES
    )
    assert held + step <= free
    assert plan.memory.max_running_seqs <= plan.memory.max_batch_tokens <= 8192
    pages = plan.memory.kv_cache_bytes // (64 * 16384 * (4 if plan.weights.precision == "fp32" else 2))
    assert plan.memory.max_model_len <= (pages - 1) * 64
    assert (
        plan.memory.max_model_len * 16384 * (4 if plan.weights.precision == "fp32" else 2) <= plan.memory.kv_cache_bytes
    )


def test_contexts_and_sequences_in_whole_pages(llama_1b: Needs) -> None:
    """A page is 64 tokens of keys and values, and one is nobody's: what is promised must fit into the others."""
    from app.hardware.plan.memory_budget import KV_PAGE_TOKENS
    from armature_kernels.attention.paged import PAGE_TOKENS

    assert KV_PAGE_TOKENS == PAGE_TOKENS, "the plan does not import torch, so it says the number again"
    page = 64 * 2 * llama_1b.kv_elements_per_token
    forced = chosen(with_gpu(70 * GIB), llama_1b, kv_cache_bytes=10 * page + 5)
    assert (forced.memory.max_model_len, forced.memory.max_running_seqs) == (9 * 64, 9)
    with pytest.raises(PlanImpossible, match="577 tokens"):
        chosen(with_gpu(70 * GIB), llama_1b, kv_cache_bytes=10 * page + 5, max_model_len=577, device="cuda")
    short = dataclasses.replace(llama_1b, max_model_len=100)
    assert chosen(with_gpu(70 * GIB), short).memory.kv_cache_bytes == (2 * 256 * 2 + 1) * page, (
        "a context of 100 takes two pages"
    )


# ---- steps and threads ---------------------------------------------------------------------------------------------------


def test_how_a_gpu_makes_its_steps(recorded: Recorded, llama_1b: Needs) -> None:
    plan = chosen(recorded("h200"), llama_1b)
    assert (plan.steps.compile, plan.steps.speculation, plan.steps.deterministic) == (True, True, False)
    assert "CUDA graphs" in plan.decisions["compile"].reason
    assert plan.steps.calibrate and "will be measured" in plan.decisions["calibrate"].reason
    assert (plan.weights.kernels, plan.weights.pack_folder, plan.weights.int8_copy) == ("triton", None, False)
    assert chosen(recorded("h200"), llama_1b, compile="off").steps.compile is False
    assert chosen(recorded("h200"), llama_1b, calibrate="off").steps.calibrate is False
    apple = chosen(recorded("mac-m4-pro"), llama_1b)
    assert (apple.steps.compile, apple.weights.kernels, apple.weights.kernel_folder) == (False, "metal", None)
    with pytest.raises(PlanImpossible, match="compile is on, but on mps nothing can be captured"):
        chosen(recorded("mac-m4-pro"), llama_1b, compile="on", device="mps")


def test_a_gpu_quantizes_nothing_unasked_for_its_speed(recorded: Recorded, llama_1b: Needs) -> None:
    """No cost in quality is measured there, so none is known to be within the budget."""
    threads = chosen(recorded("h200"), llama_1b).cpu.threads
    rates = {"bf16": 20.0, "int8": 40.0, "int4": 70.0}
    trials = [
        TrialTimes(name, threads, {1: 1 / rate, 8: 1 / rate}, {256: 0.1, 2048: 0.5}) for name, rate in rates.items()
    ]
    decision = make_plan(recorded("h200"), Measurements(trials=tuple(trials)), Settings(), llama_1b, ON_GPUS).decisions[
        "precision"
    ]
    assert decision.value == "bf16" and "What int4 would cost in quality is not measured on a GPU" in decision.reason


def test_keys_and_values_in_int8_on_a_gpu(recorded: Recorded, llama_1b: Needs) -> None:
    exact, codes = (chosen(recorded("h200"), llama_1b, device="cuda", kv_precision=one) for one in ("auto", "int8"))
    assert (exact.weights.kv_precision, codes.weights.kv_precision) == ("bf16", "int8")
    with pytest.raises(PlanImpossible, match="kv_precision is int8, but on mps"):
        chosen(recorded("mac-m4-pro"), llama_1b, device="mps", precision="bf16", kv_precision="int8")


def test_prompts_are_not_kept_from_a_gpu(recorded: Recorded, llama_1b: Needs) -> None:
    with pytest.raises(PlanImpossible, match="keys and values of a GPU are kept in the host's memory only"):
        chosen(recorded("h200"), llama_1b, prompt_cache="/kept", device="cuda")
    assert chosen(recorded("h200"), llama_1b, prompt_cache="memory", device="cuda").steps.prompt_cache == "memory"
    with pytest.raises(PlanImpossible, match="prompt_cache is memory, which is for one NVIDIA GPU"):
        chosen(recorded("h200"), llama_1b, prompt_cache="memory", device="cpu")


def test_several_engines_and_ranks(recorded: Recorded, llama_1b: Needs) -> None:
    host = recorded("h200")
    first = host.cuda[0]
    fuller = dataclasses.replace(first, index=1, uuid="GPU-2", free_bytes=(first.free_bytes or 0) // 2)
    host = dataclasses.replace(host, cuda=(first, fuller))
    split = chosen(host, llama_1b, tensor_parallel=2, device="cuda")
    alone = chosen(host, llama_1b, device="cuda")
    assert (split.placement.tensor_parallel, len(set(split.placement.rank_devices))) == (2, 2)
    assert split.placement.visible_devices == split.placement.rank_devices[0] == "GPU-2", "it has the least memory"
    assert split.memory.weight_bytes < alone.memory.weight_bytes and alone.placement.rank_devices == ()
    parts = divide_machine(host, "cuda", 2)
    assert [len(part.cuda) for part in parts] == [1, 1] and parts[0].cuda != parts[1].cuda
    for settings, words in (
        ({"tensor_parallel": 3}, "the usable GPUs of this machine are 2"),
        ({"tensor_parallel": 2, "cuda_device": 0}, "cuda_device names one GPU"),
        ({"tensor_parallel": 2, "device": "cpu"}, "models are split among NVIDIA GPUs only"),
        ({"tensor_parallel": 2, "data_parallel": 2}, "tensor_parallel is not offered with it"),
        ({"data_parallel": 2, "cuda_device": 0}, "cuda_device names one GPU"),
        ({"data_parallel": 2, "api_processes": 2}, "several API processes are not offered"),
        ({"data_parallel": 2, "engine_process": "off"}, "each engine computes in a process"),
        ({"data_parallel": 2, "lora_root": "/adapters"}, "adapters that clients load reach one engine only"),
    ):
        with pytest.raises(PlanImpossible, match=words):
            chosen(host, llama_1b, **settings)
    with pytest.raises(PlanImpossible, match="the usable GPUs of this machine are 2"):
        divide_machine(host, "cuda", 3)


def test_encoders_on_a_gpu(recorded: Recorded, llama_1b: Needs) -> None:
    bert = dataclasses.replace(llama_1b, kind="encoder", kv_elements_per_token=0, max_model_len=512, hidden_size=1024)
    plan = chosen(recorded("h200"), bert)
    assert (plan.memory.batch_target_tokens, plan.memory.max_running_seqs, plan.memory.max_waiting_requests) == (
        16_384,
        1024,
        4096,
    )
    assert chosen(recorded("h200"), dataclasses.replace(bert, hidden_size=384)).memory.batch_target_tokens == 32_768
    assert chosen(recorded("h200"), bert, device="cpu", precision="fp32").memory.batch_target_tokens == 512
    assert "of few short texts are captured" in plan.decisions["compile"].reason
    small = chosen(with_gpu(4 * GIB, 6 * GIB), dataclasses.replace(bert, max_model_len=8192))
    assert (
        small.memory.batch_target_tokens < 16_384 and "Memory is short" in small.decisions["batch_target_tokens"].reason
    )


def test_a_mac_takes_smaller_steps(recorded: Recorded, llama_1b: Needs) -> None:
    plan = chosen(recorded("mac-m4-pro"), llama_1b)
    assert (plan.memory.max_batch_tokens, plan.memory.max_running_seqs) == (1024, 64)
    bert = dataclasses.replace(llama_1b, kind="encoder", kv_elements_per_token=0, max_model_len=512, hidden_size=1024)
    texts = chosen(recorded("mac-m4-pro"), bert)
    assert (texts.memory.batch_target_tokens, texts.memory.max_running_seqs) == (4096, 256)


def test_the_hosts_threads_feed_the_device(recorded: Recorded, llama_1b: Needs) -> None:
    plan = chosen(recorded("h100"), llama_1b)
    assert (plan.cpu.threads, plan.cpu.wait_policy, plan.cpu.cpu_ids, plan.cpu.numa_node) == (
        4,
        "passive",
        (),
        None,
    )
    assert plan.environment()["OMP_NUM_THREADS"] == "4"
    near = chosen(recorded("h100"), llama_1b, numa_node=1)
    assert near.cpu.numa_node == 1 and len(near.cpu.cpu_ids) == 52
    assert chosen(recorded("h100"), llama_1b, threads=9).cpu.threads == 9
    half = chosen(with_gpu(70 * GIB, cgroup=Cgroup(2, quota_cores=0.5)), llama_1b)
    assert (half.cpu.threads, half.cpu.throttling_quota) == (1, None)
