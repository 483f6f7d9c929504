"""A text that runs through the layers while they are packed: statistics by hand, better codes, kept upgrades."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from app.backends.selection import select_host_backend
from app.engine.calibration import streaming
from app.engine.calibration.streaming import (
    CALIBRATION_TEXT,
    InputMeter,
    StreamedCalibration,
    WindowScorer,
    calibration_for,
)
from app.engine.decoder.kv_cache import kv_dtype
from app.errors import SettingsInvalid
from app.hardware.plan.plan import ServingPlan, make_plan
from app.hardware.probe.probe import probe
from app.models.decoders.decoder import Decoder
from app.settings import load_settings
from app.weights.checkpoint import Checkpoint, open_checkpoint
from app.weights.forms import RECIPES
from app.weights.load import Packing, load_model
from app.weights.packs import PackFolder
from armature_kernels.linear.fp32_panels import Fp32PanelLinear
from armature_kernels.linear.linear import ExactLinear, Linear
from armature_kernels.linear.quantization import InputStatistics, compute_gptq_factors
from armature_kernels.linear.smoothing import activation_aware_scales
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from tiny_checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 32}


def plan_of(checkpoint: Checkpoint, precision: str) -> ServingPlan:
    settings = load_settings(precision=precision, int8_copy="off", threads="1", max_model_len="128")[0]
    return make_plan(probe(), None, settings, checkpoint.needs(), RECIPES.keys())


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    lines = [f"the cat number {number} and the hen went there, and then another one" for number in range(40)]
    file.write_text("\n---\n".join(lines), encoding="utf-8")
    return file


def exact_form(linear: Linear, form: Any) -> ExactLinear:
    """The weight that the form was packed from."""
    weight = form.rows(torch.arange(linear.out_features)) if isinstance(form, Fp32PanelLinear) else form.weight
    return ExactLinear([weight], form.bias)


def linears_of(model: Decoder) -> set[Linear]:
    return {module for module in model.modules() if isinstance(module, Linear)}


def run_stages(seen: StreamedCalibration, model: Decoder) -> list[Mapping[Linear, InputStatistics]]:
    """The statistics of each stage, after which its products get the forms that they had."""
    forms = {linear: linear.form for linear in linears_of(model)}
    stages = []
    for stage in seen.stages(model, lambda linear: exact_form(linear, forms[linear])):
        stages.append(stage)
        for linear in stage:
            linear.form = forms[linear]
    return stages


@torch.inference_mode()
def test_products_before_and_after_the_layers_have_statistics_too(tmp_path: Path, text: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "tiny", "Gemma3nForCausalLM"))
    plan = plan_of(checkpoint, "int4")
    model = load_model(checkpoint, plan_of(checkpoint, "fp32"), select_host_backend(plan_of(checkpoint, "fp32")))
    seen = StreamedCalibration(checkpoint, plan, select_host_backend(plan), text)
    stages = run_stages(seen, model)
    assert len(stages) == len(model.layers) + 3 and {linear for stage in stages for linear in stage} == linears_of(
        model
    )
    windows = [torch.tensor(window) for number, window in enumerate(seen._windows) if seen._is_shown(number)]
    x = torch.cat([model.embedding(window) for window in windows])
    torch.testing.assert_close(stages[0][model.entry.inputs].mean_squares, x.square().mean(0), rtol=1e-3, atol=1e-4)
    states = [model.embedded(window, torch.arange(len(window))) for window in windows]
    assert all(statistics.num_rows == sum(map(len, states)) for statistics in stages[-2].values())
    assert max(seen.losses.values(), default=0.0) < 1e-6, "the exact forms lose nothing"


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_a_model_with_several_hidden_states_is_calibrated_and_measured(
    tmp_path: Path, text: Path, precision: str
) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "tiny", "Gemma3nForCausalLM"))
    plan = plan_of(checkpoint, precision)
    backend = select_host_backend(plan)
    packing = Packing(make_calibrator=lambda: calibration_for(checkpoint, plan, backend, text))
    model = load_model(checkpoint, plan, backend, packing=packing)
    exact = load_model(checkpoint, plan_of(checkpoint, "fp32"), select_host_backend(plan_of(checkpoint, "fp32")))
    window = list(range(4, 60))
    with torch.inference_mode():
        found, expected = (
            WindowScorer(one, checkpoint.decoder, kv_dtype(own), select_host_backend(own)).score(window)
            for one, own in ((model, plan), (exact, plan_of(checkpoint, "fp32")))
        )
    assert found[0] == pytest.approx(expected[0], rel=0.05)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM", "Phi3ForCausalLM"])
@torch.inference_mode()
def test_the_statistics_are_those_of_the_inputs(tmp_path: Path, text: Path, architecture: str) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "tiny", architecture))
    plan = plan_of(checkpoint, "int4")
    backend = select_host_backend(plan)
    model = load_model(checkpoint, plan_of(checkpoint, "fp32"), select_host_backend(plan_of(checkpoint, "fp32")))
    seen = StreamedCalibration(checkpoint, plan, backend, text)
    stages = run_stages(seen, model)
    assert len(stages) == len(model.layers) + 1 and {linear for stage in stages for linear in stage} == linears_of(
        model
    )
    first = model.layers[0].attention.qkv
    windows = [window for number, window in enumerate(seen._windows) if seen._is_shown(number)]
    x = torch.cat([model.layers[0].attention_norm(model.embedding(torch.tensor(one))) for one in windows]).float()
    torch.testing.assert_close(stages[0][first].mean_squares, x.square().mean(0), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(stages[0][first].correlations[0], x.T @ x, rtol=1e-3, atol=1e-2)
    assert all(statistics.correlations for statistics in stages[-1].values()), "GPTQ rounds the output layer too"
    assert max(seen.losses.values(), default=0.0) < 1e-6, "the exact forms lose nothing"


@torch.inference_mode()
def test_a_calibrated_model_is_nearer_and_its_upgrades_are_kept(tmp_path: Path, text: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "tiny", **SHAPE))
    exact_plan, plan = plan_of(checkpoint, "fp32"), plan_of(checkpoint, "int4")
    backend = select_host_backend(plan)
    window = StreamedCalibration(checkpoint, plan, backend, text)._windows[3]

    def logits(model: torch.nn.Module, of: ServingPlan) -> torch.Tensor:
        scorer = WindowScorer(model, checkpoint.decoder, kv_dtype(of), select_host_backend(of))
        return torch.cat([part.clone() for _, part in scorer.targets_and_logits(window)])

    expected = logits(load_model(checkpoint, exact_plan, select_host_backend(exact_plan)), exact_plan)
    plain = load_model(checkpoint, plan, backend)
    packs = PackFolder(tmp_path / "cache", lambda done, total: None)
    seen = StreamedCalibration(checkpoint, plan, backend, text)
    seen.losses = {}
    calibrated = load_model(checkpoint, plan, backend, packing=Packing(packs, lambda: seen))
    errors = [float((logits(model, plan) - expected).norm() / expected.norm()) for model in (plain, calibrated)]
    assert errors[1] < 0.9 * errors[0]
    assert seen.losses and max(seen.losses.values()) > 1e-6
    kept = load_model(checkpoint, plan, backend, packing=Packing(packs))
    assert torch.equal(logits(kept, plan), logits(calibrated, plan))
    bits = {linear.sources: linear.form.nbytes for linear in calibrated.modules() if isinstance(linear, Linear)}
    assert bits == {linear.sources: linear.form.nbytes for linear in kept.modules() if isinstance(linear, Linear)}


@torch.inference_mode()
@pytest.mark.parametrize("precision", ("int8", "int4"))
def test_the_cost_is_the_divergence_on_unseen_text(
    tmp_path: Path, text: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_surprise", lambda logits, following: 0.0)  # random weights predict nothing
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "tiny", **SHAPE))
    exact_plan, plan = plan_of(checkpoint, "fp32"), plan_of(checkpoint, precision)
    backend, costs = select_host_backend(plan), list[float]()
    seen = StreamedCalibration(checkpoint, plan, backend, text)
    packs = PackFolder(tmp_path / "cache", lambda done, total: None)
    packed = load_model(checkpoint, plan, backend, packing=Packing(packs, lambda: seen, report_cost=costs.append))
    exact = load_model(checkpoint, exact_plan, select_host_backend(exact_plan))
    nats, count = 0.0, 0
    for number, window in enumerate(seen._windows):
        if not seen._is_shown(number):
            pair = []
            for model, of in ((exact, exact_plan), (packed, plan)):
                scorer = WindowScorer(model, checkpoint.decoder, kv_dtype(of), select_host_backend(of))
                pair.append(torch.cat([part.clone() for _, part in scorer.targets_and_logits([*window, 0])]))
            wanted, found = (logits.log_softmax(-1) for logits in pair)
            nats += float((wanted.exp() * (wanted - found)).sum())
            count += len(window)
    assert count and costs == [pytest.approx(math.expm1(nats / count), rel=0.25, abs=2e-5)]
    load_model(checkpoint, plan, backend, packing=Packing(packs, must_not_run, report_cost=costs.append))
    assert costs[1] == costs[0], "the pack keeps it"


@torch.inference_mode()
def test_random_weights_have_no_cost(tmp_path: Path, text: Path) -> None:
    """They predict the text no better than chance, so its perplexity says nothing."""
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "tiny", **SHAPE))
    plan, costs = plan_of(checkpoint, "int8"), list[float]()
    backend = select_host_backend(plan)
    seen = StreamedCalibration(checkpoint, plan, backend, text)
    load_model(checkpoint, plan, backend, packing=Packing(None, lambda: seen, report_cost=costs.append))
    assert costs == []


def must_not_run() -> None:
    raise AssertionError("the text is not read if the weights are packed already")


def test_wide_inputs_are_correlated_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "MAX_CORRELATED", 64)
    meter = InputMeter.of(ExactLinear([torch.zeros(8, 160)], None), 160, correlate=True)
    x = torch.randn(50, 160)
    meter.observe(x)
    assert [len(part) for part in meter.sums.correlations] == [64, 64, 32]
    torch.testing.assert_close(meter.sums.correlations[1], x[:, 64:128].T @ x[:, 64:128])
    assert compute_gptq_factors(meter.sums.correlations[2]).rounding_order.shape == (32,)


def test_every_token_counts_alike_in_a_loss() -> None:
    """The first token of many models has a residual stream that is hundreds of times larger."""
    expected = torch.ones(4, 8)
    expected[0] *= 500
    error = torch.zeros(4, 8)
    error[1] = 0.2
    assert streaming._relative_error(error, expected) == pytest.approx(0.01)
    error[0] = 50
    assert streaming._relative_error(error, expected) == pytest.approx(0.0125)


@pytest.mark.parametrize("int8_copy", ("off", "on"))
def test_a_loss_is_that_of_four_bits_alone(tmp_path: Path, text: Path, int8_copy: str) -> None:
    """Neither the rounding of inputs nor an int8 copy, which multiplies many rows, is part of it."""
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "tiny", **SHAPE))
    settings = load_settings(precision="int4", int8_copy=int8_copy, threads="1", max_model_len="128")[0]
    plan = make_plan(probe(), None, settings, checkpoint.needs(), RECIPES.keys())
    backend = select_host_backend(plan)
    packed: Any = load_model(checkpoint, plan, backend).layers[0].mlp.gate_up.form
    few = packed.few if int8_copy == "on" else packed
    noise = torch.randn(few.outputs, few.inputs, generator=torch.Generator().manual_seed(1))
    weight = few.dequantized() * (1 + 0.02 * noise)
    exact = ExactLinear([weight], None)
    for rows in (8, 200):
        x = torch.randn(rows, few.inputs, generator=torch.Generator().manual_seed(2)) ** 3
        form = streaming._rounded_form(packed, exact, exact.multiply(x))
        change, expected = form.multiply(x) - x @ weight.T, x @ (few.dequantized() - weight).T
        assert (
            float((change - expected).norm() / expected.norm()) < 0.35
        )  # W r - Q r for inputs r with scales of 128 inputs, which these tails make coarse
        if rows == 8:
            plain = few.multiply(x) - x @ weight.T
            assert float((plain - expected).norm() / expected.norm()) > 0.6, "the rounding of inputs counts"
    hidden = torch.ones(200, few.outputs)
    form.add_to(hidden, x)
    torch.testing.assert_close(hidden, 1 + form.multiply(x))


def test_scales_give_inputs_and_columns_equal_size() -> None:
    inputs, weights = torch.tensor([4.0, 1.0, 0.0, 0.25]), torch.tensor([0.04, 0.01, 1.0, 0.25])
    scales = activation_aware_scales(inputs, weights)
    ratio = (inputs / scales.square()) / (weights * scales.square())
    torch.testing.assert_close(ratio[[0, 1, 3]], ratio[[0, 0, 0]])
    assert scales[2] == 1 and scales[[0, 1, 3]].log().sum().abs() < 1e-5


def test_without_a_tokenizer_nothing_is_calibrated_but_a_given_text_must_be_readable(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "tiny"))
    plan = plan_of(checkpoint, "int8")
    backend = select_host_backend(plan)
    assert calibration_for(checkpoint, plan_of(checkpoint, "fp32"), backend) is None
    with pytest.raises(SettingsInvalid, match="absent"):
        calibration_for(checkpoint, plan, backend, tmp_path / "absent")
    (checkpoint.directory / "tokenizer.json").unlink()
    assert calibration_for(checkpoint, plan, backend) is None
    assert len(CALIBRATION_TEXT.read_text(encoding="utf-8")) > 20_000
