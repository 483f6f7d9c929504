"""The pace of streams while others prefill, on a machine whose steps cost what we say they cost."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from app.engine.pace import MIN_PREFILL_TOKENS, PROBE_EVERY_STEPS, StepPace
from app.messages import StepStats

DECODE_SECONDS = 0.020
TOKEN_SECONDS = 0.0005


def step(pace: StepPace, prefill: int, decode: int, seconds: float) -> None:
    pace.observe(StepStats(seconds=seconds, prefill_tokens=prefill, decode_tokens=decode))


def linear(prefill: int) -> float:
    return DECODE_SECONDS + prefill * TOKEN_SECONDS


def roofline(prefill: int) -> float:
    """Reading the weights costs the same for any number of rows until the products take longer."""
    return max(DECODE_SECONDS, (prefill + 4) * TOKEN_SECONDS)


def mixed_steps(pace: StepPace, cost: Callable[[int], float], number: int) -> list[float]:
    """Seconds of the steps of four streams while an endless prompt prefills."""
    seconds = []
    for _ in range(number):
        budget = pace.prefill_budget(4)
        seconds.append(cost(budget))
        step(pace, budget, 4, seconds[-1])
    return seconds


def warm(pace: StepPace, cost: Callable[[int], float] = linear) -> StepPace:
    step(pace, 256, 0, cost(256))
    for _ in range(5):
        step(pace, 0, 4, cost(0))
    return pace


def test_nobody_decoding_means_the_whole_budget() -> None:
    assert StepPace(512).prefill_budget(0) == 512


def test_the_decodes_alone_are_measured_first() -> None:
    pace = StepPace(512)
    assert pace.prefill_budget(1) == 0
    step(pace, 0, 1, DECODE_SECONDS)
    assert pace.prefill_budget(1) > 0


@pytest.mark.parametrize("cost", [linear, roofline])
def test_mixed_steps_stay_below_three_decode_steps_and_are_used(cost: Callable[[int], float]) -> None:
    seconds = mixed_steps(warm(StepPace(512), cost), cost, 200)
    assert max(seconds) <= 3 * DECODE_SECONDS
    assert sum(seconds[100:]) >= 100 * 2 * DECODE_SECONDS, "the prompt gets what the streams can spare"


def test_an_explicit_target_is_kept() -> None:
    seconds = mixed_steps(warm(StepPace(512, itl_target_seconds=0.1)), linear, 100)
    assert max(seconds) <= 0.1
    assert max(seconds) > 0.09


def test_a_target_that_cannot_be_met_still_lets_prompts_get_on() -> None:
    assert warm(StepPace(512, itl_target_seconds=0.001)).prefill_budget(4) == MIN_PREFILL_TOKENS


def test_the_budget_is_never_more_than_a_step_may_carry() -> None:
    assert warm(StepPace(4)).prefill_budget(1) == 4
    assert warm(StepPace(64, itl_target_seconds=10.0)).prefill_budget(1) == 64


def test_outliers_hardly_change_the_budget() -> None:
    pace, steady = warm(StepPace(512)), warm(StepPace(512))
    for one in (pace, steady):
        mixed_steps(one, linear, 40)
    step(pace, pace.prefill_budget(4), 4, 2.0)
    assert pace.prefill_budget(4) >= 0.7 * steady.prefill_budget(4)
    mixed_steps(pace, linear, 40)
    step(pace, 0, 4, 2.0)
    assert pace.prefill_budget(4) <= 1.3 * steady.prefill_budget(4)


def test_the_price_follows_a_prompt_that_grows_dearer() -> None:
    pace = warm(StepPace(512))
    mixed_steps(pace, linear, 10)
    seconds = mixed_steps(pace, lambda prefill: DECODE_SECONDS + prefill * TOKEN_SECONDS * 2, 40)
    assert max(seconds[5:]) <= 3 * DECODE_SECONDS


def test_the_decode_pace_stays_measured_while_prompts_never_end() -> None:
    pace = warm(StepPace(512))
    mixed_steps(pace, lambda prefill: 3 * DECODE_SECONDS + prefill * TOKEN_SECONDS, 8 * PROBE_EVERY_STEPS)
    assert pace.decode_step_seconds == pytest.approx(3 * DECODE_SECONDS)


def test_noise_does_not_break_the_bound() -> None:
    noise = Random(4)
    seconds = mixed_steps(warm(StepPace(512)), lambda prefill: linear(prefill) * noise.uniform(0.9, 1.1), 300)
    late = sorted(seconds)[-3]  # the third worst of 300 stands for the 99th percentile
    assert late <= 3 * DECODE_SECONDS


def test_speeds_are_tokens_over_the_seconds_of_their_steps() -> None:
    pace = StepPace(512)
    assert pace.prefill.tokens_per_second == pace.decode.tokens_per_second == 0.0
    for _ in range(100):
        step(pace, 100, 0, 0.5)
        step(pace, 0, 8, 0.1)
    assert pace.prefill.tokens_per_second == pytest.approx(200)
    assert pace.decode.tokens_per_second == pytest.approx(80)
