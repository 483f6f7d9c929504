"""Decodes from their product by one kernel (norms, RoPE, the KV write, attention) against the references and against two kernels."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from app.engine.scheduler.speculation import MAX_DRAFT_TOKENS
from armature_kernels.attention.attention import KvRows, QkvHeads, token_bytes, view_kv_rows
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.paged import MAX_SEQUENCE_DECODES, PAGE_TOKENS, PagedStep, paged_attention_torch
from armature_kernels.elementwise.rope import apply_rope_to_qkv_torch
from armature_kernels.triton import attention, rope
from armature_kernels.triton.attention import attend_decodes
from paged_steps import NOWHERE, Shape, alone, made_step

BF16 = torch.bfloat16
PLAIN = AttentionSpec(0.3)
CLOSE = {torch.float32: 1e-5, BF16: 2**-6, torch.float16: 2**-9}
ROUNDED = {torch.float32: 2e-6, BF16: 2**-7, torch.float16: 2**-10}  # sums in another order, rounded once


@dataclass(frozen=True, slots=True)
class Case:
    """Decodes of these lengths; those of `drafted` more rows are of one sequence, the last ones. `rotated`: share of a head.

    `reads`: all keys and values are in the cache.
    """

    shape: Shape
    lengths: tuple[int, ...]
    spec: AttentionSpec = PLAIN
    rotated: float = 1.0
    has_norms: bool = False
    is_int8: bool = False
    programs: int = 8
    drafted: int = 0
    has_value_norm: bool = False
    reads: bool = False


CASES = {
    "all at once": Case(Shape(6, 2, 80, BF16), (70, 0, 1, 200), AttentionSpec(0.3, window=130), 0.4, True),
    "small heads": Case(Shape(4, 2, 8), (1, 64, 65, 0)),
    "one head for all": Case(Shape(20, 1, 64, torch.float16), (300, 0)),
    "qwen3": Case(Shape(4, 2, 128, BF16), (130, 3), has_norms=True),
    "gemma": Case(Shape(2, 1, 256, BF16), (100, 66), AttentionSpec(0.1, window=70, softcap=5.0)),
    "no angles": Case(Shape(4, 2, 32), (100,), rotated=0.0),
    "norms alone": Case(Shape(4, 2, 32), (100,), rotated=0.0, has_norms=True),
    "window of one": Case(Shape(2, 1, 32), (70, 64), AttentionSpec(0.3, window=1)),
    "norms of values": Case(Shape(4, 2, 64), (100, 64), has_norms=True, has_value_norm=True, drafted=1),
    "norms of values in int8": Case(Shape(4, 2, 32), (70,), has_norms=True, has_value_norm=True, is_int8=True),
    "of another layer's keys": Case(Shape(4, 2, 64, BF16), (100, 0, 64), has_norms=True, reads=True),
    "int8": Case(Shape(4, 2, 64, BF16), (100, 64, 0), has_norms=True, is_int8=True),
    "int8 of fp32": Case(Shape(4, 2, 24), (100, 65), is_int8=True),
    "more parts than tokens": Case(Shape(2, 1, 32), (3, 200), programs=128),
    "one part": Case(Shape(4, 2, 32), (300, 64, 0), programs=1),
    "drafts": Case(Shape(4, 2, 32), (20, 0, 300), drafted=7),
    "drafts over a page": Case(Shape(4, 2, 32), (5, 66), AttentionSpec(0.3, window=5), has_norms=True, drafted=7),
    "drafts from the beginning": Case(Shape(2, 2, 32, BF16), (8,), drafted=7),
    "drafts in int8": Case(Shape(2, 2, 32), (130,), is_int8=True, drafted=3, programs=32),
}


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one by one. Parts are merged by twos and fours."""
    monkeypatch.setattr(attention, "_TARGET_PROGRAMS", 8)
    monkeypatch.setattr(attention, "_MERGED_ELEMENTS", 128)


def with_drafts(step: PagedStep, drafted: int) -> PagedStep:
    """Return the step with `drafted` more rows of its last sequence, one token longer each up to its length."""
    lengths = torch.arange(-drafted, 1, device=step.lengths.device, dtype=torch.int32) + step.lengths[-1]
    count = step.num_decodes + drafted
    return replace(
        step, slots=torch.cat((step.slots, step.slots[-1:].expand(drafted))), lengths=torch.cat((step.lengths[:-1], lengths)),
        starts=torch.arange(count + 1, dtype=torch.int32, device=step.starts.device), num_decodes=count,
    )  # fmt: skip


