"""Plans with measurements: each rule on both sides of its threshold, with the figures in the reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.errors import PlanImpossible
from app.hardware.decision import Measurements, TrialTimes
from app.hardware.facts import Cgroup, Facts, NativeLibrary, Needs, TorchBuild
from app.hardware.plan.plan import ServingPlan, make_plan
from app.settings import Settings
from armature_kernels.linear.torchao_config import KLEIDI_INT4
from planned_machines import GIB, RECIPES, machine

SIZES = (16, 32, 64, 128, 256, 512)
READ, PRODUCTS = 50e9, {"bf16": 1e12, "int8": 3e12, "int4": 3e12}


def trial(precision: str, one: float, eight: float, prompt: float, threads: int = 8, **more: Any) -> TrialTimes:
    """By tokens a second: at one sequence, at eight, of a prompt at any size of step; decode beyond eight rows costs in proportion."""
    decode = {1: 1 / one, 8: 8 / eight, 16: 16 / eight, 64: 64 / eight}
    return TrialTimes(precision, threads, decode, {size: size / prompt for size in SIZES}, **more)


def measured(*trials: TrialTimes, **more: Any) -> Measurements:
    return Measurements(READ, PRODUCTS, trials, seconds=2.5, **more)


def plan(
    measurements: Measurements | None, needs: Needs | None, facts: Facts | None = None, **asked: Any
) -> ServingPlan:
    return make_plan(facts or machine(), measurements, Settings(**{"calibrate": "auto", **asked}), needs, RECIPES)


BF16 = trial("bf16", 25, 150, 1000)


# ---- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("int8", "chosen"),
    [
        (trial("int8", 30.01, 181, 900), "int8"),
        (trial("int8", 29.9, 300, 900), "bf16"),  # 1.196 times at one sequence
        (trial("int8", 50, 179, 900), "bf16"),  # 1.193 times at eight
    ],
)
def test_eight_bits_where_they_are_a_fifth_quicker(llama_1b: Needs, int8: TrialTimes, chosen: str) -> None:
    assert plan(measured(BF16, int8), llama_1b).weights.precision == chosen


def test_the_reason_has_what_was_measured_and_what_it_costs(llama_1b: Needs) -> None:
    reason = plan(measured(BF16, trial("int8", 45.31, 240, 900)), llama_1b).decisions["precision"].reason
    assert (
        "45.3 tokens/s at one sequence and 240 at 8, against 25.0 tokens/s at one sequence and 150 at 8 in bf16"
        in reason
    )
    assert "(1.8 and 1.6 times as fast)" in reason and "not measured for this model" in reason
    kept = plan(measured(BF16, trial("int8", 26, 150, 900)), llama_1b).decisions["precision"].reason
    assert (
        kept.startswith("This processor has BF16 products") and "1.04 and 1.00 times as fast" in kept and "1.2" in kept
    )


@pytest.mark.parametrize(
    ("one", "four", "chosen"),
    [(49.9, 65.0, "int4"), (49.9, 64.8, "int8"), (50.0, 100.0, "int8")],
)
def test_four_bits_where_eight_are_slow_and_four_are_not(llama_1b: Needs, one: float, four: float, chosen: str) -> None:
    slow = trial("bf16", 10, 50, 300)
    found = plan(measured(slow, trial("int8", one, 90, 300), trial("int4", four, 120, 300)), llama_1b).decisions[
        "precision"
    ]
    assert found.value == chosen
    assert chosen != "int4" or (
        "49.9 tokens/s at one sequence in int8" in found.reason and "not measured for this model" in found.reason
    )


@pytest.mark.parametrize(("eight", "chosen"), [(80, "int4"), (65, "int8")])
def test_four_bits_may_lose_little_at_eight_sequences(llama_1b: Needs, eight: float, chosen: str) -> None:
    slow = trial("bf16", 5, 20, 300)
    found = plan(measured(slow, trial("int8", 15, 90, 300), trial("int4", 22.5, eight, 300)), llama_1b).decisions[
        "precision"
    ]
    assert found.value == chosen
    assert chosen == "int4" or "int4 would be slower at 8 sequences" in found.reason


ARM_ISA = frozenset({"lse", "dotprod", "i8mm", "bf16"})


def arm(kleidiai: bool = True, isa: frozenset[str] = ARM_ISA, **changes: Any) -> Facts:
    torch = TorchBuild(version="2.13.0", kleidiai=kleidiai)
    return machine(architecture="arm64", isa=isa, torch=torch, **changes)


OURS = trial("int4", 20, 100, 400)
GROUPS, CHANNELS = (trial(KLEIDI_INT4[group], 20, 100, 400) for group in (32, None))


def faster(one: TrialTimes, gain: float) -> TrialTimes:
    decode, prompt = (
        {size: seconds / gain for size, seconds in table.items()} for table in (one.decode_seconds, one.prefill_seconds)
    )
    return dataclasses.replace(one, decode_seconds=decode, prefill_seconds=prompt)


@pytest.mark.parametrize(("gain", "winner"), [(1.31, KLEIDI_INT4[32]), (1.29, "int4")])
def test_kleidiai_serves_int4_where_it_gains_enough_and_the_plan_says_by_how_much(
    llama_1b: Needs, gain: float, winner: str
) -> None:
    found = plan(
        measured(OURS, faster(GROUPS, gain), faster(CHANNELS, 3)), llama_1b, arm(), precision="int4"
    ).decisions["precision"]
    assert found.value == winner
    assert f"{gain:.2f} times as fast in groups of 32 and 3.00 times as fast per channel" in found.reason
    assert ("KleidiAI by torchao serves it" if gain > 1.3 else "Our kernels serve it") in found.reason


def test_kleidiai_per_channel_is_never_chosen_unasked(llama_1b: Needs) -> None:
    assert plan(measured(OURS, faster(CHANNELS, 9)), llama_1b, arm(), precision="int4").weights.precision == "int4"
    found = plan(measured(OURS, faster(CHANNELS, 9)), llama_1b, arm(), quantization=KLEIDI_INT4[None])
    assert found.weights.precision == KLEIDI_INT4[None]


@pytest.mark.parametrize(
    ("facts", "asked"),
    [
        (arm(kleidiai=False), {}),
        (arm(isa=ARM_ISA - {"bf16"}), {}),  # activations in FP32 would take twice the memory
        (arm(memory=int(1.7 * GIB)), {}),  # it takes more memory than ours
        (arm(), {"int8_copy": "on"}),
        (arm(native=NativeLibrary(levels=("i8mm",))), {"deterministic": "on"}),
        (machine(), {}),
    ],
)
def test_our_int4_serves_where_kleidiai_cannot(llama_1b: Needs, facts: Facts, asked: dict[str, str]) -> None:
    found = plan(measured(OURS, faster(GROUPS, 2)), llama_1b, facts, precision="int4", **asked)
    assert found.weights.precision == "int4"


@pytest.mark.parametrize(("parameters", "chosen"), [(99_999_999, "bf16"), (100_000_000, "int8")])
def test_small_models_stay_exact(llama_1b: Needs, parameters: int, chosen: str) -> None:
    needs = dataclasses.replace(llama_1b, num_parameters=parameters)
    found = plan(measured(BF16, trial("int8", 60, 400, 2000)), needs).decisions["precision"]
    assert found.value == chosen
    assert chosen != "bf16" or "100M parameters" in found.reason


def test_what_was_not_measured_does_not_count(llama_1b: Needs) -> None:
    int8 = trial("int8", 60, 400, 2000)
    assert plan(measured(int8), llama_1b).weights.precision == "int8", "the other one is estimated"
    assert plan(measured(BF16, int8, fallback="the machine is busy"), llama_1b).weights.precision == "bf16"
    assert plan(measured(BF16, dataclasses.replace(int8, threads=4)), llama_1b).weights.precision == "bf16"
    assert (
        plan(measured(BF16, dataclasses.replace(int8, decode_seconds={1: float("nan")})), llama_1b).weights.precision
        == "bf16"
    )
    assert plan(measured(BF16, int8), llama_1b, precision="bf16").decisions["precision"].reason == "Asked for."


@pytest.mark.parametrize(
    ("memory", "chosen"), [(64 * GIB, "bf16"), (4 * GIB, "bf16"), (3 * GIB, "int8"), (int(1.6 * GIB), "int4")]
)
def test_what_does_not_fit_is_held_in_fewer_bits(llama_1b: Needs, memory: int, chosen: str) -> None:
    found = plan(None, llama_1b, machine(memory=memory))
    assert found.weights.precision == chosen
    if chosen != "bf16":
        assert (
            "Weights in bf16 take 2.3 GiB" in found.decisions["precision"].reason
            and "not measured for this model" in found.decisions["precision"].reason
        )
        assert found.memory.weight_bytes == llama_1b.bytes_by_precision[chosen]


def test_what_is_measured_but_does_not_fit_is_not_chosen(llama_1b: Needs) -> None:
    quick = measured(BF16, trial("int8", 15, 400, 2000), trial("int4", 19, 400, 2000))
    assert plan(quick, llama_1b, machine(memory=int(1.6 * GIB))).weights.precision == "int4", (
        "too little of a gain, but it fits"
    )


# ---- threads and steps of a prompt -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("quicker", "threads"), [(1.031, 7), (1.029, 8), (0.5, 8)])
def test_fewer_threads_where_they_are_quicker(llama_1b: Needs, quicker: float, threads: int) -> None:
    fewer = trial("bf16", 25 * quicker, 150 * quicker, 1000 * quicker, threads=7)
    found = plan(measured(BF16, fewer), llama_1b)
    assert found.cpu.threads == threads
    assert found.environment()["OMP_NUM_THREADS"] == str(threads)
    assert "other work" not in found.decisions["threads"].reason
    told = {7: "Measured with 7 threads", 8: "7 threads would"}[threads]
    assert (
        told in found.decisions["threads"].reason
        and "8 physical cores may be used" in found.decisions["threads"].reason
    )


def test_far_too_many_threads_are_a_sign_of_other_work(llama_1b: Needs) -> None:
    """Two threads that share a core with somebody wait for each other; what was measured then is true, but may not last."""
    found = plan(measured(BF16, trial("bf16", 33, 200, 1320, threads=7)), llama_1b).decisions["threads"]
    assert found.value == 7 and "a sign of other work on these cores" in found.reason


def test_threads_that_are_forced_stay(llama_1b: Needs) -> None:
    fewer = trial("bf16", 50, 300, 2000, threads=4)
    assert plan(measured(BF16, fewer), llama_1b, threads=8).cpu.threads == 8
    more = trial("bf16", 90, 900, 9000, threads=9)
    assert plan(measured(BF16, more), llama_1b).cpu.threads == 8, "nobody may be given more than there is"


def test_half_a_core_of_quota_is_left_alone(llama_1b: Needs) -> None:
    host = machine(cores=2, cgroup=Cgroup(2, quota_cores=1.5))
    found = plan(
        measured(trial("bf16", 25, 150, 1000, threads=2), trial("bf16", 20, 100, 900, threads=1)), llama_1b, host
    )
    assert found.cpu.threads == 1 and "quota is 1.5 cores, rounded down" in found.decisions["threads"].reason


def test_fewer_threads_are_compared_in_steps_that_both_were_timed_with(llama_1b: Needs) -> None:
    """Steps of 512 are the quicker ones: a trial that stops at 128 would look slow."""
    prompts = {128: 128 / 500, 512: 512 / 1000}
    full = dataclasses.replace(BF16, prefill_seconds=prompts)
    fewer = TrialTimes("bf16", 7, BF16.decode_seconds, {128: 128 / 600})
    assert plan(measured(full, fewer), llama_1b).cpu.threads == 7


def by_size(rates: dict[int, float]) -> Measurements:
    return measured(dataclasses.replace(BF16, prefill_seconds={size: size / each for size, each in rates.items()}))


@pytest.mark.parametrize(
    ("rates", "tokens"),
    [
        ({64: 1000, 128: 951, 256: 980, 512: 1000}, 128),
        ({64: 1000, 128: 949, 256: 980, 512: 1000}, 256),
        ({128: 500, 256: 700, 512: 800, 1024: 1000}, 1024),
        ({128: 900, 256: 1000}, 512),  # still rising where measuring ended
        ({128: 990, 256: 1000}, 128),
        ({16: 1000, 64: 1000}, 512),  # too small for the sequences that run beside
    ],
)
def test_the_shortest_step_with_which_prompts_are_quick(llama_1b: Needs, rates: dict[int, float], tokens: int) -> None:
    found = plan(by_size(rates), llama_1b).decisions["max_batch_tokens"]
    assert found.value == tokens
    assert tokens == 512 or "easured" in found.reason


def test_steps_are_bounded_by_memory(llama_1b: Needs) -> None:
    rising = by_size({512: 500, 4096: 900, 8192: 1000})
    assert plan(rising, llama_1b).memory.max_batch_tokens == 8192
    tight = plan(rising, llama_1b, machine(memory=4 * GIB))
    assert tight.memory.max_batch_tokens < 8192 and "Memory is short" in tight.decisions["max_batch_tokens"].reason
    forced = plan(rising, llama_1b, machine(memory=4 * GIB), max_batch_tokens=8192)
    assert (forced.memory.max_batch_tokens, forced.weights.precision) == (8192, "int8"), (
        "what is asked for stays: weights give way"
    )


# ---- a copy in eight bits, keys and values ---------------------------------------------------------------------------


@pytest.mark.parametrize(("fast", "has_copy"), [(1101, True), (1099, False)])
def test_a_copy_where_prompts_gain_a_tenth(llama_1b: Needs, fast: float, has_copy: bool) -> None:
    lean, copy = trial("int4", 40, 200, 1000), trial("int4", 40, 200, fast, int8_copy=True)
    found = plan(measured(lean, copy, most_few_rows=24), llama_1b, precision="int4")
    assert found.weights.int8_copy is has_copy
    assert f"{fast:,.0f} tokens/s with 8 bits, 1,000 with 4 bits" in found.decisions["int8_copy"].reason
    assert found.weights.most_few_rows == (24 if has_copy else None)
    assert found.memory.weight_bytes == llama_1b.bytes_by_precision["int4"] + has_copy * llama_1b.int8_copy_bytes


def test_a_copy_wants_room(llama_1b: Needs) -> None:
    quick = measured(trial("int4", 40, 200, 1000), trial("int8", 40, 200, 2000))
    assert plan(quick, llama_1b, precision="int4").weights.int8_copy, "measured of eight bits alone"
    short = plan(quick, llama_1b, machine(memory=3 * GIB), precision="int4").decisions["int8_copy"]
    assert not short.value and "quarter" in short.reason
    assert not plan(quick, llama_1b, precision="int4", int8_copy="off").weights.int8_copy
    assert not plan(measured(trial("int4", 40, 200, 1000)), llama_1b, precision="int4").weights.int8_copy
    kernels = machine(native=NativeLibrary(("portable",), None))
    assert not plan(quick, llama_1b, kernels, precision="int4", deterministic="on").weights.int8_copy


def test_keys_and_values_in_eight_bits_where_memory_is_short(llama_1b: Needs) -> None:
    assert plan(None, llama_1b).weights.kv_precision == "bf16"
    short = plan(None, llama_1b, machine(memory=int(1.4 * GIB)), precision="int4", max_batch_tokens=64)
    assert short.weights.kv_precision == "int8" and "nearly twice as many" in short.decisions["kv_precision"].reason
    wide = plan(
        None, llama_1b, machine(memory=int(1.4 * GIB)), precision="int4", max_batch_tokens=64, kv_precision="bf16"
    )
    assert short.memory.max_model_len > 1.7 * wide.memory.max_model_len


def test_bytes_of_keys_and_values_in_eight_bits(llama_1b: Needs) -> None:
    """Codes of one byte, and a scale of four for each head of keys and of values; each layer's row in whole cache lines."""
    needs = dataclasses.replace(llama_1b, max_model_len=100, kv_elements_per_token=2 * 16 * 16 * 64, num_kv_heads=16)
    row = 2 * 16 * 64 + 2 * 16 * 4
    assert row % 64 == 0
    assert plan(None, needs, kv_precision="int8").memory.kv_cache_bytes == 2 * 64 * 100 * 16 * row
    odd = dataclasses.replace(needs, kv_elements_per_token=2 * 16 * 1 * 8, num_kv_heads=1)
    assert plan(None, odd, kv_precision="int8").memory.kv_cache_bytes == 2 * 64 * 100 * 16 * 64


