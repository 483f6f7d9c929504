"""Calibration files are found again only if nothing relevant has changed; a broken file is measured again."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.engine.calibration import cache
from app.engine.calibration.cache import Calibration, CalibrationFile, calibration_key
from app.hardware.decision import Measurements, TrialTimes
from app.hardware.facts import Cgroup, Core, Cpu, CudaDevice, Facts, NativeLibrary, TorchBuild
from app.hardware.probe import software
from app.settings import DEMO_DIRECTORY, Settings
from app.weights.checkpoint import Checkpoint, open_checkpoint
from planned_machines import ON_GPUS, machine
from planned_machines import plan as planned

TRIAL = TrialTimes("bf16", 8, {1: 0.02, 8: 0.03}, {64: 0.1, 512: 0.7}, 1e-7, 10**9, 2e9, pair_seconds=1e-8)
FOUND = Measurements(5e10, {"bf16": 8e11}, (TRIAL,), 48, 2.5)
TAKEN = Calibration(FOUND, 1.0, from_cache=False)
CHANGES: dict[str, Callable[[Facts], Facts]] = {
    "another processor": lambda facts: dataclasses.replace(facts, cpu=Cpu("AMD", "EPYC", "Zen 4")),
    "other instructions": lambda facts: dataclasses.replace(facts, isa=facts.isa | {"amx_int8"}),
    "a quota": lambda facts: dataclasses.replace(facts, cgroup=Cgroup(version=2, quota_cores=8.5)),
    "fewer cores allowed": lambda facts: dataclasses.replace(facts, affinity=facts.affinity[:-1]),
    "another torch": lambda facts: dataclasses.replace(facts, torch=TorchBuild("9.9")),
    "other levels": lambda facts: dataclasses.replace(facts, native=NativeLibrary(("portable",))),
}


@pytest.fixture(autouse=True)
def _nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARMATURE_CALIBRATE", raising=False)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(DEMO_DIRECTORY)


def key(facts: Facts, checkpoint: Checkpoint, **settings: Any) -> dict[str, str]:
    asked = Settings(**settings)
    return calibration_key(facts, asked, planned(facts, checkpoint.needs(), **settings), checkpoint.model_config)


# ---- where it is found -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES)
def test_it_is_not_found_on(checkpoint: Checkpoint, change: str) -> None:
    assert key(CHANGES[change](machine()), checkpoint) != key(machine(), checkpoint)


def test_it_is_not_found_for_other_shapes_settings_or_code(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = key(machine(), checkpoint)
    wider = dataclasses.replace(checkpoint.model_config, intermediate_size=1024)
    facts, settings = machine(), Settings()
    assert calibration_key(facts, settings, planned(facts, checkpoint.needs()), wider) != known
    for asked in (
        {"precision": "fp32"},
        {"threads": 3},
        {"compile": "off"},
        {"kv_precision": "int8"},
        {"max_batch_tokens": 64},
    ):
        assert key(machine(), checkpoint, **asked) != known, asked
    monkeypatch.setattr(software, "native_library_hash", lambda: "another library")
    other = key(machine(), checkpoint)
    assert other != known
    monkeypatch.setattr(cache, "VERSION", "9.9.9")
    assert key(machine(), checkpoint) != other


def test_neither_the_hosts_name_nor_which_cores_nor_free_memory_matter(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = key(machine(), checkpoint)
    monkeypatch.setenv("HOSTNAME", "another-pod-7d9f")
    monkeypatch.setattr(os, "uname", lambda: pytest.fail("whoever asks for the host's name"))
    others = tuple(Core((number + 64,)) for number in range(8))
    moved = machine(cores=8, available_bytes=10 * 2**30)
    moved = dataclasses.replace(moved, cores=others, affinity=tuple(range(64, 72)), numa_nodes=())
    assert key(moved, checkpoint, host="0.0.0.0", port=9) == known


def test_each_kind_of_gpu_is_measured_for_itself(checkpoint: Checkpoint) -> None:
    """Of GPUs alike one finds what another measured, however much of its memory is free."""

    def of(gpu: CudaDevice) -> dict[str, str]:
        facts = machine(cuda=(gpu,))
        return calibration_key(facts, Settings(), planned(facts, checkpoint.needs(), ON_GPUS), checkpoint.model_config)

    l4 = CudaDevice(0, "NVIDIA L4", (8, 9), 24 * 2**30, 23 * 2**30, "GPU-1")
    assert of(l4) == of(dataclasses.replace(l4, index=3, uuid="GPU-2", free_bytes=20 * 2**30))
    assert of(l4) != of(dataclasses.replace(l4, name="NVIDIA H200"))
    assert of(l4)["device"] == "cuda NVIDIA L4" and key(machine(), checkpoint)["device"] == "cpu"


# ---- files -----------------------------------------------------------------------------------------------------------


def kept(tmp_path: Path, **changed: str) -> CalibrationFile:
    return CalibrationFile(tmp_path, {"cpu": "a", "shapes": "b", **changed})


def test_what_is_kept_is_found_whole(tmp_path: Path) -> None:
    kept(tmp_path).write(TAKEN)
    assert kept(tmp_path).read() == dataclasses.replace(TAKEN, from_cache=True)
    assert kept(tmp_path, cpu="c").read() is None


def test_what_was_not_taken_for_true_is_not_kept(tmp_path: Path) -> None:
    kept(tmp_path).write(Calibration(Measurements(fallback="the machine is too busy"), 1.0, from_cache=False))
    assert kept(tmp_path).read() is None


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"key": {}}', "\udcff",
        json.dumps({"key": {"cpu": "a", "shapes": "b"}, "measured_at": 1.0, "measurements": {"trials": [{"threads": 1}]}}),
        json.dumps({"key": {"cpu": "a", "shapes": "b"}, "measured_at": 1.0, "measurements": {"trials": [], "unknown": 1}}),
        json.dumps({"key": {"cpu": "a", "shapes": "b"}, "measured_at": None, "measurements": {"trials": []}}),
        "[" * 100_000,
    ],
)  # fmt: skip
def test_a_broken_file_is_measured_anew(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    place = kept(tmp_path)
    place.write(TAKEN)
    assert place.file is not None
    place.file.write_text(text, errors="surrogateescape")
    assert place.read() is None
    assert "measuring again" in caplog.text
    place.write(TAKEN)
    assert place.read() is not None


def test_what_others_could_have_written_is_not_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = kept(tmp_path)
    place.write(TAKEN)
    assert place.file is not None
    place.file.chmod(0o666)
    assert place.read() is None
    assert "others may write to it" in caplog.text


def test_another_machines_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in a fleet of two architectures with one volume. What is no calibration at all is passed over."""
    theirs, ours = ({"shapes": "s", "cpu": cpu, "version": "0.1.0"} for cpu in ("Neoverse", "Zen"))
    CalibrationFile(tmp_path, theirs).write(TAKEN)
    for name, text in {"list": "[]", "text": "{", "key": '{"key": 5}', "other": '{"key": {"shapes": "t"}}'}.items():
        (tmp_path / "calibration" / f"{name}.json").write_text(text)
    with caplog.at_level(logging.INFO):
        assert CalibrationFile(tmp_path, ours).read() is None
    assert caplog.messages == [
        f"calibrations of this model in {tmp_path}/calibration differ in cpu: they are not used and stay there"
    ]
    CalibrationFile(tmp_path, ours).write(TAKEN)
    assert CalibrationFile(tmp_path, theirs).read() is not None


def test_a_folder_that_cannot_be_written_is_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "calibration").write_text("a file where the folder would be")
    kept(tmp_path).write(TAKEN)
    assert "cannot be kept" in caplog.text
    caplog.clear()
    CalibrationFile(None, {}).write(TAKEN)
    assert CalibrationFile(None, {}).read() is None
    assert not caplog.text


def test_several_processes_may_keep_it_at_once(tmp_path: Path) -> None:
    def write() -> None:
        for _ in range(20):
            kept(tmp_path).write(TAKEN)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found = kept(tmp_path).read()
        assert found is None or found.measurements == FOUND
    for thread in threads:
        thread.join()
    assert [file.suffix for file in (tmp_path / "calibration").iterdir()] == [".json"]


def test_what_no_longer_holds_is_forgotten_once(tmp_path: Path) -> None:
    place, newer = kept(tmp_path), dataclasses.replace(TAKEN, measured_at=2.0)
    place.write(newer)
    place.forget(TAKEN)
    assert place.read() is not None, "another process has measured since"
    place.forget(newer)
    assert place.read() is None
    place.forget(newer)  # gone already
