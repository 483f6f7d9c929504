"""A server that could not measure at its start times its own steps while idle, with the real engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from app.engine.calibration import idle
from app.hardware.decision import Measurements
from app.hardware.probe.probe import probe
from app.server.prepare import with_kept_calibration
from app.server.startup import ServerRuntime
from app.settings import DEMO_DIRECTORY, Settings
from app.weights.open import open_model
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from exported_programs import write_program

DEMOS = {"decode": DEMO_DIRECTORY, "encode": DEMO_DIRECTORY.parent / "bert", "program": None}


@pytest.fixture
def _threads_as_before(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("os.environ", dict(__import__("os").environ))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def busy(what: Any, budget: float, report: Callable[[str], None]) -> Measurements:
    return Measurements(fallback="the machine is too busy")


@pytest.mark.cases(test=1)
@pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="estimates need the native library")
@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.parametrize("phase", DEMOS)
def test_what_is_estimated_is_measured_while_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    monkeypatch.setattr("app.engine.calibration.measure.measure_machine", busy)
    monkeypatch.setattr(idle, "MAX_SPREAD", 1e9)  # whatever else the machine does
    monkeypatch.setattr(idle, "monotone_table", lambda seconds: seconds)
    model = DEMOS[phase] or write_program(tmp_path, "recommender")
    settings = Settings(model=model, cache_dir=tmp_path, calibrate="auto", threads=1)
    prepared = with_kept_calibration(probe(), settings, open_model(settings.checkpoint_directory))
    runtime = ServerRuntime(prepared, lambda error: None)
    with torch.inference_mode():
        engine = runtime.host.build(lambda stage: None)
        assert runtime._info()["plan"]["speed_source"]["value"] == "estimated"
        assert b"armature_speed_estimated 1.0" in runtime.metrics.render()[0]
        estimated = runtime._info()["speed"]["capacity_tokens_per_second"]
        assert runtime.host.use_idle_time(engine, lambda: True), "a command waits: later"
        assert not runtime.host.use_idle_time(engine, lambda: False)
    info = runtime._info()
    assert info["plan"]["speed_source"]["value"] == "measured" and not info["speed"]["estimated"]
    kind = "decode" if phase == "decode" else "encode"
    assert info["speed"]["capacity_tokens_per_second"][kind] != estimated[kind]
    assert b"armature_speed_estimated 0.0" in runtime.metrics.render()[0]
    (kept,) = (tmp_path / "calibration").glob("*.json")
    assert json.loads(kept.read_text())["measurements"]["is_partial"]
    assert not runtime.host.use_idle_time(engine, lambda: False), "there is nothing left to do"


@pytest.mark.usefixtures("_threads_as_before")
def test_nothing_is_measured_unasked(tmp_path: Path) -> None:
    settings = Settings(model=DEMO_DIRECTORY, cache_dir=tmp_path, calibrate="off", threads=1)
    prepared = with_kept_calibration(probe(), settings, open_model(settings.checkpoint_directory))
    runtime = ServerRuntime(prepared, lambda error: None)
    assert not runtime.host.use_idle_time(object(), lambda: False)  # type: ignore[arg-type]
