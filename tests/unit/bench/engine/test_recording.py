"""The cost of recording a step is measured with everything that serving does, and leaves no trace in the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.hardware.probe.probe import probe
from armature_bench.engine import recording
from armature_bench.engine.recording import TARGET_MICROSECONDS, StepInstruments, measure_step_recording


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(recording, "SAMPLES_PER_ROUND", 40)
    yield
    gc.unfreeze()


def test_recording_a_step_takes_microseconds() -> None:
    outcome = measure_step_recording(probe(Path("/")), rounds=1)
    assert outcome.complete and len(outcome.figures) == 5
    ordinary = outcome.figures[0]
    assert (
        0.0 < ordinary.parts["least"] < 4 * TARGET_MICROSECONDS
    )  # the aim is of the reference machine; a slow one may take longer
    assert [figure.target for figure in outcome.figures] == 3 * [TARGET_MICROSECONDS] + 2 * [None]
    assert gc.isenabled()


def test_what_is_timed_is_what_serving_does() -> None:
    """Each step is in the log and the histograms, and the slow ones have a cause."""
    serving = StepInstruments()
    for _ in range(4):
        serving.monitor_and_count(recording.DECODE_STEP)
        serving.monitor_and_count(recording.MIXED_STEP)
        serving.monitor_rotating(recording.DECODE_STEP, recording.SLOW_STEP)
    serving.watch.close()
    causes = serving.metrics.step_log.since(0)["steps"]["cause"]
    assert [causes[index::3] for index in (0, 1)] == [4 * [""], 4 * ["prefill"]]
    assert [bool(cause) for cause in causes[2::3]] == [True, False, True, False]
    text = serving.metrics.render()[0].decode()
    assert 'armature_step_seconds_count{phase="decode"} 4.0' in text
    assert 'armature_step_stalls_total{cause="prefill"} 4.0' in text


def test_an_interruption_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = recording._microseconds, iter(range(1000))

    def interrupted(work: object) -> float:
        if next(calls) >= 60:
            raise KeyboardInterrupt
        return real(work)  # type: ignore[arg-type]

    monkeypatch.setattr(recording, "_microseconds", interrupted)
    outcome = measure_step_recording(probe(Path("/")), rounds=1)
    assert not outcome.complete and len(outcome.figures) == 1
    assert gc.isenabled()
