"""How large steps are, and when it pays to wait: from the table alone."""

from __future__ import annotations

import pytest

from app.engine.encode_pace import EncodePace
from app.hardware.step_seconds import StepSeconds
from app.measured import StepStats
from encoder_simulation import EncoderSimulation, encode

FIXED, EACH = 0.001, 0.0001  # seconds of any step, and of a token
TABLE = StepSeconds((), (), encode_points=tuple((tokens, FIXED + EACH * tokens) for tokens in (1, 16, 64, 256, 1024)))


def after(interval: float, tokens: int = 20, steps: StepSeconds | None = TABLE) -> EncodePace:
    """Requests of so many tokens came at this interval; the last at 0."""
    pace = EncodePace(256, steps)
    for number in range(-7, 1):
        pace.arrived(number * interval, tokens)
    return pace


def test_nobody_waits_where_requests_come_seldom() -> None:
    assert after(2 * FIXED).patience_seconds(20, oldest=0.0, now=0.0) == 0.0


def test_where_they_come_quickly_the_oldest_waits_for_no_longer_than_that_saves() -> None:
    pace = after(FIXED / 10)
    assert pace.patience_seconds(20, oldest=0.0, now=0.0) == pytest.approx(FIXED)
    assert pace.patience_seconds(20, oldest=-0.6 * FIXED, now=0.0) == pytest.approx(0.4 * FIXED)
    assert pace.patience_seconds(20, oldest=-2 * FIXED, now=0.0) == 0.0  # it stood in the queue for a step already


def test_nobody_waits_with_a_full_step_or_without_knowledge() -> None:
    assert after(FIXED / 10).patience_seconds(256, 0.0, 0.0) == 0.0
    assert after(FIXED / 10, steps=None).patience_seconds(20, 0.0, 0.0) == 0.0
    few = EncodePace(256, TABLE)
    few.arrived(0.0, 20)
    assert few.patience_seconds(20, 0.0, 0.0) == 0.0


def test_nothing_is_waited_for_that_would_not_make_a_step_cheaper() -> None:
    line = StepSeconds((), (), encode_points=((1, EACH), (1024, 1024 * EACH)))  # a step of two costs two of one
    assert after(1e-9, steps=line).patience_seconds(20, 0.0, 0.0) <= 1e-12


def test_a_burst_that_is_over_is_forgotten() -> None:
    pace = after(FIXED / 10)
    assert pace.patience_seconds(20, oldest=0.0099, now=0.01) == 0.0


def test_steps_correct_the_table() -> None:
    pace = EncodePace(1024, TABLE)
    for _ in range(5):
        pace.observe(StepStats(2 * (FIXED + EACH * 64), encode_tokens=64, num_encode_sequences=1, encode_pairs=64 * 64))
    assert pace.tempo is not None and pace.tempo.encode_factor == pytest.approx(2.0)
    pace.observe(StepStats(1.0))  # of nothing there is nothing to learn


def test_the_engine_waits_as_its_pace_says() -> None:
    sim = EncoderSimulation(pace=after(FIXED / 10))
    assert sim.engine.patience_seconds == 0.0  # idle: it blocks on its mailbox
    sim.engine.add(encode("r", 20, at=0.0))
    assert 0.0 < sim.engine.patience_seconds <= FIXED
