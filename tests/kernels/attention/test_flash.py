"""CPU attention, native and torch, against the formula in float32: mixtures of rows, segments, windows, caps, heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from armature_kernels.attention import flash
from armature_kernels.attention.attention import AttentionSequence, KvSegment, token_bytes, view_kv_rows
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.flash import (
    AttentionRow,
    BlockRow,
    Segment,
    attend_in_blocks,
    reference_attention,
    torch_attention,
)
from ragged_batches import Batch, Share, attend, make_batch

# Standard normal inputs, results below 5. In bfloat16 a part's result and its softmax weights are rounded to 8 bits.
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 5e-6}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 6e-3}}


def torchs(batch: Batch, spec: AttentionSpec) -> torch.Tensor:
    return torch_attention(batch.query, batch.segments, spec)


def check(
    shares: list[Share], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, spec: AttentionSpec
) -> None:
    """Both roads where both are there: our kernels (bfloat16), and torch's own."""
    batch = make_batch(shares, heads, kv_heads, head_dim, dtype)
    expected = reference_attention(batch.query, batch.segments, spec)
    for result in (attend(batch, spec, dtype), torchs(batch, spec)):
        assert (result.shape, result.dtype) == (batch.query.shape, dtype)
        torch.testing.assert_close(result.float(), expected, **TOLERANCE[dtype])


RAGGED = [
    Share(0, 40, 1),
    Share(17, 0, 1),
    Share(30, 12, 1),
    Share(0, 0, 9),
    Share(0, 21, 8),
    Share(13, 0, 7),
    Share(5, 6, 11),
    Share(0, 0, 1),
]
SPECS = [
    AttentionSpec(0.125),
    AttentionSpec(0.2, window=8),
    AttentionSpec(0.2, window=16, softcap=3.0),
    AttentionSpec(0.3, softcap=2.0),
    AttentionSpec(0.1, window=1),
    AttentionSpec(0.1, window=1000),
    AttentionSpec(0.2, window=9, sinks=torch.linspace(-4.0, 4.0, 8)),
    AttentionSpec(0.2, slopes=torch.linspace(0.5, -0.1, 8)),
    AttentionSpec(0.2, softcap=2.0, sinks=torch.linspace(4.0, -4.0, 8), slopes=torch.linspace(0.0, 0.3, 8)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=[str(place) for place in range(len(SPECS))])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (6, 2), (3, 1)])
def test_a_ragged_batch(dtype: torch.dtype, spec: AttentionSpec, heads: int, kv_heads: int) -> None:
    vectors = {"sinks": spec.sinks, "slopes": spec.slopes}
    own = {name: None if vector is None else vector[:heads] for name, vector in vectors.items()}
    check(RAGGED, heads, kv_heads, 64, dtype, replace(spec, **own))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 33, 80, 96, 100, 128, 256])
