"""Decode and prompts of a ragged batch at every level this processor has, against the formula; and that no result depends on neighbours,
threads, or how a context is divided."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armature_kernels.attention.attention import (
    AttentionSequence,
    AttentionStep,
    KvSegment,
    quantize_heads,
    token_bytes,
    view_kv_rows,
)
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.flash import reference_attention
from armature_kernels.attention.ragged import attend as native_attend
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel, observe_operations, run_operation
from hypothesis_examples import examples
from native_levels import at_level, levels
from ragged_batches import Share, attend, make_batch

LEVELS = levels()
needs_levels = pytest.mark.skipif(not LEVELS, reason="no native library")
a_level = st.sampled_from(LEVELS or ("none",))
# A result is rounded to 8 bits; at prompts, softmax weights as well.
CLOSE = {"rtol": 1.6e-2, "atol": 6e-3}
# The formula reads int8 as bf16: half a unit of a value of 4 is 2^-7, and scores move too.
CLOSE_INT8 = {"rtol": 1.6e-2, "atol": 1.6e-2}
CLOSE_FP32 = {"rtol": 2e-5, "atol": 2e-5}
DTYPES = [torch.bfloat16, torch.int8, torch.float32]
few = st.builds(Share, st.integers(0, 300), st.integers(0, 600), st.integers(1, 3))
many = st.builds(Share, st.integers(0, 40), st.integers(0, 200), st.integers(1, 40))


def with_vectors(spec: AttentionSpec, heads: int, names: Iterable[str] = ("sinks", "slopes")) -> AttentionSpec:
    """With sinks from far below all scores to far above them, and slopes of both signs."""
    values = {"sinks": torch.linspace(-30.0, 30.0, heads), "slopes": torch.linspace(0.5, -0.02, heads)}
    return replace(spec, **{name: values[name] for name in names})


@needs_levels
@settings(max_examples=examples(120))
@given(
    level=a_level,
    shares=st.lists(few | many, min_size=1, max_size=5),
    kv_heads=st.integers(1, 5),
    group=st.integers(1, 8) | st.sampled_from([9, 32]),
    head_dim=st.sampled_from([8, 16, 24, 64, 72, 80, 96, 128, 256, 512]),
    window=st.none() | st.integers(1, 700),
    softcap=st.none() | st.floats(1.0, 50.0),
    dtype=st.sampled_from(DTYPES),
    vectors=st.sets(st.sampled_from(["sinks", "slopes"])),
)
def test_any_batch_is_what_the_formula_says(
    level: str,
    shares: list[Share],
    kv_heads: int,
    group: int,
    head_dim: int,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
    vectors: set[str],
) -> None:
    spec = with_vectors(AttentionSpec(head_dim**-0.5, window, softcap), kv_heads * group, vectors)
    batch = make_batch(shares, kv_heads * group, kv_heads, head_dim, dtype)
    with at_level(level):
        assert has_kernel(OpCode.ATTENTION)
        result = attend(batch, spec)
    close = {torch.int8: CLOSE_INT8, torch.float32: CLOSE_FP32}.get(dtype, CLOSE)
    torch.testing.assert_close(result.float(), reference_attention(batch.query, batch.segments, spec), **close)


LONG = [
    Share(300, 500, 1),
    Share(0, 1500, 1),
    Share(0, 255, 1),
    Share(0, 256, 1),
    Share(10, 900, 3),
    Share(0, 700, 2),
    Share(0, 0, 40),
]


@needs_levels
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "spec",
    [AttentionSpec(0.125), AttentionSpec(0.125, 400, 20.0), with_vectors(AttentionSpec(0.125, 300), 8)],
    ids=["plain", "window and cap", "sinks and ALiBi"],
)
def test_a_row_is_bit_for_bit_the_same_whatever_is_beside_it(
    level: str, dtype: torch.dtype, spec: AttentionSpec
) -> None:
    """With one thread and with two; alone and in a batch; each query alone; one segment instead of two."""
    batch, before = make_batch(LONG, 8, 2, 64, dtype), torch.get_num_threads()
    with at_level(level):
        torch.set_num_threads(1)
        one = attend(batch, spec)
        torch.set_num_threads(2)
        two = attend(batch, spec)
        torch.set_num_threads(before)
        assert torch.equal(one, two)
        for row in batch.rows[:-1]:
            for query in range(row.num_tokens):
                runs = tuple(part for part in (_cut(run, row.start + query + 1) for run in row.runs) if part.num_tokens)
                alone = replace(
                    batch,
                    query=batch.query[row.first + query][None],
                    rows=[AttentionSequence(0, 1, row.start + query, runs)],
                )
                assert torch.equal(attend(alone, spec)[0], one[row.first + query])


def _cut(run: KvSegment, end: int) -> KvSegment:
    return replace(run, num_tokens=min(run.num_tokens, end - run.position))


@needs_levels
@pytest.mark.parametrize("level", LEVELS)
def test_a_shared_prefix_changes_no_bit(level: str) -> None:
    batch = make_batch([Share(0, 700, 1)], 8, 2, 64, torch.bfloat16)
    (row,) = batch.rows
    (run,) = row.runs
    with at_level(level):
        whole = attend(batch, AttentionSpec(0.125))
        for border in (1, 31, 256, 700):
            halves = KvSegment(run.first, border, 0), KvSegment(run.first + border, run.num_tokens - border, border)
            assert torch.equal(attend(replace(batch, rows=[replace(row, runs=halves)]), AttentionSpec(0.125)), whole)


@needs_levels
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_values_stay_with_those_who_see_them(level: str, dtype: torch.dtype, bad: float) -> None:
    """Position 40 of the first sequence is bad in head 1: other sequences, head 0 and who has it outside the window stay as they were."""
    batch, spec = (
        make_batch([Share(0, 90, 2), Share(0, 60, 1), Share(7, 300, 1)], 4, 2, 64, dtype),
        AttentionSpec(0.125),
    )
    near = replace(spec, window=45)
    with at_level(level):
        clean, cleans_near = attend(batch, spec), attend(batch, near)
        value = torch.zeros(1, 2, 64)
        value[0, 1, 5] = bad
        batch.kv.write(torch.tensor([batch.rows[0].runs[0].first + 40]), torch.zeros(1, 2, 64), value)
        batch.kv.write(
            torch.tensor([batch.rows[0].runs[0].first + 91]), torch.zeros(1, 2, 64), value
        )  # seen by its second query alone
        result = attend(batch, replace(spec, window=None))
        assert not result[0, 2:, 5].isfinite().any()
        assert not result[1, 2:, 5].isfinite().any()
        assert result[0, :2].isfinite().all()
        assert torch.equal(result[2:], clean[2:])
        assert torch.equal(attend(batch, near)[0], cleans_near[0])


@pytest.mark.skipif(not has_kernel(OpCode.LINEAR_BF16), reason="no products of bf16 here")
@pytest.mark.parametrize("spec", [AttentionSpec(0.125), AttentionSpec(0.125, 100, 20.0)], ids=str)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 64), (1, 8), (3, 72), (2, 128)])
def test_prompts_read_codes_as_the_bf16_that_they_mean(spec: AttentionSpec, kv_heads: int, head_dim: int) -> None:
    """To the bit: what is packed from codes is what is packed from their twin's numbers, NaN and all."""
    codes = make_batch(
        [Share(0, 0, 40), Share(50, 90, 33), Share(0, 300, 70)], 4 * kv_heads, kv_heads, head_dim, torch.int8
    )
    bad = torch.full((1, kv_heads, head_dim), torch.nan)
    codes.kv.write(torch.tensor([codes.rows[0].runs[0].first + 30]), bad, bad)
    rows = len(codes.kv.keys)
    numbers = view_kv_rows(
        torch.empty(rows, token_bytes(kv_heads, head_dim, torch.bfloat16), dtype=torch.uint8),
        kv_heads,
        head_dim,
        torch.bfloat16,
    )
    numbers.write(torch.arange(rows), *codes.kv.read(0, rows))
    found, expected = attend(codes, spec), attend(replace(codes, kv=numbers), spec)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert found[30:40].isnan().all() and found[40:].isfinite().all()


