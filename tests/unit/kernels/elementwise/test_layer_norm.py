"""LayerNorm and activations against their torch references at every level, alone and fused into a product."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from armature_kernels.elementwise.activations import (
    ACTIVATIONS,
    activate,
    activate_torch,
    convert_rows,
    xielu,
    xielu_torch,
)
from armature_kernels.elementwise.norms import layer_norm, layer_norm_in_place, layer_norm_torch
from armature_kernels.linear.activations import ROW_DTYPES, Activations, RowGroups, quantise, unquantised
from armature_kernels.linear.int_panels import IntPanelFactory
from armature_kernels.linear.linear import FORMS, ActivatingForm, Linear
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from hypothesis_examples import examples
from native_levels import at_level
from row_checks import (
    a_level,
    bad_values,
    bits,
    check,
    group_of,
    groups,
    needs_levels,
    num_rows,
    rows_of,
    sizes,
    spreads,
)

EPS = 1e-12
often = settings(max_examples=examples(60), deadline=None)


def norm_of(size: int, with_bias: bool) -> tuple[Tensor, Tensor | None, float]:
    return rows_of(1, size, seed=1)[0], rows_of(1, size, seed=2)[0] if with_bias else None, EPS


@needs_levels
@often
@given(
    level=a_level, rows=num_rows, size=sizes, group=groups, shift=st.sampled_from([0.0, 3.0, 300.0]), bad=bad_values,
    with_bias=st.booleans(), in_place=st.booleans(), dtype=st.sampled_from(ROW_DTYPES),
)  # fmt: skip
def test_the_norm_equals_its_reference(
    level: str,
    rows: int,
    size: int,
    group: RowGroups | None,
    shift: float,
    bad: float | None,
    with_bias: bool,
    in_place: bool,
    dtype: torch.dtype,
) -> None:
    wide, norm, group = rows_of(rows, size + 8, 1.0, bad) + shift, norm_of(size, with_bias), group_of(group, size)
    before = wide.clone()
    meant = layer_norm_torch(before[:, :size].double(), norm).float()
    with at_level(level):
        assume(has_kernel(OpCode.LAYER_NORM))
        found = layer_norm(wide[:, :size], norm, dtype, group, in_place)
        exact = 1e-3 if shift == 300 else 2e-5  # what fp32 loses to the shift
        torch.testing.assert_close(
            wide[:, :size], meant if in_place else before[:, :size], rtol=exact, atol=exact, equal_nan=True
        )
        alone = before.clone()
        layer_norm_in_place(alone[:, :size], norm)
        torch.testing.assert_close(alone[:, :size], meant, rtol=exact, atol=exact, equal_nan=True)
        check(found, alone[:, :size], group)  # its own fp32: a bias may cancel all but the last bits
    torch.testing.assert_close(wide[:, size:], before[:, size:], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(alone[:, size:], before[:, size:], rtol=0, atol=0, equal_nan=True)


@needs_levels
@often
@given(
    level=a_level, rows=num_rows, size=sizes, group=groups, spread=spreads, bad=bad_values,
    activation=st.sampled_from(sorted(ACTIVATIONS)), dtype=st.sampled_from(ROW_DTYPES),
)  # fmt: skip
def test_an_activation_equals_its_reference(
    level: str, rows: int, size: int, group: RowGroups | None, spread: float, bad: float | None, activation: str,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    wide, group = rows_of(rows, size + 8, spread, bad).to(dtype), group_of(group, size)
    with at_level(level):
        assume(has_kernel(OpCode.ACTIVATE))
        check(
            activate(wide[:, :size], activation, group),
            activate_torch(wide[:, :size].double(), activation).float(),
            group,
        )


@needs_levels
@often
@given(
    level=a_level, rows=num_rows, size=sizes, group=groups, spread=st.sampled_from([0.01, 1.0, 20.0]),
    factors=st.tuples(st.floats(0.1, 2.0), st.floats(0.1, 2.0)), dtype=st.sampled_from(ROW_DTYPES),
)  # fmt: skip
def test_xielu_equals_its_reference(
    level: str, rows: int, size: int, group: RowGroups | None, spread: float, factors: tuple[float, float],
    dtype: torch.dtype,
) -> None:  # fmt: skip
    wide, group = rows_of(rows, size + 8, spread, None).to(dtype), group_of(group, size)
    with at_level(level):
        assume(has_kernel(OpCode.ACTIVATE))
        meant = xielu_torch(wide[:, :size].double(), *factors).float()
        # Below zero it is the difference of two numbers of the size of x.
        check(xielu(wide[:, :size], *factors, group), meant, group, atol=2e-7 * spread)


@needs_levels
@often
@given(level=a_level, rows=num_rows, size=sizes, group=groups, dtype=st.sampled_from(ROW_DTYPES))
def test_rows_are_converted_to_what_a_product_reads(
    level: str, rows: int, size: int, group: RowGroups | None, dtype: torch.dtype
) -> None:
    wide, group = rows_of(rows, size + 8), group_of(group, size)
    with at_level(level):
        assume(has_kernel(OpCode.ACTIVATE))
        check(convert_rows(wide[:, :size], dtype, group), wide[:, :size], group)


@needs_levels
@settings(max_examples=examples(20), deadline=None)
@given(level=a_level, rows=num_rows, size=sizes, group=groups)
def test_a_row_says_the_same_whatever_else_is_in_the_batch(
    level: str, rows: int, size: int, group: RowGroups | None
) -> None:
    hidden, norm, group = rows_of(rows, size), norm_of(size, True), group_of(group, size)
    with at_level(level):
        assume(has_kernel(OpCode.LAYER_NORM))

        def said(own: slice) -> list[Tensor]:
            return bits(layer_norm(hidden[own], norm, torch.bfloat16, group)) + bits(
                activate(hidden[own].bfloat16(), "gelu", group)
            )

        together = said(slice(rows))
        for row in {0, rows // 2, rows - 1}:
            assert all(torch.equal(a[0], t[row]) for a, t in zip(said(slice(row, row + 1)), together, strict=True))


class TakesGroups:
    """A form that reads quantised rows, and does nothing else."""

    def activation_group(self, rows: int) -> RowGroups:
        return RowGroups(64)


def layer(form: object, outputs: int, inputs: int) -> Linear:
    made = Linear(("a",), inputs, outputs)
    made.form = form  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("name", [*FORMS, "int8", "int4/32"])
@torch.inference_mode()
def test_a_product_is_activated_on_its_way_out(name: str, activation: str, dtype: torch.dtype) -> None:
    packing = FORMS[name] if name in FORMS else IntPanelFactory(8, None) if name == "int8" else IntPanelFactory(4, 32)
    if not packing.supports(512, 512, dtype) or (name not in FORMS and dtype == torch.float32):
        pytest.skip("this machine does not have it")
    form = packing.pack(rows_of(515, 160, 0.2).to(dtype), rows_of(1, 515, seed=3)[0].to(dtype))
    x, feeds = rows_of(23, 160, seed=4).to(dtype), layer(FORMS["plain"].pack(torch.ones(1, 515), None), 1, 515)
    meant = activate_torch(form.multiply(x).double(), activation)
    found = unquantised(layer(form, 515, 160).multiply_activated(x, activation, feeds))
    assert found.dtype == dtype and isinstance(form, ActivatingForm) == (name != "plain")
    torch.testing.assert_close(
        found.double(),
        meant,
        **({"atol": 1e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.02, "rtol": 2**-6}),
    )
    if dtype == torch.bfloat16 and has_kernel(OpCode.QUANTISE):
        codes: Activations = layer(form, 515, 160).multiply_activated(x, activation, layer(TakesGroups(), 1, 515))
        if name != "plain":
            assert all(
                torch.equal(a, b) for a, b in zip(bits(codes), bits(quantise(found, RowGroups(64))), strict=True)
            )
