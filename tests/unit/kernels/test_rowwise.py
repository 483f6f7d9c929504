"""Norm, gate and gather against their torch twins at every level this processor has: bf16 and quantised, odd sizes, bad values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.kernels import rowwise
from app.kernels.activations import Activations, Quantised, plain, quantise, quantise_torch, unpacked
from app.kernels.operations import Code, has
from native_levels import at_level, levels

EPS = 1e-5
LEVELS = levels()
needs_levels = pytest.mark.skipif(not LEVELS, reason="no native library")
a_level = st.sampled_from(LEVELS or ("none",))
num_rows = st.integers(1, 40)
sizes = st.sampled_from([8, 64, 100, 576, 896, 2048, 3000, 8192])
spreads = st.sampled_from([0.0, 1e-37, 1e-3, 1.0, 30.0, 1e4, 3e37])
bad_values = st.sampled_from([None, torch.nan, torch.inf, -torch.inf])
# None asks for bf16, 0 for one group of the whole row.
groups = st.sampled_from([None, 0, 32, 64, 128])
often = settings(max_examples=60, deadline=None)


def rows_of(rows: int, size: int, spread: float = 1.0, bad: float | None = None, seed: int = 0) -> Tensor:
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * spread
    if bad is not None:
        x[rows // 2, size // 3] = bad
    return x


def group_of(group: int | None, size: int) -> int | None:
    return -(-size // 32) * 32 if group == 0 else group


def check(found: Activations, meant: Tensor, group: int | None) -> None:
    """meant: fp32. Codes may be one off, as the values may differ in their last bit."""
    if group is None:
        # GELU in fp64 loses 2^-53 of 1 + erf, times a gate and an up of some ten thousand.
        torch.testing.assert_close(plain(found), meant.bfloat16(), rtol=2**-7, atol=1e-10, equal_nan=True)
        return
    assert isinstance(found, Quantised)
    codes, scales = unpacked(found)
    expected_codes, expected_scales = quantise_torch(meant, group)
    torch.testing.assert_close(scales, expected_scales, rtol=2e-5, atol=1e-37, equal_nan=True)
    assert (codes.int() - expected_codes.int()).abs().max() <= 1
    assert torch.equal(sums_of(found), -codes.sum(-1, dtype=torch.int32))
    assert not codes.flatten(1)[:, found.size :].any()


def sums_of(x: Quantised) -> Tensor:
    """Int32 [rows, groups], out of their tiles, where they lie as scales do."""
    swapped = Quantised(x.codes, x.sums.view(torch.float32), x.sums, x.rows, x.size, x.group, x.height)
    return unpacked(swapped)[1].view(torch.int32)


def bits(x: Activations) -> list[Tensor]:
    """Everything that a row says, [rows, ...]."""
    if not isinstance(x, Quantised):
        return [x.view(torch.int16)]
    codes, scales = unpacked(x)
    return [codes, scales.view(torch.int32), sums_of(x)]


@needs_levels
@often
@given(
    level=a_level, rows=num_rows, size=sizes, group=st.sampled_from([0, 32, 64, 96, 128, 1536]), spread=spreads, bad=bad_values
)
def test_quantising_is_its_twin_to_the_bit(
    level: str, rows: int, size: int, group: int, spread: float, bad: float | None
) -> None:
    x, group = rows_of(rows, size, spread, bad).bfloat16(), group_of(group, size) or 0
    with at_level(level):
        assume(has(Code.QUANTISE))
        found = quantise(x, group)
        codes, scales = unpacked(found)
        assert torch.equal(sums_of(found), -codes.sum(-1, dtype=torch.int32))
    expected_codes, expected_scales = quantise_torch(x, group)
    assert torch.equal(codes, expected_codes)
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)


@needs_levels
@often
@given(level=a_level, rows=num_rows, size=sizes, group=groups, spread=spreads, bad=bad_values)
def test_the_norm_is_its_twin(level: str, rows: int, size: int, group: int | None, spread: float, bad: float | None) -> None:
    hidden, weight, group = rows_of(rows, size, spread, bad), rows_of(1, size, seed=1)[0], group_of(group, size)
    wide = torch.zeros(rows, size + 8)
    wide[:, :size] = hidden
    with at_level(level):
        assume(has(Code.NORM))
        check(
            rowwise.rms_norm(wide[:, :size], weight, EPS, torch.bfloat16, group),
            rowwise.rms_norm_torch(hidden, weight, EPS, torch.float32),
            group,
        )
    torch.testing.assert_close(wide[:, :size], hidden, rtol=0, atol=0, equal_nan=True)


@needs_levels
@often
@given(level=a_level, rows=num_rows, size=sizes, spread=spreads, bad=bad_values)
def test_a_norm_that_is_added_is_its_twin(level: str, rows: int, size: int, spread: float, bad: float | None) -> None:
    branch, weight = rows_of(rows, size, spread, bad).bfloat16(), rows_of(1, size, seed=1)[0]
    wide, twin = rows_of(rows, size + 8, seed=2), rows_of(rows, size + 8, seed=2)
    with at_level(level):
        assume(has(Code.NORM))
        rowwise.add_rms_norm(wide[:, :size], branch, weight, EPS)
    rowwise.add_rms_norm_torch(twin[:, :size], branch, weight, EPS)
    torch.testing.assert_close(wide, twin, rtol=2e-5, atol=2e-5, equal_nan=True)
    assert torch.equal(wide[:, size:], twin[:, size:])


@needs_levels
@often
@given(
    level=a_level, rows=num_rows, size=sizes, group=groups, spread=spreads, bad=bad_values,
    activation=st.sampled_from(sorted(rowwise.ACTIVATIONS)),
)  # fmt: skip
def test_the_gate_is_its_twin(
    level: str, rows: int, size: int, group: int | None, spread: float, bad: float | None, activation: str
) -> None:
    gate_up, group = rows_of(rows, 2 * size, spread, bad).bfloat16(), group_of(group, size)
    with at_level(level):
        assume(has(Code.GATE))
        found = rowwise.gate(gate_up, activation, group)
        # In fp64, as the GELUs of torch lose small results of negative numbers to cancellation.
        check(found, rowwise.gate_torch(gate_up.double(), activation).float(), group)


@needs_levels
@settings(max_examples=20, deadline=None)
@given(level=a_level, rows=num_rows, size=sizes, group=groups)
def test_a_row_says_the_same_whatever_else_is_in_the_batch(level: str, rows: int, size: int, group: int | None) -> None:
    gate_up, hidden, weight = rows_of(rows, 2 * size).bfloat16(), rows_of(rows, size, seed=1), rows_of(1, size, seed=2)[0]
    group = group_of(group, size)
    with at_level(level):
        assume(has(Code.NORM) and has(Code.GATE))
        together = bits(rowwise.gate(gate_up, "silu", group)) + bits(rowwise.rms_norm(hidden, weight, EPS, torch.bfloat16, group))
        for row in {0, rows // 2, rows - 1}:
            one = slice(row, row + 1)
            alone = bits(rowwise.gate(gate_up[one], "silu", group))
            alone += bits(rowwise.rms_norm(hidden[one], weight, EPS, torch.bfloat16, group))
            assert all(torch.equal(a[0], t[row]) for a, t in zip(alone, together, strict=True))


@needs_levels
@pytest.mark.parametrize("activation", sorted(rowwise.ACTIVATIONS))
@pytest.mark.parametrize("level", LEVELS)
def test_a_gate_is_exact_for_every_bf16(level: str, activation: str) -> None:
    finite = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    x = torch.cat((finite, -finite))
    expected = rowwise.ACTIVATIONS[activation](x.double())
    with at_level(level):
        if not has(Code.GATE):
            pytest.skip("this level has no such kernel")
        found = plain(rowwise.gate(torch.cat((x, torch.ones_like(x)))[None], activation))[0].double()
    # Half a bf16 and what fp32 lost on the way; below that, e^x ends at -87.
    torch.testing.assert_close(found, expected, rtol=2**-8 * 1.01, atol=1e-12)


@needs_levels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 64, 2048])
@pytest.mark.parametrize("level", LEVELS)
def test_gathered_rows_are_those_asked_for(level: str, size: int, dtype: torch.dtype) -> None:
    x, rows = rows_of(9, size + 6)[:, 2 : 2 + size].to(dtype), torch.tensor([8, 0, 0, 3, 7])
    with at_level(level):
        assert torch.equal(rowwise.gather(x, rows), x[rows])
        assert torch.equal(rowwise.gather(x, rows[::2]), x[rows[::2]])
        assert rowwise.gather(x, rows[:0]).shape == (0, size)


@needs_levels
@pytest.mark.parametrize("name", LEVELS)
def test_a_level_serves_while_it_is_asked_for(name: str) -> None:
    with at_level(name) as chosen:
        assert chosen.level == name
