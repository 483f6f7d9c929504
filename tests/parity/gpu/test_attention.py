"""Paged attention on a GPU against plain torch: decodes and prompts, ragged, windows, soft caps, every dtype."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armature_kernels.attention.attention import token_bytes, view_kv_rows
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.paged import PAGE_TOKENS, paged_attention_torch
from armature_kernels.triton import attention, prompts
from armature_kernels.triton.attention import attend_decodes, num_splits
from armature_kernels.triton.prompts import attend_prompts, gather_fresh_kv
from hypothesis_examples import examples
from paged_steps import NOWHERE, Shape, alone, made_step

PLAIN = AttentionSpec(0.3)
SPECS = {"plain": PLAIN, "window": AttentionSpec(0.3, window=70), "capped": AttentionSpec(0.3, softcap=2.0)}
CLOSE = {
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (2**-6, 2**-6),
    torch.float16: (2**-9, 2**-9),
}  # products of halves round their weights


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one by one."""
    monkeypatch.setattr(attention, "_TARGET_PROGRAMS", 8)


def equal_to_the_twin(
    shape: Shape, spans: list[tuple[int, int]], num_decodes: int, spec: AttentionSpec, gpu: torch.device
) -> None:
    query, kv, step = made_step(shape, spans, num_decodes, gpu)
    out = torch.full(query.shape, torch.nan, dtype=query.dtype, device=gpu)
    if num_decodes:
        attend_decodes(alone(query), kv, NOWHERE, step, spec, out)
    if len(spans) > num_decodes:
        attend_prompts(query, kv, step, spec, out)
    expected = paged_attention_torch(query, kv, step, spec)
    rtol, atol = CLOSE[shape.dtype]
    torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_decodes_of_any_length(spec: AttentionSpec, gpu: torch.device) -> None:
    equal_to_the_twin(Shape(6, 2, 32), [(1, n) for n in (1, 64, 200)], 3, spec, gpu)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_prompts_of_which_some_was_read_before(spec: AttentionSpec, gpu: torch.device) -> None:
    equal_to_the_twin(Shape(2, 1, 32), [(1, 1), (40, 40), (33, 130), (2, 90)], 0, spec, gpu)


def test_decodes_and_prompts_in_one_step(gpu: torch.device) -> None:
    equal_to_the_twin(Shape(4, 2, 32), [(1, 100), (1, 3), (5, 5), (7, 70)], 2, PLAIN, gpu)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves(dtype: torch.dtype, gpu: torch.device) -> None:
    equal_to_the_twin(Shape(4, 2, 64, dtype), [(1, 100), (20, 90)], 1, PLAIN, gpu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_in_int8(dtype: torch.dtype, gpu: torch.device) -> None:
    query, plain, step = made_step(Shape(6, 2, 32, dtype), [(1, 100), (1, 70), (33, 90)], 2, gpu)
    memory = torch.full((len(plain.keys), token_bytes(2, 32, torch.int8)), 255, dtype=torch.uint8, device=gpu)
    kv = view_kv_rows(memory, 2, 32, torch.int8)  # 255: scales outside any context are NaN
    used = plain.keys.isfinite().flatten(1).all(1).nonzero().flatten()
    kv.write(used, plain.keys[used], plain.values[used])
    out = torch.full(query.shape, torch.nan, dtype=dtype, device=gpu)
    spec = AttentionSpec(0.3, window=80)
    attend_decodes(alone(query), kv, NOWHERE, step, spec, out)
    attend_prompts(query, kv, step, spec, out)
    rtol, atol = CLOSE[dtype]
    torch.testing.assert_close(out, paged_attention_torch(query, kv, step, spec), rtol=rtol, atol=atol)
    assert (out - paged_attention_torch(query, plain, step, spec)).abs().max() < 0.05


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 256), (3, 1, 96), (20, 1, 40)])
def test_heads_of_any_size_and_number(heads: int, kv_heads: int, head_dim: int, gpu: torch.device) -> None:
    equal_to_the_twin(Shape(heads, kv_heads, head_dim), [(1, 70), (2, 66)], 1, PLAIN, gpu)


@pytest.mark.full
@settings(max_examples=examples(8))
@given(
    spans=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 100)), min_size=1, max_size=3),
    decodes=st.lists(st.integers(1, 150), max_size=3),
    window=st.none() | st.integers(1, 160),
)
def test_ragged_steps(spans: list[tuple[int, int]], decodes: list[int], window: int | None, gpu: torch.device) -> None:
    every = [(1, n) for n in decodes] + [(queries, past + queries) for queries, past in spans]
    equal_to_the_twin(Shape(2, 1, 16), every, len(decodes), AttentionSpec(0.3, window), gpu)