# ---- what to expect --------------------------------------------------------------------------------------------------


def test_capacity_counts_a_typical_context(llama_1b: Needs) -> None:
    found = plan(measured(dataclasses.replace(BF16, context_token_seconds=1e-6)), llama_1b).decisions[
        "capacity_tokens_per_second"
    ]
    decode, prefill = found.value["decode"], found.value["prefill"]
    assert list(decode) == [1, 8, 16, 64]
    assert decode[8] == pytest.approx(8 / (8 / 150 + 8 * 512e-6))
    assert prefill[128] == pytest.approx(1000)
    assert "at 64, each 512 tokens long" in found.reason
    assert list(plan(measured(BF16), llama_1b, max_running_seqs=5).speed.capacity_tokens_per_second["decode"]) == [1, 5]
    few = dataclasses.replace(BF16, decode_seconds={1: 1 / 25, 8: 8 / 150})
    assert list(plan(measured(few), llama_1b).speed.capacity_tokens_per_second["decode"]) == [1, 8], (
        "nothing is made up beyond"
    )
    assert plan(None, None).speed.capacity_tokens_per_second == {}


def test_how_near_the_ceilings_it_comes(llama_1b: Needs) -> None:
    """Reads of 1 GB at 50 GB/s take 20 ms; 2e9 operations a token at 1e12 a second take 2 ms."""
    known = trial("bf16", 25, 150, 400, read_bytes=10**9, operations_per_token=2e9)
    ratio = plan(measured(known), llama_1b).decisions["roofline_ratio"]
    assert ratio.value == {
        "decode": pytest.approx(0.5),
        "decode_full": pytest.approx(0.3),
        "prefill": pytest.approx(0.8),
    }
    assert "50% at one sequence, 30% at 64" in ratio.reason


