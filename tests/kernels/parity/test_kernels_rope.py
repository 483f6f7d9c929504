"""Head norms, RoPE and the KV write against their torch reference at every level."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armature_kernels.attention.attention import KvRows, QkvHeads, token_bytes, view_kv_rows
from armature_kernels.elementwise.rope import apply_rope_and_write_kv, apply_rope_to_qkv_torch
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from hypothesis_examples import examples
from native_levels import at_level, levels

LEVELS = levels()
needs_levels = pytest.mark.skipif(not LEVELS, reason="no native library")
a_level = st.sampled_from(LEVELS or ("none",))
CLOSE = {"rtol": 1e-2, "atol": 1e-5}  # one rounding to bfloat16 on either side
CLOSE_FP32 = {"rtol": 1e-5, "atol": 1e-5}
MARK = 77  # in bytes that nobody may write


def rows_of(kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[KvRows, torch.Tensor]:
    memory = torch.full((20, token_bytes(kv_heads, head_dim, dtype)), MARK, dtype=torch.uint8)
    return view_kv_rows(memory, kv_heads, head_dim, dtype), memory


def heads_of(
    tokens: int,
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    dim: int,
    norms: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> QkvHeads:
    generator = torch.Generator().manual_seed(tokens * 7 + head_dim + dim)
    width = (num_heads + 2 * kv_heads) * head_dim
    product = torch.randn(tokens, width + 8, generator=generator).to(dtype)[
        :, :width
    ]  # a view: rows are not beside each other
    weights = 1 + 0.2 * torch.randn(2, head_dim, generator=generator)
    angle = torch.randn(tokens, 1, dim, generator=generator)
    own = (weights[0], weights[1]) if norms else (None, None)
    return QkvHeads(product, num_heads, kv_heads, head_dim, *own, 1e-5, (angle.cos(), angle.sin()) if dim else None)


@needs_levels
@settings(max_examples=examples(120))
@given(
    level=a_level, tokens=st.integers(1, 9), kv_heads=st.integers(1, 4), group=st.integers(1, 5),
    head_dim=st.sampled_from([8, 16, 24, 64, 72, 80, 128, 256, 512]), turned=st.sampled_from([0, 0.5, 1]), norms=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.int8, torch.float32]),
)  # fmt: skip
def test_rope_is_applied_and_kv_written_as_the_reference_does(
    level: str, tokens: int, kv_heads: int, group: int, head_dim: int, turned: float, norms: bool, dtype: torch.dtype
) -> None:
    wide = dtype == torch.float32
    product = dtype if wide else torch.bfloat16
    heads = heads_of(tokens, kv_heads * group, kv_heads, head_dim, int(head_dim * turned), norms, product)
    expected = apply_rope_to_qkv_torch(heads)
    kv, memory = rows_of(kv_heads, head_dim, dtype)
    written = torch.randperm(20)[:tokens]
    with at_level(level):
        assert has_kernel(OpCode.ROPE)
        query = apply_rope_and_write_kv(heads, kv, written)
    torch.testing.assert_close(query, expected[0], **(CLOSE_FP32 if wide else CLOSE))
    for row, token in enumerate(written.tolist()):
        for read, wanted in zip(kv.read(token, 1), (expected[1][row], expected[2][row]), strict=True):
            step = wanted.float().abs().amax(-1, keepdim=True) / 127 if dtype == torch.int8 else torch.zeros(1)
            near = 0.51 * step + (1e-5 if wide else 0.01) * wanted.float().abs() + 1e-5
            assert bool(((read[0].float() - wanted.float()).abs() <= near).all())
    others = [row for row in range(20) if row not in written.tolist()]
    assert bool((memory[others] == MARK).all())


@needs_levels
@settings(max_examples=examples(80))
@given(
    level=a_level, tokens=st.integers(1, 9), kv_heads=st.integers(1, 4), group=st.integers(1, 5),
    head_dim=st.sampled_from([8, 16, 24, 64, 80, 256, 512]), turned=st.sampled_from([0, 0.5, 1]), own=st.booleans(),
    subtracts_mean=st.booleans(), together=st.booleans(), last=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)  # fmt: skip
def test_other_norms_of_heads_equal_their_reference(
    level: str, tokens: int, kv_heads: int, group: int, head_dim: int, turned: float, own: bool, subtracts_mean: bool,
    together: bool, last: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    num_heads, wide = kv_heads * group, dtype == torch.float32
    heads = heads_of(tokens, num_heads, kv_heads, head_dim, int(head_dim * turned), True, dtype)
    together = together and not subtracts_mean  # no model has both
    last = last and not together  # its statistics are those before RoPE, which rotates; the angles here do not
    heads = replace(heads, subtracts_mean=subtracts_mean, together=together, norm_after_rope=last)
    if own:
        generator = torch.Generator().manual_seed(head_dim)
        norms = iter(1 + 0.2 * torch.randn(count * head_dim, generator=generator) for count in (num_heads, kv_heads))
        heads = replace(heads, query_norm=next(norms), key_norm=next(norms))
    elif subtracts_mean:  # with a bias
        norms = iter(torch.randn(2, 2 * head_dim, generator=torch.Generator().manual_seed(head_dim)))
        heads = replace(heads, query_norm=next(norms), key_norm=next(norms), norm_bias=True)
    expected = apply_rope_to_qkv_torch(heads)
    kv, _ = rows_of(kv_heads, head_dim, dtype)
    with at_level(level):
        query = apply_rope_and_write_kv(heads, kv, torch.arange(tokens))
    close = CLOSE_FP32 if wide else CLOSE
    torch.testing.assert_close(query, expected[0], **close)
    torch.testing.assert_close(kv.read(0, tokens)[0], expected[1], **close)
    torch.testing.assert_close(kv.read(0, tokens)[1], expected[2], **close)


@needs_levels
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("head_dim", [8, 24, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float32], ids=str)
def test_values_may_have_a_norm(level: str, head_dim: int, dtype: torch.dtype) -> None:
    product = torch.float32 if dtype == torch.float32 else torch.bfloat16
    heads = replace(heads_of(5, 4, 2, head_dim, head_dim, True, product), value_norm=1 + torch.rand(head_dim))
    query, key, value = apply_rope_to_qkv_torch(heads)
    plain = torch.nn.functional.rms_norm(heads.split()[2].float(), (head_dim,), heads.value_norm, heads.eps)
    torch.testing.assert_close(value.float(), plain, rtol=1e-2, atol=1e-5)
    kv, _ = rows_of(2, head_dim, dtype)
    with at_level(level):
        found = apply_rope_and_write_kv(heads, kv, torch.arange(5))
    torch.testing.assert_close(found, query, **(CLOSE_FP32 if dtype == torch.float32 else CLOSE))
    step = 0.51 / 127 if dtype == torch.int8 else 0.0
    for read, wanted in zip(kv.read(0, 5), (key, value), strict=True):
        near = step * wanted.float().abs().amax(-1, keepdim=True) + 0.01 * wanted.float().abs() + 1e-5
        assert bool(((read.float() - wanted.float()).abs() <= near).all())


@needs_levels
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float32], ids=str)
def test_queries_alone_write_nothing(level: str, dtype: torch.dtype) -> None:
    heads = heads_of(5, 4, 0, 24, 24, True, torch.float32 if dtype == torch.float32 else torch.bfloat16)
    heads = replace(heads, key_norm=None)
    expected = apply_rope_to_qkv_torch(heads)[0]
    kv, memory = rows_of(2, 24, dtype)
    with at_level(level):
        found = apply_rope_and_write_kv(heads, kv.heads_of(heads), torch.arange(5))
    torch.testing.assert_close(found, expected, **(CLOSE_FP32 if dtype == torch.float32 else CLOSE))
    assert bool((memory == MARK).all())


@needs_levels
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_values_stay_in_their_head(level: str, bad: float) -> None:
    heads, (kv, _) = heads_of(3, 2, 2, 16, 16, False), rows_of(2, 16, torch.int8)
    heads.product[1, 2 * 16 + 3] = bad  # the first key of token 1
    with at_level(level):
        apply_rope_and_write_kv(heads, kv, torch.tensor([4, 5, 6]))
    key, value = kv.read(4, 3)
    assert key[1, 0].isnan().all()
    assert value.isfinite().all()
    key[1, 0] = 0
    assert key.isfinite().all()


@needs_levels
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float32], ids=str)
def test_a_token_is_bit_for_bit_the_same_alone(level: str, dtype: torch.dtype) -> None:
    with at_level(level):
        (together, memory), (kv, own) = rows_of(2, 64, dtype), rows_of(2, 64, dtype)
        heads = heads_of(6, 4, 2, 64, 64, True, torch.bfloat16 if dtype == torch.int8 else dtype)
        product = heads.product.clone()
        queries = apply_rope_and_write_kv(heads, together, torch.arange(6))
        for row in range(6):
            assert heads.angles is not None
            cos, sin = heads.angles
            norms = heads.query_norm, heads.key_norm
            alone = QkvHeads(
                product[row : row + 1], 4, 2, 64, *norms, heads.eps, (cos[row : row + 1], sin[row : row + 1])
            )
            assert torch.equal(apply_rope_and_write_kv(alone, kv, torch.tensor([row]))[0], queries[row])
        assert torch.equal(memory, own)
