"""The step time model: every user sees the same steps, and each step is observed once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.hardware.decision import TrialTimes
from app.hardware.step_times import StepTimeTable
from app.metrics.steps import FACTOR_LIMITS, MIN_WINDOW_STEPS, StepKind, StepStats, StepTimeModel
from encoder_simulation import EncoderSimulation, encode
from engine_simulation import Simulation

TABLE = StepTimeTable.from_trial(TrialTimes("int4", 2, {1: 0.016, 8: 0.030}, {128: 0.2}, context_token_seconds=1e-6))
DECODE = StepStats(TABLE.decode(8, 800), decode_tokens=8, num_decode_sequences=8, context_tokens=800)
MIXED = replace(DECODE, prefill_tokens=64)
PROMPT = StepStats(0.1, prefill_tokens=64)


def times(step: StepStats, factor: float) -> StepStats:
    """The step at a speed: it takes `factor` times what the table says."""
    seconds = factor * step.expected_seconds(TABLE)
    return replace(step, seconds=seconds, model_seconds=seconds)


def observed(*steps: StepStats, table: StepTimeTable | None = TABLE) -> StepTimeModel:
    model = StepTimeModel(table)
    for step in steps:
        model.observe(step)
    return model


def test_all_predictions_follow_a_machine_that_became_slower() -> None:
    model = observed(*[times(DECODE, 1.8)] * MIN_WINDOW_STEPS)
    found = model.step_times(512)
    assert found is not None and found.decode_factor == pytest.approx(1.8)
    assert found.seconds(8, 0, 800) == pytest.approx(1.8 * DECODE.seconds)
    assert model.decode(8, 800) == pytest.approx(1.8 * DECODE.seconds)
    assert model.predict(DECODE) == pytest.approx(1.8 * DECODE.seconds)
    assert model.predict_without_prefill(MIXED) == model.predict(DECODE)
    assert model.window_factors() == {"decode": pytest.approx(1.8)}
    assert model.window_model_factor() == pytest.approx(1.8)


def test_a_kind_of_step_that_was_not_seen_gets_the_factor_of_the_most_similar_kind() -> None:
    def factors(model: StepTimeModel) -> tuple[float, float, float]:
        found = model.step_times(512)
        assert found is not None
        return found.decode_factor, found.mixed_factor, found.prefill_factor

    assert factors(observed()) == (1.0, 1.0, 1.0)
    assert factors(observed(times(DECODE, 2.0))) == pytest.approx((2.0, 2.0, 2.0))
    assert factors(observed(times(PROMPT, 3.0))) == pytest.approx((1.0, 3.0, 3.0))
    assert factors(observed(times(MIXED, 3.0), times(DECODE, 2.0))) == pytest.approx((2.0, 3.0, 3.0))
    assert factors(observed(times(DECODE, 99.0)))[0] == FACTOR_LIMITS[1]


def test_the_usual_time_of_a_step_is_what_was_usual_before_it() -> None:
    model = observed(times(DECODE, 1.0))
    assert model.usual_seconds == pytest.approx(DECODE.seconds)
    model.observe(times(DECODE, 10.0))
    assert model.usual_seconds == pytest.approx(DECODE.seconds)
    model.observe(DECODE)
    assert model.usual_seconds == pytest.approx(1.1 * DECODE.seconds)


@pytest.mark.parametrize("step", [StepStats(1.0), StepStats(1.0, encode_tokens=8, num_encode_sequences=1)])
def test_a_step_of_which_the_table_says_nothing_is_not_learned(step: StepStats) -> None:
    model = observed(times(DECODE, 2.0), *[step] * MIN_WINDOW_STEPS)
    assert model.usual_seconds is None
    assert model.window_factors() == {}
    assert model.step_times(512) == observed(times(DECODE, 2.0)).step_times(512)


def test_a_step_that_scores_prompts_is_not_learned() -> None:
    model = observed(*[replace(times(PROMPT, 3.0), scored_tokens=60)] * 20)
    assert model.usual_seconds is None
    assert model.predict(PROMPT) == pytest.approx(PROMPT.expected_seconds(TABLE))
    unmeasured = observed(*[replace(PROMPT, scored_tokens=1)] * 20, DECODE, table=None)
    found = unmeasured.step_times(512)
    assert found is not None and found.max_tokens < 64, "the price of a prefill token is unknown"


def test_the_short_and_the_long_window_differ() -> None:
    model = observed(*[times(DECODE, 1.0)] * MIN_WINDOW_STEPS, *[times(DECODE, 2.0)] * 9)
    found = model.step_times(512)
    assert found is not None and found.decode_factor == pytest.approx(2.0)
    assert model.window_factors() == {"decode": pytest.approx(1.0)}


@pytest.mark.parametrize(
    ("step", "kind", "phase"),
    [
        (DECODE, "decode", "decode"),
        (MIXED, "mixed", "prefill"),
        (PROMPT, "prefill", "prefill"),
        (StepStats(1.0, encode_tokens=3), "encode", "encode"),
    ],
)
def test_kinds_of_steps(step: StepStats, kind: StepKind, phase: str) -> None:
    assert (step.kind, step.phase) == (kind, phase)


def test_every_engine_observes_each_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[StepStats] = []
    monkeypatch.setattr(StepTimeModel, "observe", lambda self, step: seen.append(step))
    decoder, encoder = Simulation().with_guesses(0.5), EncoderSimulation()
    seen.clear()  # the simulation begins with steps that it has seen
    decoder.add("a", [1, 2, 3], max_tokens=20, ignore_eos=True)
    decoder.finish()
    assert len(seen) == len(decoder.runner.batches) > 1
    seen.clear()
    for name in "ab":
        encoder.engine.add(encode(name, 4))
        encoder.step()
        assert encoder.engine.stats is not None
    assert len(seen) == len(encoder.runner.batches) == 2


def test_a_table_that_was_not_measured_is_corrected_further_and_states_no_usual_time() -> None:
    table = StepTimeTable(((1, 0.01), (8, 0.02)), ((32, 0.1),))
    for is_measured, factor in ((True, 4.0), (False, 10.0)):
        model = StepTimeModel(table, is_measured=is_measured)
        step = StepStats(0.1, decode_tokens=1, num_decode_sequences=1)
        assert (model.predict(step) is None) == (not is_measured)
        for _ in range(20):
            model.observe(step)
        times = model.step_times(512)
        assert times is not None and times.decode_factor == factor
        assert is_measured or model.predict(step) == pytest.approx(0.1)


def test_without_a_table_nothing_is_measured() -> None:
    assert not StepTimeModel(None).is_measured


def test_a_measured_table_takes_the_place_of_an_estimate() -> None:
    model = StepTimeModel(StepTimeTable(((1, 1.0),), ((32, 1.0),)), is_measured=False)
    step = StepStats(0.1, decode_tokens=1, num_decode_sequences=1)
    for _ in range(20):
        model.observe(step)
    model.use_table(StepTimeTable(((1, 0.1),), ((32, 0.2),)))
    times = model.step_times(512)
    assert model.is_measured and times is not None
    assert times.seconds(1, 0) == pytest.approx(0.1), "no factor of the old table is left"
