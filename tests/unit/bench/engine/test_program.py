"""The bench of an exported program's engine on a tiny one: what it counts, what it asks for, what it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.cli.parser import parse_arguments
from app.engine.build import BuildRequest
from app.engine.program import RunnableProgram, build_program_engine
from app.hardware.facts import Core, Cpu, Facts
from app.hardware.plan.plan import ServingPlan, make_plan
from app.hardware.probe.probe import probe
from app.server.prepare import prepare
from app.settings import Settings
from app.weights.forms import RECIPES
from app.weights.program import ProgramCheckpoint, open_program
from armature_bench.console import BenchOutcome, MeasurementFailed
from armature_bench.engine import encoder, program
from armature_bench.engine.decoder import EngineBenchOptions
from armature_bench.engine.program import ProgramDriver, ProgramLoad, measure_program_engine
from armature_bench.run import IN_PROCESS_BENCHES
from armature_kernels import ceilings
from exported_programs import write_program

FACTS = Facts("linux", "x86_64", Cpu("", ""), (Core((0,)),), 2**34, 2**34, (0,))
OPERATIONS = 2 * (24 * 64 + 64 * 32 + 32)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ceilings, "BUFFER_BYTES", 2**20)
    monkeypatch.setattr(ceilings, "PRODUCT_SHAPES", ((64, 64, 64),))
    monkeypatch.setattr(ceilings, "SPIN_DOWN_SECONDS", 0.0)
    monkeypatch.setattr(encoder, "ROUND_SECONDS", 0.0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> ProgramCheckpoint:
    return open_program(write_program(tmp_path_factory.mktemp("bench"), "recommender"))


def plan_of(checkpoint: ProgramCheckpoint, precision: str = "fp32") -> ServingPlan:
    settings = Settings(threads=1, precision=precision, max_batch_tokens=16)
    return make_plan(probe(), None, settings, checkpoint.needs(), RECIPES.keys())


def run(checkpoint: ProgramCheckpoint, asked: EngineBenchOptions, precision: str = "fp32") -> BenchOutcome:
    return measure_program_engine(checkpoint, plan_of(checkpoint, precision), FACTS, None, asked)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_every_batch_is_held_against_the_ceilings(checkpoint: ProgramCheckpoint, precision: str) -> None:
    outcome = run(checkpoint, EngineBenchOptions(rounds=2), precision)
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
    one, two = (program._minimum_work(checkpoint, plan_of(checkpoint), FACTS, ProgramLoad(rows)) for rows in (16, 17))
    assert one.num_bytes == OPERATIONS // 2 * 4 and two.num_bytes == 2 * one.num_bytes
    assert (one.operations, two.operations) == (16 * OPERATIONS, 17 * OPERATIONS)


def test_what_is_named_is_measured_so_often(checkpoint: ProgramCheckpoint) -> None:
    outcome = run(checkpoint, EngineBenchOptions(rounds=2, rows=(3,), steps=5))
    assert {name: len(taken) for name, taken in outcome.details["batch_seconds"].items()} == {"×3": 6}
    with pytest.raises(MeasurementFailed, match="--prompts does not apply to an exported program"):
        run(checkpoint, EngineBenchOptions(rounds=1, prompts=(10,)))


def test_rows_that_the_program_cannot_compute_are_no_measurement(
    checkpoint: ProgramCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = ProgramDriver(
        build_program_engine(BuildRequest(checkpoint, plan_of(checkpoint))).engine, checkpoint.signature
    )
    assert driver.answer(ProgramLoad(2))[0] > 0.0

    def broken(served: RunnableProgram, inputs: object) -> dict[str, torch.Tensor]:
        raise RuntimeError("no memory")

    monkeypatch.setattr(RunnableProgram, "run", broken)
    with pytest.raises(MeasurementFailed, match="×2 was not answered"):
        driver.answer(ProgramLoad(2))


def test_what_interrupting_leaves(checkpoint: ProgramCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = ProgramDriver.answer

    def interrupted(driver: ProgramDriver, load: ProgramLoad) -> tuple[float, float]:
        if driver._number == 3:  # two to warm up, one measured
            raise KeyboardInterrupt
        return answer(driver, load)

    monkeypatch.setattr(ProgramDriver, "answer", interrupted)
    outcome = run(checkpoint, EngineBenchOptions(rounds=2, rows=(1, 2)))
    assert not outcome.complete and list(outcome.details["batch_seconds"]) == ["×1"]


def test_the_command_takes_a_program(checkpoint: ProgramCheckpoint) -> None:
    settings = Settings(model=Path(checkpoint.path), threads=1, precision="fp32", calibrate="off")
    outcome = IN_PROCESS_BENCHES["engine"](
        prepare(settings), parse_arguments(["bench", "engine", "--rows=2", "--rounds=1", "--steps=1"])
    )
    assert outcome.subject == "recommender, fp32, 1 threads" and outcome.complete
