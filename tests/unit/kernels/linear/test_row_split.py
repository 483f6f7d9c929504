"""A weight whose rows have several precisions: every part of the product is that of its own form."""

from __future__ import annotations

import pytest
import torch

from armature_kernels.linear.activations import RowGroups, quantise
from armature_kernels.linear.int_panels import IntPanelFactory
from armature_kernels.linear.row_split import RowSplitFactory
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel

pytestmark = pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")

FOUR, EIGHT = IntPanelFactory(4, 32, double_quantized=True), IntPanelFactory(8, 32)
SIZES = (40, 24, 33)
INPUTS = 96


def weight_and_bias() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(sum(SIZES), INPUTS, generator=generator), torch.randn(sum(SIZES), generator=generator)


@pytest.mark.parametrize("rows", [1, 5, 17])
@pytest.mark.parametrize("with_bias", [False, True])
def test_each_range_is_multiplied_by_its_own_form(rows: int, with_bias: bool) -> None:
    weight, bias = weight_and_bias()
    given = bias if with_bias else None
    packing = RowSplitFactory(tuple(zip(SIZES, (FOUR, EIGHT, FOUR), strict=True)))
    assert packing.supports(sum(SIZES), INPUTS, torch.bfloat16)
    form, x = packing.pack(weight, given), torch.randn(rows, INPUTS).bfloat16()
    parts = zip(weight.split(SIZES), bias.split(SIZES), (FOUR, EIGHT, FOUR), strict=True)
    alone = [own.pack(part, one if with_bias else None) for part, one, own in parts]
    # Four bits alone would have scales of 128 inputs.
    assert form.activation_group(rows) == alone[1].row_groups == RowGroups(32) != alone[0].row_groups
    codes = quantise(x, RowGroups(32))
    expected = torch.cat([one.multiply(codes) for one in alone], 1)
    assert torch.equal(form.multiply(x), expected)
    relu = torch.cat([one.multiply_activated(codes, "relu") for one in alone], 1)
    assert torch.equal(form.multiply_activated(x, "relu"), relu)
    hidden = torch.ones(rows, sum(SIZES))
    form.add_to(hidden, x)
    torch.testing.assert_close(hidden - 1, expected.float(), atol=0.05, rtol=2**-7)
    assert torch.equal(form.dequantised(), torch.cat([one.dequantised() for one in alone]))
    assert form.nbytes == sum(one.nbytes for one in alone)


def test_rows_may_come_in_pieces_across_ranges_and_parts_are_kept() -> None:
    weight, _ = weight_and_bias()
    packing = RowSplitFactory(tuple(zip(SIZES, (FOUR, EIGHT, FOUR), strict=True)))
    whole, pieces = packing.pack(weight, None), packing.empty_form(sum(SIZES), INPUTS, None)
    for first in range(0, sum(SIZES), 32):  # 32 rows reach from one range into the next
        pieces.fill(first, weight[first : first + 32])
    assert all(torch.equal(*pair) for pair in zip(whole.parts, pieces.parts, strict=True))
    assert tuple(part.nbytes for part in whole.parts) == packing.part_bytes(sum(SIZES), INPUTS)
    again = packing.from_parts(sum(SIZES), INPUTS, None, whole.parts)
    x = torch.randn(3, INPUTS).bfloat16()
    assert torch.equal(again.multiply(x), whole.multiply(x))


def test_forms_with_different_groups_are_refused() -> None:
    packing = RowSplitFactory(((40, FOUR), (24, IntPanelFactory(8, 64))))
    assert not packing.supports(64, INPUTS, torch.bfloat16)
