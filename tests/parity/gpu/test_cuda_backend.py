"""Kernel choice of the CUDA backend, and its results against the references.

Without a GPU, torch's flash attention is faked.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from torch import Tensor

from app.backends import cuda
from app.backends.cuda import CudaBackend
from armature_kernels.attention import texts as flash
from armature_kernels.attention.attention import QkvHeads, token_bytes, view_kv_rows
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.paged import (
    PAGE_TOKENS,
    PackedTexts,
    PagedStep,
    attend_texts_padded_torch,
    paged_attention_torch,
)
from armature_kernels.elementwise.rope import apply_rope_to_qkv_torch
from armature_kernels.triton import attention, prompts, support
from paged_steps import NOWHERE, Shape, alone, made_step
from planned_machines import bare_plan

BF16 = torch.bfloat16


def played(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *words: Any, **named: Any) -> tuple[Tensor]:
    """As torch's kernel is documented: lower-right causal, windows as reaches to both sides; rows of no sequence are left open."""
    result = torch.full(query.shape, torch.nan, dtype=query.dtype)
    causal, left, right = words[4], named["window_size_left"], named["window_size_right"]
    for first, last in pairwise(starts.tolist()):
        group, at = query.shape[1] // key.shape[1], torch.arange(last - first)
        ahead = at - at[:, None]
        hidden = (ahead > 0) if causal else (left >= 0) & (ahead < -left) | (right >= 0) & (ahead > right)
        queries, keys, values = (x[first:last].float().transpose(0, 1) for x in (query, key, value))
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = (queries @ keys.transpose(1, 2) * named["scale"]).masked_fill(hidden, -torch.inf)
        result[first:last] = (scores.softmax(-1) @ values).transpose(0, 1).to(query.dtype)
    return (result,)