def test_head_sizes(dtype: torch.dtype, head_dim: int) -> None:
    check(RAGGED, 4, 2, head_dim, dtype, AttentionSpec(head_dim**-0.5))
    check(RAGGED, 4, 2, head_dim, dtype, AttentionSpec(head_dim**-0.5, window=10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "spec", [AttentionSpec(0.125), AttentionSpec(0.125, window=600), AttentionSpec(0.125, softcap=20.0)], ids=str
)
def test_lengths_beyond_the_kernels_own_blocks(dtype: torch.dtype, spec: AttentionSpec) -> None:
    """Torch's kernel splits keys by 512 and queries by 256 at the most; ours splits masked queries by 256."""
    check([Share(300, 500, 1), Share(0, 700, 580), Share(600, 0, 70), Share(0, 0, 900)], 2, 1, 16, dtype, spec)


@given(
    shares=st.lists(
        st.builds(Share, st.integers(0, 40), st.integers(0, 40), st.integers(1, 24)), min_size=1, max_size=6
    ),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    head_dim=st.sampled_from([4, 7, 16, 40, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.none() | st.integers(1, 60),
    softcap=st.none() | st.floats(1.0, 50.0),
)
def test_any_mixture(
    shares: list[Share],
    kv_heads: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
) -> None:
    check(shares, kv_heads * group, kv_heads, head_dim, dtype, AttentionSpec(head_dim**-0.5, window, softcap))


def test_the_formula_itself() -> None:
    """One head, two tokens seen, worked by hand: scores 0 and log 3 weigh 1/4 and 3/4."""
    key = torch.tensor([[[0.0]], [[math.log(3.0)]]])
    value = torch.tensor([[[4.0]], [[8.0]]])
    row = AttentionRow(0, 1, 1, (Segment(key, value, 0),))
    query = torch.tensor([[[1.0]]])
    assert reference_attention(query, [row], AttentionSpec(1.0)).item() == pytest.approx(7.0)
    assert reference_attention(query, [row], AttentionSpec(1.0, window=1)).item() == pytest.approx(8.0)
    capped = 2.0 * math.tanh(math.log(3.0) / 2.0)
    weight = math.exp(capped) / (1 + math.exp(capped))
    assert reference_attention(query, [row], AttentionSpec(1.0, softcap=2.0)).item() == pytest.approx(4 + 4 * weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[2], SPECS[8], AttentionSpec(0.2, window=4)], ids=str)
def test_tokens_of_a_block_see_each_other(dtype: torch.dtype, spec: AttentionSpec) -> None:
    kv_heads, group, head_dim, context = 2, 4, 16, 14
    kv = view_kv_rows(torch.zeros(40, token_bytes(kv_heads, head_dim, dtype), dtype=torch.uint8), 2, head_dim, dtype)
    kv.write(torch.arange(40), torch.randn(40, kv_heads, head_dim), torch.randn(40, kv_heads, head_dim))
    query, out = torch.randn(12, kv_heads * group, head_dim).to(dtype), torch.zeros(12, kv_heads * group, head_dim)
    row = BlockRow(2, 7, 7, (5, context), (KvSegment(20, 5, 0), KvSegment(3, 11, 5)))
    attend_in_blocks(query, kv, [row], spec, out)
    key, value = (torch.cat((rows[20:25], rows[3:12])).float() for rows in (kv.keys, kv.values))
    expected = torch.zeros_like(out)
    for place in range(7):
        position = 7 + place
        seen = torch.tensor([max(0, position + 1 - (spec.window or context)) <= one for one in range(context)])
        for head in range(kv_heads * group):
            scores = key[:, head // group] @ query[2 + place, head].float() * spec.scale
            scores = flash.apply_softcap(scores, spec.softcap)
            if spec.slopes is not None:
                scores = scores + spec.slopes[head] * (torch.arange(context) - position)
            scores = scores.masked_fill(~seen, -torch.inf)
            sink = scores[:0] if spec.sinks is None else spec.sinks[head : head + 1]
            expected[2 + place, head] = torch.cat((scores, sink)).softmax(0)[:context] @ value[:, head // group]
    torch.testing.assert_close(out, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("near", [0, 1])
def test_parts_of_very_different_weight_are_merged_stably(dtype: torch.dtype, near: int) -> None:
    """A part whose scores are 8,000 lower adds nothing, whichever it is, and nothing overflows."""
    kv = view_kv_rows(torch.empty(6, token_bytes(1, 16, dtype), dtype=torch.uint8), 1, 16, dtype)
    parts = [
        (torch.full((3, 1, 16), sign * 50.0), torch.full((3, 1, 16), value)) for sign, value in ((1, 1.0), (-1, 9.0))
    ]
    for at, (key, value) in enumerate(parts if near == 0 else parts[::-1]):
        kv.write(torch.arange(3 * at, 3 * at + 3), key, value)
    query = torch.full((1, 1, 16), 5.0, dtype=dtype)
    batch = Batch(query, kv, [AttentionSequence(0, 1, 5, (KvSegment(0, 3, 0), KvSegment(3, 3, 3)))])
    for result in (attend(batch, AttentionSpec(1.0), dtype), torchs(batch, AttentionSpec(1.0))):
        torch.testing.assert_close(result.float(), torch.ones(1, 1, 16))


@pytest.mark.parametrize("attention", [attend, torchs], ids=["backend", "torch"])
def test_a_row_does_not_depend_on_its_neighbours(attention: Callable[[Batch, AttentionSpec], torch.Tensor]) -> None:
    batch, spec = make_batch(RAGGED, 8, 2, 64, torch.bfloat16), AttentionSpec(0.125)
    together = attention(batch, spec)
    for row in batch.rows:
        own = slice(row.first, row.first + row.num_tokens)
        alone = Batch(batch.query[own], batch.kv, [replace(row, first=0)])
        assert torch.equal(attention(alone, spec), together[own])


@pytest.mark.parametrize("attention", [attend, torchs], ids=["backend", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_query_may_be_a_view_of_the_fused_product(
    attention: Callable[[Batch, AttentionSpec], torch.Tensor], dtype: torch.dtype
) -> None:
    batch = make_batch(RAGGED, 4, 2, 16, dtype)
    fused = torch.cat([batch.query.flatten(1), torch.randn(len(batch.query), 64).to(dtype)], 1)
    view = replace(batch, query=fused[:, :64].view(-1, 4, 16))
    assert torch.equal(attention(view, AttentionSpec(0.25)), attention(batch, AttentionSpec(0.25)))


def test_a_cache_in_another_precision_is_read_as_it_is() -> None:
    batch = make_batch(RAGGED, 4, 2, 16, torch.bfloat16)
    wide = replace(batch, query=batch.query.float())
    result = attend(wide, AttentionSpec(0.25), torch.float32)
    assert result.dtype == torch.float32
    expected = reference_attention(wide.query, wide.segments, AttentionSpec(0.25))
    torch.testing.assert_close(result, expected, **TOLERANCE[torch.bfloat16])


def test_keys_and_values_are_not_copied_on_the_quick_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = flash._flash

    def spy(queries: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object, **options: object) -> object:
        seen.extend((key.data_ptr(), value.data_ptr()))
        return original(queries, key, value, *rest, **options)

    monkeypatch.setattr(flash, "_flash", spy)
    batch = make_batch([Share(9, 4, 1), Share(0, 5, 6)], 4, 2, 16, torch.bfloat16)
    torchs(batch, AttentionSpec(0.25))
    memory = {
        tensor.data_ptr()
        for row in batch.segments
        for segment in row.segments
        for tensor in (segment.key, segment.value)
    }
    inside = {
        tensor[5:].data_ptr() for segment in batch.segments[1].segments for tensor in (segment.key, segment.value)
    }
    assert set(seen) == memory | inside
