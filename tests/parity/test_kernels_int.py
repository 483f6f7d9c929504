"""Integer products against their references at every level of this processor: odd sizes, extreme codes, NaN, infinity.
A row's result has the same bits alone as among others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from armature_kernels.linear.activations import RowGroups, quantise, quantise_torch, unpack_tiles
from armature_kernels.linear.bf16_product import WideRows
from armature_kernels.linear.int_panels import IntPanelFactory, IntPanelLinear
from armature_kernels.native.library import native_library
from hypothesis_examples import examples
from native_levels import at_level, levels

LEVELS = levels()
pytestmark = pytest.mark.skipif(not LEVELS, reason=native_library().reason)
at_every_level = pytest.mark.parametrize("level", LEVELS)

# Rows of int8, however many there are.
FORMS = st.sampled_from(
    [
        IntPanelFactory(8, None, wide=WideRows.NEVER),
        IntPanelFactory(8, 128, wide=WideRows.NEVER),
        *(IntPanelFactory(4, group, low, wide=WideRows.NEVER) for group in (32, 64, 128) for low in (False, True)),
        IntPanelFactory(4, 32, double_quantized=True, wide=WideRows.NEVER),
    ]
)
# Above 512, one and two rows multiply several panels in turns on some levels.
OUTPUTS = st.one_of(st.integers(1, 100), st.sampled_from([545, 1100]))
INPUTS = st.one_of(st.sampled_from([576, 896, 32, 128]), st.integers(1, 300))
SEEDS = st.integers(0, 2**31)


@dataclass(frozen=True, slots=True)
class Product:
    """What is multiplied: x [rows, inputs] bf16 and a weight [outputs, inputs] in panels."""

    x: Tensor
    form: IntPanelLinear
    groups: RowGroups  # in which x is quantised

    def expected_seconds(self) -> tuple[Tensor, Tensor]:
        """Float64 [rows, outputs], and the sum of all magnitudes in it."""
        codes, scales = quantise_torch(self.x, self.groups)
        rounded = (codes.double() * scales.double()[..., None]).flatten(1)[:, : self.form.inputs]
        weight = self.form.dequantised().double()
        bias = torch.zeros(self.form.outputs) if self.form.bias is None else self.form.bias
        return rounded @ weight.T + bias, rounded.abs() @ weight.abs().T + bias.abs()


@st.composite
def products(draw: st.DrawFn, most_rows: int = 40) -> Product:
    generator = torch.Generator().manual_seed(draw(SEEDS))
    rows, outputs, inputs = draw(st.integers(1, most_rows)), draw(OUTPUTS), draw(INPUTS)
    x = torch.randn(rows, inputs, generator=generator) * draw(st.sampled_from([1.0, 1e-6, 1e6]))
    if draw(st.booleans()):
        x = x * (torch.rand(rows, inputs, generator=generator) < 0.3)  # zeros, and groups of nothing else
    weight = torch.randn(outputs, inputs, generator=generator)
    if draw(st.booleans()):
        weight = weight.sign()
    bias = torch.randn(outputs, generator=generator) if draw(st.booleans()) else None
    form = draw(FORMS).pack(weight, bias)
    shared = draw(st.sampled_from([1, 2, 4, 8])) if form.group == 32 else 1
    return Product(x.bfloat16(), form, RowGroups(form.group, shared))


def multiplied(form: IntPanelLinear, x: Tensor) -> Tensor:
    """fp32 [rows, outputs]: nothing is rounded away. Without the bias, which an output that is added to has not."""
    y = torch.zeros(len(x), form.outputs)
    form.add_to(y, x)
    return y


@at_every_level
@settings(max_examples=examples(25))
@given(x=st.data())
def test_activations_are_rounded_as_the_reference_rounds_them(level: str, x: st.DataObject) -> None:
    with at_level(level):
        product = x.draw(products())
        groups = RowGroups(x.draw(st.sampled_from([32, 64, 128, 256])), 1)
        if groups.size == 32:
            groups = replace(groups, shared=x.draw(st.sampled_from([1, 2, 4, 8])))
        expected, found = quantise_torch(product.x, groups), unpack_tiles(quantise(product.x, groups))
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@at_every_level
@settings(max_examples=examples(40))
@given(data=st.data())
def test_a_product_is_that_of_what_the_codes_mean(level: str, data: st.DataObject) -> None:
    with at_level(level):
        product = data.draw(products())
        expected, size = product.expected_seconds()
        error = (product.form.multiply(quantise(product.x, product.groups)).double() - expected).abs()
        assert (error <= 2e-5 * size + expected.abs() / 256).all(), f"off by {float(error.max()):g}"
        expected, size = replace(product, groups=product.form.row_groups).expected_seconds()
        twin = product.form.multiply_torch(product.x).double()
        assert ((twin - expected).abs() <= 2e-5 * size).all()


@at_every_level
@settings(max_examples=examples(25))
@given(data=st.data())
def test_a_row_has_the_same_bits_alone_and_among_others(level: str, data: st.DataObject) -> None:
    with at_level(level):
        product = data.draw(products(30))
        together = multiplied(product.form, product.x)
        for row in range(len(product.x)):
            assert torch.equal(multiplied(product.form, product.x[row : row + 1])[0], together[row]), f"row {row}"


@at_every_level
@settings(max_examples=examples(20))
@given(data=st.data(), bad=st.sampled_from([torch.nan, torch.inf, -torch.inf]))
def test_what_is_not_a_number_stays_in_its_row(level: str, data: st.DataObject, bad: float) -> None:
    with at_level(level):
        product = data.draw(products(20))
        good = multiplied(product.form, product.x)
        row, column = data.draw(st.integers(0, len(product.x) - 1)), data.draw(st.integers(0, product.form.inputs - 1))
        spoilt = product.x.clone()
        spoilt[row, column] = bad
        found = multiplied(product.form, spoilt)
        assert found[row].isnan().all()
        others = torch.arange(len(spoilt)) != row
        assert torch.equal(found[others], good[others])


def rounded(x: Tensor) -> Tensor:
    """Fp32 rounded to bf16, ties away from zero."""
    return ((x.view(torch.int32) + 0x8000) & ~0xFFFF).view(torch.float32)


@at_every_level
@settings(max_examples=examples(40))
@given(data=st.data(), more=st.integers(0, 300))
def test_many_rows_may_be_multiplied_in_bf16(level: str, data: st.DataObject, more: int) -> None:
    with at_level(level) as native:
        if not native.wide_rows:
            return
        few = data.draw(products())
        x = few.x[torch.arange(native.wide_rows + more) % len(few.x)]
        packing, shape = replace(few.form.packing, wide=WideRows.MANY), (few.form.outputs, few.form.inputs)
        form = IntPanelLinear(packing, *shape, few.form.bias, few.form.panels)
        assert form.activation_group(len(x)) is None
        assert form.activation_group(native.wide_rows - 1) == form.row_groups
        rows, weight = x.double(), rounded(form.dequantised()).double()
        bias = torch.zeros(form.outputs) if form.bias is None else form.bias
        expected, size = rows @ weight.T + bias, rows.abs() @ weight.abs().T + bias.abs()
        # With scales of more than bf16's bits, a group's zero is off by up to 1/512 of its step.
        off = packing.double_quantized * rows.abs().sum(1, keepdim=True) * weight.abs().amax(1) / 256
        found = multiplied(form, x)
        assert ((found.double() - expected).abs() <= off + 1e-5 * size).all()
        assert ((form.multiply(x) - found).abs() <= found.abs() / 200 + 1e-5 * size).all()
        exact = rows @ form.dequantised().double().T + bias
        assert ((form.multiply_torch(x) - exact).abs() <= size / 256).all()
        assert all(torch.equal(found[row], found[row % len(few.x)]) for row in range(len(x)))


def packed(packing: IntPanelFactory, codes: Tensor, scales: Tensor, others: Tensor | None) -> IntPanelLinear:
    """Codes [outputs, groups * group] and scales [outputs, groups], as they are; others: `IntPanelLinear.fill_codes`."""
    form = packing.empty_form(len(codes), codes.shape[1], None)
    form.fill_codes(0, codes, scales, others)
    return form


@dataclass(frozen=True, slots=True)
class Weight:
    """Any codes, with scales and minimums that are integers: all that is made of them is exact in fp32."""

    packing: IntPanelFactory
    codes: Tensor
    scales: Tensor
    others: Tensor | None

    @property
    def values(self) -> Tensor:
        """Float64 [outputs, inputs]."""
        codes, scales = self.codes.double().view(*self.scales.shape, -1), self.scales.double()
        codes = codes - 8 if self.packing.bits == 4 and not self.packing.zero_points else codes
        if self.packing.double_quantized:
            assert self.others is not None
            return (codes * (self.others.double() * scales * scales.abs())[..., None]).flatten(1)
        low = 0 if self.others is None else self.others.double()[..., None]
        return (codes * scales[..., None] + low).flatten(1)


@st.composite
def weights(draw: st.DrawFn) -> Weight:
    generator = torch.Generator().manual_seed(draw(SEEDS))
    packing, outputs, groups = draw(FORMS), draw(st.integers(1, 100)), draw(st.integers(1, 4))
    group = packing.group or 32 * groups
    groups = groups if packing.group else 1
    least, most, kind = (0, 16, torch.uint8) if packing.bits == 4 else (-127, 128, torch.int8)
    codes = torch.randint(least, most, (outputs, groups * group), generator=generator, dtype=torch.int16)
    if draw(st.booleans()):
        codes = torch.where(codes > (least + most) // 2, most - 1, least)  # nothing but extremes
    signs = torch.randint(0, 2, (outputs, groups), generator=generator) * 2.0 - 1
    lows = torch.randint(-15, 16, (outputs, groups), generator=generator).bfloat16() if packing.zero_points else None
    if packing.double_quantized:
        own = 2.0 ** torch.randint(-1, 2, (outputs, 1), generator=generator)
        return Weight(packing, codes.to(kind), (signs * 2).to(torch.int8), own.bfloat16())
    return Weight(packing, codes.to(kind), signs.bfloat16(), lows)


@at_every_level
@settings(max_examples=examples(40))
@given(data=st.data())
def test_what_was_packed_comes_out_again(level: str, data: st.DataObject) -> None:
    with at_level(level):
        weight = data.draw(weights())
        form = packed(weight.packing, weight.codes, weight.scales, weight.others)
        assert torch.equal(form.dequantised().double(), weight.values)


@at_every_level
@settings(max_examples=examples(40))
@given(data=st.data())
def test_the_integer_part_is_exact_to_the_last_bit(level: str, data: st.DataObject) -> None:
    with at_level(level):
        weight = data.draw(weights())
        form = packed(weight.packing, weight.codes, weight.scales, weight.others)
        rows, generator = data.draw(st.integers(1, 40)), torch.Generator().manual_seed(data.draw(SEEDS))
        x = torch.randint(-127, 128, (rows, form.inputs), generator=generator)
        if data.draw(st.booleans()):
            x = torch.where(x > 0, 127, -127)
        x.view(rows, -1, form.group)[..., 0] = 127  # so that each group's scale is 1, and a code is its value
        assert torch.equal(multiplied(form, x.bfloat16()).double(), x.double() @ weight.values.T)
