"""Pooling of texts and vectors of unit length: the native kernel at every level against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from armature_kernels.elementwise import pooling
from armature_kernels.elementwise.pooling import MEAN, SUM, pool_rows, pool_rows_torch, unit_rows
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel, observe_operations
from native_levels import at_level, levels

NATIVE = pytest.mark.skipif(not has_kernel(OpCode.POOL), reason="the native library is not built")
LENGTHS = (1, 12, 3, 200)


def texts(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = torch.randn(sum(LENGTHS), size + 5, generator=torch.Generator().manual_seed(size))[:, :size]
    return hidden, torch.tensor((0, *LENGTHS)).cumsum(0)


@NATIVE
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("size", [1, 31, 64, 384, 1030])
@pytest.mark.parametrize("mode", [SUM, MEAN])
def test_texts_are_pooled_like_by_torch(level: str, size: int, mode: int) -> None:
    hidden, starts = texts(size)
    skipped = torch.tensor([1, 5, 0, 199])  # nothing of the first text counts
    with at_level(level):
        for skip in (None, skipped):
            torch.testing.assert_close(
                pool_rows(hidden, starts, mode, skip), pool_rows_torch(hidden, starts, mode, skip)
            )


@NATIVE
@pytest.mark.parametrize("level", levels())
def test_rows_get_unit_length_like_by_torch(level: str) -> None:
    rows = torch.cat((texts(384)[0], torch.zeros(1, 384), torch.full((1, 384), 1e-20)))
    with at_level(level):
        for cut in (384, 100):
            torch.testing.assert_close(unit_rows(rows[:, :cut]), F.normalize(rows[:, :cut], dim=-1))


@NATIVE
def test_a_text_has_the_same_vector_alone_and_among_others() -> None:
    hidden, starts = texts(384)
    among = pool_rows(hidden, starts, MEAN)
    for text, length in enumerate(LENGTHS):
        rows = hidden[starts[text] : starts[text + 1]]
        assert torch.equal(pool_rows(rows, torch.tensor([0, length]), MEAN)[0], among[text])


@NATIVE
def test_it_is_native_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, starts = texts(64)
    seen: list[OpCode] = []
    with observe_operations(lambda code, arguments: seen.append(code)):
        unit_rows(pool_rows(hidden, starts, MEAN))
        assert seen == [OpCode.POOL, OpCode.POOL]
        expected = pool_rows(hidden, starts, MEAN)
        monkeypatch.setattr(pooling, "has_kernel", lambda code: False)
        torch.testing.assert_close(pool_rows(hidden, starts, MEAN), expected)
        torch.testing.assert_close(unit_rows(expected), F.normalize(expected, dim=-1))
    assert len(seen) == 3