def test_quicker_than_the_ceiling_is_no_measurement(llama_1b: Needs) -> None:
    known = trial("bf16", 51, 150, 400, read_bytes=10**9, operations_per_token=2e9)
    ratio = plan(measured(known), llama_1b).decisions["roofline_ratio"]
    assert "decode" not in ratio.value and "prefill" in ratio.value
    assert "Steps at one sequence were measured faster than their limit and are left out" in ratio.reason


def test_the_planned_rate(llama_1b: Needs) -> None:
    assert (
        "about 107 ms with 8 sequences, whose steps take 53.3 ms"
        in plan(measured(BF16), llama_1b).decisions["itl_target_seconds"].reason
    )
    quick = plan(measured(trial("bf16", 2500, 9000, 10000)), llama_1b).decisions["itl_target_seconds"]
    assert quick.value is None and "about 10 ms" in quick.reason


def test_how_it_was_measured(llama_1b: Needs) -> None:
    assert "in 2.5 s" in plan(measured(BF16), llama_1b).decisions["calibrate"].reason
    assert (
        "facts alone, since the machine is busy."
        in plan(measured(BF16, fallback="the machine is busy"), llama_1b).decisions["calibrate"].reason
    )
    assert plan(None, llama_1b).steps.calibrate and not plan(None, llama_1b, calibrate="off").steps.calibrate


