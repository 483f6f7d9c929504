"""The cost of a quantized encoder: the lowest cosine of its vectors with the exact ones, measured while it is packed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from app.backends.selection import select_host_backend
from app.engine.build import BuildRequest
from app.engine.calibration import streaming
from app.engine.calibration.streaming import WORDS, measure_encoder_cost, sample_texts
from app.engine.encoder.build import build_encoder_engine
from app.hardware.plan.plan import ServingPlan, make_plan
from app.hardware.plan.precision import describe_cost
from app.hardware.probe.probe import probe
from app.models.encoders.encoder import Encoder
from app.settings import load_settings
from app.weights.checkpoint import Checkpoint, open_checkpoint
from app.weights.forms import RECIPES
from app.weights.load import Packing, load_model
from armature_kernels.linear.int_panels import IntPanelLinear
from armature_kernels.linear.linear import ExactLinear, Linear
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.library import native_library
from armature_kernels.native.operations import has_kernel
from tiny_encoders import write_encoder

pytestmark = pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")


def plan_of(checkpoint: Checkpoint, precision: str, cache: Path | None = None) -> ServingPlan:
    settings = load_settings(precision=precision, threads="1", cache_dir="" if cache is None else str(cache))[0]
    return make_plan(probe(), None, settings, checkpoint.needs(), RECIPES.keys())


@pytest.mark.parametrize("architecture", ["BertModel", "Gemma3TextModel"])  # LayerNorm; RMSNorm, which is balanced
def test_a_start_that_packs_measures_and_the_next_one_reads(tmp_path: Path, architecture: str) -> None:
    checkpoint = open_checkpoint(write_encoder(tmp_path / "tiny", architecture))
    plan, costs = plan_of(checkpoint, "int8", tmp_path / "cache"), list[float]()
    for _ in range(2):
        build_encoder_engine(BuildRequest(checkpoint, plan, report_cost=costs.append))
    assert len(costs) == 2 and costs[0] == costs[1]
    assert 1e-6 < costs[0] < 0.05


def groups_of(model: Encoder) -> set[int]:
    """The inputs that share a scale, of all products."""
    forms = [linear.form for linear in model.modules() if isinstance(linear, Linear)]
    return {form.group for form in forms if isinstance(form, IntPanelLinear)}


@pytest.mark.skipif(native_library().wide_rows > 0, reason="rows are multiplied in bf16")
@pytest.mark.parametrize(
    ("measured", "groups"),
    [((0.001,), {32, 64}), ((0.01, 0.001), {32}), ((None, 0.01, 0.01), {32})],
    ids=["rows", "groups before the last products", "groups"],
)
def test_rows_have_one_scale_if_the_vectors_stay_close_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: tuple[float | None, ...], groups: set[int]
) -> None:
    found = iter(measured)
    monkeypatch.setattr(streaming, "measure_encoder_cost", lambda *_: next(found))
    checkpoint, costs = open_checkpoint(write_encoder(tmp_path / "tiny")), list[float]()
    plan = plan_of(checkpoint, "int8", tmp_path / "cache")
    for _ in range(2):  # packed, and read from the pack
        model = build_encoder_engine(BuildRequest(checkpoint, plan, report_cost=costs.append)).model
        assert isinstance(model, Encoder)
        assert groups_of(model) == groups
    assert costs == [measured[-1]] * 2 and next(found, None) is None


def measure(
    checkpoint: Checkpoint,
    plan: ServingPlan,
    costs: dict[str, float | None],
    model: Encoder,
    exact: Callable[[Linear], ExactLinear],
) -> float | None:
    forms = [linear.form for linear in model.modules() if isinstance(linear, Linear)]
    cost = costs[plan.weights.precision] = measure_encoder_cost(checkpoint, plan, model, exact)
    assert forms == [linear.form for linear in model.modules() if isinstance(linear, Linear)], "they are put back"
    return cost


def test_four_bits_cost_more_than_eight_and_exact_weights_are_not_measured(tmp_path: Path) -> None:
    checkpoint, costs = open_checkpoint(write_encoder(tmp_path / "tiny")), dict[str, float | None]()
    for precision in ("int4", "int8", "fp32"):
        plan = plan_of(checkpoint, precision)
        backend = select_host_backend(plan)
        costs[precision] = None
        load_model(
            checkpoint, plan, backend, packing=Packing(measure_encoder=partial(measure, checkpoint, plan, costs))
        )
    assert costs["fp32"] is None
    assert costs["int4"] is not None and costs["int8"] is not None and costs["int4"] > 2 * costs["int8"]


def test_without_a_tokenizer_or_with_vectors_that_are_no_numbers_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(write_encoder(tmp_path / "tiny"))
    plan = plan_of(checkpoint, "int8")
    backend = select_host_backend(plan)
    model = load_model(checkpoint, plan, backend)
    assert isinstance(model, Encoder)

    def stored(linear: Linear) -> ExactLinear:
        return ExactLinear([torch.zeros(linear.out_features, linear.in_features)], None)

    with monkeypatch.context() as patch:
        patch.setattr(streaming, "_vectors", lambda model, texts: torch.full((2, 8), torch.nan))
        assert measure_encoder_cost(checkpoint, plan, model, stored) is None
    (checkpoint.directory / "tokenizer.json").unlink()
    assert measure_encoder_cost(checkpoint, plan, model, stored) is None


def test_the_texts_are_short_and_long() -> None:
    assert [len(text.split()) for text in sample_texts()] == list(WORDS)
    assert len(set(sample_texts())) == len(WORDS)


def test_the_cost_is_said_by_kind() -> None:
    assert describe_cost("encoder", 0.001) == "vectors have cosines of at least 0.9990 with the exact ones"
    assert describe_cost("decoder", 0.004) == "it raises perplexity by 0.4%"
