"""Calibration of tiny encoders: steps run with synthetic weights, and the whole model's times follow from theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from app.backends.selection import select_backend
from app.engine.calibration.measure import CalibrationSubject, measure_machine
from app.engine.calibration.trials import (
    COARSE_TRIAL,
    FULL_TRIAL,
    EncoderTrial,
    TrialScope,
    TrialStep,
    truncated_encoder_config,
)
from app.hardware.plan.plan import ServingPlan, make_plan
from app.hardware.probe.probe import probe
from app.settings import Settings
from app.weights.checkpoint import Checkpoint, open_checkpoint
from app.weights.forms import RECIPES
from app.weights.load import load_model
from armature_kernels.linear.layout import PANEL_OUTPUTS
from armature_kernels.linear.linear import Linear
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from tiny_encoders import write_encoder

FIXED, LAYER, ROW, PAIR = 1e-3, 1e-4, 1e-5, 1e-8  # seconds of a step on the machine of these tests


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Texts of up to 256 tokens: long enough to tell what attending costs."""
    folder = tmp_path_factory.mktemp("encoding") / "tiny"
    return open_checkpoint(write_encoder(folder, num_hidden_layers=8, max_position_embeddings=256))


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def plan_of(checkpoint: Checkpoint, **settings: Any) -> ServingPlan:
    asked = {"threads": 1, "precision": "fp32", "max_batch_tokens": 256, **settings}
    return make_plan(probe(), None, Settings(**asked), checkpoint.needs(), RECIPES.keys())


def rehearsal_of(checkpoint: Checkpoint, **settings: Any) -> EncoderTrial:
    plan = plan_of(checkpoint, **settings)
    return EncoderTrial(checkpoint.encoder, plan, TrialScope(0, 4))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_run_with_weights_that_nobody_read(checkpoint: Checkpoint, precision: str) -> None:
    with torch.inference_mode():
        rehearsal = rehearsal_of(checkpoint, precision=precision)
        for shape in rehearsal.trial_steps(FULL_TRIAL):
            (row, *_) = rehearsal.step(shape)()  # type: ignore[misc]
            assert torch.frombuffer(bytearray(row["embedding"]), dtype=torch.float32).isfinite().all()


@pytest.mark.parametrize(
    "architecture", ["MPNetModel", "ModernBertForSequenceClassification", "Qwen3Model", "NomicBertModel"]
)
def test_every_family_can_be_tried(tmp_path: Path, architecture: str) -> None:
    checkpoint = open_checkpoint(write_encoder(tmp_path / "tiny", architecture))
    with torch.inference_mode():
        rehearsal = rehearsal_of(checkpoint, precision="bf16", max_batch_tokens="auto", max_model_len=32)
        assert rehearsal.step(TrialStep("encode", 40, rehearsal.layer_counts[0]))()


def test_weights_that_a_step_reads_are_counted_as_they_are_loaded(checkpoint: Checkpoint) -> None:
    plan = plan_of(checkpoint)
    model = load_model(checkpoint, plan, select_backend(plan))
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    padding = sum(-layer.out_features % PANEL_OUTPUTS * layer.in_features * 4 for layer in layers)
    held = sum(layer.form.nbytes for layer in layers) - (padding if has_kernel(OpCode.LINEAR_FP32) else 0)
    biases = sum(layer.out_features * 4 for layer in layers if layer.has_bias)
    assert rehearsal_of(checkpoint).read_bytes in (held, held - biases)


def test_few_short_texts_many_and_a_long_one(checkpoint: Checkpoint) -> None:
    rehearsal = rehearsal_of(checkpoint)
    assert rehearsal.step_sizes() == [16, 32, 64, 128, 256], "no more than was asked for"
    full = rehearsal.trial_steps(FULL_TRIAL)
    assert TrialStep("encode", 256, 2, context=256) in full
    assert {shape.size for shape in rehearsal.trial_steps(COARSE_TRIAL)} == {16, 256}
    assert [shape.size for shape in full] == sorted(shape.size for shape in full)
    assert max(rehearsal_of(checkpoint, max_batch_tokens="auto").step_sizes()) == 2048


def test_the_first_layers_of_an_embedder_are_its_decoders(tmp_path: Path) -> None:
    config = open_checkpoint(write_encoder(tmp_path / "tiny", "Qwen3Model")).encoder
    cut = truncated_encoder_config(config, 1)
    assert cut.decoder is not None and cut.num_layers == cut.decoder.num_layers == len(cut.decoder.ropes) == 1


# ---- what is said of the whole model ---------------------------------------------------------------------------------


class Machine:
    """A clock that only steps move, by what they would take on a machine without noise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(EncoderTrial, "step", lambda rehearsal, shape: lambda: self._run(rehearsal, shape))

    def __call__(self) -> float:
        return self.now

    def _run(self, rehearsal: EncoderTrial, shape: TrialStep) -> None:
        more = shape.size * (shape.context - 128) if shape.context else 0
        seconds = FIXED + shape.layers * (LAYER + shape.size * ROW + more * PAIR)
        self.now += seconds * (0.5 if rehearsal.plan.weights.precision == "bf16" else 1.0)


def test_the_whole_models_seconds(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = CalibrationSubject(checkpoint.encoder, (plan_of(checkpoint),), (1,), lambda found: ("fp32", 1))
    found = measure_machine(subject, 0.9, lambda stage: None, Machine(monkeypatch))
    (trial,) = found.trials
    assert (trial.precision, trial.threads, found.fallback) == ("fp32", 1, "")
    assert trial.encode_seconds == pytest.approx(
        {size: FIXED + 8 * (LAYER + size * ROW) for size in (16, 32, 64, 128, 256)}
    )
    assert trial.pair_seconds == pytest.approx(8 * PAIR)
    assert (trial.decode_seconds, trial.prefill_seconds) == ({}, {})
    config = checkpoint.encoder
    layer = 4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size
    assert trial.operations_per_token == 2 * 8 * layer


def test_what_is_not_taken_is_looked_at_coarsely(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = tuple(plan_of(checkpoint, precision=name) for name in ("fp32", "bf16"))
    subject = CalibrationSubject(checkpoint.encoder, ways, (1,), lambda found: ("fp32", 1))
    found = measure_machine(subject, 1.4, lambda stage: None, Machine(monkeypatch))
    by_precision = {trial.precision: trial for trial in found.trials}
    assert by_precision["bf16"].encode_seconds == pytest.approx(
        {16: (FIXED + 8 * (LAYER + 16 * ROW)) / 2, 256: (FIXED + 8 * (LAYER + 256 * ROW)) / 2}
    )
    assert len(by_precision["fp32"].encode_seconds) == 5
