"""Attention of whole texts against its torch reference at every level: lengths, heads, windows, caps, distances."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from armature_kernels.attention.attention import QkvHeads
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.texts import TextStarts, attend_texts, attend_texts_torch
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from hypothesis_examples import examples
from native_levels import at_level
from row_checks import LEVELS, a_level, needs_levels, rows_of

MOST = 400
DTYPES = [torch.bfloat16, torch.float32]


def heads_of(
    tokens: int, shape: tuple[int, int, int], dtype: torch.dtype, turning: bool = False, gap: int = 0
) -> QkvHeads:
    """Whose product has rows `gap` elements apart."""
    heads, kv_heads, size = shape
    width = (heads + 2 * kv_heads) * size
    product = rows_of(tokens, width + gap, seed=tokens).to(dtype)[:, :width]
    if not turning:
        return QkvHeads(product, heads, kv_heads, size)
    angles = rows_of(tokens, size, seed=7)[:, None].cos(), rows_of(tokens, size, seed=7)[:, None].sin()
    return QkvHeads(product, heads, kv_heads, size, torch.rand(size) + 0.5, torch.rand(size) + 0.5, 1e-5, angles)


def held(lengths: list[int]) -> TextStarts:
    texts = TextStarts(MOST)
    texts.fill(list(accumulate(lengths, initial=0)))
    return texts


def both(heads: QkvHeads, texts: TextStarts, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """What the kernel makes of it, and what its twin makes of the same in FP32."""
    meant = attend_texts_torch(replace(heads, product=heads.product.float()), texts.starts, spec)
    return attend_texts(
        replace(heads, product=heads.product.clone() if heads.angles else heads.product), texts, spec
    ), meant


@needs_levels
@settings(max_examples=examples(60), deadline=None)
@given(
    level=a_level, lengths=st.lists(st.sampled_from([1, 2, 5, 31, 32, 33, 64, 65, 130]), min_size=1, max_size=3),
    shape=st.sampled_from([(2, 2, 64), (3, 1, 32), (4, 2, 80), (1, 1, 256), (1, 1, 512), (2, 2, 18)]), dtype=st.sampled_from(DTYPES),
    bidirectional=st.booleans(), window=st.sampled_from([None, 1, 2, 16, 65]), softcap=st.sampled_from([None, 3.0]),
    most=st.sampled_from([None, 4, 100]), vectors=st.booleans(), turning=st.booleans(), gap=st.sampled_from([0, 6]),
)  # fmt: skip
def test_texts_attend_as_their_reference_says(
    level: str, lengths: list[int], shape: tuple[int, int, int], dtype: torch.dtype, bidirectional: bool, window: int | None,
    softcap: float | None, most: int | None, vectors: bool, turning: bool, gap: int,
) -> None:  # fmt: skip
    heads = heads_of(sum(lengths), shape, dtype, turning, gap)
    bias = None if most is None else rows_of(shape[0], 2 * most + 1, seed=3)
    sinks, slopes = (
        (torch.linspace(-9.0, 3.0, shape[0]), torch.linspace(0.3, -0.02, shape[0])) if vectors else (None, None)
    )
    spec = AttentionSpec(
        shape[2] ** -0.5, window, softcap, bidirectional=bidirectional, distance_bias=bias, slopes=slopes, sinks=sinks
    )
    with at_level(level):
        assume(has_kernel(OpCode.TEXT_ATTENTION))
        found, meant = both(heads, held(lengths), spec)
    near = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(found.float(), meant, atol=near, rtol=near)


@needs_levels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_a_text_says_the_same_in_any_company_and_with_any_threads(level: str, dtype: torch.dtype) -> None:
    spec = AttentionSpec(0.125, bidirectional=True)
    lengths, threads = [40, 200, 1, 7], torch.get_num_threads()
    heads = heads_of(sum(lengths), (2, 1, 64), dtype)
    with at_level(level):
        together = attend_texts(heads, held(lengths), spec)
        try:
            torch.set_num_threads(2)
            assert torch.equal(attend_texts(heads, held(lengths), spec), together)
        finally:
            torch.set_num_threads(threads)
        for first, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
            own = slice(first, first + length)
            alone = attend_texts(replace(heads, product=heads.product[own]), held([length]), spec)
            assert torch.equal(alone, together[own])


@needs_levels
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("level", LEVELS)
def test_a_value_that_is_not_finite_spoils_its_own_text_only(level: str, bad: float) -> None:
    heads, spec, texts = (
        heads_of(90, (2, 2, 32), torch.bfloat16),
        AttentionSpec(0.2, bidirectional=True),
        held([30, 30, 30]),
    )
    with at_level(level):
        good = attend_texts(heads, texts, spec)
        heads.product[40, 64:128] = bad  # a key of each head
        spoiled = attend_texts(heads, texts, spec)
    assert torch.equal(spoiled[:30], good[:30]) and torch.equal(spoiled[60:], good[60:])
    assert spoiled[30:60].isnan().any(1).all()


def test_more_texts_than_there_is_room_for_lie_elsewhere() -> None:
    texts = TextStarts(MOST, max_texts=2)
    texts.fill([0, 1, 2])
    before = texts.address
    assert texts.stays
    texts.fill([0, 1, 2, 3])
    assert not texts.stays and texts.starts == (0, 1, 2, 3)
    texts.fill([0, 4])
    assert texts.stays and texts.address == before