@pytest.mark.parametrize("many", [1, 8], ids=["in one part", "in parts"])
def test_a_row_that_only_fills_a_bucket_is_zeros(many: int, monkeypatch: pytest.MonkeyPatch, gpu: torch.device) -> None:
    monkeypatch.setattr(attention, "_TARGET_PROGRAMS", many)
    query, kv, step = made_step(Shape(2, 1, 32), [(1, 0), (1, 5), (1, 0)], 3, gpu)
    out = torch.full(query.shape, torch.nan, device=gpu)
    attend_decodes(alone(query), kv, NOWHERE, step, PLAIN, out)
    assert out[[0, 2]].abs().max() == 0.0
    torch.testing.assert_close(out, paged_attention_torch(query, kv, step, PLAIN), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("many", [1, 2, 16], ids=lambda many: f"{many} programs")
def test_however_many_parts_a_context_is_cut_into(
    many: int, monkeypatch: pytest.MonkeyPatch, gpu: torch.device
) -> None:
    monkeypatch.setattr(attention, "_TARGET_PROGRAMS", many)
    equal_to_the_twin(Shape(2, 1, 32), [(1, 300), (1, 64)], 2, AttentionSpec(0.3, window=130), gpu)


def test_what_is_not_a_number_is_reported_and_stays_with_its_own(gpu: torch.device) -> None:
    query, kv, step = made_step(Shape(2, 1, 32), [(1, 100), (1, 100), (3, 80), (3, 80)], 2, gpu)
    for sequence in (0, 2):
        page = int(step.tables[step.slots[sequence], 0])
        kv.keys[page * PAGE_TOKENS + 7] = torch.nan
    out = torch.zeros(query.shape, device=gpu)
    attend_decodes(alone(query), kv, NOWHERE, step, PLAIN, out)
    attend_prompts(query, kv, step, PLAIN, out)
    assert out[[0, 2, 3, 4]].isnan().all()
    assert out[[1, 5, 6, 7]].isfinite().all()


def test_prompts_of_this_step_are_laid_out_as_the_batch_is(gpu: torch.device) -> None:
    _, kv, step = made_step(Shape(2, 2, 24, torch.bfloat16), [(1, 9), (70, 70), (3, 3)], 1, gpu)
    assert step.fresh
    key, value = gather_fresh_kv(kv, step, 74)
    for sequence, first, count in ((1, 1, 70), (2, 71, 3)):
        at = torch.arange(count, device=gpu)
        rows = step.tables[step.slots[sequence]].long()[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS
        assert torch.equal(key[first : first + count], kv.keys[rows])
        assert torch.equal(value[first : first + count], kv.values[rows])


def test_pages_of_the_sequence_that_pads_a_step_are_read_within_its_table(gpu: torch.device) -> None:
    """It may have more tokens than a slot has pages; its slot is the last row of the tables."""
    _, kv, step = made_step(Shape(2, 1, 32), [(70, 70)], 0, gpu)
    step = replace(
        step,
        tables=torch.cat((step.tables, torch.zeros_like(step.tables[:1]))),
        slots=torch.tensor([int(step.slots[0]), len(step.tables)], dtype=torch.int32, device=gpu),
        starts=torch.tensor([0, 70, 270], dtype=torch.int32, device=gpu),
        max_queries=200,
    )
    kv.keys[:PAGE_TOKENS], kv.values[:PAGE_TOKENS] = 5.0, 6.0
    key, value = gather_fresh_kv(kv, step, 270)
    assert (key[70:] == 5.0).all() and (value[70:] == 6.0).all() and not key[:70].isnan().any()


def test_padding_behind_decodes_and_prompts_is_zero(gpu: torch.device) -> None:
    equal_to_the_twin(Shape(4, 2, 32), [(1, 100), (1, 0), (5, 5), (60, 0), (0, 0)], 2, PLAIN, gpu)


def test_a_long_context_beside_others_is_read_in_parts(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_TARGET_PROGRAMS", 1)
    monkeypatch.setattr(attention, "PART_TOKENS", 64)
    equal_to_the_twin(Shape(4, 2, 32), [(1, 200), (1, 3)], 2, PLAIN, gpu)


def test_how_a_context_is_cut_depends_on_the_bucket_the_heads_and_the_bound_of_the_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    assert [num_splits(8 * bucket) for bucket in (1, 2, 4, 8, 16, 24, 64, 256)] == [64, 32, 16, 8, 4, 4, 1, 1]
    assert num_splits(1) == 64
    assert [num_splits(8 * 64, length) for length in (8192, 8193, 100_000, 10**7)] == [1, 2, 16, 64], (
        "a long context among 64 others is not read by 8 programs alone"
    )


def test_blocks_fit_the_memory_of_the_smallest_gpu() -> None:
    assert [attention.key_block_size(dim, 2) for dim in (32, 64, 128, 256)] == [64, 64, 64, 32]
    assert [attention.key_block_size(dim, 4) for dim in (32, 64, 128, 256)] == [64, 64, 32, 16]
    assert [prompts.query_block_size(dim, 2) for dim in (64, 128, 256)] == [128, 128, 64]
