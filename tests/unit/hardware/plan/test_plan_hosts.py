"""Plans for every recorded host: threads, CPUs, precision, memory, each with a reason."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import pytest

from app.errors import PlanImpossible
from app.hardware.decision import RecipeKey
from app.hardware.facts import Facts, NativeLibrary, Needs
from app.hardware.plan.plan import ServingPlan, make_plan
from app.hardware.plan.weights import check_torch_can_run
from app.settings import Settings
from planned_machines import machine

Recorded = Callable[[str], Facts]
Recipes = Collection[RecipeKey]

# host: precision, threads, memory node, how many CPUs the threads are confined to (0: not), wait policy, tokenizer threads
PLANNED: dict[str, tuple[str, int, int | None, int, str, int]] = {
    "zen5-vm": ("bf16", 2, None, 0, "active", 2),
    "skylake": ("fp32", 2, None, 2, "active", 2),
    "cascade-lake": ("fp32", 2, None, 0, "active", 2),
    "ice-lake": ("fp32", 8, None, 8, "active", 4),
    "zen2": ("fp32", 8, None, 8, "active", 4),
    "zen3": ("fp32", 16, None, 16, "active", 4),
    "zen4": ("bf16", 8, None, 0, "active", 4),
    "axion": ("bf16", 8, None, 0, "active", 4),
    "grace": ("bf16", 72, None, 0, "active", 4),
    "raspberry-pi-5": ("fp32", 4, None, 0, "active", 4),
    "orion-o6": ("bf16", 8, None, 8, "active", 4),
    "rock-5b": ("fp32", 4, None, 4, "active", 4),
    "radxa-x4": ("fp32", 4, None, 0, "active", 4),
    "core-i7-1360p": ("fp32", 4, None, 4, "active", 4),
    "graviton2": ("fp32", 2, None, 0, "active", 2),
    "graviton3": ("bf16", 8, None, 0, "active", 4),
    "graviton3-old-kernel": ("fp32", 8, None, 0, "active", 4),
    "graviton4": ("bf16", 96, None, 0, "active", 4),
    "altra": ("fp32", 64, None, 0, "active", 4),
    "altra-cpuset": ("fp32", 3, None, 0, "active", 3),
    "altra-two-sockets": ("fp32", 80, 1, 80, "active", 4),
    "xeon-amx": ("bf16", 48, 0, 48, "active", 4),
    "xeon-avx2": ("fp32", 22, 0, 22, "active", 4),
    "cgroup-v1": ("fp32", 1, 0, 44, "active", 1),
    "cgroup-v2-nested": ("bf16", 1, None, 0, "passive", 1),
    "h100": ("bf16", 52, 0, 52, "active", 4),
    "mac-m1": ("fp32", 4, None, 0, "active", 4),
    "mac-m2": ("bf16", 4, None, 0, "active", 4),
}

# host: words that the reason of a decision must have, so that an operator learns what decided
REASONS: list[tuple[str, str, str]] = [
    ("zen5-vm", "precision", "avx512_bf16"),
    ("xeon-amx", "precision", "amx_bf16"),
    ("graviton3", "precision", "bf16"),
    ("graviton2", "precision", "has no BF16 products"),
    ("cgroup-v1", "threads", "quota is 1.5 cores, rounded down"),
    ("cgroup-v2-nested", "threads", "quota is 0.5 cores"),
    ("cgroup-v2-nested", "wait_policy", "quota of 0.5 cores"),
    ("cgroup-v2-nested", "throttling_quota", "1 thread on a quota of 0.5 cores"),
    ("cgroup-v1", "throttling_quota", "No thread is throttled"),
    ("cgroup-v2-nested", "cpu_ids", "quota is less than the cores"),
    ("altra-cpuset", "threads", "3 physical cores may be used"),
    ("altra-two-sockets", "threads", "on memory node 1"),
    ("altra-two-sockets", "numa_node", "Of 2 memory nodes"),
    ("xeon-avx2", "threads", "SMT siblings"),
    ("xeon-avx2", "cpu_ids", "One CPU of each core"),
    ("mac-m2", "threads", "4 efficiency cores"),
    ("mac-m2", "cpu_ids", "cannot bind"),
    ("mac-m2", "service_cpu_ids", "cannot bind"),
    ("orion-o6", "threads", "4 efficiency cores would delay"),
    ("orion-o6", "service_cpu_ids", "use the 4 efficiency cores"),
    ("core-i7-1360p", "service_cpu_ids", "use the 8 efficiency cores"),
    ("radxa-x4", "service_cpu_ids", "not two kinds of cores"),
    ("mac-m2", "device", "Apple GPU (MPS) is present, but serving on it is not supported yet"),
    ("h100", "device", "8 × NVIDIA H100 80GB HBM3 is present, but serving on it is not supported yet"),
    ("cgroup-v1", "kv_cache_bytes", "control group's limit of 6.0 GiB"),
    ("graviton3", "kv_cache_bytes", "the machine's memory"),
    ("xeon-avx2", "kv_cache_bytes", "memory node 0"),
]


def planned(facts: Facts, recipes: Recipes, needs: Needs | None = None) -> ServingPlan:
    return make_plan(facts, None, Settings(), needs, recipes)


@pytest.mark.parametrize("name", PLANNED)
def test_what_is_planned(recorded: Recorded, recipes: Recipes, name: str) -> None:
    plan = planned(recorded(name), recipes)
    assert PLANNED[name] == (
        plan.weights.precision,
        plan.cpu.threads,
        plan.cpu.numa_node,
        len(plan.cpu.cpu_ids),
        plan.cpu.wait_policy,
        plan.cpu.tokenizer_threads,
    )
    assert plan.weights.dtype == {"bf16": "bfloat16", "fp32": "float32"}[plan.weights.precision]
    assert plan.weights.kv_precision == plan.weights.precision
    assert (plan.placement.device, plan.cpu.interop_threads) == ("cpu", 1)


@pytest.mark.parametrize("name", PLANNED)
def test_threads_fit_what_the_process_may_use(recorded: Recorded, recipes: Recipes, name: str) -> None:
    facts = recorded(name)
    plan = planned(facts, recipes)
    assert 1 <= plan.cpu.threads <= len(facts.allowed_cpus)
    assert set(plan.cpu.cpu_ids) <= facts.allowed_cpus
    if facts.cgroup.quota_cores is not None:
        assert plan.cpu.threads <= max(1, facts.cgroup.quota_cores)
    if len(plan.cpu.cpu_ids) == plan.cpu.threads:
        siblings = [core.cpu_ids for core in facts.cores]
        assert all(len(set(core) & set(plan.cpu.cpu_ids)) <= 1 for core in siblings), "no two threads on one core"


@pytest.mark.parametrize("name", PLANNED)
def test_every_decision_says_why(recorded: Recorded, recipes: Recipes, llama_1b: Needs, name: str) -> None:
    needs = llama_1b if name not in ("graviton2", "radxa-x4", "cgroup-v1", "cgroup-v2-nested") else None
    for field, decision in planned(recorded(name), recipes, needs).decisions.items():
        assert decision.reason.endswith("."), f"{field}: {decision.reason!r} is no sentence"
        assert decision.reason[0].isupper() or decision.reason[0].isdigit(), field


@pytest.mark.parametrize(("name", "field", "words"), REASONS)
def test_reasons(recorded: Recorded, recipes: Recipes, llama_1b: Needs, name: str, field: str, words: str) -> None:
    needs = llama_1b if field == "kv_cache_bytes" and name == "graviton3" else None
    assert words in planned(recorded(name), recipes, needs).decisions[field].reason


@pytest.mark.parametrize(
    ("name", "cpus", "bound"),
    [
        ("orion-o6", (), (1, 2, 3, 4)),
        ("rock-5b", (), (0, 1, 2, 3)),
        ("core-i7-1360p", (), tuple(range(8, 16))),
        ("core-i7-1360p", (0, 1, 2, 3, 9, 12), (9, 12)),  # of those that the affinity mask allows
        ("core-i7-1360p", (0, 1, 2, 3, 9), ()),  # one is too few
        ("core-i7-1360p", (0, 1, 2, 3), ()),
        ("core-i7-1360p", (8, 9, 10, 11), ()),  # they compute
        ("mac-m2", (), ()),
        ("h100", (), ()),
    ],
)
def test_other_threads_use_the_efficiency_cores(
    recorded: Recorded, recipes: Recipes, name: str, cpus: tuple[int, ...], bound: tuple[int, ...]
) -> None:
    host = recorded(name)
    plan = planned(replace(host, affinity=cpus or host.affinity), recipes)
    assert plan.cpu.service_cpu_ids == bound
    assert not set(bound) & set(plan.cpu.cpu_ids)


def test_other_threads_are_not_bound_where_the_compute_threads_are_not(recorded: Recorded, recipes: Recipes) -> None:
    """They would inherit the mask of the event loop, which starts their thread, and stay on efficiency cores."""
    quota = replace(recorded("orion-o6").cgroup, quota_cores=2.0)
    plan = planned(replace(recorded("orion-o6"), cgroup=quota), recipes)
    assert (plan.cpu.cpu_ids, plan.cpu.service_cpu_ids) == ((), ())
    assert "compute threads are not bound" in plan.decisions["service_cpu_ids"].reason
    cpuset = replace(recorded("orion-o6").cgroup, cpuset=(2, 3, 5, 6))
    assert planned(replace(recorded("orion-o6"), cgroup=cpuset), recipes).cpu.service_cpu_ids == (2, 3)


def test_a_model_that_does_not_fit_is_refused_with_the_numbers(
    recorded: Recorded, recipes: Recipes, llama_1b: Needs
) -> None:
    with pytest.raises(PlanImpossible, match=r"4.6 GiB of weights in fp32, .*4.0 GiB are available .*limit of 6.0 GiB"):
        planned(recorded("cgroup-v1"), recipes, llama_1b)
    with pytest.raises(
        PlanImpossible, match=r"4.6 GiB of weights in fp32, .*2.0 GiB are available \(the machine's memory\)"
    ):
        planned(recorded("graviton2"), recipes, llama_1b)


def test_what_the_process_itself_holds_is_counted(recorded: Recorded, recipes: Recipes, llama_1b: Needs) -> None:
    """The weights alone, 2.3 GiB, would fit into the 2.6 GiB that are left of the pod's 3."""
    summands = r"2.3 GiB of weights in bf16, \d+ MiB for keys and values of one sequence of 1,024 tokens and \d+ MiB for the process"
    with pytest.raises(
        PlanImpossible, match=summands + r" and its activations make 2.9 GiB, but only 2.6 GiB are available \(of the"
    ):
        planned(recorded("cgroup-v2-nested"), recipes, llama_1b)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raspberry-pi-4", "Cortex-A72.*no lse.*Armv8.1"),
        ("xeon-westmere", "no avx:.*Sandy Bridge"),
    ],
)
def test_torch_is_not_even_imported_where_it_would_crash(
    recorded: Recorded, recipes: Recipes, name: str, words: str
) -> None:
    with pytest.raises(PlanImpossible, match=words):
        check_torch_can_run(recorded(name))
    with pytest.raises(PlanImpossible, match=words):
        planned(recorded(name), recipes)


