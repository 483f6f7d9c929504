"""The cost of a precision in quality: noted for the next start, and a reason for `auto` to choose another one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from app.engine.calibration.cache import Calibration
from app.errors import PrecisionTooCostly
from app.hardware.decision import Measurements, TrialTimes
from app.server.engine_host import EngineHost
from app.server.prepare import Prepared, QualityNotes, with_kept_calibration
from app.settings import DEMO_DIRECTORY, Settings
from app.weights.checkpoint import open_checkpoint
from engine_surroundings import quiet_surroundings
from planned_machines import machine


def timed(precision: str, one: float, eight: float) -> TrialTimes:
    """By tokens a second: at one sequence and at eight."""
    return TrialTimes(precision, 8, {1: 1 / one, 8: 8 / eight}, {size: size / 400 for size in (16, 512)})


TIMES = Measurements(50e9, {"bf16": 1e12, "int8": 3e12}, (timed("bf16", 5, 30), timed("int8", 10, 70)), seconds=2.5)


def prepared_as(tmp_path: Path, **settings: object) -> Prepared:
    """A large model on a machine where int8 is twice as fast."""
    checkpoint = open_checkpoint(DEMO_DIRECTORY)
    found = with_kept_calibration(machine(), Settings(cache_dir=tmp_path, **settings), checkpoint)
    return dataclasses.replace(found, needs=dataclasses.replace(found.needs, num_parameters=10**9)).with_calibration(
        Calibration(TIMES, 0.0, from_cache=False)
    )


def test_a_measured_cost_is_known_at_the_next_start(tmp_path: Path) -> None:
    first = prepared_as(tmp_path, precision="int8")
    assert "not measured" in first.plan.decisions["precision"].reason
    assert "perplexity by 1.2%" in first.with_quality_cost(0.012).plan.decisions["precision"].reason
    assert "perplexity by 1.2%" in prepared_as(tmp_path, precision="int8").plan.decisions["precision"].reason
    assert "not measured" in prepared_as(tmp_path, precision="int4").plan.decisions["precision"].reason
    other = prepared_as(tmp_path, precision="int8", keep_layers="lm_head=bf16")
    assert "not measured" in other.plan.decisions["precision"].reason, "other layers cost something else"


@pytest.mark.parametrize(("cost", "chosen"), ((0.02, "int8"), (0.05, "bf16")))
def test_auto_leaves_a_precision_that_costs_too_much(tmp_path: Path, cost: float, chosen: str) -> None:
    first = prepared_as(tmp_path)
    assert first.plan.weights.precision == "int8"
    again = first.with_quality_cost(cost)
    assert again.plan.weights.precision == chosen
    assert f"raises perplexity by {100 * cost:.1f}%" in again.plan.decisions["precision"].reason
    host = EngineHost(first, quiet_surroundings())
    if chosen == "int8":
        host.take_quality_cost(cost)
    else:
        with pytest.raises(PrecisionTooCostly, match=r"int8: it raises perplexity by 5\.0%"):
            host.take_quality_cost(cost)
    assert host.prepared.plan.weights.precision == chosen


def test_a_damaged_note_counts_as_none(tmp_path: Path) -> None:
    first = prepared_as(tmp_path, precision="int8").with_quality_cost(0.012)
    (note,) = (tmp_path / "packs").glob("*.quality")
    for text in ("", "[]", '{"int8": "x"}', '{"int8": null}', "{" * 4000):
        note.write_text(text)
        assert QualityNotes(first.checkpoint, first.settings).read() == {}
    note.chmod(0o666)
    note.write_text('{"int8": 0.5}')
    assert QualityNotes(first.checkpoint, first.settings).read() == {}, "others could have written it"
