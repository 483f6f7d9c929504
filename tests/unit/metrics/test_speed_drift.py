"""Speed drift while serving: it is reported once, and the expected speed is known before the first step."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from app.hardware.decision import TrialTimes
from app.hardware.step_times import StepTimeTable
from app.metrics.instruments import Metrics
from app.metrics.step_monitor import StepRecorder
from app.metrics.steps import (
    MIN_WINDOW_STEPS,
    WINDOW_STEPS,
    EngineSnapshot,
    ExpectedSpeed,
    SpeedDrift,
    StepStats,
    StepTimeModel,
)

STEPS = StepTimeTable.from_trial(TrialTimes("int4", 2, {1: 0.016, 8: 0.030}, {128: 0.2}, context_token_seconds=1e-6))
PROMISE = ExpectedSpeed({"decode": {1: 62.5, 8: 266.0}, "prefill": {128: 640.0}}, {"decode": 0.9, "prefill": 0.6})


class Serving:
    """`stale` counts how often the calibration was thrown away."""

    def __init__(self) -> None:
        self.stale = 0
        self.model = StepTimeModel(STEPS)
        self.drift = SpeedDrift(self.model, PROMISE, self._on_stale)

    def _on_stale(self) -> None:
        self.stale += 1

    def decode(self, factor: float, number: int = WINDOW_STEPS, overhead: float = 0.0) -> None:
        model = factor * STEPS.decode(8, 800)
        stats = StepStats(
            model * (1 + overhead), decode_tokens=8, num_decode_sequences=8, context_tokens=800, model_seconds=model
        )
        for _ in range(number):
            self.model.observe(stats)
        self.drift.update()


def test_what_was_promised_stands_until_enough_was_seen() -> None:
    serving = Serving()
    serving.decode(3.0, number=MIN_WINDOW_STEPS // 2)
    assert serving.drift.speed.capacity() == PROMISE.capacity
    assert serving.drift.speed.roofline() == PROMISE.roofline


def test_capacity_follows_the_machine_by_phase() -> None:
    serving = Serving()
    serving.decode(1.25)
    assert serving.drift.speed.capacity()["decode"][8] == pytest.approx(266.0 / 1.25)
    assert serving.drift.speed.capacity()["prefill"] == PROMISE.capacity["prefill"], "of which nothing was seen"
    assert serving.drift.speed.roofline()["decode"] == pytest.approx(0.9 / 1.25)
    for _ in range(WINDOW_STEPS):
        serving.model.observe(StepStats(2 * STEPS.prefill(128), prefill_tokens=128))
    serving.drift.update()
    assert serving.drift.speed.capacity()["prefill"][128] == pytest.approx(320.0)


def test_a_slower_machine_is_reported_once_and_measured_anew(caplog: pytest.LogCaptureFixture) -> None:
    serving = Serving()
    with caplog.at_level(logging.INFO, "app.metrics.steps"):
        serving.decode(1.1)
        assert not serving.drift.speed.drifted
        for factor in (1.3, 1.15, 1.25, 1.12, 1.3):  # around the bound, to and fro
            serving.decode(factor)
            assert serving.drift.speed.drifted
        assert (serving.stale, len(caplog.records)) == (1, 1)
        serving.decode(1.05)
        assert not serving.drift.speed.drifted
        serving.decode(0.7)
    told = serving.drift.speed.to_json()
    assert (told["steps_over_measured"], told["drifted"]) == ({"decode": 0.7}, True)
    assert told["capacity_tokens_per_second"] == serving.drift.speed.capacity()
    assert (serving.stale, len(caplog.records)) == (1, 3)


def test_a_few_slow_steps_are_no_other_machine() -> None:
    serving = Serving()
    serving.decode(1.0)
    serving.decode(5.0, number=WINDOW_STEPS // 3)
    assert not serving.drift.speed.drifted


def test_what_is_spent_beside_the_model_is_capacity_and_no_drift() -> None:
    serving = Serving()
    serving.decode(1.0, overhead=0.5)
    assert serving.drift.speed.capacity()["decode"][1] == pytest.approx(62.5 / 1.5)
    assert (serving.drift.speed.drifted, serving.stale) == (False, 0)


def test_a_scrape_reports_capacity_before_the_first_request_and_what_draft_tokens_came_to() -> None:
    metrics = Metrics()
    StepRecorder(metrics).speed = SpeedDrift(StepTimeModel(STEPS), PROMISE).speed
    text = metrics.render()[0].decode()
    assert 'armature_capacity_tokens_per_second{phase="decode",rows="8"} 266.0' in text
    assert 'armature_roofline_ratio{phase="prefill"} 0.6' in text
    assert 'armature_speculation_tokens_total{kind="accepted"} 0.0' in text
    metrics.on_step(
        StepStats(0.1, decode_tokens=6, num_decode_sequences=2, draft_tokens=7, accepted_tokens=4), EngineSnapshot()
    )
    text = metrics.render()[0].decode()
    assert 'armature_speculation_tokens_total{kind="drafted"} 7.0' in text
    assert 'armature_speculation_tokens_total{kind="accepted"} 4.0' in text


def test_steps_of_texts_are_held_against_their_own_table() -> None:
    steps = StepTimeTable.from_trial(
        TrialTimes("bf16", 2, {}, {}, pair_seconds=1e-7, encode_seconds={128: 0.1, 512: 0.3})
    )
    stale: list[str] = []
    model = StepTimeModel(steps)
    promise = ExpectedSpeed({"encode": {512: 1700.0}}, {"encode": 0.8, "encode_few": 0.4})
    drift = SpeedDrift(model, promise, lambda: stale.append("told"))
    long = StepStats(0.3 + 512 * 384 * 1e-7, encode_tokens=512, num_encode_sequences=1, encode_pairs=512 * 512)
    for _ in range(WINDOW_STEPS):
        model.observe(replace(long, model_seconds=long.seconds))
    drift.update()
    assert drift.speed.capacity()["encode"][512] == pytest.approx(1700.0) and not stale, (
        "a long text attends to more: that is no drift"
    )
    for _ in range(WINDOW_STEPS):
        model.observe(replace(long, seconds=2 * long.seconds, model_seconds=2 * long.seconds))
    drift.update()
    assert drift.speed.capacity()["encode"][512] == pytest.approx(850.0) and stale == ["told"]
    assert drift.speed.roofline() == pytest.approx({"encode": 0.4, "encode_few": 0.2})


def test_an_estimate_is_corrected_and_is_nothing_to_drift_from(caplog: pytest.LogCaptureFixture) -> None:
    stale: list[bool] = []
    model = StepTimeModel(STEPS, is_measured=False)
    drift = SpeedDrift(model, replace(PROMISE, is_estimated=True), lambda: stale.append(True))
    stats = StepStats(20 * STEPS.decode(8), decode_tokens=8, num_decode_sequences=8, model_seconds=20 * STEPS.decode(8))
    with caplog.at_level(logging.INFO):
        for _ in range(WINDOW_STEPS):
            model.observe(stats)
        drift.update()
    assert drift.speed.capacity()["decode"][8] == pytest.approx(266.0 / 20)
    assert (drift.speed.drifted, stale, caplog.text) == (False, [], "")
    assert drift.speed.to_json()["estimated"] is True


@pytest.mark.parametrize("is_estimated", [True, False])
def test_the_metrics_say_if_the_speed_is_estimated(is_estimated: bool) -> None:
    metrics = Metrics()
    recorder = StepRecorder(metrics)
    assert b"armature_speed_estimated" not in metrics.render()[0]
    recorder.speed = SpeedDrift(StepTimeModel(STEPS), replace(PROMISE, is_estimated=is_estimated)).speed
    assert f"armature_speed_estimated {float(is_estimated)}".encode() in metrics.render()[0]
