"""The references of paged attention and of packed texts against the formula and each text alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.backends.cpu import AttentionRow, Segment, reference_attention
from armature_kernels.attention import paged
from armature_kernels.attention.attention import KvRows, QkvHeads
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.paged import (
    PAGE_TOKENS,
    PackedTexts,
    PagedStep,
    attend_texts_padded_torch,
    paged_attention_torch,
)
from armature_kernels.attention.texts import attend_texts_torch
from hypothesis_examples import examples

MANY = 300  # tokens of context: pages enough to lie in any order


@dataclass(frozen=True)
class Ragged:
    """A step over pages that lie anywhere, all else in the cache being NaN; and the same as the formula takes it."""

    query: Tensor
    kv: KvRows
    step: PagedStep
    rows: list[AttentionRow]


def ragged(
    decodes: list[int], prompts: list[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype, spare: int
) -> Ragged:
    """`decodes`: lengths of context, 0 where one only fills a bucket; `prompts`: tokens before, tokens of this step; `spare` more rows."""
    num_heads, kv_heads, head_dim = heads
    lengths = [*decodes, *(past + new for past, new in prompts)]
    counts = [*[1] * len(decodes), *(new for _, new in prompts)]
    starts = list(accumulate(counts, initial=0))
    generator = torch.Generator().manual_seed(sum(lengths))
    width = max(-(-max(lengths) // PAGE_TOKENS), 1)
    tables = (torch.randperm(len(lengths) * width, generator=generator) + 1).view(len(lengths), width)
    memory = torch.full(((tables.numel() + 1) * PAGE_TOKENS, 2, kv_heads, head_dim), torch.nan, dtype=dtype)
    slots = torch.randperm(len(lengths), generator=generator)
    rows = []
    for sequence, length in enumerate(lengths):
        at = torch.arange(length)
        own = tables[slots[sequence]][at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS
        memory[own] = torch.randn((length, 2, kv_heads, head_dim), generator=generator).to(dtype)
        if length:
            segment = Segment(memory[own, 0], memory[own, 1], 0)
            rows.append(AttentionRow(starts[sequence], counts[sequence], length - counts[sequence], (segment,)))
    ints = [torch.tensor(values, dtype=torch.int32) for values in (slots.tolist(), starts, lengths)]
    bounds = (len(decodes), max((new for _, new in prompts), default=1), max(1, *lengths))
    query = torch.randn((starts[-1] + spare, num_heads, head_dim), generator=generator).to(dtype)
    step = PagedStep(tables.to(torch.int32), *ints, *bounds)
    return Ragged(query, KvRows(memory[:, 0], memory[:, 1], memory[0].nbytes), step, rows)


lengths_of_context = st.sampled_from([0, 1, 2, 63, 64, 65, 130, MANY])
a_prompt = st.tuples(st.sampled_from([0, 1, 63, 64, 100]), st.sampled_from([1, 2, 17, 64, 90]))
a_spec = st.builds(
    AttentionSpec,
    scale=st.just(0.3),
    window=st.sampled_from([None, 1, 5, 64, 100]),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.sampled_from([None, torch.linspace(-3.0, 3.0, 6)]),
    slopes=st.sampled_from([None, torch.linspace(0.4, -0.1, 6)]),
)


@settings(max_examples=examples(25))
@given(
    decodes=st.lists(lengths_of_context, max_size=4), prompts=st.lists(a_prompt, max_size=3), spec=a_spec,
    heads=st.sampled_from([(2, 2, 8), (4, 1, 16), (6, 2, 10)]), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    spare=st.sampled_from([0, 3]), scores=st.sampled_from([2**24, 3000, 1]),
)  # fmt: skip
def test_pages_are_attended_as_the_formula_says(
    decodes: list[int], prompts: list[tuple[int, int]], spec: AttentionSpec, heads: tuple[int, int, int], dtype: torch.dtype, spare: int,
    scores: int,
) -> None:  # fmt: skip
    """Whatever else lies in pages is NaN, and no part is larger than allowed."""
    if not decodes and not prompts:
        return
    batch = ragged(decodes, prompts, heads, dtype, spare)
    spec = replace(
        spec,
        **{
            name: None if one is None else one[: heads[0]]
            for name, one in (("sinks", spec.sinks), ("slopes", spec.slopes))
        },
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "_MAX_SCORES", scores)
        result = paged_attention_torch(batch.query, batch.kv, batch.step, spec)
    assert result.dtype == dtype
    meant = torch.zeros(batch.query.shape)
    for row in batch.rows:
        own = slice(row.first, row.first + row.num_tokens)
        meant[own] = reference_attention(batch.query, [row], spec)[own]
    torch.testing.assert_close(result.float(), meant, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)


def test_a_model_that_fails_is_reported() -> None:
    batch = ragged([70, 3], [], (2, 1, 8), torch.float32, 0)
    batch.query[0, 1, 3] = torch.nan
    result = paged_attention_torch(batch.query, batch.kv, batch.step, AttentionSpec(0.3))
    assert result.isnan().any(-1).tolist() == [[False, True], [False, False]]


@settings(max_examples=examples(25))
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 31, 64, 90]), min_size=1, max_size=5), bidirectional=st.booleans(),
    window=st.sampled_from([None, 1, 2, 16, 65]), softcap=st.sampled_from([None, 3.0]), most=st.sampled_from([None, 4, 100]),
    vectors=st.booleans(), shape=st.sampled_from([(2, 2, 8), (4, 2, 10)]), scores=st.sampled_from([2**24, 500]),
    spare=st.sampled_from([0, 5]),
)  # fmt: skip
def test_packed_texts_are_each_attended_alone(
    lengths: list[int], bidirectional: bool, window: int | None, softcap: float | None, most: int | None, vectors: bool,
    shape: tuple[int, int, int], scores: int, spare: int,
) -> None:  # fmt: skip
    heads, kv_heads, head_dim = shape
    if sum(lengths) == 0:
        return
    bias = None if most is None else torch.randn((heads, 2 * most + 1), generator=torch.Generator().manual_seed(1))
    sinks, slopes = (torch.linspace(-2.0, 2.0, heads), torch.linspace(0.4, -0.1, heads)) if vectors else (None, None)
    spec = AttentionSpec(
        0.3, window, softcap, bidirectional=bidirectional, distance_bias=bias, slopes=slopes, sinks=sinks
    )
    width = (heads + 2 * kv_heads) * head_dim
    product = torch.randn((sum(lengths) + spare, width), generator=torch.Generator().manual_seed(sum(lengths)))
    given_heads = QkvHeads(product, heads, kv_heads, head_dim)
    starts = list(accumulate(lengths, initial=0))
    texts = PackedTexts(torch.tensor(starts, dtype=torch.int32), max(lengths))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "_MAX_SCORES", scores)
        result = attend_texts_padded_torch(given_heads, texts, spec)
    present = [0, *(last for first, last in pairwise(starts) if first < last)]
    meant = attend_texts_torch(QkvHeads(product[: starts[-1]], heads, kv_heads, head_dim), present, spec)
    torch.testing.assert_close(result[: starts[-1]], meant, rtol=0, atol=1e-5)
    assert not result[starts[-1] :].any()
