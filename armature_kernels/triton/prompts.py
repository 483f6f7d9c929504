"""Attention of many queries per sequence on a GPU: prompts over a paged KV cache, and packed texts.

Prompts may have cached context before them. Each block of queries loops over the keys that any of its queries
sees. Windows to both sides, soft caps and distance biases are supported in every dtype. Torch's flash attention is
faster where it applies. For it, `gather_fresh_kv` copies prompts out of their pages.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from armature_kernels.attention.attention import KvRows
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.paged import PAGE_TOKENS, PackedTexts, PagedStep
from armature_kernels.triton.attention import (
    LOG2_E,
    UNBOUNDED,
    check_layout,
    dequantized,
    key_block_size,
    load_keys_values,
    padded_head_dim,
    scale_scores,
    update_softmax,
)
from armature_kernels.triton.launch import launch_options, wait_for_inputs

_UNALIGNED = ("tables", "slots", "starts", "lengths")  # see the decode kernels


def attend_prompts(query: Tensor, kv: KvRows, step: PagedStep, spec: AttentionSpec, out: Tensor) -> None:
    """Write the attention of all rows that are not decodes to `out`, contiguous [tokens, heads, head_dim].

    Each query sees its context up to its own position.
    """
    check_layout(query, kv, out)
    pages = (step.tables, step.slots, step.starts, step.lengths)
    _launch(query, kv, pages, spec, out, (step.max_queries, step.num_decodes))


def attend_packed(query: Tensor, key: Tensor, value: Tensor, texts: PackedTexts, spec: AttentionSpec) -> Tensor:
    """Compute attention within each of several packed texts; rows between texts are zero.

    `query` and the result are [tokens, heads, head_dim]. `key` and `value` are [tokens, kv_heads, head_dim].
    """
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    kv = KvRows(key, value, 0)
    check_layout(query, kv, out)
    _launch(query, kv, (None, None, texts.starts, None), spec, out, (texts.most_tokens, 0))
    return out


def gather_fresh_kv(kv: KvRows, step: PagedStep, tokens: int) -> tuple[Tensor, Tensor]:
    """Copy keys and values of this step's prompts from their pages to [tokens, kv_heads, head_dim] in batch order.

    Rows of decodes are not initialised.
    """
    _, kv_heads, head_dim = kv.keys.shape
    assert step.fresh and kv.keys.stride() == kv.values.stride() and kv.keys.stride(2) == 1, (
        "prompts must begin in this step, and their rows must be contiguous"
    )
    key, value = (kv.keys.new_empty((tokens, kv_heads, head_dim)) for _ in range(2))
    grid = (triton.cdiv(step.max_queries, PAGE_TOKENS), kv_heads, len(step.slots) - step.num_decodes)
    _gather[grid](
        kv.keys, kv.values, key, value, step.tables, step.slots, step.starts, step.num_decodes,
        kv.keys.stride(0), kv.keys.stride(1), step.tables.stride(0),
        HEAD_DIM=head_dim, DIM=triton.next_power_of_2(head_dim), PAGE=PAGE_TOKENS, num_warps=4,
        **launch_options(),
    )  # fmt: skip
    return key, value


def query_block_size(dim: int, itemsize: int) -> int:
    """Return the number of queries per block, limited so that sums and queries fit in registers."""
    if itemsize > 2:
        return 32
    return 128 if dim <= 128 else 64


def _launch(
    query: Tensor,
    kv: KvRows,
    layout: tuple[Tensor | None, ...],
    spec: AttentionSpec,
    out: Tensor,
    sizes: tuple[int, int],
) -> None:
    """Start the kernel.

    `layout` contains tables, slots, starts and lengths of the sequences. Packed texts have only starts. `sizes`
    contains the most queries of one sequence, and the number of leading sequences to skip.
    """
    tables, slots, starts, lengths = layout
    assert starts is not None, "the starts of the sequences are required"
    heads, head_dim = query.shape[1:]
    kv_heads, (most_queries, skipped), bias = kv.keys.shape[1], sizes, spec.distance_bias
    assert bias is None or (bias.is_contiguous() and bias.dtype == torch.float32 and bias.shape[0] == heads), (
        "the bias must be fp32 with one row per head"
    )
    before, after = spec.visible_window(UNBOUNDED)
    dim = padded_head_dim(head_dim)
    scales, scale_stride = (kv.key_scales, kv.value_scales), 0 if kv.key_scales is None else kv.key_scales.stride(0)
    itemsize = kv.keys.itemsize if kv.key_scales is None else query.itemsize  # of what is multiplied
    block = query_block_size(dim, itemsize)
    # Paged keys need a third stage, because page numbers are read first.
    table_stride, stages = (0, 2) if tables is None else (tables.stride(0), 3)
    stages = stages if bias is None else 1  # a block of biases uses the memory of a stage
    _attend_block[(triton.cdiv(most_queries, block), heads, len(starts) - 1 - skipped)](
        query, kv.keys, kv.values, *scales, out, tables, slots, starts, lengths, bias, skipped,
        query.stride(0), query.stride(1), kv.keys.stride(0), kv.keys.stride(1), kv.values.stride(0), scale_stride, table_stride,
        before, after, spec.scale, spec.softcap or 1.0, 0 if bias is None else bias.shape[1] // 2,
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, CAPPED=spec.softcap is not None, PAGE=PAGE_TOKENS,
        QUERIES=block, DIM=dim, TOKENS=key_block_size(dim, itemsize),
        num_warps=8 if block == 128 or itemsize > 2 else 4, num_stages=stages, **launch_options(),
    )  # fmt: skip


@triton.jit(do_not_specialize=("skipped",), do_not_specialize_on_alignment=_UNALIGNED)
def _attend_block(
    query, keys, values, key_scales, value_scales, out, tables, slots, starts, lengths, bias, skipped,
    query_stride, head_stride, key_stride, kv_head_stride, value_stride, scale_stride, table_stride,
    before, after, scale, cap, most,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, CAPPED: tl.constexpr, PAGE: tl.constexpr,
    QUERIES: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute one block of one sequence's queries for one head; with causal attention long blocks start first."""
    wait_for_inputs(DEPENDENT)
    block, head, sequence = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2) + skipped
    first = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - first
    if block * QUERIES >= count:
        return
    if tables is None:
        length = count
        table = starts  # not read
    else:
        length = tl.load(lengths + sequence)
        table = tables + tl.load(slots + sequence).to(tl.int64) * table_stride
    past = length - count
    places, dims, tokens = block * QUERIES + tl.arange(0, QUERIES), tl.arange(0, DIM), tl.arange(0, TOKENS)
    mask = (places < count)[:, None] & (dims < HEAD_DIM)[None, :]
    rows = (first + places).to(tl.int64)
    query_offsets = rows[:, None] * query_stride + head * head_stride + dims[None, :]
    queries = tl.load(query + query_offsets, mask=mask, other=0.0)
    if key_scales is None:
        queries = queries.to(keys.dtype.element_ty)
    kv_offset = (head // GROUP) * kv_head_stride

    positions = past + places
    low = tl.maximum(past + block * QUERIES - before, 0) // TOKENS * TOKENS
    high = tl.minimum(past + tl.minimum((block + 1) * QUERIES, count) + after, length)
    total = tl.zeros([QUERIES], tl.float32)
    highest = tl.full([QUERIES], -float("inf"), tl.float32)
    acc = tl.zeros([QUERIES, DIM], tl.float32)
    for at in range(low, high, TOKENS):
        if tables is None:
            begin = first.to(tl.int64) + at
        else:
            begin = tl.load(table + at // PAGE).to(tl.int64) * PAGE + at % PAGE
        in_context = at + tokens < length
        key, value = load_keys_values(
            keys + kv_offset, values + kv_offset, begin + tokens, key_stride, value_stride, in_context, dims, HEAD_DIM
        )
        ahead = (at + tokens)[None, :] - positions[:, None]
        value_scale = None
        if key_scales is not None:
            scaled_rows = (begin + tokens) * scale_stride + head // GROUP
            key, value, key_scale, value_scale = dequantized(
                key, value, queries, key_scales, value_scales, scaled_rows, in_context
            )
        scores = tl.dot(queries, key, input_precision="ieee")
        if key_scales is not None:
            scores = scores * key_scale[None, :]
        scores = scale_scores(scores, scale, cap, CAPPED)
        if bias is not None:
            column = most + tl.minimum(tl.maximum(ahead, -most), most)
            scores += tl.load(bias + head * (2 * most + 1) + column) * LOG2_E
        seen = in_context[None, :] & (ahead >= -before) & (ahead <= after)
        scores = tl.where(seen, scores, -float("inf"))
        total, acc, highest = update_softmax(total, acc, highest, scores, value, value_scale)

    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = (rows * tl.num_programs(1) + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("skipped",), do_not_specialize_on_alignment=_UNALIGNED[:3])
def _gather(
    keys, values, key, value, tables, slots, starts, skipped,
    row_stride, kv_head_stride, table_stride,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Copy one page of one sequence and KV head to its tokens' rows of the batch."""
    wait_for_inputs(DEPENDENT)
    number, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2) + skipped
    first = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - first
    if number * PAGE >= count:
        return
    # The sequence that pads a step may have more tokens than a slot has pages, which are all the padding page.
    column = tl.minimum(number, table_stride - 1)
    page = tl.load(tables + tl.load(slots + sequence).to(tl.int64) * table_stride + column).to(tl.int64)
    tokens, dims = tl.arange(0, PAGE), tl.arange(0, DIM)
    mask = (number * PAGE + tokens < count)[:, None] & (dims < HEAD_DIM)[None, :]
    source = (page * PAGE + tokens)[:, None] * row_stride + head * kv_head_stride + dims[None, :]
    target = ((first + number * PAGE + tokens).to(tl.int64) * tl.num_programs(1) + head)[:, None] * HEAD_DIM + dims[
        None, :
    ]
    tl.store(key + target, tl.load(keys + source, mask=mask), mask=mask)
    tl.store(value + target, tl.load(values + source, mask=mask), mask=mask)
