"""Sizes of steps and when waiting for more texts pays off, from the table alone."""

from __future__ import annotations

import pytest

from app.engine.encoder.batching import BatchingDelay
from app.hardware.step_times import StepTimeTable
from app.metrics.steps import StepStats, StepTimeModel
from encoder_simulation import EncoderSimulation, encode

FIXED, EACH = 0.001, 0.0001  # seconds of any step, and of a token
TABLE = StepTimeTable((), (), encode_points=tuple((tokens, FIXED + EACH * tokens) for tokens in (1, 16, 64, 256, 1024)))


def after(back: float, tokens: int = 20, steps: StepTimeTable | None = TABLE, ended: float = 0.0) -> BatchingDelay:
    """So long after each answer the next request came, of so many tokens; the last answer is of `ended`."""
    pace = BatchingDelay(256, StepTimeModel(steps))
    for number in range(-8, 0):
        pace.observe_answers(float(number), 1)
        pace.observe_arrival(number + back, tokens)
        pace.observe_arrival(number + back + 0.5, tokens)  # who comes later says nothing
    pace.observe_answers(ended, 2)
    return pace


def test_nobody_waits_where_requests_come_back_slowly() -> None:
    assert after(FIXED / 3).batching_delay_seconds(20, now=0.0) == 0.0


def test_where_they_come_back_quickly_a_step_waits_for_twice_as_long_from_the_answer_on() -> None:
    pace = after(FIXED / 10)
    assert pace.batching_delay_seconds(20, now=0.0) == pytest.approx(FIXED / 5)
    assert pace.batching_delay_seconds(20, now=FIXED / 10) == pytest.approx(FIXED / 10)
    assert pace.batching_delay_seconds(20, now=FIXED / 4) == 0.0  # whoever comes to an idle engine waits for nobody


def test_once_all_are_back_nobody_is_waited_for() -> None:
    pace = after(FIXED / 10)
    pace.observe_arrival(FIXED / 20, 20)
    assert pace.batching_delay_seconds(20, now=FIXED / 20) > 0.0
    pace.observe_arrival(FIXED / 20, 20)
    assert pace.batching_delay_seconds(40, now=FIXED / 20) == 0.0


def test_who_comes_while_a_step_runs_came_back_from_the_one_before() -> None:
    pace = BatchingDelay(256, StepTimeModel(TABLE))
    for number in range(9):  # two clients in turn: one's request comes early in the other's step
        pace.observe_answers(0.01 * number, 1)
        if number:
            pace.observe_arrival(0.01 * (number - 1) + FIXED / 10, 20)
    assert pace.batching_delay_seconds(20, now=0.08) == pytest.approx(FIXED / 5)


def test_nobody_waits_with_a_full_step_or_without_knowledge() -> None:
    assert after(FIXED / 10).batching_delay_seconds(256, 0.0) == 0.0
    assert after(FIXED / 10, steps=None).batching_delay_seconds(20, 0.0) == 0.0
    few = BatchingDelay(256, StepTimeModel(TABLE))
    assert few.batching_delay_seconds(20, 0.0) == 0.0
    few.observe_answers(0.0, 2)
    few.observe_arrival(FIXED / 10, 20)
    assert few.batching_delay_seconds(20, 0.0) == 0.0


def test_nothing_is_waited_for_that_would_not_make_a_step_cheaper() -> None:
    line = StepTimeTable((), (), encode_points=((1, EACH), (1024, 1024 * EACH)))  # a step of two costs two of one
    assert after(1e-6, steps=line).batching_delay_seconds(20, 0.0) == 0.0


def test_steps_correct_the_table() -> None:
    pace = BatchingDelay(1024, StepTimeModel(TABLE))
    for _ in range(5):
        pace.observe(StepStats(2 * (FIXED + EACH * 64), encode_tokens=64, num_encode_sequences=1, encode_pairs=64 * 64))
    assert pace.step_times is not None and pace.step_times.encode_factor == pytest.approx(2.0)
    pace.observe(StepStats(1.0))  # of nothing there is nothing to learn


def test_the_engine_waits_as_its_batching_delay_says() -> None:
    sim = EncoderSimulation(pace=after(FIXED / 10))
    assert sim.engine.batching_delay_seconds == 0.0  # idle: it blocks on its mailbox
    sim.engine.add(encode("r", 20, at=0.0))
    assert sim.engine.batching_delay_seconds == pytest.approx(FIXED / 5)
    sim.step()
    assert "r" in sim.told and sim.engine.batching_delay_seconds == 0.0
