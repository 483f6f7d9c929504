"""Decode attention on a GPU: one query per sequence over a paged KV cache (`PagedStep`).

The queries that share a KV head are the rows of one product, so keys and values are read once. A context is split
into parts, enough to occupy the device and none too long, which are merged by their log-sum-exp (flash decoding). The
number of parts depends only on the batch bucket, the heads and the bound of the lengths, so one CUDA graph serves any
lengths up to it. Prompts are handled by the prompt kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from armature_kernels.attention.attention import KvRows
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.paged import PAGE_TOKENS, PART_TOKENS, PagedStep

# Window size that exceeds every context; the sum of a position and a window size stays within int32.
UNBOUNDED = 2**30
LOG2_E = tl.constexpr(1.4426950408889634)  # kernels compute exponentials as powers of two

_TARGET_PROGRAMS = 512  # target number of programs: about four for each multiprocessor of an H200 (132)
_MAX_SPLITS = 64
# Bytes of keys, and of values, per block: two stages of both fit the 99 KiB of the smallest supported GPUs.
_TILE_BYTES = 2**14
# Views into one buffer, with any alignment; one compiled kernel serves all alignments.
_UNALIGNED = ("tables", "slots", "lengths")


def attend_decodes(query: Tensor, kv: KvRows, step: PagedStep, spec: AttentionSpec, out: Tensor) -> None:
    """Write the attention of the decode rows, [0, num_decodes), to the same rows of `out`.

    `out` is contiguous [tokens, heads, head_dim]. `query` has the same shape with any strides but the last.
    """
    _, heads, head_dim = query.shape
    kv_heads, sequences = kv.keys.shape[1], step.num_decodes
    check_layout(query, kv, out)
    assert kv.keys.stride(0) == kv.values.stride(0), "keys and values must have the same row stride"
    parts = num_splits(sequences * kv_heads, step.max_context)
    sums = query.new_empty((sequences, heads, parts, head_dim), dtype=torch.float32) if parts > 1 else out
    weights = query.new_empty((sequences, heads, parts), dtype=torch.float32) if parts > 1 else out
    dim = padded_head_dim(head_dim)
    scales, scale_stride = (kv.key_scales, kv.value_scales), 0 if kv.key_scales is None else kv.key_scales.stride(0)
    itemsize = kv.keys.itemsize if kv.key_scales is None else query.itemsize  # of what is multiplied
    _attend_split[(sequences, kv_heads, parts)](
        query, kv.keys, kv.values, *scales, step.tables, step.slots, step.lengths, out, sums, weights,
        query.stride(0), query.stride(1), kv.keys.stride(0), kv.keys.stride(1), scale_stride, step.tables.stride(0),
        UNBOUNDED if spec.window is None else spec.window - 1, spec.scale, spec.softcap or 1.0,
        PARTS=parts, GROUP=heads // kv_heads, HEAD_DIM=head_dim, CAPPED=spec.softcap is not None, PAGE=PAGE_TOKENS,
        ROWS=max(16, triton.next_power_of_2(heads // kv_heads)), DIM=dim, TOKENS=key_block_size(dim, itemsize),
        # FP32 products need more registers than four warps have.
        num_warps=8 if itemsize > 2 else 4, num_stages=2,
    )  # fmt: skip
    if parts > 1:
        _merge_splits[(sequences, heads)](sums, weights, out, PARTS=parts, HEAD_DIM=head_dim, DIM=dim, num_warps=4)


def check_layout(query: Tensor, kv: KvRows, out: Tensor) -> None:
    """Assert that shapes and strides are those the kernels support, before a kernel reads out of bounds."""
    heads, head_dim = query.shape[1:]
    assert kv.key_scales is None or kv.value_scales is None or kv.key_scales.stride() == kv.value_scales.stride(), (
        "scales of keys and values must have the same strides"
    )
    assert query.stride(2) == 1 and kv.keys.stride(2) == 1, "the elements of a head must be contiguous"
    assert kv.keys.stride(1) == kv.values.stride(1) and kv.values.stride(2) == 1, (
        "keys and values must have the same head stride"
    )
    assert heads % kv.keys.shape[1] == 0 and kv.keys.shape[2] == head_dim, (
        "query heads must be a multiple of KV heads, of equal size"
    )
    assert out.is_contiguous() and out.shape == query.shape, "out must be contiguous and have the query's shape"


def padded_head_dim(head_dim: int) -> int:
    """Round head_dim up to a power of two, at least 16, the smallest inner size of a GPU product.

    Triton's interpreter accepts smaller ones.
    """
    return max(16, 1 << (head_dim - 1).bit_length())


def num_splits(programs: int, max_context: int = 0) -> int:
    """Return the number of parts a context of at most `max_context` tokens is split into.

    `programs` run for each part. Beside many others, a long context would otherwise be read by a few programs alone.
    """
    needed = max(-(-_TARGET_PROGRAMS // max(programs, 1)), -(-max_context // PART_TOKENS))
    return min(_MAX_SPLITS, 1 << (needed - 1).bit_length())


def key_block_size(dim: int, itemsize: int) -> int:
    """Return the number of tokens whose keys are loaded together; it divides a page.

    Products need at least 16.
    """
    return max(16, min(PAGE_TOKENS, _TILE_BYTES // (dim * itemsize)))


@triton.jit
def load_keys_values(keys, values, rows, key_stride, value_stride, in_context, dims, HEAD_DIM: tl.constexpr):
    """Load keys [dim, tokens] and values [tokens, dim] of one head at `rows` int64; masked elements are zero."""
    in_head = dims < HEAD_DIM
    key = tl.load(
        keys + rows[None, :] * key_stride + dims[:, None], mask=in_context[None, :] & in_head[:, None], other=0.0
    )
    value = tl.load(
        values + rows[:, None] * value_stride + dims[None, :], mask=in_context[:, None] & in_head[None, :], other=0.0
    )
    return key, value


@triton.jit
def dequantized(key, value, scores_of, key_scales, value_scales, rows, in_context):
    """Return int8 keys [dim, tokens] and values in the dtype of the queries, and the scales of the tokens."""
    key_scale = tl.load(key_scales + rows, mask=in_context, other=0.0)
    value_scale = tl.load(value_scales + rows, mask=in_context, other=0.0)
    # By way of FP32: Triton's interpreter has no conversion from int8 to BF16.
    wide, value = key.to(tl.float32).to(scores_of.dtype), value.to(tl.float32).to(scores_of.dtype)
    return wide, value, key_scale, value_scale


@triton.jit
def scale_scores(scores, scale, cap, CAPPED: tl.constexpr):
    """Scale scores to base-2 exponents, with the soft cap if there is one.

    tanh(x) = 1 - 2 / (exp(2x) + 1) holds at both ends of the range too.
    """
    if CAPPED:
        return (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E * scale / cap)) + 1.0)) * (cap * LOG2_E)
    return scores * (scale * LOG2_E)


@triton.jit
def update_softmax(total, sums, highest, scores, value, value_scale):
    """Update the running softmax by scores [rows, tokens] and values [tokens, dim]; masked scores are -inf.

    `value_scale` [tokens] multiplies values; None: nothing does.

    NaN is kept: the maximum of the scores drops it, but the sum of their powers does not.
    """
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    base = tl.where(new_highest == -float("inf"), 0.0, new_highest)  # no score so far
    powers = tl.exp2(scores - base[:, None])
    decay = tl.exp2(highest - base)
    total = total * decay + tl.sum(powers, 1)
    if value_scale is not None:
        powers = powers * value_scale[None, :]
    sums = tl.dot(powers.to(value.dtype), value, sums * decay[:, None], input_precision="ieee")
    return total, sums, new_highest


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def _attend_split(
    query, keys, values, key_scales, value_scales, tables, slots, lengths, out, sums, weights,
    query_stride, head_stride, row_stride, kv_head_stride, scale_stride, table_stride,
    before, scale, cap,
    PARTS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, CAPPED: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute one part of one sequence's context for the queries of one KV head.

    An empty sequence has parts without tokens.
    """
    sequence, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    table = tables + tl.load(slots + sequence).to(tl.int64) * table_stride
    first_page = tl.maximum(length - 1 - before, 0) // PAGE
    share = tl.cdiv(tl.cdiv(length, PAGE) - first_page, PARTS)  # pages per part
    begin = (first_page + part * share) * PAGE
    end = tl.minimum(begin + share * PAGE, length)

    rows, dims, tokens = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, TOKENS)
    mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + rows
    query_offsets = sequence.to(tl.int64) * query_stride + heads[:, None] * head_stride + dims[None, :]
    queries = tl.load(query + query_offsets, mask=mask, other=0.0)
    if key_scales is None:
        queries = queries.to(keys.dtype.element_ty)
    kv_offset = kv_head * kv_head_stride
    total = tl.zeros([ROWS], tl.float32)
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for at in range(begin, end, TOKENS):
        page = tl.load(table + at // PAGE).to(tl.int64)
        at_rows = page * PAGE + at % PAGE + tokens
        in_context = at + tokens < end
        key, value = load_keys_values(
            keys + kv_offset, values + kv_offset, at_rows, row_stride, row_stride, in_context, dims, HEAD_DIM
        )
        value_scale = None
        if key_scales is not None:
            scaled_rows = at_rows * scale_stride + kv_head
            key, value, key_scale, value_scale = dequantized(
                key, value, queries, key_scales, value_scales, scaled_rows, in_context
            )
        scores = tl.dot(queries, key, input_precision="ieee")
        if key_scales is not None:
            scores = scores * key_scale[None, :]
        scores = scale_scores(scores, scale, cap, CAPPED)
        seen = in_context & (at + tokens >= length - 1 - before)
        scores = tl.where(seen[None, :], scores, -float("inf"))
        total, acc, highest = update_softmax(total, acc, highest, scores, value, value_scale)

    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = sequence.to(tl.int64) * tl.num_programs(1) * GROUP + heads
    if PARTS == 1:
        tl.store(out + place[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(sums + (place * PARTS + part)[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)
        tl.store(
            weights + place * PARTS + part, highest + tl.log2(tl.where(total == 0.0, 1.0, total)), mask=rows < GROUP
        )


@triton.jit
def _merge_splits(sums, weights, out, PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Merge the parts of one head of one sequence into its result; parts without tokens have weight zero."""
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    parts, dims = tl.arange(0, PARTS), tl.arange(0, DIM)
    weight = tl.load(weights + place * PARTS + parts)
    highest = tl.max(weight, 0)
    powers = tl.exp2(weight - tl.where(highest == -float("inf"), 0.0, highest))
    rows = (place * PARTS + parts)[:, None] * HEAD_DIM + dims[None, :]
    part = tl.load(sums + rows, mask=(powers != 0.0)[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    total = tl.sum(powers, 0)
    result = tl.sum(part * powers[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + place * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
