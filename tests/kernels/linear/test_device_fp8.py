"""Weights in E4M3 on a device whose products multiply E4M3, by torch's product on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from armature_kernels.linear import device_fp8
from armature_kernels.linear.device_fp8 import DeviceFp8Factory, multiplies_blocks, multiplies_fp8, quantize_fp8
from tiled_codes import TiledCodes, tiled

__all__ = ["tiled"]  # a fixture
CPU = torch.device("cpu")


@pytest.mark.parametrize(("block", "by_codes"), [(None, True), ((16, 96), True), ((48, 96), True), ((16, 32), False)])
@torch.inference_mode()
def test_many_rows_are_quantized_too_where_the_device_multiplies_codes(
    tiled: TiledCodes, monkeypatch: pytest.MonkeyPatch, block: tuple[int, int] | None, by_codes: bool
) -> None:
    """Of weights with a scale for each output: in blocks of inputs they are dequantized. The sums of FP8 are exact in FP32."""
    monkeypatch.setattr(device_fp8, "multiplies_fp8", lambda device, dtype: True)
    weight, x, bias = torch.randn(48, 96), torch.randn(130, 96).bfloat16(), torch.randn(48).bfloat16()
    x[0] = 0
    form = DeviceFp8Factory(CPU, torch.bfloat16, block).empty_form(48, 96, bias)
    if block is None:
        form.fill(0, weight[:32])
        form.fill(32, weight[32:])
    else:
        codes, scales = (
            (weight * 100).to(torch.float8_e4m3fn),
            (torch.rand(-(-48 // block[0]), 96 // block[1]) + 0.5) / 100,
        )
        form.fill_stored(0, codes.view(torch.uint8), scales.repeat_interleave(block[0], 0)[:48])
    held = form.dequantized().float()
    codes, scales = quantize_fp8(x)
    rounded = F.linear(codes.float() * scales, held, bias.float())
    plain = F.linear(x.float(), held, bias.float())
    near, far = (rounded, plain) if by_codes else (plain, rounded)
    found = form.multiply(x).float()
    assert (found - near).norm() < 0.004 * near.norm() < (found - far).norm()
    assert (form.multiply(x[:128]).float() - plain[:128]).norm() < 0.004 * plain.norm()


def product_of_blocks(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """In place of torch's product, with what it demands (pytorch/pytorch, ScaledBlas.cpp)."""
    assert len(codes) % 4 == 0 and scales.stride() == (1, len(codes)), "a group's scales are contiguous"
    assert weight_scales.stride(1) == 1 and weight_scales.stride(0) % 4 == 0, "rows of 16 bytes"
    wide = codes.float() * scales.repeat_interleave(128, 1)
    own = weight.float() * weight_scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return F.linear(wide, own).bfloat16()


@pytest.mark.parametrize(("outputs", "inputs", "by_codes"), [(256, 512, True), (256, 384, False), (192, 512, False)])
@torch.inference_mode()
def test_many_rows_are_quantized_in_groups_for_weights_in_blocks(
    tiled: TiledCodes, monkeypatch: pytest.MonkeyPatch, outputs: int, inputs: int, by_codes: bool
) -> None:
    monkeypatch.setattr(device_fp8, "multiplies_blocks", lambda device, dtype: True)
    monkeypatch.setattr(device_fp8, "product_of_blocks", product_of_blocks)
    x = torch.randn(131, inputs).bfloat16() * torch.logspace(-3, 3, inputs).bfloat16()
    form = DeviceFp8Factory(CPU, torch.bfloat16, (128, 128)).empty_form(
        outputs, inputs, torch.randn(outputs).bfloat16()
    )
    scales = (torch.rand(-(-outputs // 128), inputs // 128) + 0.5).repeat_interleave(128, 0)[:outputs] / 100
    form.fill_stored(0, torch.randn(outputs, inputs).to(torch.float8_e4m3fn).view(torch.uint8), scales)
    assert form.bias is not None and form.multiplies_codes == by_codes
    held, bias = form.dequantized().float(), form.bias.float()
    codes, own = quantize_fp8(x, 128)
    rounded = F.linear(codes.float() * own.repeat_interleave(128, 1), held, bias)
    plain = F.linear(x.float(), held, bias)
    near, far = (rounded, plain) if by_codes else (plain, rounded)
    found = form.multiply(x).float()
    assert found.shape == (131, outputs) and (found - near).norm() < 0.004 * near.norm() < (found - far).norm()


def test_a_quantized_weight_is_near_and_zeros_stay() -> None:
    weight = torch.randn(32, 64) * torch.logspace(-20, 4, 32)[:, None]
    weight[3] = 0
    codes, scales = quantize_fp8(weight)
    again = codes.float() * scales
    assert ((again - weight).norm(dim=1) <= 0.04 * weight.norm(dim=1)).all() and not again[3].any()
    assert codes.float().abs().amax(1)[:3].eq(448).all()


@pytest.mark.parametrize(
    ("capability", "result", "expected"), [((8, 9), 16.0, True), ((8, 6), 16.0, False), ((9, 0), 15.0, False)]
)
def test_products_are_tried_once_on_gpus_that_may_have_them(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], result: float, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "ones", lambda *sizes, device: torch.full(sizes, 1.0))
    monkeypatch.setattr(device_fp8, "scaled_product", lambda codes, *rest: torch.full((len(codes), len(codes)), result))
    multiplies_fp8.cache_clear()
    assert multiplies_fp8(torch.device("cuda", 0), torch.bfloat16) is expected
    assert not multiplies_fp8(torch.device("cuda", 0), torch.float16) and not multiplies_fp8(CPU, torch.bfloat16)
    multiplies_fp8.cache_clear()


@pytest.mark.parametrize(
    ("capability", "factor", "expected"), [((9, 0), 1.0, True), ((10, 0), 1.0, False), ((9, 0), 1.05, False)]
)
def test_products_of_blocks_are_tried_with_another_scale_for_each(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], factor: float, expected: bool
) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for name in ("ones", "arange"):
        plain = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *sizes, device, plain=plain: plain(*sizes))

    def product(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
        changed = weight_scales.clone()
        changed[1, 2] *= factor
        return product_of_blocks(codes, scales, weight, changed)

    monkeypatch.setattr(device_fp8, "product_of_blocks", product)
    multiplies_blocks.cache_clear()
    assert multiplies_blocks(gpu, torch.bfloat16) is expected
    assert not multiplies_blocks(CPU, torch.bfloat16) and not multiplies_blocks(gpu, torch.float16)
    multiplies_blocks.cache_clear()