@pytest.fixture
def backend(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    if gpu.type == "cpu":
        monkeypatch.setattr(cuda, "triton_usable", lambda tensor: True)
        monkeypatch.setattr(flash, "_flash", played)
        monkeypatch.setattr(attention, "_TARGET_PROGRAMS", 4)
    monkeypatch.setattr(cuda, "_agrees", lambda *asked: True)
    return CudaBackend(BF16)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which launchers served, in order."""
    names: list[str] = []

    def noted(launcher: Callable[..., Any], *words: Any) -> Any:
        names.append(launcher.__name__)
        return launcher(*words)

    for module, name in (
        (attention, "attend_decodes"),
        (prompts, "attend_prompts"),
        (prompts, "attend_packed"),
        (flash, "torch_flash_attention"),
    ):
        monkeypatch.setattr(module, name, partial(noted, getattr(module, name)))
    return names


@pytest.mark.parametrize(
    ("spans", "num_decodes", "spec", "expected"),
    [
        ([(1, 70), (1, 0)], 2, AttentionSpec(0.3), ["attend_decodes"]),
        ([(9, 9), (5, 5)], 0, AttentionSpec(0.3), ["torch_flash_attention"]),
        ([(1, 70), (9, 9), (66, 66)], 1, AttentionSpec(0.3, window=7), ["torch_flash_attention", "attend_decodes"]),
        ([(1, 70), (9, 9)], 1, AttentionSpec(0.3, softcap=2.0), ["attend_decodes", "attend_prompts"]),
        ([(1, 70), (9, 19), (5, 5)], 1, AttentionSpec(0.3), ["attend_decodes", "attend_prompts"]),
    ],
    ids=["decodes", "fresh", "mixed", "capped", "with a past"],
)
def test_steps(
    spans: list[tuple[int, int]],
    num_decodes: int,
    spec: AttentionSpec,
    expected: list[str],
    backend: CudaBackend,
    served: list[str],
    gpu: torch.device,
) -> None:
    query, kv, step = made_step(Shape(4, 2, 32, BF16), spans, num_decodes, gpu)
    found = backend.attention(alone(query), kv, NOWHERE, step, spec)[1]
    assert served == expected
    torch.testing.assert_close(found, paged_attention_torch(query, kv, step, spec), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("has_plain_norm", [True, False], ids=["in one kernel", "in two"])
def test_a_decode_is_the_same_beside_prompts(has_plain_norm: bool, backend: CudaBackend, gpu: torch.device) -> None:
    shape, spec = Shape(4, 2, 32), AttentionSpec(0.3, softcap=2.0)
    _, kv, step = made_step(shape, [(1, 70), (1, 3), (9, 9)], 2, gpu)
    pages = step.tables[step.slots.long(), 0].long() * PAGE_TOKENS
    second = step.tables[step.slots[0].long(), 1].long() * PAGE_TOKENS
    written = torch.cat((second[None] + 5, pages[1:2] + 2, pages[2] + torch.arange(9, device=gpu)))
    generator = torch.Generator().manual_seed(3)
    product, angle = (torch.randn(*size, generator=generator).to(gpu) for size in ((11, 8 * 32), (11, 1, 16)))
    norm = torch.full((32,), 1.5, device=gpu)
    heads = QkvHeads(
        product, 4, 2, 32, norm, norm, 1e-5, (angle.cos(), angle.sin()), norm_after_rope=not has_plain_norm
    )
    memory = kv.keys.clone(), kv.values.clone()

    expected_query, key, value = apply_rope_to_qkv_torch(heads)
    query, found = backend.attention(replace(heads, product=product.clone()), kv, written, step, spec)
    torch.testing.assert_close(query[2:], expected_query[2:])
    torch.testing.assert_close(kv.keys[written], key)
    assert torch.equal(kv.values[written], value)
    torch.testing.assert_close(found, paged_attention_torch(expected_query, kv, step, spec), rtol=1e-4, atol=1e-4)

    kv.keys.copy_(memory[0])
    kv.values.copy_(memory[1])
    alone_step = replace(step, slots=step.slots[:2], starts=step.starts[:3], lengths=step.lengths[:2])
    first = replace(heads, product=product[:2], angles=(angle[:2].cos(), angle[:2].sin()))
    assert torch.equal(backend.attention(first, kv, written[:2], alone_step, spec)[1], found[:2])


@pytest.mark.parametrize(
    ("dtype", "spec", "expected"),
    [
        (BF16, AttentionSpec(0.3, bidirectional=True), "torch_flash_attention"),
        (BF16, AttentionSpec(0.3, window=8, bidirectional=True), "torch_flash_attention"),
        (BF16, AttentionSpec(0.3, window=8), "torch_flash_attention"),
        (BF16, AttentionSpec(0.3, softcap=2.0, bidirectional=True), "attend_packed"),
        (torch.float32, AttentionSpec(0.3, window=8, bidirectional=True), "attend_packed"),
    ],
    ids=["whole", "window", "causal window", "capped", "fp32"],
)
def test_texts(
    dtype: torch.dtype, spec: AttentionSpec, expected: str, backend: CudaBackend, served: list[str], gpu: torch.device
) -> None:
    product = torch.randn((21, 8 * 16), generator=torch.Generator().manual_seed(3)).to(gpu, dtype)
    heads = QkvHeads(product, 4, 2, 16)
    texts = PackedTexts(torch.tensor([0, 17, 17, 21], dtype=torch.int32, device=gpu), 17)
    found = backend.encoder_attention(heads, texts, spec)
    assert served == [expected]
    rtol = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(found, attend_texts_padded_torch(heads, texts, spec), rtol=rtol, atol=rtol)


def test_without_triton_the_references_serve(
    backend: CudaBackend, served: list[str], gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "triton_usable", lambda tensor: False)
    query, kv, step = made_step(Shape(4, 2, 32, BF16), [(1, 70), (9, 9)], 1, gpu)
    found = backend.attention(alone(query), kv, NOWHERE, step, AttentionSpec(0.3))[1]
    assert served == []
    assert torch.equal(found, paged_attention_torch(query, kv, step, AttentionSpec(0.3)))


@pytest.mark.parametrize(
    ("kv_heads", "size", "rotated", "has_norm", "dtype", "kv_dtype", "spec"),
    [
        (2, 32, 32, True, BF16, BF16, AttentionSpec(0.2)),
        (1, 64, 16, False, BF16, torch.int8, AttentionSpec(0.1, window=50, softcap=20.0)),
        (4, 16, 0, False, torch.float32, torch.float32, AttentionSpec(0.25)),
    ],
)
def test_the_kernels_are_compared_with_the_reference_at_their_first_use(
    kv_heads: int, size: int, rotated: int, has_norm: bool, dtype: torch.dtype, kv_dtype: torch.dtype,
    spec: AttentionSpec, gpu: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A kernel that is wrong on some GPU does not serve there."""
    monkeypatch.setattr(cuda, "triton_usable", lambda tensor: True)
    monkeypatch.setattr(attention, "_TARGET_PROGRAMS", 4)
    monkeypatch.setattr(support, "_agreed", {})
    norm = torch.linspace(0.5, 1.5, size, device=gpu) if has_norm else None
    angles = (torch.ones(1, 1, rotated, device=gpu), torch.zeros(1, 1, rotated, device=gpu)) if rotated else None
    product = torch.randn(1, (4 + 2 * kv_heads) * size, generator=torch.Generator().manual_seed(1)).to(gpu, dtype)
    heads = QkvHeads(product, 4, kv_heads, size, norm, norm, 1e-5, angles)
    memory = torch.zeros(2 * PAGE_TOKENS, token_bytes(kv_heads, size, kv_dtype), dtype=torch.uint8, device=gpu)
    kv = view_kv_rows(memory, kv_heads, size, kv_dtype)
    assert cuda.attention_difference(heads, kv, spec) < (1e-5 if dtype == torch.float32 else 0.05)

    one = torch.ones(1, dtype=torch.int32, device=gpu)
    step = PagedStep(one[None], 0 * one, torch.tensor([0, 1], dtype=torch.int32, device=gpu), one, 1, 1, 1)
    arguments = (heads, kv, torch.full((1,), PAGE_TOKENS, device=gpu), step, spec)
    by_kernels = CudaBackend(dtype).attention(*arguments)[1]
    expected = cuda.attend_by_reference(*arguments)[1]
    torch.testing.assert_close(by_kernels, expected, rtol=2**-6, atol=2**-6)
    plain, calls = cuda.attend_by_kernels, []

    def wrong(*words: Any) -> tuple[Tensor, Tensor]:
        calls.append(words)
        query, result = plain(*words)
        return query, torch.where(torch.arange(len(result), device=gpu)[:, None, None] == 3, result * 2, result)

    monkeypatch.setattr(cuda, "attend_by_kernels", wrong)
    monkeypatch.setattr(support, "_agreed", {})
    for _ in "ab":
        assert torch.equal(CudaBackend(dtype).attention(*arguments)[1], expected)
    assert len(calls) == 1, "compared once"
    assert re.search(r"The kernel of attention over pages differs from its reference by (0\.9|1)", caplog.text)


def test_memory_that_serves_captured_steps_alone_is_not_free(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def segment(pool: tuple[int, int], total: int, used: int) -> dict[str, object]:
        return {"device": 0, "segment_pool_id": pool, "total_size": total, "allocated_size": used}

    segments = [segment((0, 0), 500, 300), segment((0, 1), 4000, 10)]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert backend.free_bytes() == 1000 + 200


def test_products_of_halves_are_summed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in (
        ("init", None), ("set_device", None), ("get_device_capability", (9, 0)), ("get_device_name", "a GPU"),
        ("Stream", None), ("graph_pool_handle", (0, 1)),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    options = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before, threads = [getattr(options, name) for name in names], torch.get_num_threads()
    try:
        for name in names:
            setattr(options, name, True)
        CudaBackend(BF16).configure(bare_plan(device="cuda", threads=threads))
        assert [getattr(options, name) for name in names] == [False, False]
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(options, name, value)