@pytest.mark.parametrize("name", PLANNED)
def test_torch_is_imported_everywhere_else(recorded: Recorded, name: str) -> None:
    check_torch_can_run(recorded(name))


AVX2 = frozenset("sse4_2 popcnt avx avx2 fma".split())
AVX2_LEVEL = NativeLibrary(("avx2", "portable"), None)


def test_a_decoder_stored_in_bf16_stays_so_without_bf16_products(recipes: Recipes, llama_1b: Needs) -> None:
    """Where our kernels widen weights; what is stored in FP32, and vectors, keep FP32."""
    host = machine(isa=AVX2, native=AVX2_LEVEL)
    plan = planned(host, recipes, llama_1b)
    assert (plan.weights.precision, plan.weights.dtype, plan.weights.kv_precision) == ("bf16", "bfloat16", "bf16")
    reason = plan.decisions["precision"].reason
    assert "checkpoint is in BF16" in reason and "widened while they are read" in reason
    assert planned(machine(isa=AVX2), recipes, llama_1b).weights.precision == "fp32"
    assert planned(host, recipes, replace(llama_1b, stored_dtype="float32")).weights.precision == "fp32"
    encoder = replace(llama_1b, kind="encoder", kv_elements_per_token=0)
    assert planned(host, recipes, encoder).weights.precision == "fp32"


