"""Norm, gate and gather against their torch references at every level: bf16 and quantised, odd sizes, bad values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from armature_kernels.elementwise import norms
from armature_kernels.elementwise.activations import ACTIVATIONS
from armature_kernels.linear.activations import (
    ROW_DTYPES,
    RowGroups,
    quantise,
    quantise_torch,
    unpack_tiles,
    unquantised,
)
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from hypothesis_examples import examples
from native_levels import at_level
from row_checks import (
    LEVELS,
    WHOLE_ROW,
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
    sums_of,
)

EPS = 1e-5
often = settings(max_examples=examples(60), deadline=None)
dtypes = st.sampled_from(ROW_DTYPES)


@needs_levels
@often
@given(
    level=a_level,
    rows=num_rows,
    size=sizes,
    groups=st.sampled_from(
        [WHOLE_ROW, *(RowGroups(32, shared) for shared in (1, 2, 4, 8)), *map(RowGroups, (64, 96, 128, 1536))]
    ),
    spread=spreads,
    bad=bad_values,
)
def test_quantising_equals_its_reference_to_the_bit(
    level: str, rows: int, size: int, groups: RowGroups, spread: float, bad: float | None
) -> None:
    x, group = rows_of(rows, size, spread, bad).bfloat16(), group_of(groups, size) or groups
    with at_level(level):
        assume(has_kernel(OpCode.QUANTISE))
        found = quantise(x, group)
        codes, scales = unpack_tiles(found)
        assert torch.equal(sums_of(found), -codes.sum(-1, dtype=torch.int32))
    expected_codes, expected_scales = quantise_torch(x, group)
    assert torch.equal(codes, expected_codes)
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)


@needs_levels
@often
@given(level=a_level, rows=num_rows, size=sizes, group=groups, spread=spreads, bad=bad_values, dtype=dtypes)
def test_the_norm_equals_its_reference(
    level: str, rows: int, size: int, group: RowGroups | None, spread: float, bad: float | None, dtype: torch.dtype
) -> None:
    hidden, weight, group = rows_of(rows, size, spread, bad), rows_of(1, size, seed=1)[0], group_of(group, size)
    wide = torch.zeros(rows, size + 8)
    wide[:, :size] = hidden
    with at_level(level):
        assume(has_kernel(OpCode.NORM))
        check(
            norms.rms_norm(wide[:, :size], weight, EPS, dtype, group),
            norms.rms_norm_torch(hidden, weight, EPS, torch.float32),
            group,
        )
    torch.testing.assert_close(wide[:, :size], hidden, rtol=0, atol=0, equal_nan=True)


@needs_levels
@often
@given(level=a_level, rows=num_rows, size=sizes, spread=spreads, bad=bad_values, dtype=dtypes)
def test_a_norm_that_is_added_equals_its_reference(
    level: str, rows: int, size: int, spread: float, bad: float | None, dtype: torch.dtype
) -> None:
    branch, weight = rows_of(rows, size, spread, bad).to(dtype), rows_of(1, size, seed=1)[0]
    wide, twin = rows_of(rows, size + 8, seed=2), rows_of(rows, size + 8, seed=2)
    with at_level(level):
        assume(has_kernel(OpCode.NORM))
        norms.add_rms_norm(wide[:, :size], branch, weight, EPS)
    norms.add_rms_norm_torch(twin[:, :size], branch, weight, EPS)
    torch.testing.assert_close(wide, twin, rtol=2e-5, atol=2e-5, equal_nan=True)
    assert torch.equal(wide[:, size:], twin[:, size:])


@needs_levels
@often
@given(
    level=a_level, rows=num_rows, size=sizes, group=groups, spread=spreads, bad=bad_values,
    activation=st.sampled_from([*sorted(ACTIVATIONS), "swiglu_oai"]), dtype=dtypes,
)  # fmt: skip
def test_the_gate_equals_its_reference(
    level: str, rows: int, size: int, group: RowGroups | None, spread: float, bad: float | None, activation: str,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    gate_up, group = rows_of(rows, 2 * size, spread, bad).to(dtype), group_of(group, size)
    with at_level(level):
        assume(has_kernel(OpCode.GATE))
        found = norms.gate(gate_up, activation, group)
        # In fp64, as the GELUs of torch lose small results of negative numbers to cancellation.
        check(found, norms.gate_torch(gate_up.double(), activation).float(), group)


@needs_levels
@often
@given(
    level=a_level, rows=num_rows, size=sizes, group=groups, spread=st.sampled_from([1e-3, 1.0, 30.0]), bad=bad_values,
    deviations=st.sampled_from([-0.5, 0.0, 1.6448536]), dtype=dtypes,
)  # fmt: skip
def test_lowered_gates_equal_their_reference(
    level: str, rows: int, size: int, group: RowGroups | None, spread: float, bad: float | None, deviations: float,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    gate_up, group = rows_of(rows, 2 * size, spread, bad).to(dtype), group_of(group, size)
    with at_level(level):
        assume(has_kernel(OpCode.GATE))
        found = norms.gate(gate_up, "gelu_tanh", group, deviations)
        # A cutoff is rounded like the largest gates, and what remains of a gate may be small: of all of a group, too.
        error = 3e-5 * spread**2
        check(found, norms.gate_torch(gate_up.float(), "gelu_tanh", deviations), group, atol=error, slack=error)


def test_the_reference_lowers_gates_by_the_statistics_of_their_row() -> None:
    gate_up = torch.tensor([[0.0, 2.0, 4.0, 10.0, 1.0, 1.0, 1.0, 3.0]])  # mean 4, deviation sqrt(14)
    found = norms.gate_torch(gate_up, "relu", 1.0)
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.0, 0.0, 3 * (6 - 14**0.5)]]))


@needs_levels
@often
@given(level=a_level, rows=num_rows, size=sizes, group=groups, spread=spreads, bad=bad_values, dtype=dtypes)
def test_a_gate_with_other_factors_equals_its_reference(
    level: str, rows: int, size: int, group: RowGroups | None, spread: float, bad: float | None, dtype: torch.dtype
) -> None:
    gates, up, group = (
        rows_of(rows, size, spread, bad).to(dtype),
        rows_of(rows, size + 9, seed=1),
        group_of(group, size),
    )
    with at_level(level):
        assume(has_kernel(OpCode.GATE))
        found = norms.gate_with(gates, up[:, 5 : 5 + size], "gelu_tanh", group)
        meant = ACTIVATIONS["gelu_tanh"](gates.double()) * up[:, 5 : 5 + size]
        check(found, meant.float(), group)  # it reads the level's tiles


@needs_levels
@settings(max_examples=examples(20), deadline=None)
@given(level=a_level, rows=num_rows, size=sizes, group=groups)
def test_a_row_says_the_same_whatever_else_is_in_the_batch(
    level: str, rows: int, size: int, group: RowGroups | None
) -> None:
    gate_up, hidden, weight = (
        rows_of(rows, 2 * size).bfloat16(),
        rows_of(rows, size, seed=1),
        rows_of(1, size, seed=2)[0],
    )
    group = group_of(group, size)
    with at_level(level):
        assume(has_kernel(OpCode.NORM) and has_kernel(OpCode.GATE))
        together = bits(norms.gate(gate_up, "silu", group)) + bits(
            norms.rms_norm(hidden, weight, EPS, torch.bfloat16, group)
        )
        for row in {0, rows // 2, rows - 1}:
            one = slice(row, row + 1)
            alone = bits(norms.gate(gate_up[one], "silu", group))
            alone += bits(norms.rms_norm(hidden[one], weight, EPS, torch.bfloat16, group))
            assert all(torch.equal(a[0], t[row]) for a, t in zip(alone, together, strict=True))


@needs_levels
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("level", LEVELS)
def test_a_gate_is_exact_for_every_bf16(level: str, activation: str) -> None:
    finite = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    x = torch.cat((finite, -finite))
    expected = ACTIVATIONS[activation](x.double()).float().double()  # squares may be infinite
    with at_level(level):
        if not has_kernel(OpCode.GATE):
            pytest.skip("this level has no such kernel")
        found = unquantised(norms.gate(torch.cat((x, torch.ones_like(x)))[None], activation))[0].double()
    # Half a bf16 and what fp32 lost on the way; below that, e^x ends at -87.
    torch.testing.assert_close(found, expected, rtol=2**-8 * 1.01, atol=1e-12)


@needs_levels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 64, 2048])
@pytest.mark.parametrize("level", LEVELS)
def test_gathered_rows_are_those_asked_for(level: str, size: int, dtype: torch.dtype) -> None:
    x, rows = rows_of(9, size + 6)[:, 2 : 2 + size].to(dtype), torch.tensor([8, 0, 0, 3, 7])
    with at_level(level):
        assert torch.equal(norms.gather(x, rows), x[rows])
        assert torch.equal(norms.gather(x, rows[::2]), x[rows[::2]])
        into = torch.full((9, size + 8), 5.0, dtype=dtype)
        norms.copy_rows(into[:, 4 : 4 + size], x)
        assert torch.equal(into[:, 4 : 4 + size], x) and bool(
            (into[:, :4] == 5).all() and (into[:, 4 + size :] == 5).all()
        )
        assert norms.gather(x, rows[:0]).shape == (0, size)


@needs_levels
@pytest.mark.parametrize("name", LEVELS)
def test_a_level_serves_while_it_is_asked_for(name: str) -> None:
    with at_level(name) as chosen:
        assert chosen.level == name
