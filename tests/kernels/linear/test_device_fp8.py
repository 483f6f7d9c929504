"""Weights in E4M3 on a device whose products multiply E4M3, by torch's product on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from armature_kernels.linear import device_fp8
from armature_kernels.linear.device_fp8 import DeviceFp8Factory, multiplies_fp8, quantize_fp8
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
        codes, scales = (weight * 100).to(torch.float8_e4m3fn), torch.rand(-(-48 // block[0]), 96 // block[1]) / 100
        form.fill_stored(0, codes.view(torch.uint8), scales.repeat_interleave(block[0], 0)[:48])
    held = form.dequantized().float()
    codes, scales = quantize_fp8(x)
    rounded = F.linear(codes.float() * scales, held, bias.float())
    plain = F.linear(x.float(), held, bias.float())
    near, far = (rounded, plain) if by_codes else (plain, rounded)
    found = form.multiply(x).float()
    assert (found - near).norm() < 0.004 * near.norm() < (found - far).norm()
    assert (form.multiply(x[:128]).float() - plain[:128]).norm() < 0.004 * plain.norm()


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
