"""Head norms, RoPE and the KV write by the Triton kernel against the torch reference."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hypothesis_examples import examples

pytest.importorskip("triton", reason="Triton is not installed")
from armature_kernels.attention.attention import KvRows, QkvHeads, token_bytes, view_kv_rows
from armature_kernels.elementwise import rope as turn

pytestmark = pytest.mark.usefixtures("served_by_triton")
RELATIVE = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-7}
_NORESERVE = 0x4000  # of Linux, where Triton is
MARK, ROWS = 77, 20  # in bytes that nobody may write


def heads_of(
    gpu: torch.device, sizes: tuple[int, int, int, int], dim: int, norms: bool, dtype: torch.dtype
) -> QkvHeads:
    """sizes: tokens, num_heads, num_kv_heads, head_dim. The product's rows are not beside each other."""
    tokens, num_heads, kv_heads, head_dim = sizes
    generator = torch.Generator().manual_seed(tokens * 7 + head_dim + dim)
    width = (num_heads + 2 * kv_heads) * head_dim
    product = torch.randn(tokens, width + 8, generator=generator).to(gpu, dtype)[:, :width]
    weights = (1 + 0.2 * torch.randn(2, head_dim, generator=generator)).to(gpu)
    angle = torch.randn(tokens, 1, dim, generator=generator).to(gpu)
    own = (weights[0], weights[1]) if norms else (None, None)
    return QkvHeads(product, num_heads, kv_heads, head_dim, *own, 1e-5, (angle.cos(), angle.sin()) if dim else None)


def close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    relative = RELATIVE[found.dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=relative, atol=relative, equal_nan=True)


@settings(max_examples=examples(25))
@given(
    tokens=st.integers(0, 4), kv_heads=st.integers(1, 3), group=st.integers(1, 5), norms=st.booleans(),
    head_dim=st.sampled_from([8, 16, 24, 64, 72, 128, 256]), turned=st.sampled_from([0, 0.5, 1]), dtype=st.sampled_from(list(RELATIVE)),
    value_norms=st.booleans(),
)  # fmt: skip
def test_rope_is_applied_and_kv_written_as_the_reference_does(
    gpu: torch.device,
    tokens: int,
    kv_heads: int,
    group: int,
    norms: bool,
    head_dim: int,
    turned: float,
    dtype: torch.dtype,
    value_norms: bool,
) -> None:
    heads = heads_of(gpu, (tokens, kv_heads * group, kv_heads, head_dim), int(head_dim * turned), norms, dtype)
    heads = replace(heads, value_norm=torch.full((head_dim,), 0.7, device=gpu) if value_norms else None)
    expected = turn.apply_rope_to_qkv_torch(heads)
    memory = torch.full((ROWS, token_bytes(kv_heads, head_dim, dtype)), MARK, dtype=torch.uint8, device=gpu)
    kv, written = view_kv_rows(memory, kv_heads, head_dim, dtype), torch.randperm(ROWS).to(gpu)[:tokens]
    found = (turn.apply_rope_and_write_kv(heads, kv, written), kv.keys[written], kv.values[written])
    for one, twin in zip(found, expected, strict=True):
        close(one, twin)
    others = [row for row in range(ROWS) if row not in written.tolist()]
    assert bool((memory[others] == MARK).all())


