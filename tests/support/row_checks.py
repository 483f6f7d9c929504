"""Shared by tests of row kernels: hypothesis strategies for shapes and values, and the comparison of results."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from armature_kernels.linear.activations import (
    Activations,
    QuantisedActivations,
    RowGroups,
    quantise_torch,
    unpack_tiles,
    unquantised,
)
from native_levels import levels

LEVELS = levels()
needs_levels = pytest.mark.skipif(not LEVELS, reason="no native library")
a_level = st.sampled_from(LEVELS or ("none",))
num_rows = st.integers(1, 40)
sizes = st.sampled_from([8, 64, 100, 576, 896, 2048, 3000, 8192])
spreads = st.sampled_from([0.0, 1e-37, 1e-3, 1.0, 30.0, 1e4, 3e37])
bad_values = st.sampled_from([None, torch.nan, torch.inf, -torch.inf])
WHOLE_ROW = RowGroups(0)  # one group
# None asks for bf16.
groups = st.sampled_from([None, WHOLE_ROW, RowGroups(32), RowGroups(32, 4), RowGroups(64), RowGroups(128)])


def rows_of(rows: int, size: int, spread: float = 1.0, bad: float | None = None, seed: int = 0) -> Tensor:
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * spread
    if bad is not None:
        x[rows // 2, size // 3] = bad
    return x


def group_of(group: RowGroups | None, size: int) -> RowGroups | None:
    return RowGroups(-(-size // 32) * 32) if group == WHOLE_ROW else group


def check(found: Activations, meant: Tensor, group: RowGroups | None, atol: float = 1e-10, slack: float = 0.0) -> None:
    """meant: fp32. Codes may be one off, as the values may differ in their last bit, and by `slack` before they are codes."""
    if group is None and unquantised(found).dtype == torch.float32:
        torch.testing.assert_close(unquantised(found), meant, rtol=1e-4, atol=atol, equal_nan=True)
        return
    if group is None:
        # GELU in fp64 loses 2^-53 of 1 + erf, times a gate and an up of some ten thousand.
        torch.testing.assert_close(unquantised(found), meant.bfloat16(), rtol=2**-7, atol=atol, equal_nan=True)
        return
    assert isinstance(found, QuantisedActivations)
    codes, scales = unpack_tiles(found)
    expected_codes, expected_scales = quantise_torch(meant, group)
    torch.testing.assert_close(scales, expected_scales, rtol=2e-5, atol=max(1e-37, slack / 127), equal_nan=True)
    off, step = (codes.int() - expected_codes.int()).abs(), expected_scales[..., None]
    assert ((off <= 1) | (off * step <= step + slack)).all()
    assert torch.equal(sums_of(found), -codes.sum(-1, dtype=torch.int32))
    assert not codes.flatten(1)[:, found.size :].any()


def sums_of(x: QuantisedActivations) -> Tensor:
    """Int32 [rows, groups], out of their tiles, where they lie as scales do."""
    swapped = QuantisedActivations(x.codes, x.sums.view(torch.float32), x.sums, x.rows, x.size, x.group, x.height)
    return unpack_tiles(swapped)[1].view(torch.int32)


def bits(x: Activations) -> list[Tensor]:
    """Everything that a row says, [rows, ...]."""
    if not isinstance(x, QuantisedActivations):
        return [x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)]
    codes, scales = unpack_tiles(x)
    return [codes, scales.view(torch.int32), sums_of(x)]
