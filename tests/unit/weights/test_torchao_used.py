"""torchao is what serves: on a processor and on a device, and nothing else does in its place if it is missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.errors import PlanImpossible
from app.hardware.plan.memory_budget import MemoryDemand
from app.weights.checkpoint import open_checkpoint
from app.weights.form_choice import OUTPUT_SOURCES
from armature_bench.engine.quality import loaded_weight_bytes
from armature_kernels.errors import KernelError
from armature_kernels.linear import int_panels, torchao_linear
from armature_kernels.linear.device import DeviceLinear
from armature_kernels.linear.linear import Linear, PlainLinear
from armature_kernels.linear.torchao_config import EXAMPLE, INT4_REFERENCE, INT8_REFERENCE
from armature_kernels.linear.torchao_linear import TorchaoLinear, torchao_module
from loaded_models import load, load_on
from reference_attention import PlainAttend, context_of
from tiny_checkpoints import write_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny", hidden_size=64, intermediate_size=96, head_dim=16)


@pytest.fixture
def _forgotten() -> Iterator[None]:
    """What earlier tests learned about torchao is forgotten, before and after."""
    caches = (torchao_linear.build_config, torchao_linear._refusal)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def _layers(model: torch.nn.Module) -> list[Linear]:
    found = [module for module in model.modules() if isinstance(module, Linear)]
    return [linear for linear in found if linear.sources not in OUTPUT_SOURCES]


@torch.inference_mode()
def test_every_layer_of_a_format_by_name_is_a_tensor_of_torchao(checkpoint: Path) -> None:
    tensor = torchao_module("torchao.utils").TorchAOBaseTensor
    prompt = list(range(9))
    exact = load(checkpoint)(context_of(prompt, PlainAttend()))
    model = load(checkpoint, EXAMPLE)
    forms = [linear.form for linear in _layers(model)]
    assert len(forms) > 4 and all(isinstance(form, TorchaoLinear) for form in forms)
    assert all(isinstance(form.module.weight, tensor) for form in forms)  # type: ignore[attr-defined]
    served = model(context_of(prompt, PlainAttend())).float()
    assert 1e-3 * exact.norm() < (served - exact).norm() < 0.5 * exact.norm()


@pytest.mark.usefixtures("_forgotten")
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_without_our_kernels_and_without_torchao_nothing_is_quantized(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setattr(int_panels, "has_kernel", lambda code: False)
    assert {type(linear.form) for linear in _layers(load(checkpoint, precision))} == {TorchaoLinear}
    torchao_linear._refusal.cache_clear()
    torchao_linear.build_config.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.setitem(sys.modules, name, None)  # an import of it then fails
    assert {type(linear.form) for linear in _layers(load(checkpoint, precision))} == {PlainLinear}
    with pytest.raises(KernelError, match="torchao"):
        load(checkpoint, INT8_REFERENCE)


def test_a_format_that_suits_no_layer_is_refused(checkpoint: Path) -> None:
    with pytest.raises(PlanImpossible, match="suits no layer of this model"):
        load(checkpoint, "torchao:Int8WeightOnlyConfig(granularity=PerGroup(128))")
    with pytest.raises(KernelError, match=r"Int4WeightOnlyConfig cannot serve on cpu here.*mslk"):
        load(checkpoint, "torchao:Int4WeightOnlyConfig")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
@pytest.mark.parametrize(
    "quantization",
    [EXAMPLE, INT8_REFERENCE, INT4_REFERENCE, "torchao:Int8WeightOnlyConfig(granularity=PerGroup(128))"],
)
def test_the_plan_counts_hardly_more_than_what_is_held(tmp_path: Path, quantization: str, architecture: str) -> None:
    """With 320 inputs, half of the layers have no whole groups of 128."""
    sizes = {"hidden_size": 256, "intermediate_size": 320, "head_dim": 64}
    directory = write_checkpoint(tmp_path / "wide", architecture, dtype=torch.bfloat16, **sizes)
    held = loaded_weight_bytes(load(directory, quantization))
    planned = MemoryDemand(open_checkpoint(directory).needs(), quantization, "bf16").weight_bytes
    assert 0.98 * held <= planned <= 1.1 * held


@torch.inference_mode()
def test_a_device_holds_them_in_its_memory_and_its_dtype(checkpoint: Path) -> None:
    """The processor stands for the device: the same code runs on both."""
    model = load_on(checkpoint, INT8_REFERENCE)
    forms = [linear.form for linear in _layers(model)]
    assert all(isinstance(form, TorchaoLinear) and form.module.weight.dtype == torch.bfloat16 for form in forms)
    assert isinstance(model.output.form, DeviceLinear)
