"""Attention of sequences that decode, on a GPU: a query each, keys and values in pages (kernels/paged.py).

The queries of a head of keys are the rows of one product, so that keys and values are read once. A context is cut into parts, as many as
keep the device busy, which are merged by their log-sum-exp. How many depends on the bucket and the heads alone: a graph that was recorded
once serves any length. Prompts are prompts.py's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.kernels.kv_rows import KVRows
from app.kernels.paged import PAGE_TOKENS, PagedStep
from app.models.context import AttentionSpec

EVERYTHING = 2**30  # a reach beyond every context; positions and reaches together stay within int32
LOG2_E = tl.constexpr(1.4426950408889634)  # what kernels exponentiate is a power of two

_PROGRAMS = 512  # wanted at a time: about four for each multiprocessor of an H200 (132)
_MOST_PARTS = 64
_TILE_BYTES = 2**14  # of keys, and as many of values, at a time: two stages of both fit the 99 KiB of the smallest GPUs served
_UNSTEADY = ("tables", "slots", "lengths")  # views into one block of words: any alignment, and kernels are not compiled for each


def attend_decodes(query: Tensor, kv: KVRows, step: PagedStep, spec: AttentionSpec, out: Tensor) -> None:
    """Writes rows [0, num_decodes) of out, contiguous [tokens, heads, head_dim], from those of query, of any strides but the last."""
    _, heads, head_dim = query.shape
    kv_heads, sequences = kv.keys.shape[1], step.num_decodes
    check(query, kv, out)
    assert kv.keys.stride(0) == kv.values.stride(0), "keys and values of a token lie beside each other"
    parts = num_parts(sequences * kv_heads)
    sums = query.new_empty((sequences, heads, parts, head_dim), dtype=torch.float32) if parts > 1 else out
    weights = query.new_empty((sequences, heads, parts), dtype=torch.float32) if parts > 1 else out
    dim = padded(head_dim)
    _part[(sequences, kv_heads, parts)](
        query, kv.keys, kv.values, step.tables, step.slots, step.lengths, out, sums, weights,
        query.stride(0), query.stride(1), kv.keys.stride(0), kv.keys.stride(1), step.tables.stride(0),
        EVERYTHING if spec.window is None else spec.window - 1, spec.scale, spec.softcap or 1.0,
        PARTS=parts, GROUP=heads // kv_heads, HEAD_DIM=head_dim, CAPPED=spec.softcap is not None, PAGE=PAGE_TOKENS,
        ROWS=max(16, triton.next_power_of_2(heads // kv_heads)), DIM=dim, TOKENS=tokens_at_a_time(dim, kv.keys.itemsize),
        num_warps=8 if kv.keys.itemsize > 2 else 4, num_stages=2,  # FP32 is multiplied out of registers, of which four warps have too few
    )  # fmt: skip
    if parts > 1:
        _merge[(sequences, heads)](sums, weights, out, PARTS=parts, HEAD_DIM=head_dim, DIM=dim, num_warps=4)


def check(query: Tensor, kv: KVRows, out: Tensor) -> None:
    """Our own bugs, said before a kernel reads beyond its tensors."""
    heads, head_dim = query.shape[1:]
    assert kv.key_scales is None, "keys and values of int8 are a processor's"
    assert query.stride(2) == 1 and kv.keys.stride(2) == 1, "kernels read heads from end to end"
    assert kv.keys.stride(1) == kv.values.stride(1) and kv.values.stride(2) == 1, "heads of keys and values lie alike"
    assert heads % kv.keys.shape[1] == 0 and kv.keys.shape[2] == head_dim, "queries in groups, one for each head of keys"
    assert out.is_contiguous() and out.shape == query.shape, "a row for each query"


def padded(head_dim: int) -> int:
    """To a power of two, and to the 16 that are the fewest a product on a GPU sums over; Triton's interpreter takes fewer."""
    return max(16, 1 << (head_dim - 1).bit_length())


