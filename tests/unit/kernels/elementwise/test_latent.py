"""Heads of latent attention as rows, norms of narrow rows, and rows without gaps: kernels against their references."""

from __future__ import annotations

import pytest
import torch

from armature_kernels.elementwise.latent import latent_heads, latent_heads_torch
from armature_kernels.elementwise.latent_sizes import LatentHeads
from armature_kernels.elementwise.norms import contiguous, rms_norm, rms_norm_torch
from armature_kernels.linear.activations import RowGroups
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from native_levels import at_level
from row_checks import LEVELS, WHOLE_ROW, check, group_of, needs_levels, rows_of

SIZES = [LatentHeads(3, 12, 4, 10, True), LatentHeads(5, 128, 64, 128, True), LatentHeads(2, 6, 2, 8, False)]


def test_the_reference_orders_parts_as_rotary_embeddings_need_them() -> None:
    sizes = LatentHeads(heads=1, plain=2, rotated=4, value=3, interleaved=True)
    queries, others = torch.tensor([[1.0, 2, 10, 11, 12, 13]]), torch.tensor([[3.0, 4, 5, 6, 7]])
    found = latent_heads_torch(queries, others, torch.tensor([[20.0, 21, 22, 23]]), sizes)
    assert found.tolist() == [[10, 12, 11, 13, 1, 2, 20, 22, 21, 23, 3, 4, 5, 6, 7, 0, 0, 0]]


@needs_levels
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{sizes.heads}-{sizes.value}")
def test_heads_equal_their_reference(level: str, dtype: torch.dtype, sizes: LatentHeads) -> None:
    first = rows_of(7, sizes.heads * sizes.size + 5 + sizes.rotated).to(dtype)
    queries, _, rotated = first.tensor_split((sizes.heads * sizes.size, -sizes.rotated), 1)
    others = rows_of(7, sizes.heads * (sizes.plain + sizes.value), seed=1).to(dtype)
    with at_level(level):
        assert has_kernel(OpCode.LATENT)
        found = latent_heads(queries, others, rotated, sizes)
    assert torch.equal(found, latent_heads_torch(queries, others, rotated, sizes))


@needs_levels
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("size", [8, 100, 512, 1536])
@pytest.mark.parametrize("group", [None, WHOLE_ROW, RowGroups(32), RowGroups(32, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_some_columns_equal_their_reference(
    level: str, size: int, group: RowGroups | None, dtype: torch.dtype
) -> None:
    x, weight = rows_of(6, size + 6).to(dtype)[:, 4 : 4 + size], rows_of(1, size, seed=2)[0]
    own = group_of(group, size)
    with at_level(level):
        found = rms_norm(x, weight, 1e-6, torch.bfloat16, own)
        check(found, rms_norm_torch(x, weight, 1e-6, torch.float32), own, atol=1e-6)  # it reads the level's tiles


@needs_levels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [10, 7])
def test_columns_become_rows_without_gaps(dtype: torch.dtype, columns: int) -> None:
    x = rows_of(5, 16).to(dtype)
    found = contiguous(x[:, :columns])
    assert found.is_contiguous() and torch.equal(found, x[:, :columns])
