"""Ragged causal attention by PyTorch's kernels, where the native one cannot run, and a reference attention in float32.

PyTorch's flash kernel supports neither a window nor a soft cap, and it is causal only if queries and keys start at the same
position. So the context is cut into parts that it can compute, and the parts are merged by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from armature_kernels.attention.attention import AttentionSequence, KvRows, KvSegment
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.weights import attention_weights

# query, key, value [1, heads or kv_heads, tokens, head_dim] with any strides; nothing is copied. Returns the result
# and, in float32, the log-sum-exp of each row's scores. torch 2.10 and 2.13 (both tested) have this schema and allow
# kv_heads < heads.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

_MASKED_QUERIES = 256  # queries per mask; a mask has this number times the context (or the window) elements

_MAX_SCORE_ELEMENTS = 2**22  # elements of a score matrix that is materialised at once: 16 MiB in float32


@dataclass(frozen=True, slots=True)
class Segment:
    """Contiguous run of one sequence's cached tokens in one layer.

    `key` and `value` are [tokens, kv_heads, head_dim]; the first token is at absolute position `position`.
    """

    key: Tensor
    value: Tensor
    position: int


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One sequence of a ragged batch.

    Its queries are rows `[first, first + num_tokens)` of the batch, at absolute positions from `start`. Its
    context is one or two segments that together cover positions `[0, start + num_tokens)`, the tokens of this step
    included.
    """

    first: int
    num_tokens: int
    start: int
    segments: tuple[Segment, ...]


def attention_row(row: AttentionSequence, kv: KvRows) -> AttentionRow:
    """Return the attention row of a sequence with its context in one layer."""
    return AttentionRow(row.first, row.num_tokens, row.start, context_segments(row.runs, kv))


def context_segments(runs: Iterable[KvSegment], kv: KvRows) -> tuple[Segment, ...]:
    """Return the keys and values of one layer for these runs: views, or dequantized copies of an int8 KV cache."""
    return tuple(Segment(*kv.read(run.first, run.num_tokens), run.position) for run in runs)


# Takes queries, their context, and for each query and key the key's position minus the query's.
MaskedAttention = Callable[[Tensor, Segment, Tensor, AttentionSpec], Tensor]


