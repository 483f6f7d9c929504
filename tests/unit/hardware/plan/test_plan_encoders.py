"""Plans for what does not generate: encoders and exported programs, on both sides of each border."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.errors import PlanImpossible
from app.hardware.decision import Measurements, TrialTimes
from app.hardware.facts import Needs
from app.hardware.plan.plan import ServingPlan, make_plan
from app.settings import Settings
from planned_machines import GIB, RECIPES, machine

READ, PRODUCTS = 50e9, {"bf16": 1e12, "int8": 2e12}
BERT_LARGE = Needs(
    kind="encoder",
    architecture="BertModel",
    num_parameters=334_000_000,
    weight_bytes=1_336_000_000,
    bytes_by_precision={"fp32": 1_336_000_000, "bf16": 668_000_000, "int8": 400_000_000},
    kv_elements_per_token=0,
    max_model_len=512,
    num_layers=24,
    hidden_size=1024,
    vocab_size=30_522,
    stored_dtype="float32",
)
LONG = dataclasses.replace(BERT_LARGE, max_model_len=8192)
PROGRAM = dataclasses.replace(BERT_LARGE, kind="program", max_model_len=1, num_layers=0, hidden_size=0, vocab_size=0)
RATES = {16: 400.0, 128: 900.0, 512: 1500.0, 1024: 1560.0, 2048: 1575.0}


def trial(precision: str = "bf16", factor: float = 1.0, threads: int = 8, **more: Any) -> TrialTimes:
    seconds = {size: size / (factor * rate) for size, rate in RATES.items()}
    return TrialTimes(precision, threads, {}, {}, encode_seconds=seconds, **more)


def measured(*trials: TrialTimes) -> Measurements:
    return Measurements(READ, PRODUCTS, trials, seconds=2.5)


def plan(
    needs: Needs = BERT_LARGE, measurements: Measurements | None = None, memory: int = 64 * GIB, **asked: Any
) -> ServingPlan:
    return make_plan(machine(memory=memory), measurements, Settings(**asked), needs, RECIPES)


def test_nothing_is_kept_drafted_or_waited_for() -> None:
    found = plan()
    assert (found.memory.kv_cache_bytes, found.steps.speculation, found.steps.itl_target_seconds) == (0, False, None)
    assert found.speed.decode_tokens_per_second is found.speed.prefill_tokens_per_second is None
    assert found.steps.calibrate and "will be measured" in found.decisions["calibrate"].reason
    assert found.weights.precision == "bf16"


@pytest.mark.parametrize(
    ("needs", "target", "most"),
    [(BERT_LARGE, 512, 512), (LONG, 512, 8192), (dataclasses.replace(BERT_LARGE, max_model_len=128), 512, 512)],
)
def test_texts_are_put_together_up_to_a_target_and_the_longest_goes_alone(needs: Needs, target: int, most: int) -> None:
    found = plan(needs)
    assert (found.memory.batch_target_tokens, found.memory.max_batch_tokens) == (target, most)
    assert found.memory.max_model_len == needs.max_model_len <= found.memory.max_batch_tokens


@pytest.mark.parametrize(
    ("rates", "target"),
    [
        ({64: 10_000, 128: 40_000, 256: 44_000, 512: 49_000, 1024: 50_000}, 512),  # all are short: within a tenth
        ({64: 2_000, 128: 2_500, 256: 2_800, 512: 2_900, 1024: 3_000}, 128),  # all are long: within a fifth
        ({64: 6_000, 128: 7_900, 256: 9_100, 512: 9_500, 1024: 10_000}, 256),
    ],
)
def test_the_target_is_a_short_step_not_far_from_the_best(rates: dict[int, int], target: int) -> None:
    table = dataclasses.replace(trial(), encode_seconds={size: size / each for size, each in rates.items()})
    found = plan(dataclasses.replace(BERT_LARGE, max_model_len=64), measured(table)).decisions["batch_target_tokens"]
    assert found.value == target
    assert (
        f"{rates[target]:,} tokens/s in steps of {target}" in found.reason
        and f"{rates[1024]:,} in steps of 1024" in found.reason
    )


@pytest.mark.parametrize(
    ("threads", "speed", "target"), [(1, 1, 128), (2, 1, 512), (2, 0.3, 128), (3, 1, 1024), (8, 1, 128)]
)
def test_threads_that_share_a_step_are_given_texts_enough_while_it_is_short(
    threads: int, speed: float, target: int
) -> None:
    rates = {64: 8_000, 128: 10_100, 256: 10_200, 512: 10_300, 1024: 10_400}
    table = dataclasses.replace(
        trial(), threads=threads, encode_seconds={size: size / each / speed for size, each in rates.items()}
    )
    made = plan(dataclasses.replace(BERT_LARGE, max_model_len=64), measured(table), threads=threads)
    found = made.decisions["batch_target_tokens"]
    assert found.value == target
    assert ("share evenly" in found.reason) == (target >= 512)


def test_a_table_that_ends_early_and_still_rises_decides_nothing() -> None:
    short = dataclasses.replace(trial(), encode_seconds={16: 16 / 100, 128: 128 / 1000})
    assert plan(measurements=measured(short)).memory.batch_target_tokens == 512


def test_a_step_has_a_token_for_each_text_that_it_may_have() -> None:
    short = dataclasses.replace(BERT_LARGE, max_model_len=100)
    best_at_few = dataclasses.replace(trial(), encode_seconds={16: 0.001, 64: 0.01, 256: 0.1, 512: 0.2})
    assert plan(short, measured(best_at_few)).memory.batch_target_tokens == 64, "however quick a step of fewer may be"
    assert plan(short, measured(best_at_few), max_running_seqs=300).memory.max_batch_tokens == 512
    assert plan(short, measured(best_at_few), max_running_seqs=600).memory.max_batch_tokens == 600


def test_eight_bits_are_offered_and_never_taken() -> None:
    found = plan(measurements=measured(trial(), trial("int8", 2.5))).decisions["precision"]
    assert found.value == "bf16"
    assert "2.50 times as fast" in found.reason and "precision=int8" in found.reason


def test_eight_bits_are_taken_where_nothing_else_fits() -> None:
    found = plan(
        dataclasses.replace(
            BERT_LARGE, num_parameters=10**9, bytes_by_precision={"fp32": 4 * GIB, "bf16": 3 * GIB, "int8": GIB}
        ),
        memory=3 * GIB,
    )
    assert found.weights.precision == "int8"
    reason = found.decisions["precision"].reason
    assert "not measured for this model" in reason and "keys and values" not in reason


def test_fewer_threads_where_texts_are_quicker() -> None:
    found = plan(measurements=measured(trial(), trial(threads=7, factor=1.1)))
    assert found.cpu.threads == 7
    assert "a second in steps of 16 and" in found.decisions["threads"].reason


def test_what_is_to_be_expected() -> None:
    known = trial(read_bytes=600_000_000, operations_per_token=6e8)
    found = plan(measurements=measured(known))
    capacity = found.speed.capacity_tokens_per_second["encode"]
    assert capacity == pytest.approx({16: 400.0, 128: 900.0, 512: 1500.0})
    assert "11.7 texts of 128 tokens a second" in found.decisions["capacity_tokens_per_second"].reason
    ratios = found.speed.roofline_ratio
    assert ratios["encode_few"] == pytest.approx(600_000_000 / READ / (16 / 400))
    assert ratios["encode"] == pytest.approx(1500 * 6e8 / 1e12)


def test_so_many_wait_as_a_few_seconds_are_worth() -> None:
    assert plan().memory.max_waiting_requests == 256
    assert plan(measurements=measured(trial())).memory.max_waiting_requests == round(1500 / 128 * 10)
    assert plan(measurements=measured(trial(factor=0.01))).memory.max_waiting_requests == 64
    assert plan(max_waiting_requests=5).memory.max_waiting_requests == 5


def test_a_step_that_was_asked_for_shortens_the_longest_text() -> None:
    found = plan(LONG, max_batch_tokens=1000)
    assert (found.memory.max_batch_tokens, found.memory.batch_target_tokens, found.memory.max_model_len) == (
        1000,
        1000,
        1000,
    )
    assert "never divided" in found.decisions["max_model_len"].reason


def test_memory_shortens_the_longest_text_and_the_step() -> None:
    needs = dataclasses.replace(LONG, max_model_len=2**20)
    found = plan(needs, memory=2 * GIB)
    assert found.memory.max_model_len == found.memory.max_batch_tokens < 2**20
    assert "memory" in found.decisions["max_model_len"].reason
    assert found.memory.max_model_len * 4 * 1024 * 16 + found.memory.weight_bytes < 2 * GIB


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"kv_cache_bytes": 2**30}, "kv_cache_bytes is 1073741824, but this model generates no text"),
        (
            {"precision": "int8", "keep_layers": "*=bf16"},
            r"keep_layers is \*=bf16, but this model generates no text: leave it out",
        ),
        ({"kv_precision": "int8"}, "kv_precision is int8"),
        ({"itl_target_ms": 20.0}, "itl_target_ms is 20"),
        ({"prompt_cache": "/kept"}, "prompt_cache is /kept, but this model generates no text: leave it out"),
        ({"max_model_len": 513}, "supports at most 512"),
        ({"max_model_len": 300, "max_batch_tokens": 200}, "never divided"),
        ({"max_running_seqs": 600, "max_batch_tokens": 512}, "each text needs one token"),
        ({"max_batch_tokens": 10**9}, "memory for"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanImpossible, match=words):
        plan(**asked)


def test_a_model_that_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(PlanImpossible, match=r"does not fit: .* of weights in int8, .* for one text of 512 tokens and"):
        plan(memory=GIB // 2)


def test_a_program_has_rows_for_tokens() -> None:
    found = plan(PROGRAM)
    assert (found.memory.batch_target_tokens, found.memory.max_batch_tokens, found.memory.max_model_len) == (32, 32, 1)
    assert found.steps.calibrate and not found.steps.compile and found.memory.kv_cache_bytes == 0
    assert plan(PROGRAM, max_batch_tokens=100).memory.max_batch_tokens == 100
    with pytest.raises(PlanImpossible, match="its own"):
        plan(PROGRAM, compile="on")


@pytest.mark.parametrize(
    ("rates", "target"),
    [
        ({1: 10, 2: 11, 4: 12, 8: 13}, 2),  # steps are long: within a fifth of the best
        ({1: 1_000, 2: 2_000, 8: 7_000, 32: 20_000, 128: 21_000, 256: 22_000}, 32),
        ({1: 1_000, 8: 8_000, 64: 60_000, 256: 200_000}, 256),  # still rising at more than is usual
        ({1: 1_000, 2: 2_000, 4: 4_000}, 32),  # still rising at less: it tells nothing
    ],
)
def test_a_programs_step_has_as_many_rows_as_pay(rates: dict[int, float], target: int) -> None:
    table = dataclasses.replace(trial(), encode_seconds={size: size / each for size, each in rates.items()})
    found = plan(PROGRAM, measured(table))
    assert found.memory.batch_target_tokens == found.memory.max_batch_tokens == target
    assert found.speed.capacity_tokens_per_second["encode"][1] == pytest.approx(rates[1])
    assert (
        "tokens"
        not in found.decisions["capacity_tokens_per_second"].reason + found.decisions["max_waiting_requests"].reason
    )
    most = (
        found.speed.capacity_tokens_per_second["encode"][max(rates)]
        if target == max(rates)
        else rates.get(target, 4_000)
    )
    assert found.memory.max_waiting_requests == round(min(max(10 * most, 64), 4096))


def test_rows_that_cost_what_each_request_chooses_are_not_measured() -> None:
    found = plan(dataclasses.replace(PROGRAM, rows_vary=True)).decisions["calibrate"]
    assert not found.value and "each request chooses" in found.reason


def test_a_programs_threads_are_compared_at_one_row_and_at_more() -> None:
    few = dataclasses.replace(trial(threads=7), encode_seconds={1: 1e-3, 8: 3e-3})
    all_of_them = dataclasses.replace(trial(), encode_seconds={1: 2e-3, 8: 4e-3})
    found = plan(PROGRAM, measured(few, all_of_them)).decisions["threads"]
    assert found.value == 7 and "1,000 a second in steps of 1 and 2,667 of 8" in found.reason
