"""The pace of streams while others prefill, on a machine whose steps cost what we say they cost."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from app.engine.scheduler.policy import PROBE_EVERY_STEPS, PROBE_EVERY_STEPS_WITH_TABLE, PrefillBudget
from app.hardware.decision import TrialTimes
from app.hardware.step_times import (
    MIN_PREFILL_TOKENS,
    MIN_TARGET_SECONDS,
    MISSED_TARGET_RATIO,
    MIXED_TO_DECODE_RATIO,
    StepTimes,
    StepTimeTable,
)
from app.metrics.steps import FIRST_PREFILL_TOKENS, StepStats, StepTimeModel

DECODE_SECONDS = 0.020
TOKEN_SECONDS = 0.0005


def step(pace: PrefillBudget, prefill: int, decode: int, seconds: float) -> None:
    pace.observe(StepStats(seconds=seconds, prefill_tokens=prefill, decode_tokens=decode))


def linear(prefill: int) -> float:
    return DECODE_SECONDS + prefill * TOKEN_SECONDS


def roofline(prefill: int) -> float:
    """Reading the weights costs the same for any number of rows until the products take longer."""
    return max(DECODE_SECONDS, (prefill + 4) * TOKEN_SECONDS)


def mixed_steps(pace: PrefillBudget, cost: Callable[[int], float], number: int) -> list[float]:
    """Seconds of the steps of four streams while an endless prompt prefills."""
    seconds = []
    for _ in range(number):
        budget = pace.max_prefill_tokens(4)
        seconds.append(cost(budget))
        step(pace, budget, 4, seconds[-1])
    return seconds


def tempo_of(pace: PrefillBudget) -> StepTimes:
    assert pace.step_times is not None
    return pace.step_times


def warm(pace: PrefillBudget, cost: Callable[[int], float] = linear) -> PrefillBudget:
    step(pace, 256, 0, cost(256))
    for _ in range(5):
        step(pace, 0, 4, cost(0))
    return pace


def test_nobody_decoding_means_the_whole_budget() -> None:
    assert PrefillBudget(512).max_prefill_tokens(0) == 512


def test_the_decodes_alone_are_measured_first() -> None:
    pace = PrefillBudget(512)
    assert pace.max_prefill_tokens(1) == 0
    step(pace, 0, 1, DECODE_SECONDS)
    assert pace.max_prefill_tokens(1) > 0


def launched(prefill: int) -> float:
    """A GPU's steps: decodes are recorded; a step with a prompt is not, and its tokens cost little."""
    return 0.005 + (0.008 + prefill * 3e-6 if prefill else 0.0)


@pytest.mark.parametrize("with_prompt_first", [True, False])
def test_chunks_are_not_small_where_tokens_cost_little_and_a_step_with_a_prompt_much(with_prompt_first: bool) -> None:
    pace = PrefillBudget(2048)
    if with_prompt_first:
        step(pace, 2048, 0, launched(2048))
    for _ in range(5):
        step(pace, 0, 256, launched(0))
    tokens = []
    for _ in range(300):
        tokens.append(pace.max_prefill_tokens(256))
        step(pace, tokens[-1], 256, launched(tokens[-1]))
        if tokens[-1] and len(tokens) == 50:
            step(pace, 2048, 0, launched(2048))  # a prompt comes while nobody decodes
    assert sorted(tokens[100:])[100] >= 128


@pytest.mark.parametrize("cost", [linear, roofline])
def test_mixed_steps_stay_below_three_decode_steps_and_are_used(cost: Callable[[int], float]) -> None:
    seconds = mixed_steps(warm(PrefillBudget(512), cost), cost, 200)
    assert max(seconds) <= 3 * DECODE_SECONDS
    assert sum(seconds[100:]) >= 100 * 1.6 * DECODE_SECONDS, "the prompt gets what the streams can spare"


def test_an_explicit_target_is_kept() -> None:
    seconds = mixed_steps(warm(PrefillBudget(512, itl_target_seconds=0.1)), linear, 100)
    assert max(seconds) <= 0.1
    assert max(seconds) > 0.08


def test_a_target_that_cannot_be_met_still_lets_prompts_get_on() -> None:
    assert warm(PrefillBudget(512, itl_target_seconds=0.001)).max_prefill_tokens(4) == MIN_PREFILL_TOKENS


def test_the_budget_is_never_more_than_a_step_may_carry() -> None:
    assert warm(PrefillBudget(4)).max_prefill_tokens(1) == 4
    assert warm(PrefillBudget(64, itl_target_seconds=10.0)).max_prefill_tokens(1) == 64


def test_outliers_hardly_change_the_budget() -> None:
    pace, steady = warm(PrefillBudget(512)), warm(PrefillBudget(512))
    for one in (pace, steady):
        mixed_steps(one, linear, 40)
    step(pace, pace.max_prefill_tokens(4), 4, 2.0)
    assert pace.max_prefill_tokens(4) >= 0.7 * steady.max_prefill_tokens(4)
    mixed_steps(pace, linear, 40)
    step(pace, 0, 4, 2.0)
    assert pace.max_prefill_tokens(4) <= 1.3 * steady.max_prefill_tokens(4)


