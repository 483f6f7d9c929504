"""The bench of an exported program's engine on a tiny one: what it counts, what it asks for, what it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.arguments import parse
from app.bench import programs, texts
from app.bench.inside import Asked
from app.bench.programs import Driver, Load, measure
from app.bench.stats import MeasurementFailed, Outcome
from app.benches import INSIDE
from app.engine.build_program import build_program
from app.engine.program import Served
from app.hardware.facts import Core, Cpu, Facts
from app.hardware.plan import ServingPlan, make_plan
from app.hardware.probe import probe
from app.kernels import ceilings
from app.preparation import prepare
from app.settings import Settings
from app.weights.program import ProgramCheckpoint, open_program
from app.weights.recipes import RECIPES
from exported_programs import write_program

FACTS = Facts("linux", "x86_64", Cpu("", ""), (Core((0,)),), 2**34, 2**34, (0,))
OPERATIONS = 2 * (24 * 64 + 64 * 32 + 32)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ceilings, "BUFFER_BYTES", 2**20)
    monkeypatch.setattr(ceilings, "SHAPES", ((64, 64, 64),))
    monkeypatch.setattr(ceilings, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(texts, "ROUND_SECONDS", 0.0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> ProgramCheckpoint:
    return open_program(write_program(tmp_path_factory.mktemp("bench"), "recommender"))


def plan_of(checkpoint: ProgramCheckpoint, precision: str = "fp32") -> ServingPlan:
    settings = Settings(threads=1, precision=precision, max_batch_tokens=16)
    return make_plan(probe(), None, settings, checkpoint.needs(), RECIPES.keys())


def run(checkpoint: ProgramCheckpoint, asked: Asked, precision: str = "fp32") -> Outcome:
    return measure(checkpoint, plan_of(checkpoint, precision), FACTS, None, asked)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_every_batch_is_held_against_the_ceilings(checkpoint: ProgramCheckpoint, precision: str) -> None:
    outcome = run(checkpoint, Asked(rounds=2), precision)
    figures = {figure.name: figure for figure in outcome.figures}
    assert outcome.complete and not outcome.mistakes
    loads = [name for name in figures if name.startswith("×")]
    assert loads == ["×1", "×4", "×8", "×16", "×32"]
    for name in loads:
        figure = figures[name]
        assert figure.parts["samples/s"] == pytest.approx(int(name.strip("×")) / figure.value * 1e3)
        assert 0.0 < figure.parts["in the model"] < 1.0 and 0.0 < (figure.ratio or 0.0) < 1.0
        assert figure.value <= figure.parts["p95"] <= (figure.p99 or 0.0)
    assert "0.00723 million operations a row" in "\n".join(outcome.notes)


def test_a_load_beyond_a_step_reads_the_weights_again(checkpoint: ProgramCheckpoint) -> None:
    one, two = (programs._floor(checkpoint, plan_of(checkpoint), FACTS, Load(rows)) for rows in (16, 17))
    assert one.num_bytes == OPERATIONS // 2 * 4 and two.num_bytes == 2 * one.num_bytes
    assert (one.operations, two.operations) == (16 * OPERATIONS, 17 * OPERATIONS)


def test_what_is_named_is_measured_so_often(checkpoint: ProgramCheckpoint) -> None:
    outcome = run(checkpoint, Asked(rounds=2, rows=(3,), steps=5))
    assert {name: len(taken) for name, taken in outcome.details["batch_seconds"].items()} == {"×3": 6}
    with pytest.raises(MeasurementFailed, match="--prompts does not apply to an exported program"):
        run(checkpoint, Asked(rounds=1, prompts=(10,)))


def test_rows_that_the_program_cannot_compute_are_no_measurement(
    checkpoint: ProgramCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(build_program(checkpoint, plan_of(checkpoint), lambda stage: None), checkpoint.signature)
    assert driver.answer(Load(2))[0] > 0.0

    def broken(served: Served, inputs: object) -> dict[str, torch.Tensor]:
        raise RuntimeError("no memory")

    monkeypatch.setattr(Served, "run", broken)
    with pytest.raises(MeasurementFailed, match="×2 was not answered"):
        driver.answer(Load(2))


def test_what_interrupting_leaves(checkpoint: ProgramCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Driver.answer

    def interrupted(driver: Driver, load: Load) -> tuple[float, float]:
        if driver._number == 3:  # two to warm up, one measured
            raise KeyboardInterrupt
        return answer(driver, load)

    monkeypatch.setattr(Driver, "answer", interrupted)
    outcome = run(checkpoint, Asked(rounds=2, rows=(1, 2)))
    assert not outcome.complete and list(outcome.details["batch_seconds"]) == ["×1"]


def test_the_command_takes_a_program(checkpoint: ProgramCheckpoint) -> None:
    settings = Settings(model=Path(checkpoint.path), threads=1, precision="fp32", calibrate="off")
    outcome = INSIDE["engine"](prepare(settings), parse(["bench", "engine", "--rows=2", "--rounds=1", "--steps=1"]))
    assert outcome.subject == "recommender, fp32, 1 threads" and outcome.complete
