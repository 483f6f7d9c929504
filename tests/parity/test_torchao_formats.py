"""Each native format against torchao's: codes and scales by the same rule are equal, and products within rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from armature_kernels.linear.linear import QUANTISED_FORMS
from armature_kernels.linear.quantization import Int4Weight, quantise_int4, quantise_int8
from armature_kernels.linear.torchao_config import INT4_REFERENCE, INT8_REFERENCE
from armature_kernels.linear.torchao_linear import TorchaoFactory, torchao_module
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel

OUTPUTS, INPUTS, ROWS = 96, 256, 9


def _weight(seed: int = 0) -> Tensor:
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(seed)) / 16


def _torchao_tensor(weight: Tensor, group: int, bits: int, scales: Tensor) -> Tensor:
    """Torchao's codes for scales [out, groups] that are given, rounded to nearest."""
    quantization = torchao_module("torchao.quantization")
    tensor: Tensor = quantization.IntxUnpackedToInt8Tensor.from_hp(
        weight, (1, group), getattr(torch, f"int{bits}"), custom_scale=scales, intx_choose_qparams_algorithm=None,
        custom_zero_point=torch.zeros_like(scales, dtype=torch.int8),
    )  # fmt: skip
    return tensor


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_codes_are_those_of_torchao_for_the_same_scales(group: int) -> None:
    weight = _weight()
    ours = quantise_int4(weight, group, zero_points=False)
    theirs = _torchao_tensor(weight, group, 4, ours.scales.float())
    assert torch.equal(ours.codes.to(torch.int8) - 8, theirs.qdata)  # type: ignore[attr-defined]
    assert torch.equal(ours.dequantise(), theirs.dequantize())


@pytest.mark.parametrize("group", [32, INPUTS])
def test_int8_codes_and_scales_are_those_of_torchao(group: int) -> None:
    """A group's scale is its largest magnitude over 127: torchao's rule without clipping, for positive extremes."""
    weight = _weight()
    groups = weight.view(-1, group)
    extremes = groups.abs().argmax(1, keepdim=True)
    groups.scatter_(1, extremes, groups.gather(1, extremes).abs())
    ours = quantise_int8(groups)
    quantization = torchao_module("torchao.quantization")
    theirs = quantization.IntxUnpackedToInt8Tensor.from_hp(
        weight, (1, group), torch.int8, mapping_type=quantization.MappingType.SYMMETRIC_NO_CLIPPING_ERR
    )
    torch.testing.assert_close(ours.scales.float().view(OUTPUTS, -1), theirs.scale, rtol=2**-8, atol=0)  # ours are BF16
    same = _torchao_tensor(weight, group, 8, ours.scales.float().view(OUTPUTS, -1))
    assert torch.equal(ours.codes.view(OUTPUTS, INPUTS), same.qdata)  # type: ignore[attr-defined]
    assert (ours.codes.view(OUTPUTS, INPUTS).int() - theirs.qdata.int()).abs().max() <= 1


@pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="the native library has no kernels here")
@pytest.mark.parametrize(
    ("native", "torchao", "apart"),
    [
        ("int8", INT8_REFERENCE, 0.015),
        ("int8", "torchao:Int8DynamicActivationInt8WeightConfig", 0.015),
        ("int8/32", "torchao:Int8DynamicActivationIntxWeightConfig(weight_granularity=PerGroup(32))", 0.015),
        ("int8/128", "torchao:Int8WeightOnlyConfig(granularity=PerGroup(128))", 0.015),
        ("int4/32", "torchao:IntxWeightOnlyConfig(weight_dtype=int4, granularity=PerGroup(32))", 0.12),
        ("int4/64 with zero points", "torchao:PrototypeInt4WeightOnlyConfig(group_size=64)", 0.12),
        ("int4/32", INT4_REFERENCE, 0.12),
    ],
)
@torch.inference_mode()
def test_a_native_product_is_that_of_torchao(native: str, torchao: str, apart: float) -> None:
    """Both are as near to the exact product as their codes allow, and as near to each other."""
    weight, x = _weight(1), torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(2)).bfloat16()
    bias = torch.linspace(-1, 1, OUTPUTS)
    exact = x.float() @ weight.T + bias
    ours = QUANTISED_FORMS[native].pack(weight, bias).multiply(x).float()
    theirs = TorchaoFactory(torchao).pack(weight, bias).multiply(x).float()
    assert (ours - exact).norm() <= apart * exact.norm()
    assert (theirs - exact).norm() <= apart * exact.norm()
    assert 0 < (ours - theirs).norm() <= 1.4 * apart * exact.norm()


@pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="the native library has no kernels here")
@torch.inference_mode()
def test_a_native_product_of_the_same_codes_differs_by_the_rounding_of_activations_alone() -> None:
    weight, x = _weight(3), torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(4)).bfloat16()
    rounded: Int4Weight = quantise_int4(weight, 32, zero_points=False)
    theirs = x.float() @ _torchao_tensor(weight, 32, 4, rounded.scales.float()).dequantize().T
    ours = QUANTISED_FORMS["int4/32"].pack(weight, None).multiply(x).float()
    assert (ours - theirs).norm() <= 0.01 * theirs.norm()
