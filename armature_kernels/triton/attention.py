"""Decodes on a GPU: norms, RoPE, the KV cache write and attention over a paged KV cache (`PagedStep`) in one kernel.

The queries that share a KV head are the rows of one product, so keys and values are read once. A context is split
into parts, enough to occupy the device and none too long (flash decoding). The program that ends last merges them by their
log-sum-exp, always in the same order. The number of parts depends only on the batch bucket, the heads and the bound of
the lengths, so one CUDA graph serves any lengths up to it. Prompts are handled by the prompt kernels.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from armature_kernels.attention.attention import KvRows, QkvHeads
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.paged import MAX_SEQUENCE_DECODES, PAGE_TOKENS, PART_TOKENS, PagedStep
from armature_kernels.triton.launch import launch_options, wait_for_inputs
from armature_kernels.triton.rope import load_heads, store_codes

# Window size that exceeds every context; the sum of a position and a window size stays within int32.
UNBOUNDED = 2**30
LOG2_E = tl.constexpr(1.4426950408889634)  # kernels compute exponentials as powers of two

_TARGET_PROGRAMS = 512  # target number of programs: about four for each multiprocessor of an H200 (132)
_MAX_SPLITS = 64
# Bytes of keys, and of values, per block: two stages of both fit the 99 KiB of the smallest supported GPUs.
_TILE_BYTES = 2**14
_MERGED_ELEMENTS = 2**12  # FP32 elements of parts that are merged together; they fit in registers
_MAX_COUNTERS = 2**16
# Views into one buffer, with any alignment; one compiled kernel serves all alignments.
_UNALIGNED = ("written", "tables", "slots", "lengths")


def attend_decodes(
    heads: QkvHeads, kv: KvRows, written: Tensor, step: PagedStep, spec: AttentionSpec, out: Tensor
) -> None:
    """Write the attention of the decode rows, [0, num_decodes), to the same rows of `out` [tokens, heads, head_dim].

    Their keys and values are written to rows `written` [tokens] int64. Without KV heads in `heads`, all are in the cache
    already. Norms are plain (`has_plain_norm`).
    """
    query, sequences, kv_heads, head_dim = heads.split()[0], step.num_decodes, kv.keys.shape[1], heads.head_dim
    check_layout(query, kv, out)
    assert kv.keys.stride(0) == kv.values.stride(0), "keys and values must have the same row stride"
    assert heads.num_kv_heads in (0, kv_heads), "the heads that are written are those that are read"
    cos, sin = heads.angles if heads.angles is not None else (None, None)
    assert cos is None or cos.is_contiguous(), "rows must be contiguous"
    programs, group, dim = sequences * kv_heads, heads.num_heads // kv_heads, padded_head_dim(head_dim)
    parts = num_splits(programs, step.max_context) if programs <= _MAX_COUNTERS else 1
    several, padded = parts > 1, triton.next_power_of_2(group)
    sums = query.new_empty((programs * group, parts, head_dim), dtype=torch.float32) if several else None
    weights = query.new_empty((programs * group, parts), dtype=torch.float32) if several else None
    scales, scale_stride = (kv.key_scales, kv.value_scales), 0 if kv.key_scales is None else kv.key_scales.stride(0)
    itemsize = kv.keys.itemsize if kv.key_scales is None else query.itemsize  # of what is multiplied
    _attend_decodes[(sequences, kv_heads, parts)](
        heads.product, heads.query_norm, heads.key_norm, heads.value_norm, cos, sin,
        written if heads.num_kv_heads else None, kv.keys, kv.values, *scales,
        step.tables, step.slots, step.lengths, out, sums, weights, _counters(out.device) if several else None,
        query.stride(0), kv.keys.stride(0), kv.keys.stride(1), scale_stride, step.tables.stride(0), heads.eps,
        UNBOUNDED if spec.window is None else spec.window - 1, spec.scale, spec.softcap or 1.0,
        PARTS=parts, GROUP=group, HEAD_DIM=head_dim, ROTATED=0 if cos is None else cos.shape[-1],
        CAPPED=spec.softcap is not None, PAGE=PAGE_TOKENS, NEW=MAX_SEQUENCE_DECODES,
        ROWS=max(16, padded), DIM=dim, TOKENS=key_block_size(dim, itemsize),
        HEADS=padded, MERGED=max(1, min(parts, _MERGED_ELEMENTS // (padded * dim))),
        # FP32 products need more registers than four warps have. With 128 of them four programs share a multiprocessor, and
        # without a limit codes take more.
        num_warps=8 if itemsize > 2 else 4, num_stages=2,
        maxnreg=128 if kv.key_scales is not None and itemsize == 2 and dim <= 128 else None, **launch_options(),
    )  # fmt: skip


@cache
def _counters(device: torch.device) -> Tensor:
    """Return the counters of finished parts, zero before and after each launch; captured steps keep their address.

    The first decodes run before anything is captured, so the memory is that of no captured step.
    """
    return torch.zeros(_MAX_COUNTERS, dtype=torch.int32, device=device)


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
def _attend_decodes(
    product, query_norm, key_norm, value_norm, cos, sin, written, keys, values, key_scales, value_scales,
    tables, slots, lengths, out, sums, weights, counters,
    stride, row_stride, kv_head_stride, scale_stride, table_stride, eps, before, scale, cap,
    PARTS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr, CAPPED: tl.constexpr,
    PAGE: tl.constexpr, NEW: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, MERGED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute one part of one sequence's context for the queries of one KV head.

    The last part has the tokens of this step, whose keys and values come from the product. An empty sequence has one
    part without tokens.
    """
    wait_for_inputs(DEPENDENT)
    sequence, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, slot = tl.load(lengths + sequence), tl.load(slots + sequence)
    first_page = tl.maximum(length - 1 - before, 0) // PAGE
    pages = tl.cdiv(length, PAGE) - first_page
    share = tl.maximum(tl.cdiv(pages, PARTS), 1)  # pages per part
    num_parts = tl.maximum(tl.cdiv(pages, share), 1)
    if part >= num_parts:
        return
    begin = (first_page + part * share) * PAGE
    end = tl.minimum(begin + share * PAGE, length)

    rows, dims, tokens = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, TOKENS)
    in_head = (dims < HEAD_DIM)[None, :]
    mask = (rows < GROUP)[:, None] & in_head
    at_queries = product + sequence.to(tl.int64) * stride + (kv_head * GROUP + rows)[:, None] * HEAD_DIM
    queries = load_heads(
        at_queries, query_norm, cos, sin, sequence * ROTATED, dims[None, :], mask, eps, HEAD_DIM, ROTATED
    ).to(product.dtype.element_ty)
    if key_scales is None:
        queries = queries.to(keys.dtype.element_ty)
    keys, values = keys + kv_head * kv_head_stride, values + kv_head * kv_head_stride
    total = tl.zeros([ROWS], tl.float32)
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    if written is not None:
        # Further decodes of the sequence (draft tokens) are the rows before this one, which write them to the cache.
        back = tl.arange(0, NEW)
        new_rows = sequence - back
        is_new = (new_rows >= 0) & (back < length)
        is_new &= tl.load(slots + new_rows, mask=is_new, other=-1) == slot
        is_new &= tl.load(lengths + new_rows, mask=is_new, other=-1) == length - back
        end = tl.minimum(end, length - tl.sum(is_new.to(tl.int32), 0))
        if part == num_parts - 1:
            total, acc, highest = _attend_new_tokens(
                queries, product, key_norm, value_norm, cos, sin, written, keys, values, key_scales, value_scales,
                new_rows, is_new, stride, row_stride, scale_stride, eps, before, scale, cap, total, acc, highest,
                GROUP, HEAD_DIM, ROTATED, CAPPED, DIM
            )  # fmt: skip

    table = tables + slot.to(tl.int64) * table_stride
    for at in range(begin, end, TOKENS):
        page = tl.load(table + at // PAGE).to(tl.int64)
        at_rows = page * PAGE + at % PAGE + tokens
        in_context = at + tokens < end
        key, value = load_keys_values(keys, values, at_rows, row_stride, row_stride, in_context, dims, HEAD_DIM)
        key_scale = None
        value_scale = None
        if key_scales is not None:
            scaled_rows = at_rows * scale_stride + kv_head
            key, value, key_scale, value_scale = dequantized(
                key, value, queries, key_scales, value_scales, scaled_rows, in_context
            )
        seen = in_context & (at + tokens >= length - 1 - before)
        total, acc, highest = _attend_tokens(
            queries, key, value, key_scale, value_scale, seen, total, acc, highest, scale, cap, CAPPED
        )

    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    group = sequence.to(tl.int64) * tl.num_programs(1) + kv_head
    place = group * GROUP + rows
    at_out = out + place[:, None] * HEAD_DIM + dims[None, :]
    tl.store(at_out, result.to(out.dtype.element_ty), mask=mask & (num_parts == 1))
    if PARTS > 1:
        at_weights = place * PARTS + part
        tl.store(sums + at_weights[:, None] * HEAD_DIM + dims[None, :], result, mask=mask & (num_parts > 1))
        weight = highest + tl.log2(tl.where(total == 0.0, 1.0, total))
        tl.store(weights + at_weights, weight, mask=(rows < GROUP) & (num_parts > 1))
        _merge_if_last(
            sums, weights, counters + group, out, group * GROUP, num_parts, PARTS, GROUP, HEADS, HEAD_DIM, DIM, MERGED
        )


@triton.jit
def _attend_new_tokens(
    queries, product, key_norm, value_norm, cos, sin, written, keys, values, key_scales, value_scales,
    rows, is_new, stride, row_stride, scale_stride, eps, before, scale, cap, total, acc, highest,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr, CAPPED: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Update the running softmax by the sequence's tokens of this step, its own and those before it, and write its own.

    They are rows `rows` of the product, the own first, where `is_new`.
    """
    kv_head, kv_heads = tl.program_id(1), tl.num_programs(1)
    back, dims = tl.arange(0, rows.shape[0]), tl.arange(0, DIM)[None, :]
    mask = is_new[:, None] & (dims < HEAD_DIM)
    source = product + rows.to(tl.int64)[:, None] * stride + (kv_heads * GROUP + kv_head) * HEAD_DIM
    angles = tl.where(is_new, rows * ROTATED, 0)[:, None]
    key = load_heads(source, key_norm, cos, sin, angles, dims, mask, eps, HEAD_DIM, ROTATED)
    value = load_heads(source + kv_heads * HEAD_DIM, value_norm, None, None, 0, dims, mask, eps, HEAD_DIM, 0)
    key, value = key.to(product.dtype.element_ty), value.to(product.dtype.element_ty)
    row = tl.load(written + rows, mask=is_new, other=0)[:, None]
    at_own, mask_own = row * row_stride + dims, mask & (back == 0)[:, None]
    key_scale = None
    value_scale = None
    if key_scales is None:
        key, value = key.to(keys.dtype.element_ty), value.to(values.dtype.element_ty)
        tl.store(keys + at_own, key, mask=mask_own)
        tl.store(values + at_own, value, mask=mask_own)
    else:
        key, value = key.to(tl.float32), value.to(tl.float32)
        at_scale = row * scale_stride + kv_head
        key, key_scale = store_codes(keys + at_own, key_scales + at_scale, key, mask, mask_own)
        value, value_scale = store_codes(values + at_own, value_scales + at_scale, value, mask, mask_own)
        key, value = key.to(queries.dtype), value.to(queries.dtype)
    seen = is_new & (back <= before)
    return _attend_tokens(
        queries, tl.trans(key), value, key_scale, value_scale, seen, total, acc, highest, scale, cap, CAPPED
    )


@triton.jit
def _attend_tokens(
    queries, key, value, key_scale, value_scale, seen, total, acc, highest, scale, cap, CAPPED: tl.constexpr
):  # fmt: skip
    """Update the running softmax by keys [dim, tokens] and values [tokens, dim], of which those `seen` count."""
    scores = tl.dot(queries, key, input_precision="ieee")
    if key_scale is not None:
        scores = scores * key_scale[None, :]
    scores = scale_scores(scores, scale, cap, CAPPED)
    scores = tl.where(seen[None, :], scores, -float("inf"))
    return update_softmax(total, acc, highest, scores, value, value_scale)


@triton.jit
def _merge_if_last(
    sums, weights, counter, out, place, num_parts,
    PARTS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    MERGED: tl.constexpr,
):  # fmt: skip
    """Count a part whose sums are stored; if it is the last one, merge the parts of all heads from row `place` of `out` on.

    Parts without tokens have weight zero.
    """
    if num_parts == 1:
        return
    # All threads of this program have stored their sums before one of them counts.
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") < num_parts - 1:
        return
    tl.store(counter, 0)
    heads, parts, some, dims = tl.arange(0, HEADS), tl.arange(0, PARTS), tl.arange(0, MERGED), tl.arange(0, DIM)
    in_group, in_head = (heads < GROUP)[:, None], dims < HEAD_DIM
    first = (place + heads)[:, None] * PARTS
    weight = tl.load(
        weights + first + parts[None, :], mask=in_group & (parts < num_parts)[None, :], other=-float("inf")
    )
    highest = tl.max(weight, 1)[:, None]
    highest = tl.where(highest == -float("inf"), 0.0, highest)
    total = tl.sum(tl.exp2(weight - highest), 1)[:, None]
    acc = tl.zeros([HEADS, MERGED, DIM], tl.float32)
    for at in range(0, num_parts, MERGED):
        mask = in_group & (at + some < num_parts)[None, :]
        part = first + at + some[None, :]
        powers = tl.exp2(tl.load(weights + part, mask=mask, other=-float("inf")) - highest)
        at_sums = sums + part[:, :, None] * HEAD_DIM + dims[None, None, :]
        acc += tl.load(at_sums, mask=mask[:, :, None] & in_head[None, None, :], other=0.0) * powers[:, :, None]
    result = tl.sum(acc, 1) / tl.where(total == 0.0, 1.0, total)
    at_out = out + (place + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(at_out, result.to(out.dtype.element_ty), mask=in_group & in_head[None, :])
