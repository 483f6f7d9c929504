"""Short convolutions over cached rows, against their definition: at every level, for each dtype, flat and over pages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from armature_kernels.attention.attention import AttentionSequence, KvRows, KvSegment
from armature_kernels.attention.convolution import (
    convolve,
    convolve_torch,
    convolved_rows,
    convolved_rows_torch,
    paged_convolve_torch,
)
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from native_levels import at_level, levels
from paged_steps import Shape, made_step
from ragged_batches import Batch, Share, make_batch

LEVELS = levels()
SHARES = [Share(0, 0, 5), Share(0, 7, 1), Share(3, 0, 1), Share(1, 1, 4), Share(2, 0, 2), Share(0, 40, 33)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.int8: 4e-2}


def filters_of(width: int, channels: int) -> Tensor:
    return torch.randn(width, channels, generator=torch.Generator().manual_seed(width))


def defined(query: Tensor, kv: KvRows, rows: list[AttentionSequence], filters: Tensor) -> Tensor:
    """One token after the other, position by position."""
    result, width = torch.empty(query.shape), len(filters)
    for row in rows:
        known = {
            run.position + at: torch.cat(kv.read(run.first + at, 1), 1).flatten().float()
            for run in row.runs
            for at in range(run.num_tokens)
        }
        for number in range(row.num_tokens):
            position, total = row.start + number, torch.zeros(filters.shape[1])
            for back in range(min(width, position + 1)):
                total += known[position - back] * filters[width - 1 - back]
            result[row.first + number] = query[row.first + number].float() * total.view(query.shape[1:])
    return result


def batch_of(dtype: torch.dtype, kv_heads: int = 3, head_dim: int = 24) -> Batch:
    return make_batch(SHARES, 2 * kv_heads, kv_heads, head_dim, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("width", [1, 3, 4])
def test_the_reference_equals_the_definition(dtype: torch.dtype, width: int) -> None:
    batch, filters = batch_of(dtype), filters_of(width, 144)
    found = convolve_torch(batch.query, batch.kv, batch.rows, filters)
    expected = defined(batch.query, batch.kv, batch.rows, filters)
    torch.testing.assert_close(found.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.skipif(not LEVELS, reason="no native library")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("width", "head_dim"), [(3, 24), (1, 64), (4, 8), (3, 256)])
def test_the_kernel_equals_the_definition(level: str, dtype: torch.dtype, width: int, head_dim: int) -> None:
    batch, filters = batch_of(dtype, head_dim=head_dim), filters_of(width, 6 * head_dim)
    with at_level(level):
        assert has_kernel(OpCode.CONVOLVE)
        found = convolve(batch.query, batch.kv, batch.step(), filters)
    expected = defined(batch.query, batch.kv, batch.rows, filters)
    assert found.dtype == batch.query.dtype
    torch.testing.assert_close(found.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.skipif(not LEVELS, reason="no native library")
def test_a_token_has_the_bits_that_it_has_among_others() -> None:
    batch, filters = batch_of(torch.bfloat16), filters_of(3, 144)
    whole = convolve(batch.query, batch.kv, batch.step(), filters)
    for row in batch.rows:
        alone = Batch(batch.query[row.first :][: row.num_tokens], batch.kv, [AttentionSequence(0, *_rest(row))])
        found = convolve(alone.query, alone.kv, alone.step(), filters)
        assert torch.equal(found, whole[row.first :][: row.num_tokens])


def _rest(row: AttentionSequence) -> tuple[int, int, tuple[KvSegment, ...]]:
    return row.num_tokens, row.start, row.runs


@pytest.mark.skipif(not LEVELS, reason="no native library")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 100, 2048])
def test_cached_rows_equal_their_reference(level: str, dtype: torch.dtype, size: int) -> None:
    x = torch.randn(7, 3 * size + 4, generator=torch.Generator().manual_seed(size)).to(dtype)[:, : 3 * size]
    with at_level(level):
        assert has_kernel(OpCode.CONVOLVED_ROWS)
        found = convolved_rows(x)
    assert torch.equal(found, convolved_rows_torch(x))


@pytest.mark.parametrize("spans", [[(1, 1), (1, 2), (1, 70)], [(1, 3), (4, 4), (5, 130)], [(2, 2)]])
def test_pages_have_the_same_result(spans: list[tuple[int, int]]) -> None:
    shape = Shape(heads=4, kv_heads=2, head_dim=8)
    decodes = sum(queries == 1 for queries, _ in spans)
    query, kv, step = made_step(shape, spans, decodes, torch.device("cpu"))
    filters = filters_of(3, 32)
    found = paged_convolve_torch(query, kv, step, filters)
    first = 0
    for number, (queries, length) in enumerate(spans):
        own = step.tables[step.slots[number]].long()
        rows = [int(own[at // 64]) * 64 + at % 64 for at in range(length)]
        flat = KvRows(kv.keys[rows], kv.values[rows], kv.token_bytes)
        run = (KvSegment(0, length, 0),)
        meant = defined(
            query[first : first + queries], flat, [AttentionSequence(0, queries, length - queries, run)], filters
        )
        torch.testing.assert_close(found[first : first + queries], meant, rtol=1e-5, atol=1e-5)
        first += queries


def test_padding_behind_the_sequences_of_pages_is_harmless() -> None:
    shape = Shape(heads=4, kv_heads=2, head_dim=8)
    query, kv, step = made_step(shape, [(1, 5), (1, 9)], 2, torch.device("cpu"))
    filters = filters_of(3, 32)
    padded = torch.cat((query, query[:1]))
    found = paged_convolve_torch(padded, kv, step, filters)
    assert torch.equal(found[:2], paged_convolve_torch(query, kv, step, filters))