def test_int8_heads_are_within_half_a_step() -> None:
    x = torch.randn(50, 3, 64) * torch.logspace(-3, 3, 50)[:, None, None]
    codes, scales = quantize_heads(x)
    assert bool(((codes * scales[..., None] - x).abs() <= 0.5001 * scales[..., None]).all())
    assert codes.abs().amax() == 127
    assert quantize_heads(torch.full((1, 1, 8), torch.inf))[1].isnan().all()


@pytest.mark.parametrize(("kv_heads", "head_dim", "expected"), [(8, 64, 1088), (1, 8, 64), (5, 72, 768), (2, 128, 576)])
def test_a_row_of_int8_begins_at_a_cache_line_and_holds_both_and_their_scales(
    kv_heads: int, head_dim: int, expected: int
) -> None:
    assert token_bytes(kv_heads, head_dim, torch.int8) == expected
    assert token_bytes(kv_heads, head_dim, torch.bfloat16) == 4 * kv_heads * head_dim
    rows = view_kv_rows(torch.zeros(3, expected, dtype=torch.uint8), kv_heads, head_dim, torch.int8)
    key, value = torch.randn(2, 2, kv_heads, head_dim).unbind(0)
    rows.write(torch.tensor([2, 0]), key, value)
    for given_, read in zip((key, value), rows.read(0, 3), strict=True):
        torch.testing.assert_close(read[[2, 0]].float(), given_, rtol=2e-2, atol=2e-2)
        assert not read[1].any()


@needs_levels
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinks_beyond_all_scores(level: str, dtype: torch.dtype) -> None:
    """A sink of minus infinity changes nothing but a rounding; one above all scores takes all of the weight."""
    batch, plain = make_batch(LONG, 4, 2, 64, dtype), AttentionSpec(0.125)
    with at_level(level):
        without = attend(batch, plain)
        found = attend(batch, replace(plain, sinks=torch.tensor([-torch.inf, -200.0, 200.0, torch.inf])))
    torch.testing.assert_close(found[:, :2], without[:, :2], rtol=1e-6, atol=1e-6)
    assert not found[:, 2:].any()


@needs_levels
def test_an_operation_run_again_finds_the_next_step_at_the_same_address() -> None:
    """Recorded for one short sequence, run again for another, much longer one: scratch has grown meanwhile."""
    short, long = (make_batch([Share(0, past, 1)], 4, 2, 64, torch.bfloat16) for past in (20, 2000))
    kv, step, heard = long.kv, AttentionStep(), []
    step.fill(short.rows)
    with observe_operations(lambda code, arguments: heard.append((code, arguments))):
        out = native_attend(long.query, kv, step, AttentionSpec(0.125))
    address = step.address
    step.fill(long.rows)
    assert step.address == address
    ((_, arguments),) = heard
    run_operation(arguments)
    assert torch.equal(out, attend(long, AttentionSpec(0.125)))