# ---- what a precision costs in quality -----------------------------------------------------------------------------------


def costing(needs: Needs, **costs: float) -> Needs:
    return dataclasses.replace(needs, quality_costs=costs)


@pytest.mark.parametrize(
    ("costs", "budget", "chosen"),
    [
        ({}, 0.03, "int4"),
        ({"int8": 0.004, "int4": 0.03}, 0.03, "int4"),
        ({"int8": 0.004, "int4": 0.031}, 0.03, "int8"),
        ({"int8": 0.004, "int4": 0.031}, 0.04, "int4"),
        ({"int8": 0.031, "int4": 0.2}, 0.03, "bf16"),
        ({}, 0, "bf16"),
    ],
)
def test_auto_stays_within_the_quality_budget(
    llama_1b: Needs, costs: dict[str, float], budget: float, chosen: str
) -> None:
    times = measured(trial("bf16", 5, 30, 400), trial("int8", 10, 70, 500), trial("int4", 18, 120, 400))
    found = plan(times, costing(llama_1b, **costs), quality_budget=budget).decisions["precision"]
    assert found.value == chosen
    for name, cost in costs.items():
        if cost > budget and chosen != "bf16":
            assert f"{name}: it raises perplexity by {100 * cost:.1f}% (measured" in found.reason
    if chosen in costs:
        assert f"it raises perplexity by {100 * costs[chosen]:.1f}%" in found.reason


def test_a_precision_that_was_asked_for_says_its_cost(llama_1b: Needs) -> None:
    assert (
        "raises perplexity by 4.0%"
        in plan(None, costing(llama_1b, int4=0.04), precision="int4").decisions["precision"].reason
    )
    assert "not measured" in plan(None, llama_1b, precision="int4").decisions["precision"].reason


def test_layers_are_kept_only_among_quantized_ones(llama_1b: Needs) -> None:
    kept = plan(None, llama_1b, precision="int4", keep_layers="*.down_proj=int8, lm_head=bf16").weights.keep_layers
    assert kept == (("*.down_proj", "int8"), ("lm_head", "bf16"))
    with pytest.raises(PlanImpossible, match="keep_layers"):
        plan(None, llama_1b, precision="bf16", keep_layers="*=int8")


@pytest.mark.parametrize("text", ("lm_head", "=int8", "lm_head=fp8", "a=int8,b"))
def test_a_list_of_layers_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="PATTERN=PRECISION"):
        Settings(keep_layers=text)
