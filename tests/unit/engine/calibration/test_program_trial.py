"""Calibration of exported programs: their steps run with synthetic weights, and the plan uses the measured times."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from app.engine.calibration import trials
from app.engine.calibration.measure import CalibrationSubject, measure_machine
from app.engine.calibration.trials import COARSE_TRIAL, FULL_TRIAL, ProgramTrial, TrialStep
from app.engine.program import RunnableProgram, synthetic_inputs
from app.errors import StepFailed
from app.hardware.plan.plan import ServingPlan, make_plan
from app.hardware.probe.probe import probe
from app.settings import Settings
from app.weights.forms import RECIPES
from app.weights.program import Archive, ProgramCheckpoint, open_program, operations_per_row, read_bytes
from exported_programs import PROGRAMS, model_of, write_program

FIXED, ROW = 1e-3, 1e-4  # seconds of a step on the machine of these tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rehearsed")
    for name in ("recommender", "vision", "reader", "guarded"):
        write_program(path, name)
    return path


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def opened(folder: Path, name: str = "recommender") -> ProgramCheckpoint:
    return open_program(folder / f"{name}.pt2")


def plan_of(checkpoint: ProgramCheckpoint, **settings: Any) -> ServingPlan:
    asked = {"threads": 1, "precision": "fp32", **settings}
    return make_plan(probe(), None, Settings(**asked), checkpoint.needs(), RECIPES.keys())


def rehearsal_of(checkpoint: ProgramCheckpoint, **settings: Any) -> ProgramTrial:
    return ProgramTrial(checkpoint, plan_of(checkpoint, **settings))


@pytest.mark.parametrize("large", [trials.LARGE_BYTES, 1], ids=["all is read", "nothing that floats is read"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", ["recommender", "vision", "guarded"])
def test_steps_run(folder: Path, name: str, precision: str, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "LARGE_BYTES", large)
    with torch.inference_mode():
        rehearsal = rehearsal_of(opened(folder, name), precision=precision)
        outputs = rehearsal.step(TrialStep("encode", 3, 1))()
    assert isinstance(outputs, dict) and all(
        len(tensor) == 3 and tensor.isfinite().all() for tensor in outputs.values()
    )


def test_large_weights_are_made_up_and_constants_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    whole = Archive.map
    monkeypatch.setattr(Archive, "map", lambda archive, name: read.append(name) or whole(archive, name))  # type: ignore[func-returns-value]
    checkpoint = opened(folder, "vision")
    largest = max(each.num_elements for each in checkpoint.states.values())
    monkeypatch.setattr(trials, "LARGE_BYTES", 4 * largest)
    read.clear()
    rehearsal_of(checkpoint)
    members = {stored.member: stored for stored in checkpoint.states.values()}
    assert {members[name].num_elements for name in read} == {each.num_elements for each in members.values()} - {largest}


def with_rows(checkpoint: ProgramCheckpoint, low: int, high: int | None) -> ProgramCheckpoint:
    """The same program, exported for other numbers of rows."""
    return dataclasses.replace(checkpoint, sizes=dataclasses.replace(checkpoint.sizes, min_rows=low, max_rows=high))


def test_sizes_of_steps(folder: Path) -> None:
    checkpoint = opened(folder)
    assert rehearsal_of(checkpoint).step_sizes() == [1, 2, 4, 8, 16, 32, 64], "no more than it was exported for"
    wide = with_rows(checkpoint, 1, None)
    assert rehearsal_of(wide).step_sizes()[-1] == 256
    assert rehearsal_of(wide, max_batch_tokens=24).step_sizes() == [1, 2, 4, 8, 16, 24], "no more than was asked for"
    assert rehearsal_of(wide, max_batch_tokens=1000).step_sizes()[-1] == 1000
    narrow = with_rows(checkpoint, 4, 20)
    rehearsal = rehearsal_of(narrow)
    assert [shape.size for shape in rehearsal.trial_steps(FULL_TRIAL)] == [4, 8, 16, 20]
    assert [shape.size for shape in rehearsal.trial_steps(COARSE_TRIAL)] == [4, 8], "one row costs what the fewest do"


def test_a_program_that_cannot_be_run_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(served: RunnableProgram, inputs: Any) -> Any:
        raise IndexError("index out of range in self")

    monkeypatch.setattr(RunnableProgram, "run", broken)
    with pytest.raises(StepFailed, match="cannot be run: index out of range"):
        rehearsal_of(opened(folder)).step(TrialStep("encode", 1, 1))()


def test_what_steps_take_is_known_of_every_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def step(rehearsal: ProgramTrial, shape: TrialStep) -> Any:
        return lambda: now.__setitem__(0, now[0] + FIXED + shape.size * ROW)

    monkeypatch.setattr(ProgramTrial, "step", step)
    checkpoint = opened(folder)
    subject = CalibrationSubject(checkpoint, (plan_of(checkpoint),), (1,), lambda found: ("fp32", 1))
    found = measure_machine(subject, 1.5, lambda stage: None, lambda: now[0])
    (trial,) = found.trials
    assert trial.encode_seconds == pytest.approx({rows: FIXED + rows * ROW for rows in (1, 2, 4, 8, 16, 32, 64)})
    assert (trial.decode_seconds, trial.prefill_seconds, trial.pair_seconds) == ({}, {}, 0.0)
    assert trial.operations_per_token == 2 * (24 * 64 + 64 * 32 + 32)
    plan = make_plan(probe(), found, Settings(threads=1, precision="fp32"), checkpoint.needs(), RECIPES.keys())
    assert plan.memory.batch_target_tokens == 64 and "64" in plan.decisions["capacity_tokens_per_second"].reason
    assert plan.speed.capacity_tokens_per_second["encode"][1] == pytest.approx(1 / (FIXED + ROW))


@pytest.mark.parametrize("name", ["recommender", "vision", "guarded"])
def test_operations_are_counted_as_torch_counts_them(folder: Path, name: str) -> None:
    checkpoint = opened(folder, name)
    inputs = synthetic_inputs(checkpoint.signature, 7)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model_of(name)(*inputs.values())
    assert 7 * operations_per_row(checkpoint, 1) == counter.get_total_flops()


def test_rows_of_a_free_dimension_count_each(folder: Path) -> None:
    checkpoint = opened(folder, "reader")
    assert operations_per_row(checkpoint, 6) == pytest.approx(6 * operations_per_row(checkpoint, 1))
    assert operations_per_row(checkpoint, 1) == 2 * 2 * (32 * 96 + 32 * 32 + 2 * 32 * 64)
    assert checkpoint.needs().rows_vary and not opened(folder).needs().rows_vary


def test_bytes_that_a_step_reads(folder: Path) -> None:
    products = 24 * 64 + 64 * 32 + 32
    assert [read_bytes(opened(folder), precision) for precision in ("fp32", "bf16", "int8")] == [
        4 * products,
        2 * products,
        products,
    ], "of the table a step reads some rows"
    convolved, head = 8 * 27 + 16 * 72, 16 * 5
    vision = opened(folder, "vision")
    assert read_bytes(vision, "bf16") == 2 * (convolved + head) and read_bytes(vision, "int8") == 4 * convolved + head


def test_a_program_is_known_by_what_it_computes(folder: Path, tmp_path: Path) -> None:
    known = {name: opened(folder, name).fingerprint for name in ("recommender", "vision", "reader")}
    assert len(set(known.values())) == 3
    assert opened(folder).fingerprint == known["recommender"] != with_rows(opened(folder), 1, 9).fingerprint
    model = PROGRAMS["recommender"][0]().eval()  # other weights
    _, example, shapes = PROGRAMS["recommender"]
    torch.export.save(torch.export.export(model, example, dynamic_shapes=shapes), tmp_path / "other.pt2")
    assert open_program(tmp_path / "other.pt2").fingerprint == known["recommender"]
