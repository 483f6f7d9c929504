"""Percentiles are samples, targets have a direction, and a share above one is a mistake."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from armature_bench import console
from armature_bench.console import (
    BenchOutcome,
    Figure,
    compute_spread,
    format_number,
    outcome_table,
    percentile,
    print_outcome,
)

SAMPLES = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


@given(SAMPLES, st.floats(0.01, 1.0))
def test_a_percentile_is_the_first_sample_that_enough_do_not_exceed(samples: list[float], share: float) -> None:
    found = percentile(samples, share)
    assert found in samples
    assert sum(sample <= found for sample in samples) >= share * len(samples) - 1e-9
    assert sum(sample < found for sample in samples) < share * len(samples)


@given(SAMPLES)
def test_a_spread_is_in_order(samples: list[float]) -> None:
    found = compute_spread(samples)
    assert found.smallest <= found.p50 <= found.p99 <= found.largest
    assert found.p50 == statistics.median(samples)
    assert found.num_samples == len(samples)


@pytest.mark.parametrize(
    "ratio, at_most, met",
    [(0.9, False, True), (0.89, False, False), (0.9, True, True), (0.91, True, False)],
)
def test_a_target_has_a_direction(ratio: float, at_most: bool, met: bool) -> None:
    assert Figure("x", 1.0, "s", ratio=ratio, target=0.9, at_most=at_most).met is met


def test_a_target_without_a_ratio_bounds_the_value() -> None:
    assert Figure("start", 4.0, "s", target=5.0, at_most=True).met is True
    assert Figure("start", 6.0, "s", target=5.0, at_most=True).met is False
    assert Figure("start", 6.0, "s").met is None


def test_a_share_above_one_is_a_failed_measurement(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figures = (Figure("decode", 1.0, "tok/s", ratio=1.01, against="read bandwidth", is_share=True),)
    outcome = BenchOutcome("engine", "tiny", figures)
    assert print_outcome(outcome, tmp_path / "out.json") == 1
    captured = capsys.readouterr()
    assert "failed measurement" in captured.err
    assert json.loads(captured.out)["mistakes"] == outcome.mistakes
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads(captured.out)


def test_the_ceiling_may_be_a_sample_of_the_same_product() -> None:
    assert Figure("512 rows", 1.0, "us", ratio=1.02, against="product rate", is_share=True).mistake is None
    assert Figure("512 rows", 1.0, "us", ratio=1.04, against="product rate", is_share=True).mistake is not None


def test_a_ratio_that_is_no_share_may_pass_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        print_outcome(BenchOutcome("itl", "tiny", (Figure("ITL", 1.0, "s", ratio=2.5, target=3, at_most=True),)), None)
        == 0
    )
    assert json.loads(capsys.readouterr().out)["figures"][0]["met"] is True


def test_what_was_interrupted_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_outcome(BenchOutcome("engine", "tiny", (), complete=False), None) == 130
    captured = capsys.readouterr()
    assert "Interrupted" in captured.err
    assert json.loads(captured.out)["complete"] is False


def test_the_table_has_a_row_for_every_figure() -> None:
    figures = (Figure("a", 1234.5, "tok/s", p99=2.0), Figure("b", 0.01234, "s", ratio=0.5, target=0.4))
    assert outcome_table(BenchOutcome("engine", "tiny", figures)).row_count == 2


def test_a_bench_names_its_values_and_their_digits(capsys: pytest.CaptureFixture[str]) -> None:
    figures = (Figure("int8", 0.99876, "", parts={"mean": 0.99987}, digits=4), Figure("int4", 0.94321, ""))
    print_outcome(BenchOutcome("quality", "tiny", figures, value_name="lowest cosine"), None)
    rows = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert ["lowest", "cosine", "mean"] in rows
    assert ["int8", "0.9988", "0.9999"] in rows and ["int4", "0.943"] in rows


@pytest.mark.parametrize("value, text", [(1234.5, "1,234"), (0.012345, "0.0123"), (47.06, "47.1"), (0, "0")])
def test_numbers_are_written_as_people_do(value: float, text: str) -> None:
    assert format_number(value) == text


def test_a_narrow_terminal_cuts_no_figure_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "_console", lambda: Console(stderr=True, width=30))
    figure = Figure("something with a long name", 123.0, "tok/s", p99=456.0, parts={"p90": 234.0, "of read": 0.5})
    print_outcome(BenchOutcome("engine", "tiny", (figure,), notes=("a note [with] brackets",)), None)
    told = capsys.readouterr().err
    assert "…" not in told
    assert next(line.split() for line in told.splitlines() if "456" in line)[-5:] == [
        "123",
        "234",
        "456",
        "tok/s",
        "0.5",
    ]
    assert "[with]" in told
