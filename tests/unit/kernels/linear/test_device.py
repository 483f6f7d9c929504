"""A weight in a device's memory: filled by rows from a buffer that is reused, multiplied, and shared with the embedding tied to it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from armature_kernels.linear.device import DeviceFactory

CPU = torch.device("cpu")


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_rows_that_came_in_any_parts_are_the_weight(dtype: torch.dtype, with_bias: bool) -> None:
    weight, x = torch.randn(10, 12), torch.randn(3, 12).to(dtype)
    bias = torch.randn(10).to(dtype) if with_bias else None
    packing = DeviceFactory(CPU, dtype)
    form, buffer = packing.empty_form(10, 12, bias), torch.empty(4, 12)
    for first in (4, 0, 8):
        count = min(4, 10 - first)
        buffer[:count] = weight[first : first + count]
        form.fill(first, buffer[:count])
        buffer.fill_(torch.nan)
    assert torch.equal(form.weight, weight.to(dtype)) and torch.equal(packing.pack(weight, None).weight, form.weight)
    expected = F.linear(x, weight.to(dtype), bias)
    hidden = torch.ones(3, 10)
    form.add_to(hidden, x)
    assert torch.equal(form.multiply(x), expected) and torch.equal(hidden, 1 + expected.float())
    assert form.activation_group(3) is None and form.nbytes == packing.weight_bytes(10, 12) + (
        10 * dtype.itemsize if with_bias else 0
    )


@torch.inference_mode()
def test_a_form_gives_its_rows_back_and_keeps_a_bias_of_its_own() -> None:
    weight, bias = torch.randn(6, 4), torch.zeros(6)
    form = DeviceFactory(CPU, torch.float32).pack(weight, bias)
    ids, factor = torch.tensor([5, 0, 5]), torch.rand(4)
    assert torch.equal(form.rows(ids, 2.0), 2 * weight[ids])
    torch.testing.assert_close(form.rows(ids, factor), weight[ids] * factor)
    bias += 1
    assert form.bias is not None and not form.bias.any()


def test_it_suits_activations_of_its_own_dtype_alone() -> None:
    packing = DeviceFactory(CPU, torch.bfloat16)
    assert packing.supports(3, 5, torch.bfloat16) and not packing.supports(3, 5, torch.float32)