def num_parts(programs: int) -> int:
    """Into how many parts each context is cut, where so many programs run for each part."""
    wanted = -(-_PROGRAMS // max(programs, 1))
    return min(_MOST_PARTS, 1 << (wanted - 1).bit_length())


def tokens_at_a_time(dim: int, itemsize: int) -> int:
    """Tokens whose keys are held together; a page has a multiple of them. Products want 16 at the least."""
    return max(16, min(PAGE_TOKENS, _TILE_BYTES // (dim * itemsize)))


@triton.jit
def held(keys, values, rows, key_stride, value_stride, there, dims, HEAD_DIM: tl.constexpr):
    """Keys [dim, tokens] and values [tokens, dim] of one head at `rows` int64; zeros for what is not there, whatever lies in its place."""
    wanted = dims < HEAD_DIM
    key = tl.load(keys + rows[None, :] * key_stride + dims[:, None], mask=there[None, :] & wanted[:, None], other=0.0)
    value = tl.load(values + rows[:, None] * value_stride + dims[None, :], mask=there[:, None] & wanted[None, :], other=0.0)
    return key, value


@triton.jit
def bent(scores, scale, cap, CAPPED: tl.constexpr):
    """Scores scaled, and bounded where they are, as powers of two want them. tanh(x) = 1 - 2 / (exp(2x) + 1), at both ends too."""
    if CAPPED:
        return (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E * scale / cap)) + 1.0)) * (cap * LOG2_E)
    return scores * (scale * LOG2_E)


@triton.jit
def absorbed(total, sums, highest, scores, value):
    """The running softmax after some more scores [rows, tokens], of which those that are not seen are -inf, and values [tokens, dim].

    What is not a number stays so: the largest of scores forgets it, the sum of their powers does not.
    """
    now = tl.maximum(highest, tl.max(scores, 1))
    base = tl.where(now == -float("inf"), 0.0, now)  # nothing seen yet
    powers = tl.exp2(scores - base[:, None])
    kept = tl.exp2(highest - base)
    total = total * kept + tl.sum(powers, 1)
    sums = tl.dot(powers.to(value.dtype), value, sums * kept[:, None], input_precision="ieee")
    return total, sums, now


@triton.jit(do_not_specialize_on_alignment=_UNSTEADY)
def _part(
    query, keys, values, tables, slots, lengths, out, sums, weights,
    query_stride, head_stride, row_stride, kv_head_stride, table_stride,
    before, scale, cap,
    PARTS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, CAPPED: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One part of one sequence's context, for the queries of one head of keys. A sequence without context has parts without tokens."""
    sequence, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    table = tables + tl.load(slots + sequence).to(tl.int64) * table_stride
    first_page = tl.maximum(length - 1 - before, 0) // PAGE
    share = tl.cdiv(tl.cdiv(length, PAGE) - first_page, PARTS)  # pages a part
    begin = (first_page + part * share) * PAGE
    end = tl.minimum(begin + share * PAGE, length)

    rows, dims, tokens = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, TOKENS)
    wanted = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + rows
    own = sequence.to(tl.int64) * query_stride + heads[:, None] * head_stride + dims[None, :]
    queries = tl.load(query + own, mask=wanted, other=0.0).to(keys.dtype.element_ty)
    kv_offset = kv_head * kv_head_stride
    total = tl.zeros([ROWS], tl.float32)
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for at in range(begin, end, TOKENS):
        page = tl.load(table + at // PAGE).to(tl.int64)
        at_rows = page * PAGE + at % PAGE + tokens
        there = at + tokens < end
        key, value = held(keys + kv_offset, values + kv_offset, at_rows, row_stride, row_stride, there, dims, HEAD_DIM)
        scores = bent(tl.dot(queries, key, input_precision="ieee"), scale, cap, CAPPED)
        seen = there & (at + tokens >= length - 1 - before)
        scores = tl.where(seen[None, :], scores, -float("inf"))
        total, acc, highest = absorbed(total, acc, highest, scores, value)

    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = sequence.to(tl.int64) * tl.num_programs(1) * GROUP + heads
    if PARTS == 1:
        tl.store(out + place[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=wanted)
    else:
        tl.store(sums + (place * PARTS + part)[:, None] * HEAD_DIM + dims[None, :], result, mask=wanted)
        tl.store(weights + place * PARTS + part, highest + tl.log2(tl.where(total == 0.0, 1.0, total)), mask=rows < GROUP)


@triton.jit
def _merge(sums, weights, out, PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Parts of one head of one sequence to its result. Parts without tokens weigh nothing."""
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