@settings(max_examples=examples(10))
@given(
    tokens=st.integers(0, 4), kv_heads=st.integers(1, 3), norms=st.booleans(), head_dim=st.sampled_from([24, 64]),
    turned=st.sampled_from([0, 0.5, 1]), dtype=st.sampled_from(list(RELATIVE)),
)  # fmt: skip
def test_rope_is_applied_to_texts_as_the_reference_does(
    gpu: torch.device, tokens: int, kv_heads: int, norms: bool, head_dim: int, turned: float, dtype: torch.dtype
) -> None:
    heads = heads_of(gpu, (tokens, 2 * kv_heads, kv_heads, head_dim), int(head_dim * turned), norms, dtype)
    before = heads.product.clone()
    for one, twin in zip(turn.apply_rope_to_qkv(heads), turn.apply_rope_to_qkv_torch(heads), strict=True):
        close(one, twin)
    assert torch.equal(heads.product, before)  # an element's partner is read there


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_in_int8_are_those_of_the_reference(dtype: torch.dtype, gpu: torch.device) -> None:
    heads = heads_of(gpu, (3, 4, 2, 24), 24, True, dtype)
    heads.product[1, 6 * 24 : 7 * 24] = 0.0  # the first head of values
    heads.product[2, 5 * 24 + 3] = torch.nan  # the second head of keys
    _, key, value = turn.apply_rope_to_qkv_torch(heads)
    memories = [torch.zeros(ROWS, token_bytes(2, 24, torch.int8), dtype=torch.uint8, device=gpu) for _ in range(2)]
    found, expected = (view_kv_rows(memory, 2, 24, torch.int8) for memory in memories)
    rows = torch.tensor([4, 9, 6], device=gpu)
    turn.apply_rope_and_write_kv(heads, found, rows)
    expected.write(rows, key, value)
    rtol = 2**-7 if dtype == torch.bfloat16 else 1e-6  # a turned key may round to its neighbour
    for one, twin in ((found.key_scales, expected.key_scales), (found.value_scales, expected.value_scales)):
        torch.testing.assert_close(one, twin, rtol=rtol, atol=0, equal_nan=True)
    for one, twin in ((found.keys, expected.keys), (found.values, expected.values)):
        assert (one.int() - twin.int()).abs().max() <= (2 if dtype == torch.bfloat16 else 1)


def test_bad_values_stay_in_their_head(gpu: torch.device) -> None:
    heads = heads_of(gpu, (3, 2, 2, 16), 16, True, torch.float32)
    heads.product[1, 2 * 16 + 3] = torch.nan  # the first key of token 1
    memory = torch.zeros(ROWS, token_bytes(2, 16, torch.float32), dtype=torch.uint8, device=gpu)
    kv = view_kv_rows(memory, 2, 16, torch.float32)
    query = turn.apply_rope_and_write_kv(heads, kv, torch.tensor([4, 5, 6], device=gpu))
    assert query.isfinite().all()
    assert kv.values.isfinite().all()
    assert (~kv.keys.isfinite()).flatten(1).sum(1).nonzero().flatten().tolist() == [5]


def test_rows_beyond_two_billion_elements(gpu: torch.device) -> None:
    """Addresses are of 64 bits: the row lies behind 2^31 elements of its layer."""
    stride, row = 2**20, 2**11 + 1
    if gpu.type == "cpu":  # reserved, not taken: only pages that are written exist
        region = mmap.mmap(-1, (row + 1) * stride * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        memory = torch.frombuffer(region, dtype=torch.float16)
    else:
        memory = torch.empty((row + 1) * stride, dtype=torch.float16, device=gpu)
    keys, values = (memory[at:].as_strided((row + 1, 1, 64), (stride, 64, 1)) for at in (0, 64))
    heads = heads_of(gpu, (1, 2, 1, 64), 64, False, torch.float16)
    expected = turn.apply_rope_to_qkv_torch(heads)
    turn.apply_rope_and_write_kv(heads, KvRows(keys, values, stride * 2), torch.tensor([row], device=gpu))
    close(keys[row], expected[1][0])
    close(values[row], expected[2][0])


def test_triton_served(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel cannot be reached, turning fails: so the tests above are of the kernel, not of the twin."""
    from armature_kernels.triton import rope as turning

    monkeypatch.setattr(turning, "triton", None)
    heads = heads_of(gpu, (1, 2, 1, 64), 64, False, torch.float32)
    kv = view_kv_rows(
        torch.zeros(ROWS, token_bytes(1, 64, torch.float32), dtype=torch.uint8, device=gpu), 1, 64, torch.float32
    )
    for call in (
        lambda: turn.apply_rope_and_write_kv(heads, kv, torch.zeros(1, dtype=torch.int64, device=gpu)),
        lambda: turn.apply_rope_to_qkv(heads),
    ):
        with pytest.raises(AttributeError):
            call()
