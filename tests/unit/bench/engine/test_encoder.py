"""The bench of an encoder's engine on a tiny one: what it counts, what it asks for, what it keeps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from app.hardware.facts import Core, Cpu, Facts
from app.hardware.plan.plan import ServingPlan, make_plan
from app.hardware.probe.probe import probe
from app.settings import Settings
from app.weights.checkpoint import Checkpoint, open_checkpoint
from app.weights.forms import RECIPES
from armature_bench.console import BenchOutcome, MeasurementFailed
from armature_bench.engine import encoder
from armature_bench.engine.decoder import EngineBenchOptions
from armature_bench.engine.encoder import (
    EncoderDriver,
    EncoderLoad,
    encoder_loads,
    encoder_operations,
    measure_encoder_engine,
)
from armature_kernels import ceilings
from tiny_encoders import Modules, write_encoder

FACTS = Facts("linux", "x86_64", Cpu("", ""), (Core((0,)),), 2**34, 2**34, (0,))


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
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_encoder(tmp_path_factory.mktemp("bench") / "tiny"))


@pytest.fixture(scope="module")
def plan(checkpoint: Checkpoint) -> ServingPlan:
    return make_plan(probe(), None, Settings(threads=1, precision="fp32"), checkpoint.needs(), RECIPES.keys())


def run(checkpoint: Checkpoint, plan: ServingPlan, asked: EngineBenchOptions) -> BenchOutcome:
    return measure_encoder_engine(checkpoint, plan, FACTS, None, asked)


def test_every_batch_is_held_against_both_ceilings(checkpoint: Checkpoint, plan: ServingPlan) -> None:
    outcome = run(checkpoint, plan, EngineBenchOptions(rounds=2))
    figures = {figure.name: figure for figure in outcome.figures}
    assert outcome.complete and not outcome.mistakes
    loads = [name for name in figures if name.startswith("×")]
    assert loads == ["×1 of 16", "×1 of 128", "×4 of 128", "×8 of 128", "×16 of 128", "×32 of 128"], (
        "512 is more than it reads"
    )
    for name in loads:
        figure, count = figures[name], int(name.split()[0].strip("×"))
        assert figure.parts["samples/s"] == pytest.approx(count / figure.value * 1e3)
        assert figure.parts["of bf16"] > 0.0 and 0.0 < figure.parts["in the model"] < 1.0
        assert figure.value <= figure.parts["p95"] <= (figure.p99 or 0.0)
    assert {"memory read", "products, bfloat16", "products, float32"} < figures.keys()


def test_what_is_named_is_measured_so_often(checkpoint: Checkpoint, plan: ServingPlan) -> None:
    outcome = run(checkpoint, plan, EngineBenchOptions(rounds=2, rows=(3,), prompts=(10, 20), steps=5))
    assert {name: len(taken) for name, taken in outcome.details["batch_seconds"].items()} == {
        "×3 of 10": 6,
        "×3 of 20": 6,
    }


def test_what_interrupting_leaves(checkpoint: Checkpoint, plan: ServingPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, asked = EncoderDriver.answer, EngineBenchOptions(rounds=2, rows=(1, 2), prompts=(10,))

    def interrupted(driver: EncoderDriver, load: EncoderLoad) -> tuple[float, float]:
        if driver._number == 3:  # two to warm up, one measured
            raise KeyboardInterrupt
        return answer(driver, load)

    monkeypatch.setattr(EncoderDriver, "answer", interrupted)
    outcome = run(checkpoint, plan, asked)
    assert not outcome.complete and list(outcome.details["batch_seconds"]) == ["×1 of 10"]


def test_lengths_that_the_model_does_not_read_are_refused() -> None:
    assert encoder_loads(EngineBenchOptions(1, prompts=(10, 300)), 200) == [
        EncoderLoad(count, 10) for count in (1, 4, 8, 16, 32)
    ]
    with pytest.raises(MeasurementFailed, match="reads 100 tokens at most"):
        encoder_loads(EngineBenchOptions(1), 100)


def test_a_head_that_wants_one_token_leaves_out_the_last_layers_rest(
    checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> None:
    mean = checkpoint.encoder
    layer = 4 * mean.hidden_size**2 + 2 * mean.hidden_size * mean.intermediate_size
    folder = tmp_path_factory.mktemp("cls") / "tiny"
    first = open_checkpoint(write_encoder(folder, modules=Modules(modes=("cls_token",)))).encoder
    every = open_checkpoint(write_encoder(folder.with_name("mean"), modules=Modules())).encoder
    assert encoder_operations(every, EncoderLoad(4, 10)) == 2 * 40 * every.num_layers * layer
    tail = layer - 3 * first.hidden_size**2
    assert encoder_operations(first, EncoderLoad(4, 10)) == 2 * (40 * (first.num_layers * layer - tail) + 4 * tail)