def test_the_price_follows_a_prompt_that_grows_dearer() -> None:
    pace = warm(PrefillBudget(512))
    mixed_steps(pace, linear, 10)
    seconds = mixed_steps(pace, lambda prefill: DECODE_SECONDS + prefill * TOKEN_SECONDS * 2, 40)
    assert max(seconds[5:]) <= 3 * DECODE_SECONDS


def test_the_decode_time_stays_measured_while_prompts_never_end() -> None:
    pace = warm(PrefillBudget(512))
    mixed_steps(pace, lambda prefill: 3 * DECODE_SECONDS + prefill * TOKEN_SECONDS, 8 * PROBE_EVERY_STEPS)
    assert tempo_of(pace).seconds(4, 0) == pytest.approx(3 * DECODE_SECONDS)


def test_noise_does_not_break_the_bound() -> None:
    noise = Random(4)
    seconds = mixed_steps(warm(PrefillBudget(512)), lambda prefill: linear(prefill) * noise.uniform(0.9, 1.1), 300)
    late = sorted(seconds)[-3]  # the third worst of 300 stands for the 99th percentile
    assert late <= 3 * DECODE_SECONDS


def test_the_first_chunk_is_small_while_its_price_is_unknown() -> None:
    pace = PrefillBudget(512)
    step(pace, 0, 4, DECODE_SECONDS)
    assert pace.max_prefill_tokens(4) == FIRST_PREFILL_TOKENS


# ---- with a table --------------------------------------------------------------------------------------------------

ROWS, CONTEXT, PROMPT = 4, 1600, 2000
TABLES = {
    "reads the weights for long": TrialTimes(
        "bf16", 2, {1: 0.045, 8: 0.047, 32: 0.080}, {128: 0.18, 512: 0.70}, 1e-6, pair_seconds=5e-7
    ),
    "multiplies from the first row on": TrialTimes(
        "int4", 2, {1: 0.014, 8: 0.025, 32: 0.075}, {64: 0.10, 512: 0.70}, 8e-7
    ),
    "small": TrialTimes("int4", 2, {1: 0.0015, 8: 0.003, 32: 0.010}, {128: 0.03, 512: 0.11}, 5e-8),
    "dear context": TrialTimes("int8", 2, {1: 0.02, 8: 0.03}, {128: 0.15}, 1e-5, pair_seconds=1e-5),
}


def arrival(pace: PrefillBudget, truth: Callable[[int, int], float]) -> list[float]:
    """Seconds of the steps in which four streams meet a long prompt; `truth` says what so many tokens behind so many take."""
    seconds, done = [], 0
    while done < PROMPT:
        budget = min(pace.max_prefill_tokens(ROWS, CONTEXT, done), PROMPT - done)
        took = truth(budget, done)
        prompts = {"prefill_tokens": budget, "prefill_pairs": budget * done}
        pace.observe(StepStats(took, decode_tokens=ROWS, num_decode_sequences=ROWS, context_tokens=CONTEXT, **prompts))
        seconds += [took] if budget else []  # a step of decodes alone now and then
        done += budget
        assert len(seconds) < PROMPT, "a prompt gets on"
    return seconds


@pytest.mark.parametrize("trial", TABLES.values(), ids=TABLES)
def test_a_table_keeps_every_step_within_the_target_from_the_first(trial: TrialTimes) -> None:
    steps = StepTimeTable.from_trial(trial)
    seconds = arrival(
        PrefillBudget(512, model=StepTimeModel(steps)), lambda tokens, done: steps.mixed(ROWS, tokens, CONTEXT, done)
    )
    target = max(MIXED_TO_DECODE_RATIO * steps.decode(ROWS, CONTEXT), MIN_TARGET_SECONDS)
    least = [steps.mixed(ROWS, MIN_PREFILL_TOKENS, CONTEXT, done) for done in range(PROMPT)]
    assert max(seconds) <= max(target, MISSED_TARGET_RATIO * max(least)) * 1.0001
    assert min(seconds[:-1]) > min(0.6 * target, min(least)), "and uses it"


