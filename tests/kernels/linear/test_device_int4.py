"""Int4 weights in device memory, by references and by operators with CUDA's code layout: few rows, many rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from armature_kernels.linear import device_int4
from armature_kernels.linear.device_int4 import (
    DequantizeScratch,
    DeviceInt4Factory,
    find_code_order,
    quantize_device_int4,
)
from armature_kernels.linear.layout import device_int4_bytes
from tiled_codes import TiledCodes, tiled

__all__ = ["tiled"]  # a fixture
CPU = torch.device("cpu")
BF16 = DeviceInt4Factory(CPU, torch.bfloat16)


def meaning(weight: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    codes, scales = quantize_device_int4(weight, dtype)
    scale, zero = scales.float().transpose(0, 1).unbind(-1)
    return ((codes.view(*scale.shape, 64).float() - 8) * scale[..., None] + zero[..., None]).flatten(1)


@pytest.mark.cases(test=5)
@pytest.mark.parametrize(("rows", "with_bias"), [(0, False), (1, True), (64, False), (65, True)])
@pytest.mark.parametrize(("outputs", "inputs"), [(8, 64), (24, 192), (40, 256), (16, 1024)])
@torch.inference_mode()
def test_few_and_many_rows_multiply_by_what_the_codes_mean(
    tiled: TiledCodes, outputs: int, inputs: int, rows: int, with_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, wide = (
        torch.randn(outputs, inputs, generator=generator),
        torch.randn(rows, inputs + 8, generator=generator).bfloat16(),
    )
    bias = torch.randn(outputs, generator=generator).bfloat16() if with_bias else None
    form, x = BF16.pack(weight, bias), wide[:, :inputs]  # rows that lie apart
    expected = F.linear(x.float(), meaning(weight).bfloat16().float(), None if bias is None else bias.float())
    product, hidden = form.multiply(x), torch.ones(rows, outputs)
    form.add_to(hidden, x)
    assert product.dtype == torch.bfloat16 and product.shape == (rows, outputs) and form.activation_group(rows) is None
    for result in (product.float(), hidden - 1):
        torch.testing.assert_close(result, expected, atol=0.02 * inputs**0.5, rtol=2**-6)
    assert tiled.multiplied == ([rows, rows] if 0 < rows <= form.max_code_rows else [])
    own = 2 * outputs if with_bias else 0
    assert form.nbytes - own == BF16.weight_bytes(outputs, inputs) == device_int4_bytes(outputs, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@torch.inference_mode()
def test_the_references_are_the_same_product_in_every_dtype(dtype: torch.dtype) -> None:
    weight, x = torch.randn(16, 128), torch.randn(3, 128).to(dtype)
    form = DeviceInt4Factory(CPU, dtype).pack(weight, None)
    expected = F.linear(x.float(), meaning(weight, dtype))
    close = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.2, "rtol": 2**-6}
    torch.testing.assert_close(form.multiply(x).float(), expected, **close)
    torch.testing.assert_close(F.linear(x, form.dequantized()).float(), expected, **close)


@torch.inference_mode()
def test_one_scratch_serves_weights_of_many_sizes_in_turn(tiled: TiledCodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_int4, "_CHUNK_ELEMENTS", 1000)  # so that each is written out in parts
    weights = [torch.randn(outputs, inputs) for outputs, inputs in ((64, 64), (24, 640), (8, 192))]
    forms = [BF16.pack(weight, None) for weight in weights]
    place = forms[0].scratch.view(1, 1).data_ptr()
    for _ in range(2):
        for form, weight in zip(forms, weights, strict=True):
            # The sum of two numbers of BF16 is rounded after the product was: two units in the last place.
            torch.testing.assert_close(form.dequantized().float(), meaning(weight), rtol=2**-7, atol=2**-8)
    assert len({id(form.scratch) for form in forms}) == 1 and forms[1].scratch.view(1, 1).data_ptr() == place


@given(
    st.integers(1, 12),
    st.sampled_from([0.0, 1.0, 100.0, -3.0]),
    st.sampled_from([1e-6, 0.02, 30.0]),
    st.integers(0, 2**31),
)
@torch.inference_mode()
def test_codes_are_the_nearest_and_a_group_about_any_middle_is_held_well(
    outputs: int, middle: float, width: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = middle + width * torch.randn(outputs, 128, generator=generator)
    codes, scales = quantize_device_int4(weight, torch.bfloat16)
    values = meaning(weight)
    scale = scales.float()[..., 0].T.repeat_interleave(64, 1)
    inside = (codes > 0) & (codes < 15)
    assert ((values - weight).abs() <= 0.5001 * scale.abs() + 2**-8 * values.abs()).logical_or(~inside).all()
    error = (values - weight).square().mean().sqrt()
    assert error <= 0.13 * width + 2**-7 * abs(
        middle
    )  # fifteen steps over five deviations, of which a half is the most


@torch.inference_mode()
def test_sixteen_equal_steps_are_held_exactly() -> None:
    weight = 0.25 * (torch.arange(128) * 7 % 16).repeat(8, 1) - torch.tensor([1.0, 2.0]).repeat(4)[:, None]
    codes, _ = quantize_device_int4(weight, torch.bfloat16)
    assert torch.equal(meaning(weight), weight) and torch.equal(codes[0], (torch.arange(128) * 7 % 16).to(torch.uint8))


@torch.inference_mode()
def test_equal_weights_are_held_as_they_are_and_zeros_as_zeros() -> None:
    weight = torch.full((8, 128), 0.40625)
    weight[3] = 0.0
    codes, _ = quantize_device_int4(weight, torch.bfloat16)
    assert torch.equal(meaning(weight), weight) and (codes == 8).all()  # not what a NaN happens to become


def test_the_order_is_learnt_whatever_it_is(tiled: TiledCodes, monkeypatch: pytest.MonkeyPatch) -> None:
    order = find_code_order(192, CPU)
    assert order.dtype == torch.int32 and torch.equal(order.sort().values, torch.arange(8 * 192, dtype=torch.int32))
    assert not torch.equal(order, torch.arange(8 * 192))
    monkeypatch.setattr(
        device_int4, "pack_code_pairs", lambda digits, inner: torch.zeros_like(tiled.pack(digits, inner))
    )
    with pytest.raises(AssertionError, match="packs every code"):
        find_code_order(192, CPU)


def test_the_scratch_keeps_its_place_when_smaller_weights_come() -> None:
    scratch = DequantizeScratch(CPU, torch.bfloat16)
    scratch.reserve(16, 256)
    place = scratch.view(16, 256).data_ptr()
    scratch.reserve(32, 64)
    assert scratch.view(32, 64).data_ptr() == place
    scratch.reserve(32, 256)
    assert scratch.view(32, 256).shape == (32, 256)


@pytest.mark.parametrize(("outputs", "inputs"), [(12, 64), (8, 96), (8, 32)])
def test_sizes_that_torch_cannot_pack_are_not_offered(outputs: int, inputs: int) -> None:
    assert BF16.supports(8, 64, torch.bfloat16) and not BF16.supports(outputs, inputs, torch.bfloat16)


def test_cuda_multiplies_bf16_alone_and_metal_all_three() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert DeviceInt4Factory(torch.device("cuda", 0), dtype).supports(8, 64, dtype) == (dtype == torch.bfloat16)
        assert DeviceInt4Factory(torch.device("mps"), dtype).supports(8, 64, dtype)
    assert not BF16.supports(8, 64, torch.float32)
