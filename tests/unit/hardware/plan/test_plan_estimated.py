"""Plans without measurements, or with some missing: what was not timed is estimated, and the slowest is never chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import PlanImpossible
from app.hardware.decision import Measurements, TrialTimes
from app.hardware.facts import Cgroup, Cpu, Facts, NativeLibrary, Needs
from app.hardware.plan.plan import ServingPlan, make_plan
from app.hardware.plan.precision import SLOW_TOKENS_PER_SECOND
from app.hardware.plan.speed import EstimateInputs, by_expected_speed, find_ceilings, known_timing
from app.settings import Settings
from hypothesis_examples import examples
from planned_machines import GIB, RECIPES, machine

AVX2 = frozenset("sse4_2 popcnt avx avx2 fma".split())
AVX512 = AVX2 | frozenset("avx512f avx512bw avx512dq avx512vl avx512_vnni".split())
X86 = NativeLibrary(("avx512bf16", "avx512", "avxvnni", "avx2", "portable"))
ARM = NativeLibrary(("i8mm", "dotprod", "neon"))
SIZES = (32, 128, 512)


@pytest.fixture
def llama_1b(llama_1b: Needs) -> Needs:
    """Stored in FP32: its reference precision is FP32 where BF16 is not multiplied."""
    return dataclasses.replace(llama_1b, stored_dtype="float32")


def cascade_lake(cores: int = 2, **changes: Any) -> Facts:
    return machine(cores, **{"cpu": Cpu("Intel", "Xeon", "Cascade Lake"), "isa": AVX512, "native": X86, **changes})


def graviton2(cores: int = 2, **changes: Any) -> Facts:
    isa = frozenset({"neon", "fp16", "dotprod", "lse"})
    known = {"architecture": "arm64", "cpu": Cpu("Arm", "N1", "Neoverse N1"), "isa": isa, "native": ARM}
    return machine(cores, **{**known, **changes})


def trial(precision: str, one: float, eight: float, prompt: float = 300.0, threads: int = 2) -> TrialTimes:
    return TrialTimes(precision, threads, {1: 1 / one, 8: 8 / eight}, {size: size / prompt for size in SIZES})


def plan(needs: Needs, found: Measurements | None = None, facts: Facts | None = None, **asked: Any) -> ServingPlan:
    return make_plan(facts or cascade_lake(), found, Settings(**{"calibrate": "auto", **asked}), needs, RECIPES)


def costing(needs: Needs, **costs: float) -> Needs:
    return dataclasses.replace(needs, quality_costs=costs)


# ---- nothing was timed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", [None, Measurements(fallback="the machine is too busy")])
@pytest.mark.parametrize(
    ("facts", "chosen"),
    [
        (cascade_lake(), "int4"),
        (cascade_lake(16), "int8"),
        (graviton2(), "int4"),
        (graviton2(16), "int8"),
        (machine(2, isa=AVX2, native=X86), "int4"),  # 1.5 times the products of int8 without VNNI
        (machine(2, isa=AVX512 | {"avx512_bf16"}, native=X86), "int4"),
        (machine(16, isa=AVX512 | {"avx512_bf16"}, native=X86), "int8"),
    ],
)
def test_a_model_of_a_billion_weights_is_quantized(
    llama_1b: Needs, facts: Facts, found: Measurements | None, chosen: str
) -> None:
    decision = plan(llama_1b, found, facts).decisions["precision"]
    assert decision.value == chosen
    assert (
        decision.reason.startswith("Estimated ")
        and "not timed but estimated from bytes and operations" in decision.reason
    )
    assert "easured" not in decision.reason.replace("not measured for this model", "").replace(
        "is measured", ""
    ).replace("it is, when", "")


@pytest.mark.parametrize("facts", [cascade_lake(native=None), graviton2(native=None)])
def test_without_kernels_nothing_is_quantized_unasked(llama_1b: Needs, facts: Facts) -> None:
    assert plan(llama_1b, facts=facts).weights.precision == "fp32"


@pytest.mark.parametrize(
    ("costs", "budget", "chosen"),
    [
        ({}, 0, "fp32"),
        ({"int8": 0.02, "int4": 0.031}, 0.03, "int8"),
        ({"int8": 0.05, "int4": 0.05}, 0.03, "fp32"),
        ({"int8": 0.05, "int4": 0.02}, 0.03, "int4"),
    ],
)
def test_estimates_stay_within_the_quality_budget(
    llama_1b: Needs, costs: dict[str, float], budget: float, chosen: str
) -> None:
    assert plan(costing(llama_1b, **costs), quality_budget=budget).weights.precision == chosen


@pytest.mark.parametrize(("parameters", "chosen"), [(99_999_999, "fp32"), (100_000_000, "int4")])
def test_small_models_stay_exact(llama_1b: Needs, parameters: int, chosen: str) -> None:
    assert plan(dataclasses.replace(llama_1b, num_parameters=parameters)).weights.precision == chosen


@pytest.mark.parametrize(
    "asked",
    [{"kv_precision": "int8"}, {"keep_layers": "lm_head=int8"}, {"int8_copy": "on"}],
    ids=lambda one: next(iter(one)),
)
def test_a_setting_that_suits_few_precisions_is_answered_alike_before_and_after_measuring(
    llama_1b: Needs, asked: dict[str, str]
) -> None:
    found = Measurements(trials=(trial("fp32", 50, 300), trial("int8", 55, 310), trial("int4", 60, 330)))
    answers = []
    for known in (None, found):
        try:
            answers.append(plan(llama_1b, known, **asked).weights.precision)
        except PlanImpossible as error:
            answers.append(type(error).__name__)
    assert answers[0] == answers[1]


# ---- some were timed -------------------------------------------------------------------------------------------------


def test_the_slow_reference_that_nobody_timed_does_not_win(llama_1b: Needs) -> None:
    """Two cores of a Cascade Lake: int8 and int4 were measured, and there was no time for FP32 (3.6 tokens/s)."""
    found = Measurements(trials=(trial("int8", 13, 80), trial("int4", 23, 110)))
    decision = plan(llama_1b, found).decisions["precision"]
    assert decision.value == "int4"
    assert "13.0 tokens/s at one sequence in int8" in decision.reason and "23.0 tokens/s" in decision.reason
    only8 = plan(llama_1b, Measurements(trials=(trial("int8", 13, 80),)), quality_budget=0.03).decisions["precision"]
    assert only8.value in ("int8", "int4")
    assert plan(costing(llama_1b, int4=1.0), found).weights.precision == "int8"
    against = plan(costing(llama_1b, int4=1.0), found).decisions["precision"].reason
    assert "Measured 13.0 tokens/s at one sequence" in against and "against an estimated " in against
    assert "fp32 was not timed but estimated" in against


@pytest.mark.parametrize("read", [10e9, 20e9, 30e9])
def test_an_estimate_reads_no_faster_than_the_machine(llama_1b: Needs, read: float) -> None:
    """Other work slowed down the products that were timed for the ceilings, so int4 was timed four times as fast as estimated."""
    products = {"int8": 5e10, "int4": 5e10, "fp32": 1e11}
    found = Measurements(read, products, single_steps={"int8": 1 / 8.4, "int4": 1 / 53.6})
    decision = plan(llama_1b, found).decisions["precision"]
    assert decision.value == "int4" and "a measured 53.6 tokens/s" in decision.reason


def test_an_estimate_does_not_displace_what_was_measured_fast_enough(llama_1b: Needs) -> None:
    fast, slow = SLOW_TOKENS_PER_SECOND + 0.1, SLOW_TOKENS_PER_SECOND / 4
    assert plan(llama_1b, Measurements(trials=(trial("fp32", fast, 100),))).weights.precision == "fp32"
    assert plan(llama_1b, Measurements(trials=(trial("fp32", slow, 20),))).weights.precision != "fp32"


def test_single_steps_of_a_busy_machine_decide_nothing(llama_1b: Needs) -> None:
    steps = {"fp32": 2.0, "int8": 3.5, "int4": 4.5}  # estimated: 0.35, 0.09, 0.05
    found = Measurements(40e9, {"fp32": 1e11, "int8": 6e11, "int4": 6e11}, single_steps=steps)
    decision = plan(llama_1b, found).decisions["precision"]
    assert decision.value == "int4" and "not timed but estimated" in decision.reason
    quiet = Measurements(40e9, {"fp32": 1e11, "int8": 6e11, "int4": 6e11}, single_steps={"fp32": 0.3, "int8": 0.35})
    assert plan(llama_1b, quiet).weights.precision != "int8", "int8 was timed slower"


def test_noisy_times_are_a_better_estimate_unless_all_were_disturbed(llama_1b: Needs) -> None:
    def noisy(precision: str, one: float, eight: float) -> TrialTimes:
        return dataclasses.replace(trial(precision, one, eight), noise="the machine is too busy", spread=0.3)

    found = Measurements(trials=(noisy("int8", 13, 80), noisy("int4", 23, 110)))
    decision = plan(llama_1b, found)
    assert decision.weights.precision == "int4" and "23.0 tokens/s" in decision.decisions["precision"].reason
    assert (
        "The times of int8 and int4 are the least of samples that varied too much."
        in decision.decisions["precision"].reason
    )
    assert decision.speed.speed_source == "noisy"
    slow = Measurements(trials=(noisy("int8", 1.0, 6), noisy("int4", 0.9, 5)))  # estimated: 11 and 19
    disturbed = plan(llama_1b, slow)
    assert disturbed.weights.precision == "int4" and disturbed.speed.speed_source == "estimated"
    beside = Measurements(trials=(trial("int8", 1.0, 6), noisy("int4", 0.9, 5)))
    assert plan(llama_1b, beside).weights.precision == "int8", "int8 was timed well, so the machine is that slow"


def test_threads_do_not_follow_noise(llama_1b: Needs) -> None:
    half = dataclasses.replace(trial("int4", 40, 200, threads=1), noise="the machine is too busy")
    found = Measurements(trials=(dataclasses.replace(trial("int4", 20, 100), noise=half.noise), half))
    assert plan(llama_1b, found).cpu.threads == 2
    steady = dataclasses.replace(found, trials=tuple(dataclasses.replace(one, noise="") for one in found.trials))
    assert plan(llama_1b, steady).cpu.threads == 1


def test_one_measured_step_scales_the_estimate(llama_1b: Needs) -> None:
    found = Measurements(trials=(trial("int8", 60, 400),), single_steps={"fp32": 0.5})
    inputs = EstimateInputs(cascade_lake(), llama_1b, "avx512", measurements=found)
    one = known_timing(inputs, "fp32", 2)
    assert one is not None and one.source == "one step"
    assert one.decode_rate(1) == pytest.approx(2.0)
    decision = plan(llama_1b, found).decisions["precision"]
    assert decision.value == "int8" and "Of fp32 only one step was timed." in decision.reason
    quick = Measurements(trials=(trial("int8", 60, 400),), single_steps={"fp32": 1 / 58})
    assert plan(llama_1b, quick).weights.precision == "fp32", "a step that is nearly as quick is no reason to quantize"
    rejected = dataclasses.replace(quick, fallback="the machine is too busy")
    assert plan(llama_1b, rejected).weights.precision == "int4"


def test_single_steps_alone_decide_and_show_how_fast_memory_is(llama_1b: Needs) -> None:
    found = Measurements(single_steps={"int8": 0.2, "int4": 0.1})
    decision = plan(llama_1b, found)
    assert decision.weights.precision == "int4"
    assert "10.0 tokens/s at one sequence" in decision.decisions["precision"].reason
    assert decision.speed.speed_source == "estimated" and "one step only" in decision.decisions["speed_source"].reason
    fast = Measurements(single_steps={"int8": 0.01})
    assert estimate(llama_1b, "fp32", fast) < estimate(llama_1b, "fp32") / 3


def test_a_reference_that_nobody_timed_does_not_win_because_the_machine_was_busy(llama_1b: Needs) -> None:
    """The ceilings were read in a quiet moment, the steps of the others beside other work: all estimates are slower."""
    ceilings = {"fp32": 8e10, "bf16": 8e11, "int8": 1.4e12, "int4": 1.6e12}
    busy = Measurements(9e9, ceilings, single_steps={"int4": 0.365, "int8": 0.438})
    for facts in (cascade_lake(), machine(2, isa=AVX512 | {"avx512_bf16"}, native=X86)):
        assert plan(llama_1b, busy, facts).weights.precision == "int8"
    slow = Measurements(9e9, ceilings, (trial("int8", 2, 10),))
    assert plan(llama_1b, slow).weights.precision in ("int8", "int4")


# ---- the estimate ----------------------------------------------------------------------------------------------------


def estimate(needs: Needs, precision: str, found: Measurements | None = None, facts: Facts | None = None) -> float:
    timing = known_timing(EstimateInputs(facts or cascade_lake(), needs, "avx512", measurements=found), precision, 2)
    assert timing is not None and timing.source == "estimated"
    return timing.steps.decode(1)


def test_a_step_reads_every_weight_and_multiplies_by_it(llama_1b: Needs) -> None:
    found = Measurements(20e9, {"fp32": 1e11})
    output = 2 * llama_1b.vocab_size * llama_1b.hidden_size
    expected = 4_943_257_600 / 20e9 + (2 * 1_235_814_400 + output) / 1e11
    assert estimate(llama_1b, "fp32", found) == pytest.approx(expected, rel=0.01)
    untied = dataclasses.replace(llama_1b, table_bytes=10**9, operations_per_token=1e9)
    assert estimate(untied, "fp32", found) == pytest.approx(3_943_257_600 / 20e9 + (1e9 + output) / 1e11, rel=0.01)


def test_measured_ceilings_count_even_if_steps_varied_too_much(llama_1b: Needs) -> None:
    busy = Measurements(4e9, {"fp32": 1e10}, fallback="the machine is too busy")
    assert estimate(llama_1b, "fp32", busy) == pytest.approx(4.943 / 4 + 0.3, rel=0.1)


def test_memory_is_at_least_as_fast_as_measured_steps_have_shown(llama_1b: Needs) -> None:
    shown = dataclasses.replace(trial("int8", 100, 500), read_bytes=10**9)
    slower = estimate(llama_1b, "fp32")
    assert estimate(llama_1b, "fp32", Measurements(trials=(shown,))) < slower / 3


def test_a_quota_and_fewer_threads_leave_less(llama_1b: Needs) -> None:
    whole = find_ceilings(EstimateInputs(cascade_lake(8), llama_1b, "avx512"), "int8", 8)
    fewer = find_ceilings(EstimateInputs(cascade_lake(8), llama_1b, "avx512"), "int8", 4)
    quarter = cascade_lake(8, cgroup=Cgroup(2, quota_cores=0.25))
    throttled = find_ceilings(EstimateInputs(quarter, llama_1b, "avx512"), "int8", 1)
    assert whole is not None and fewer is not None and throttled is not None
    assert whole.products_per_second == 2 * fewer.products_per_second == 32 * throttled.products_per_second
    assert whole.read_bytes_per_second > fewer.read_bytes_per_second > throttled.read_bytes_per_second


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_on_a_device_only_measured_ceilings_count(llama_1b: Needs, precision: str) -> None:
    inputs = EstimateInputs(cascade_lake(), llama_1b, "triton", "cuda")
    assert known_timing(inputs, precision, 2) is None
    known = dataclasses.replace(inputs, measurements=Measurements(1e12, {precision: 1e14}))
    assert known_timing(known, precision, 2) is not None


def test_a_program_whose_rows_vary_is_not_estimated(llama_1b: Needs) -> None:
    program = dataclasses.replace(llama_1b, kind="program", rows_vary=True)
    assert known_timing(EstimateInputs(cascade_lake(), program, "avx512"), "fp32", 2) is None


def test_the_fastest_comes_first_and_what_is_unknown_last(llama_1b: Needs) -> None:
    inputs = EstimateInputs(cascade_lake(), llama_1b, "avx512")
    assert by_expected_speed(inputs, ["fp32", "?", "int8", "int4"], 2) == ["int4", "int8", "fp32", "?"]
    assert by_expected_speed(inputs, ["?", "bf16"], 2) == ["bf16", "?"]


@settings(deadline=None, max_examples=examples(100))
@given(
    st.sampled_from(["avx512", "avx2", "portable", "a level of tomorrow"]),
    st.integers(1, 128),
    st.integers(10**6, 10**12),
    st.floats(1e-9, 1e15),
    st.floats(1e-9, 1e15),
)
def test_an_estimate_is_a_table_that_rises(
    level: str, threads: int, weights: int, read: float, products: float
) -> None:
    sizes = {name: max(1, int(weights * each)) for name, each in (("fp32", 4), ("int8", 1.06), ("int4", 0.57))}
    needs = Needs("decoder", "X", weights, 2 * weights, sizes, 1024, 4096, 4, 256, 32_000, "bfloat16")
    for found in (None, Measurements(read, {"fp32": products, "int8": products})):
        for name in sizes:
            timing = known_timing(EstimateInputs(cascade_lake(), needs, level, measurements=found), name, threads)
            assert timing is not None
            rates = [timing.steps.decode(rows) for rows in (1, 2, 8, 64)]
            assert 0 < rates[0] <= rates[1] <= rates[2] <= rates[3]


# ---- what is published -----------------------------------------------------------------------------------------------


def test_capacity_is_estimated_until_it_is_measured(llama_1b: Needs) -> None:
    busy = plan(llama_1b, Measurements(fallback="the machine is too busy"))
    assert (busy.speed.speed_source, "since the machine is too busy" in busy.decisions["speed_source"].reason) == (
        "estimated",
        True,
    )
    assert busy.decisions["capacity_tokens_per_second"].reason.startswith("Estimated from bytes and operations: ")
    assert busy.speed.capacity_tokens_per_second["decode"][1] > 0 and not busy.speed.roofline_ratio
    named = busy.weights.precision
    timed = plan(llama_1b, Measurements(trials=(trial("fp32", 1, 3), trial("int8", 8, 30), trial(named, 30, 90))))
    assert timed.speed.speed_source == "measured"
    assert timed.decisions["capacity_tokens_per_second"].reason.startswith("From measured steps: ")
    assert make_plan(cascade_lake(), None, Settings(), None, RECIPES).speed.speed_source == "unknown"


@pytest.mark.parametrize("kind", ["encoder", "program"])
def test_encoders_and_programs_are_estimated_and_stay_exact(llama_1b: Needs, kind: Any) -> None:
    needs = dataclasses.replace(llama_1b, kind=kind, max_model_len=512, kv_elements_per_token=0)
    found = plan(needs, facts=cascade_lake(memory=64 * GIB))
    assert found.weights.precision == "fp32", "vectors stay comparable with those of an index"
    assert (
        "int8 was estimated " in found.decisions["precision"].reason
        and "not chosen by itself" in found.decisions["precision"].reason
    )
    assert found.speed.speed_source == "estimated"
    assert found.speed.capacity_tokens_per_second["encode"]
    assert "stimated" in found.decisions["max_waiting_requests"].reason


@pytest.mark.parametrize(
    ("instructions", "engines", "operations", "chosen"),
    [
        ("avx512_bf16", ("auto", "auto"), 1e9, "fp32"),
        ("avx512_bf16", ("auto", "native"), 1e9, "bf16"),
        ("avx512_bf16", ("native", "auto"), 1e9, "bf16"),  # ONNX Runtime is not installed
        ("amx_bf16", ("auto", "auto"), 1e9, "bf16"),
        ("amx_bf16", ("auto", "auto"), 1e6, "fp32"),
    ],
)
def test_a_program_stays_in_fp32_where_onnx_runtime_may_compute_it(
    llama_1b: Needs, instructions: str, engines: tuple[Any, Any], operations: float, chosen: str
) -> None:
    needs = dataclasses.replace(
        llama_1b, kind="program", kv_elements_per_token=0, engine=engines[0], operations_per_token=operations
    )
    facts = cascade_lake(memory=64 * GIB)
    facts = dataclasses.replace(facts, isa=facts.isa | {instructions})
    decision = plan(needs, facts=facts, engine=engines[1]).decisions["precision"]
    assert decision.value == chosen
    assert ("results stay as they are" in decision.reason) == (chosen == "fp32")


# ---- vectors ---------------------------------------------------------------------------------------------------------


def encodes(precision: str, speed: float, **changes: Any) -> TrialTimes:
    return TrialTimes(precision, 2, {}, {}, encode_seconds={16: 1 / speed, 256: 4 / speed}, **changes)


@pytest.mark.parametrize(
    ("changes", "int8", "asked", "chosen", "reason"),
    [
        ({}, encodes("int8", 200), {}, "int8", "when the weights are packed"),
        ({"quality_costs": {"int8": 0.002}}, encodes("int8", 200), {}, "int8", "cosines of at least 0.9980"),
        ({"quality_costs": {"int8": 0.05}}, encodes("int8", 200), {}, "fp32", "over the quality_budget of 3%"),
        ({}, encodes("int8", 200), {"quality_budget": 0.0}, "fp32", "over the quality_budget of 0%"),
        ({}, encodes("int8", 200, noise="too busy"), {}, "int8", "2.00 times as fast"),
        ({}, encodes("int8", 110), {}, "fp32", "under the 1.2"),
        ({"has_vectors": False}, encodes("int8", 200), {}, "fp32", "only for vectors"),
        ({"kind": "program"}, encodes("int8", 200), {}, "fp32", "only for vectors"),
        ({"num_parameters": 22_000_000}, encodes("int8", 200), {}, "fp32", "22M parameters is fast"),
    ],
)
def test_measured_quality_and_speed_decide_on_vectors_in_int8(
    llama_1b: Needs, changes: dict[str, Any], int8: TrialTimes, asked: dict[str, Any], chosen: str, reason: str
) -> None:
    known = {"kind": "encoder", "max_model_len": 512, "kv_elements_per_token": 0, "has_vectors": True}
    if changes.get("kind") == "program":
        known["has_vectors"] = False
    needs = dataclasses.replace(llama_1b, **{**known, **changes})
    found = Measurements(trials=(encodes("fp32", 100), int8))
    decision = plan(needs, found, cascade_lake(memory=64 * GIB), **asked).decisions["precision"]
    assert decision.value == chosen and reason in decision.reason, decision.reason