@pytest.mark.parametrize("wrong", [0.6, 1.4])
def test_a_table_that_is_wrong_about_prompts_is_corrected_within_a_few_steps(wrong: float) -> None:
    steps = StepTimeTable.from_trial(TABLES["reads the weights for long"])
    noise = Random(5)

    def truth(tokens: int, done: int) -> float:
        beside = steps.mixed(ROWS, tokens, CONTEXT, done) * (wrong if tokens else 1.0)
        return beside * noise.uniform(0.95, 1.05)

    pace = PrefillBudget(512, model=StepTimeModel(steps))
    arrival(pace, truth)
    seconds = arrival(pace, truth)
    target = MIXED_TO_DECODE_RATIO * steps.decode(ROWS, CONTEXT)
    assert max(seconds) < 1.2 * target
    assert sorted(seconds)[len(seconds) // 2] > 0.8 * target


def test_parts_of_prompts_have_few_sizes() -> None:
    steps = StepTimeTable.from_trial(TABLES["reads the weights for long"])
    budgets = {StepTimes(steps, 300, target / 1000).prefill_tokens(ROWS, CONTEXT) for target in range(1, 500)}
    assert budgets == {4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 300}


def test_where_a_row_is_dear_chunks_are_small_enough_for_the_target() -> None:
    """Eight tokens of a prompt beside four streams take more than twice the decodes alone on AVX2 in int4."""
    steps = StepTimeTable.from_trial(TrialTimes("int4", 2, {1: 0.036, 8: 0.073}, {128: 0.85}))
    target = MIXED_TO_DECODE_RATIO * steps.decode(ROWS)
    assert steps.mixed(ROWS, 8) > target
    seconds = arrival(PrefillBudget(512, model=StepTimeModel(steps)), lambda tokens, done: steps.mixed(ROWS, tokens))
    assert max(seconds) <= target


def test_a_chunk_deep_in_a_prompt_is_smaller() -> None:
    pace = PrefillBudget(512, model=StepTimeModel(StepTimeTable.from_trial(TABLES["dear context"])))
    assert pace.max_prefill_tokens(ROWS, CONTEXT, 1500) < 0.5 * pace.max_prefill_tokens(ROWS, CONTEXT, 0)


def test_few_streams_do_not_hold_up_a_crowd() -> None:
    """Each first token that waits counts as much as a stream that goes on."""
    tempo = StepTimes(StepTimeTable.from_trial(TABLES["reads the weights for long"]), 512)
    calm = [tempo.prefill_tokens(ROWS, CONTEXT, num_prompts=prompts) for prompts in (1, ROWS)]
    crowded = [tempo.prefill_tokens(ROWS, CONTEXT, num_prompts=factor * ROWS) for factor in (2, 4, 8)]
    assert calm[0] == calm[1] < crowded[0] < crowded[1] <= crowded[2]
    assert tempo.target(ROWS, CONTEXT, 4 * ROWS) == pytest.approx(4 * tempo.target(ROWS, CONTEXT))
    promised = StepTimes(tempo.steps, 512, target_seconds=0.05)
    assert promised.prefill_tokens(ROWS, CONTEXT, num_prompts=100) == promised.prefill_tokens(ROWS, CONTEXT), (
        "what an operator promised holds"
    )


def test_a_slower_machine_makes_the_target_longer_too_and_a_table_is_seldom_probed() -> None:
    steps = StepTimeTable.from_trial(TABLES["multiplies from the first row on"])
    pace = PrefillBudget(512, model=StepTimeModel(steps))
    budgets = []
    for _ in range(8 * PROBE_EVERY_STEPS_WITH_TABLE):
        budgets.append(pace.max_prefill_tokens(ROWS, CONTEXT, 0))
        seconds = 2 * steps.mixed(ROWS, budgets[-1], CONTEXT)
        pace.observe(StepStats(seconds, budgets[-1], ROWS, num_decode_sequences=ROWS, context_tokens=CONTEXT))
    assert tempo_of(pace).decode_factor == tempo_of(pace).mixed_factor == pytest.approx(2.0)
    assert budgets.count(0) == 7
    assert budgets[-1] == budgets[0]


def test_draft_tokens_are_noted_while_there_are_any() -> None:
    steps = StepTimeTable.from_trial(TABLES["small"])
    pace = PrefillBudget(512, model=StepTimeModel(steps))
    for _ in range(60):
        pace.observe(
            StepStats(steps.decode(8), decode_tokens=6, num_decode_sequences=4, draft_tokens=4, accepted_tokens=2)
        )
    assert (tempo_of(pace).draft_tokens, tempo_of(pace).tokens_per_step) == (
        pytest.approx(1.0, abs=0.01),
        pytest.approx(1.5, abs=0.01),
    )
    assert tempo_of(pace).decode_factor == pytest.approx(1.0)
    for _ in range(60):
        pace.observe(StepStats(steps.decode(4), decode_tokens=4, num_decode_sequences=4))
    assert (tempo_of(pace).draft_tokens, tempo_of(pace).tokens_per_step) == (0.0, pytest.approx(1.0, abs=0.01))


def test_what_no_machine_does_changes_a_table_only_so_far() -> None:
    pace = PrefillBudget(512, model=StepTimeModel(StepTimeTable.from_trial(TABLES["small"])))
    for _ in range(20):
        pace.observe(StepStats(60.0, decode_tokens=1, num_decode_sequences=1))
    assert tempo_of(pace).decode_factor == 4.0
