"""A server that measures its machine before it serves: at the first start, not at the second, and never where it is not to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.engine.calibration import measure
from app.hardware.decision import Measurements
from app.settings import DEMO_DIRECTORY
from exported_programs import write_program
from tests.live.live_server import LiveServer, live, starting, until
from tiny_encoders import Modules, write_encoder

FALLBACK = "the machine is too busy: a test runs"


def told(server: LiveServer) -> Any:
    return server.client.get("/info").json()["calibration"]


@pytest.mark.full
def test_the_second_start_reads_what_the_first_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("armature_kernels.timing.MAX_SPREAD", 1e9)  # tests run on machines that do other things too
    monkeypatch.setattr("armature_kernels.timing.MAX_ADJUSTMENT", 1e9)
    monkeypatch.setattr("app.server.prepare.SMALL_BUDGET_SECONDS", 60.0)  # it takes one, where nobody else computes
    flags = {"calibrate": "auto", "cache_dir": tmp_path}
    with live(DEMO_DIRECTORY, **flags) as server:
        first = told(server)
        assert (first["from_cache"], first["measurements"]["fallback"]) == (False, "")
        assert server.generate(max_tokens=4).status_code == 200
    with live(DEMO_DIRECTORY, **flags) as server:
        second = told(server)
        assert second["from_cache"] is True
        assert second["measurements"] == first["measurements"]
        assert server.client.get("/info").json()["plan"]["capacity_tokens_per_second"]["value"]["decode"]


@pytest.mark.full
def test_an_encoder_is_measured_and_reports_what_to_expect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("armature_kernels.timing.MAX_SPREAD", 1e9)
    monkeypatch.setattr("armature_kernels.timing.MAX_ADJUSTMENT", 1e9)
    monkeypatch.setattr("app.server.prepare.SMALL_BUDGET_SECONDS", 60.0)
    checkpoint = write_encoder(tmp_path / "tiny", modules=Modules())
    with live(checkpoint, calibrate="auto", cache_dir=tmp_path / "cache", max_batch_tokens=64) as server:
        (trial,) = told(server)["measurements"]["trials"]
        assert list(trial["encode_seconds"]) == ["16", "32", "64"] and trial["decode_seconds"] == {}
        before = server.client.get("/metrics").text
        assert 'armature_capacity_tokens_per_second{phase="encode",rows="16"}' in before
        assert "armature_predicted_wait_seconds" in before, "known before the first request"
        answer = server.client.post("/encode", json={"inputs": ["hello", "the fox said hello"]})
        assert answer.status_code == 200
        until(lambda: 'armature_step_seconds_count{phase="encode"} 1.0' in server.client.get("/metrics").text)
        after = server.client.get("/metrics").text
        for line in ("armature_vectors_total 2.0", "armature_predicted_wait_error_ratio_count 1.0", 'kind="vectors"'):
            assert line in after


@pytest.mark.full
def test_a_program_is_measured_and_reports_what_to_expect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("armature_kernels.timing.MAX_SPREAD", 1e9)
    monkeypatch.setattr("armature_kernels.timing.MAX_ADJUSTMENT", 1e9)
    monkeypatch.setattr("app.server.prepare.SMALL_BUDGET_SECONDS", 60.0)
    program = write_program(tmp_path, "recommender")
    tensors = [
        {"name": "ids", "shape": [1, 5], "datatype": "INT64", "data": [3, 1, 4, 1, 5]},
        {"name": "dense", "shape": [1, 8], "datatype": "FP32", "data": [0] * 8},
    ]
    with live(program, calibrate="auto", cache_dir=tmp_path / "cache", max_batch_tokens=8) as server:
        (trial,) = told(server)["measurements"]["trials"]
        assert list(trial["encode_seconds"]) == ["1", "2", "4", "8"]
        before = server.client.get("/metrics").text
        assert 'armature_capacity_tokens_per_second{phase="encode",rows="1"}' in before
        assert "armature_predicted_wait_seconds" in before, "known before the first request"
        assert server.client.post("/v2/models/recommender/infer", json={"inputs": tensors}).status_code == 200
        until(lambda: "armature_predicted_wait_error_ratio_count 1.0" in server.client.get("/metrics").text)
    with live(program, calibrate="auto", cache_dir=tmp_path / "cache", max_batch_tokens=8) as server:
        assert told(server)["from_cache"] is True


@pytest.mark.full
def test_a_noisy_machine_serves_by_the_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "measure_machine", lambda *arguments: Measurements(fallback=FALLBACK))
    with live(DEMO_DIRECTORY, calibrate="auto", cache_dir=tmp_path) as server:
        assert told(server)["measurements"]["fallback"] == FALLBACK
        assert FALLBACK in server.client.get("/info").json()["plan"]["calibrate"]["reason"]
        assert server.generate(max_tokens=4).status_code == 200
    assert not list(tmp_path.rglob("*.json"))


def test_off_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "measure_machine", lambda *arguments: pytest.fail("it was not to be measured"))
    with live(DEMO_DIRECTORY, calibrate="off", cache_dir=tmp_path) as server:
        assert told(server) is None


def test_readiness_says_that_it_is_measured_and_a_stop_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.server.prepare.SMALL_BUDGET_SECONDS", 600.0)
    monkeypatch.setattr("armature_kernels.timing.MAX_SAMPLES", 10**9)
    monkeypatch.setattr("armature_kernels.timing.SAMPLING_SECONDS", 1e9)
    with starting(DEMO_DIRECTORY, calibrate="auto", cache_dir=tmp_path) as server:
        until(lambda: server.client.get("/readyz").json().get("stage", "").startswith("calibrating"))
        assert server.client.get("/readyz").status_code == 503
        assert server.client.get("/info").json()["calibration"] is None
        server.server.should_exit = True
        until(lambda: not server.find_served.worker.alive)
        assert server.fatal == []