def torch_attention(query: Tensor, rows: Rows[AttentionRow], spec: AttentionSpec) -> Tensor:
    """Compute causal attention over the rows of one layer with PyTorch's kernels.

    Used without the native library, and for heads that its kernels do not support.
    """
    tokens, heads, head_dim = query.shape
    kv_heads = rows[0].segments[0].key.shape[1]
    grouped = query.to(rows[0].segments[0].key.dtype).reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    results = []
    for row in rows:
        queries = grouped.narrow(0, row.first, row.num_tokens)
        if not spec.has_plain_scores:
            step = max(1, _MAX_SCORE_ELEMENTS // (heads * (row.start + row.num_tokens)))
            results.append(_blockwise_attention(queries, row, spec, _materialised_attention, step))
        elif row.num_tokens == 1:
            results.append(_decode_attention(queries, row, spec))
        elif spec.window is not None and row.start + row.num_tokens > spec.window:
            results.append(_blockwise_attention(queries, row, spec, _masked_flash_attention, _MASKED_QUERIES))
        else:
            own = _segments_between(row.segments, row.start, row.start + row.num_tokens)
            assert len(own) == 1, "the tokens of a step are in one segment"
            results.append(_chunk_attention(queries, _segments_between(row.segments, 0, row.start), own[0], spec.scale))
    result = results[0] if len(results) == 1 else torch.cat(results)
    return result.reshape(tokens, heads, head_dim).to(query.dtype)


def _decode_attention(queries: Tensor, row: AttentionRow, spec: AttentionSpec) -> Tensor:
    """Compute the attention of one token; `queries` and the result are [1, kv_heads, group, head_dim].

    The query heads of one kv head are the rows of one product. Every cached token is visible, so no mask is
    needed, and a window is a shorter context.
    """
    group = queries.shape[2]
    if group == 1 and queries.dtype == torch.bfloat16:
        queries = queries.repeat(
            1, 1, 2, 1
        )  # a product with one bfloat16 row takes four times as long as one with two (torch 2.13, x86)
    low = 0 if spec.window is None else max(0, row.start + 1 - spec.window)
    parts = [_attend(queries, segment, spec.scale) for segment in _segments_between(row.segments, low, row.start + 1)]
    return _merge_parts(parts)[:, :, :group]


def _chunk_attention(queries: Tensor, past: Iterable[Segment], own: Segment, scale: float) -> Tensor:
    """Compute the attention of a prompt chunk; `queries` and the result are [tokens, kv_heads, group, head_dim].

    The tokens of `past` are visible to every query; attention within the chunk is causal.
    """
    heads = queries.flatten(1, 2).transpose(0, 1).unsqueeze(0)  # [1, heads, tokens, head_dim]
    seen = (_attend(heads, segment, scale) for segment in past)
    return (
        _merge_parts(chain(seen, [_attend(heads, own, scale, is_causal=True)]))
        .squeeze(0)
        .transpose(0, 1)
        .reshape(queries.shape)
    )


def _attend(queries: Tensor, segment: Segment, scale: float, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    key, value = segment.key.transpose(0, 1).unsqueeze(0), segment.value.transpose(0, 1).unsqueeze(0)
    result: tuple[Tensor, Tensor] = _flash(queries, key, value, 0.0, is_causal, scale=scale)
    return result


def _merge_parts(parts: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Merge the softmax results of several parts of a context.

    Each part is weighted by the exponential of its log-sum-exp.
    """
    remaining = iter(parts)
    result, logsumexp = next(remaining)
    dtype = result.dtype
    for other, other_logsumexp in remaining:
        share = torch.sigmoid(other_logsumexp - logsumexp).unsqueeze(-1)
        result = torch.lerp(result.float(), other.float(), share)
        logsumexp = torch.logaddexp(logsumexp, other_logsumexp)
    return result.to(dtype)


def _blockwise_attention(
    queries: Tensor, row: AttentionRow, spec: AttentionSpec, masked: MaskedAttention, step: int
) -> Tensor:
    """Compute masked attention for `step` queries at a time over the context that any of them sees.

    `queries` and the result are [tokens, kv_heads, group, head_dim].
    """
    end = row.start + row.num_tokens
    results = []
    for first in range(row.start, end, step):
        last = min(first + step, end)
        low = 0 if spec.window is None else max(0, first + 1 - spec.window)
        ahead = torch.arange(low, last) - torch.arange(first, last).unsqueeze(1)
        context = _join_segments(_segments_between(row.segments, low, last))
        results.append(masked(queries[first - row.start : last - row.start], context, ahead, spec))
    return torch.cat(results)


def _masked_flash_attention(queries: Tensor, context: Segment, ahead: Tensor, spec: AttentionSpec) -> Tensor:
    return _flash_of_seen(queries, context, is_seen(ahead, spec.window), spec)


def _flash_of_seen(queries: Tensor, context: Segment, seen: Tensor, spec: AttentionSpec) -> Tensor:
    heads = queries.flatten(1, 2).transpose(0, 1).unsqueeze(0)
    bias = torch.zeros(seen.shape, dtype=queries.dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
    key, value = context.key.transpose(0, 1).unsqueeze(0), context.value.transpose(0, 1).unsqueeze(0)
    result: Tensor
    if heads.is_cpu:
        result = _flash(heads, key, value, 0.0, False, attn_mask=bias, scale=spec.scale)[0]
    else:
        result = scaled_dot_product_attention(heads, key, value, bias, scale=spec.scale, enable_gqa=True)
    return result.squeeze(0).transpose(0, 1).reshape(queries.shape)


def _materialised_attention(queries: Tensor, context: Segment, ahead: Tensor, spec: AttentionSpec) -> Tensor:
    """Materialise the scores in float32, which is the only method if they are not plain, and compute the attention."""
    return _materialised_of_seen(queries, context, ahead, is_seen(ahead, spec.window), spec)


def _materialised_of_seen(
    queries: Tensor, context: Segment, ahead: Tensor, seen: Tensor, spec: AttentionSpec
) -> Tensor:
    scores = torch.einsum("qkgd,ckd->kgqc", queries.float(), context.key.float()).mul_(spec.scale)
    weights = attention_weights(scores.flatten(0, 1), ahead, seen, spec).view(scores.shape)
    return torch.einsum("kgqc,ckd->qkgd", weights, context.value.float()).to(queries.dtype)


@dataclass(frozen=True, slots=True)
class BlockRow:
    """Tokens of a sequence in the block of positions `[block[0], block[1])`, whose tokens see each other.

    They are rows `[first, first + num_tokens)` of the batch, at positions from `start` to the block's end.
    """

    first: int
    num_tokens: int
    start: int
    block: tuple[int, int]
    runs: tuple[KvSegment, ...]


def attend_in_blocks(query: Tensor, kv: KvRows, blocks: Iterable[BlockRow], spec: AttentionSpec, out: Tensor) -> None:
    """Overwrite the rows of blocks in `out` [tokens, heads, head_dim], which causal attention computed.

    A token sees the tokens before it and all of its block, except those that are before its window.
    """
    heads, head_dim = query.shape[1:]
    for row in blocks:
        end = row.start + row.num_tokens
        low = 0 if spec.window is None else max(0, row.start + 1 - spec.window)
        context = _join_segments(_segments_between(context_segments(row.runs, kv), low, end))
        own = query[row.first : row.first + row.num_tokens].to(context.key.dtype)
        queries = own.view(row.num_tokens, context.key.shape[1], -1, head_dim)
        keys = torch.arange(low, end, device=query.device)
        ahead = keys - keys[row.start - low :].unsqueeze(1)
        seen = (ahead <= 0) | (keys >= row.block[0])
        seen &= ahead > -(spec.window or end + 1)
        result = (
            _flash_of_seen(queries, context, seen, spec)
            if spec.has_plain_scores
            else _materialised_of_seen(queries, context, ahead, seen, spec)
        )
        out[row.first : row.first + row.num_tokens] = result.reshape(row.num_tokens, heads, head_dim)


def _segments_between(segments: Rows[Segment], start: int, end: int) -> list[Segment]:
    """Return the parts of these segments at positions `[start, end)`, as views."""
    parts = []
    for segment in segments:
        low, high = max(start, segment.position), min(end, segment.position + len(segment.key))
        if (low, high - low) == (segment.position, len(segment.key)):
            parts.append(segment)
        elif low < high:
            offset = low - segment.position
            parts.append(
                Segment(segment.key.narrow(0, offset, high - low), segment.value.narrow(0, offset, high - low), low)
            )
    return parts


def _join_segments(segments: list[Segment]) -> Segment:
    if len(segments) == 1:
        return segments[0]
    keys, values = [segment.key for segment in segments], [segment.value for segment in segments]
    return Segment(torch.cat(keys), torch.cat(values), segments[0].position)


def reference_attention(query: Tensor, rows: Rows[AttentionRow], spec: AttentionSpec) -> Tensor:
    """Compute the same attention with a float32 result [tokens, heads, head_dim]."""
    result = torch.empty(query.shape, dtype=torch.float32)
    for row in rows:
        key = torch.cat([segment.key for segment in row.segments]).float()  # [context, kv_heads, head_dim]
        value = torch.cat([segment.value for segment in row.segments]).float()
        group = query.shape[1] // key.shape[1]
        ahead = torch.arange(len(key)) - torch.arange(row.start, row.start + row.num_tokens).unsqueeze(1)
        hidden = ~is_seen(ahead, spec.window)
        for head in range(query.shape[1]):
            queries = query[row.first : row.first + row.num_tokens, head].float()
            scores = apply_softcap(queries @ key[:, head // group].T * spec.scale, spec.softcap)
            scores += 0.0 if spec.slopes is None else spec.slopes[head] * ahead
            scores.masked_fill_(hidden, -torch.inf)
            total = scores.logsumexp(-1, keepdim=True)
            total = total if spec.sinks is None else torch.logaddexp(total, spec.sinks[head])
            weights = (scores - total).exp()
            result[row.first : row.first + row.num_tokens, head] = weights @ value[:, head // group]
    return result


def is_seen(ahead: Tensor, window: int | None) -> Tensor:
    """Return True for each key that its query sees; `ahead` is the key's position minus the query's.

    A token sees itself and the tokens before it; with `window`, at most `window` tokens in all.
    """
    return ahead <= 0 if window is None else (ahead <= 0) & (ahead > -window)


def apply_softcap(scores: Tensor, softcap: float | None) -> Tensor:
    """Return the scores smoothly bounded to (-softcap, softcap); unchanged if `softcap` is None."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap
