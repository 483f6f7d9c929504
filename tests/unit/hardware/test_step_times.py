"""Step times by interpolation: exact at the measured points, and never less for more work."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.hardware.decision import TrialTimes
from app.hardware.step_times import StepTimeTable

SECONDS = st.floats(1e-4, 10.0)
TABLES = st.dictionaries(st.integers(1, 64), SECONDS, min_size=1, max_size=6)
PROMPTS = st.dictionaries(st.integers(1, 1024), SECONDS, max_size=5)
COUNTS = st.integers(0, 200)
CONTEXT = st.integers(0, 5000)
STEPS = st.builds(
    lambda decode, prefill, context, pair: StepTimeTable.from_trial(
        TrialTimes("int4", 2, decode, prefill, context_token_seconds=context, pair_seconds=pair)
    ),
    TABLES,
    PROMPTS,
    st.floats(0.0, 1e-4),
    st.floats(0.0, 1e-5),
)
TRIAL = TrialTimes("int4", 2, {1: 0.016, 8: 0.030}, {128: 0.20, 512: 0.70}, context_token_seconds=1e-6)
NOISE = 1 + 1e-9  # of sums in another order


@given(STEPS, COUNTS, COUNTS, CONTEXT, CONTEXT, COUNTS)
def test_more_never_costs_less(
    steps: StepTimeTable, rows: int, tokens: int, context: int, behind: int, more: int
) -> None:
    base = steps.mixed(rows, tokens, context, behind)
    assert steps.mixed(rows + more, tokens, context, behind) * NOISE >= base
    assert steps.mixed(rows, tokens + more, context, behind) * NOISE >= base
    assert steps.mixed(rows, tokens, context + more, behind) >= base
    assert steps.mixed(rows, tokens, context, behind + more) >= base
    assert steps.decode(rows + more, context) * NOISE >= steps.decode(rows, context)
    assert steps.prefill(tokens + more, behind) * NOISE >= steps.prefill(tokens, behind)


@given(STEPS, st.integers(1, 200), st.integers(1, 2000), CONTEXT, CONTEXT)
def test_both_cost_at_least_each_alone(steps: StepTimeTable, rows: int, tokens: int, context: int, behind: int) -> None:
    both = steps.mixed(rows, tokens, context, behind) * NOISE
    assert both >= steps.decode(rows, context)
    assert both >= steps.prefill(tokens, behind)


@given(TABLES, TABLES)
def test_rising_tables_are_met_at_their_points(decode: dict[int, float], prefill: dict[int, float]) -> None:
    rising = [dict(zip(sorted(table), sorted(table.values()), strict=True)) for table in (decode, prefill)]
    steps = StepTimeTable.from_trial(TrialTimes("bf16", 2, *rising))
    assert all(steps.decode(rows) == pytest.approx(seconds) for rows, seconds in rising[0].items())
    assert all(steps.prefill(tokens) == pytest.approx(seconds) for tokens, seconds in rising[1].items())


@given(STEPS, st.floats(0.1, 10.0), COUNTS, COUNTS, CONTEXT, CONTEXT)
def test_a_slower_machine_takes_so_many_times_as_long(
    steps: StepTimeTable, factor: float, rows: int, tokens: int, context: int, behind: int
) -> None:
    slower = steps.scaled(factor).mixed(rows, tokens, context, behind)
    assert slower == pytest.approx(factor * steps.mixed(rows, tokens, context, behind))


def test_rows_that_are_sampled_cost_more_than_those_of_a_prompt() -> None:
    steps = StepTimeTable.from_trial(TrialTimes("int4", 2, {1: 0.016, 32: 0.075}, {32: 0.060, 64: 0.100, 128: 0.190}))
    assert steps.mixed(32, 32) == pytest.approx(0.100 + 0.015)
    assert steps.mixed(1, 63) == pytest.approx(0.100)


def test_between_points_it_is_linear_and_beyond_them_proportional() -> None:
    steps = StepTimeTable.from_trial(TRIAL)
    assert steps.decode(0) == steps.prefill(0) == 0.0
    assert steps.decode(3) == pytest.approx(0.020)
    assert steps.decode(16) == pytest.approx(0.060)
    assert steps.prefill(320) == pytest.approx(0.45)
    assert steps.prefill(1024) == pytest.approx(1.40)
    assert steps.prefill(8) == pytest.approx(0.016 + (0.20 - 0.016) * 7 / 127), (
        "on the line from one token to the first point"
    )
    assert steps.decode(3, 1000) == pytest.approx(0.021)
    assert steps.prefill(128, 1000) == pytest.approx(0.20 + 0.064), (
        "half of what a decode pays, where nobody measured it"
    )


def test_pairs_in_tokens_leave_out_those_that_the_table_has() -> None:
    measured = TrialTimes(
        "int8", 2, {}, {}, encode_seconds={64: 0.02, 1024: 1024 * (1e-4 + 128 * 1e-6)}, pair_seconds=1e-6
    )
    assert StepTimeTable.from_trial(measured).pair_tokens == pytest.approx(1e-6 / 1e-4)
    assert StepTimeTable.from_trial(replace(measured, pair_seconds=0.0)).pair_tokens is None
    assert StepTimeTable.from_trial(replace(measured, pair_seconds=2e-6)).pair_tokens is None  # more than there is


def test_steps_that_never_end_stay_so_between_and_at_the_points() -> None:
    steps = StepTimeTable.from_trial(TrialTimes("int8", 2, {1: 1.0, 8: math.inf, 16: math.inf}, {}))
    assert steps.decode(1) == 1.0
    assert [steps.decode(rows) for rows in (4, 8, 12, 16, 20)] == [math.inf] * 5