def written_rows(step: PagedStep) -> Tensor:
    """Return the cache row of each decode's token; padding has a row of page 0."""
    at = (step.lengths.long() - 1).clamp(min=0)
    rows = step.tables[step.slots.long(), at // PAGE_TOKENS].long() * PAGE_TOKENS + at % PAGE_TOKENS
    return torch.where(step.lengths > 0, rows, torch.arange(len(rows), device=rows.device))


def made(case: Case, gpu: torch.device) -> tuple[QkvHeads, KvRows, Tensor, PagedStep]:
    """Return decodes whose tokens are not in the cache yet: its rows are NaN there."""
    shape = case.shape
    _, kv, step = made_step(shape, [(1, length) for length in case.lengths], len(case.lengths), gpu)
    step = with_drafts(step, case.drafted)
    written, tokens = written_rows(step), step.num_decodes
    if case.is_int8:
        kv = in_int8(shape, kv)
    for part in (kv.keys, kv.values) if kv.key_scales is None else (kv.key_scales, kv.value_scales):
        part[written[:0] if case.reads else written] = torch.nan
    generator = torch.Generator().manual_seed(tokens)
    kv_heads = 0 if case.reads else shape.kv_heads
    width = (shape.heads + 2 * kv_heads) * shape.head_dim
    product = torch.randn(tokens, width + 8, generator=generator).to(gpu, shape.dtype)[:, :width]
    angle = torch.randn(tokens, 1, int(shape.head_dim * case.rotated), generator=generator).to(gpu)
    weights = (1 + 0.2 * torch.randn(3, shape.head_dim, generator=generator)).to(gpu)
    norms = (weights[0], None if case.reads else weights[1]) if case.has_norms else (None, None)
    angles = (angle.cos(), angle.sin()) if case.rotated else None
    heads = QkvHeads(product, shape.heads, kv_heads, shape.head_dim, *norms, 1e-5, angles)
    return replace(heads, value_norm=weights[2] if case.has_value_norm else None), kv, written, step


def in_int8(shape: Shape, kv: KvRows) -> KvRows:
    size = token_bytes(shape.kv_heads, shape.head_dim, torch.int8)
    memory = torch.full((len(kv.keys), size), 255, dtype=torch.uint8, device=kv.keys.device)  # scales are NaN
    codes = view_kv_rows(memory, shape.kv_heads, shape.head_dim, torch.int8)
    used = kv.keys.isfinite().flatten(1).all(1).nonzero().flatten()
    codes.write(used, kv.keys[used], kv.values[used])
    return codes


def copied(kv: KvRows) -> KvRows:
    """Return a copy of all rows; keys, values and scales of one layer lie in one memory."""
    memory = torch.empty(0, dtype=torch.uint8, device=kv.keys.device).set_(kv.keys.untyped_storage()).clone()
    dtype, (_, kv_heads, head_dim) = kv.keys.dtype, kv.keys.shape
    return view_kv_rows(memory.view(-1, kv.token_bytes), kv_heads, head_dim, dtype)


def bytes_of(kv: KvRows) -> Tensor:
    memory = torch.empty(0, dtype=torch.uint8, device=kv.keys.device).set_(kv.keys.untyped_storage())
    return memory.view(-1, kv.token_bytes)


def decoded(heads: QkvHeads, kv: KvRows, written: Tensor, step: PagedStep, spec: AttentionSpec) -> Tensor:
    out = torch.full((len(heads.product), heads.num_heads, heads.head_dim), torch.nan, device=heads.product.device)
    out = out.to(heads.product.dtype)
    attend_decodes(heads, kv, written, step, spec, out)
    return out


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_decode_is_that_of_the_references(case: Case, gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_TARGET_PROGRAMS", case.programs)
    heads, kv, written, step = made(case, gpu)
    before, elsewhere, apart, reference = bytes_of(kv).clone(), copied(kv), copied(kv), copied(kv)
    found = decoded(heads, kv, written, step, case.spec)
    in_padding = torch.arange(step.num_decodes, device=gpu)
    unread = decoded(heads, elsewhere, in_padding, step, case.spec)
    assert torch.equal(found, unread), (
        "what a step writes must not be read in the same step: the order of programs is open"
    )
    assert not attention._counters(found.device).any()

    query, key, value = apply_rope_to_qkv_torch(heads)
    if not case.reads:
        reference.write(written, key, value)
    expected, tolerance = paged_attention_torch(query, reference, step, case.spec), CLOSE[case.shape.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * (8 if case.is_int8 else 1))
    assert not found[step.lengths == 0].any()

    query = rope.apply_rope_and_write_kv(heads, apart, written)
    others = decoded(alone(query), apart, NOWHERE, step, case.spec)
    torch.testing.assert_close(found, others, rtol=ROUNDED[case.shape.dtype], atol=ROUNDED[case.shape.dtype])
    own = written[(step.lengths > 0) & (not case.reads)]
    assert torch.equal(bytes_of(kv)[own], bytes_of(apart)[own])
    bytes_of(kv)[own] = before[own]
    assert torch.equal(bytes_of(kv), before)


def test_drafts_of_a_sequence_fit_into_a_step() -> None:
    assert MAX_DRAFT_TOKENS < MAX_SEQUENCE_DECODES


def test_what_is_not_a_number_stays_with_its_sequence(gpu: torch.device) -> None:
    heads, kv, written, step = made(Case(Shape(4, 2, 32), (100, 70, 90)), gpu)
    heads.product[1, 4 * 32 + 3] = torch.nan  # a key of the first KV head
    found = decoded(heads, kv, written, step, PLAIN)
    assert found[1, :2].isnan().all()
    assert found[1, 2:].isfinite().all() and found[[0, 2]].isfinite().all()