def test_the_codes_of_a_quantized_file_are_kept(recipes: Recipes, llama_1b: Needs) -> None:
    host, recipes = (
        machine(isa=AVX2, native=AVX2_LEVEL),
        recipes | {("cpu", "x86_64", name) for name in ("int4", "int8")},
    )
    quantized = replace(llama_1b, stored_dtype="float32", stored_quantization="Q4_K", codes_precision="int4")
    precision = planned(host, recipes, quantized).decisions["precision"]
    assert (
        precision.value == "int4" and "keeps the codes" in precision.reason and "weights are Q4_K" in precision.reason
    )
    asked = make_plan(host, None, Settings(precision="int4"), quantized, recipes).decisions["precision"]
    assert asked.reason.startswith("Asked for. It keeps the codes")
    # Without our kernels no form has them; without a budget nothing is quantized; what is asked for is served.
    assert planned(machine(isa=AVX2), recipes, quantized).weights.precision == "fp32"
    exact = make_plan(host, None, Settings(quality_budget=0), quantized, recipes).decisions["precision"]
    assert exact.value == "bf16" and "The checkpoint is in Q4_K" in exact.reason
    other = make_plan(host, None, Settings(precision="int8"), quantized, recipes).decisions["precision"]
    assert other.value == "int8" and other.reason.endswith(
        "weights are Q4_K; their values are computed and rounded again."
    )
    assert not any("rounded again" in one.reason for one in (precision, asked, exact))


def test_values_without_an_equal_form_are_rounded_again_at_a_measured_cost(recipes: Recipes, llama_1b: Needs) -> None:
    host, recipes = machine(isa=AVX2, native=AVX2_LEVEL), recipes | {("cpu", "x86_64", "int4")}
    needs = replace(llama_1b, stored_dtype="float32", stored_quantization="FP8")
    precision = make_plan(host, None, Settings(precision="int4"), needs, recipes).decisions["precision"]
    assert "its cost in quality is not measured for this model (it is, when the weights are packed)" in precision.reason
    assert precision.reason.endswith("weights are FP8; their values are computed and rounded again.")


def test_bf16_that_was_asked_for_is_slow_only_without_our_kernels(recipes: Recipes) -> None:
    reasons = [
        make_plan(host, None, Settings(precision="bf16"), None, recipes).decisions["precision"].reason
        for host in (machine(isa=AVX2, native=AVX2_LEVEL), machine(isa=AVX2))
    ]
    assert "widened while they are read" in reasons[0] and "slow" in reasons[1]
