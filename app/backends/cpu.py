"""x86 and Arm processors: one file, since only data differs. Threads and pinning, and ragged attention by our kernels or torch's own.

Ours serve where they suit (kernels/attention.py). Torch's flash kernel has no way to say "window" or "soft cap", and is causal only
where queries and keys begin together; so a context is cut into parts that it can do, and the parts are merged by their log-sum-exp.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from app.backends.base import AttentionRow, Segment, segments_of, with_segments
from app.backends.reference import capped, visible
from app.errors import PlanImpossible
from app.hardware.plan import ServingPlan
from app.hardware.probe import probe
from app.kernels import attention as native_attention
from app.kernels.attention import Row, Step, between
from app.kernels.kv_rows import KVRows
from app.models.context import AttentionSpec

# query, key, value [1, heads or kv_heads, tokens, head_dim] with any strides, nothing is copied; returns the result and, in float32,
# the log-sum-exp of each row's scores. The same schema, and fewer kv_heads than heads, in torch 2.10 and 2.13 (tested).
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

_MASKED_QUERIES = 256  # queries that share one mask: its size is this times the context (or the window)
_PART = 4096  # tokens of a long context whose keys and values are seen at a time
_EXPLICIT_SCORES = 2**22  # scores held at once where they are written out: 16 MiB in float32

Masked = Callable[[Tensor, Segment, Tensor, AttentionSpec], Tensor]


class CpuBackend:
    """One process, one pool of compute threads, which belongs to the thread that calls `configure`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.device = torch.device("cpu")
        self.dtype = dtype

    def configure(self, plan: ServingPlan) -> None:
        """Pins first, sizes then: libgomp makes its pool at the first parallel region, and new threads inherit their maker's affinity.

        The calling thread's mask is narrowed, not the process's: the event loop and the tokenizers stay where they may run.
        """
        _pin(plan.cpu_ids.value)
        torch.set_num_threads(plan.threads.value)
        if torch.get_num_interop_threads() != plan.interop_threads.value:  # torch lets it be set once
            torch.set_num_interop_threads(plan.interop_threads.value)

    def free_bytes(self) -> int:
        """What this process could take without swapping, its control group's limit counted. It probes the machine: not for every step."""
        return probe().usable_bytes

    def attention(self, query: Tensor, kv: KVRows, step: Step, spec: AttentionSpec) -> Tensor:
        """Causal attention of query [tokens, heads, head_dim] over the rows of one layer that the step says; result like query."""
        if not native_attention.suits(query, kv):
            return torch_attention(query, [with_segments(row, kv) for row in step.rows], spec)
        result = native_attention.attention(query, kv, step, spec.scale, spec.window, spec.softcap)
        for row in step.rows:
            if not native_attention.takes(row, query, kv):
                own = slice(row.first, row.first + row.num_tokens)
                result[own] = _prompt(query[own], row, kv, spec)
        return result

    def synchronize(self) -> None:
        """A processor has done what was asked when the call returns."""


def torch_attention(query: Tensor, rows: Rows[AttentionRow], spec: AttentionSpec) -> Tensor:
    """As `CpuBackend.attention`, by torch's kernels: FP32, and processors that ours have no instructions for."""
    tokens, heads, head_dim = query.shape
    kv_heads = rows[0].segments[0].key.shape[1]
    grouped = query.to(rows[0].segments[0].key.dtype).reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    results = []
    for row in rows:
        queries = grouped.narrow(0, row.first, row.num_tokens)
        if spec.softcap is not None:
            step = max(1, _EXPLICIT_SCORES // (heads * (row.start + row.num_tokens)))
            results.append(_blockwise(queries, row, spec, _explicit, step))
        elif row.num_tokens == 1:
            results.append(_one_token(queries, row, spec))
        elif spec.window is not None and row.start + row.num_tokens > spec.window:
            results.append(_blockwise(queries, row, spec, _masked_flash, _MASKED_QUERIES))
        else:
            own = _between(row.segments, row.start, row.start + row.num_tokens)
            assert len(own) == 1, "a step's own tokens lie in one segment"
            results.append(_chunk(queries, _between(row.segments, 0, row.start), own[0], spec.scale))
    result = results[0] if len(results) == 1 else torch.cat(results)
    return result.reshape(tokens, heads, head_dim).to(query.dtype)


def _prompt(query: Tensor, row: Row, kv: KVRows, spec: AttentionSpec) -> Tensor:
    """One sequence's queries [tokens, heads, head_dim] by torch. What codes of int8 mean is held of no more than is seen, or of a part."""
    end = row.start + row.num_tokens
    if spec.window is not None or spec.softcap is not None:
        low = 0 if spec.window is None else max(0, row.start + 1 - spec.window)
        seen = replace(row, first=0, runs=between(row.runs, low, end))
        return torch_attention(query, [with_segments(seen, kv)], spec)
    parts = (between(row.runs, at, min(at + _PART, row.start)) for at in range(0, row.start, _PART))
    past = (segment for runs in parts for segment in segments_of(runs, kv))
    (own,) = segments_of(between(row.runs, row.start, end), kv)
    return _chunk(query.reshape(len(query), own.key.shape[1], -1, query.shape[2]), past, own, spec.scale).reshape(query.shape)


def _pin(cpu_ids: tuple[int, ...]) -> None:
    if not cpu_ids:
        return
    try:
        os.sched_setaffinity(0, cpu_ids)  # 0: the calling thread
    except (AttributeError, OSError) as error:
        raise PlanImpossible(f"The compute threads cannot be pinned to CPUs {list(cpu_ids)}: {error}.") from error


def _one_token(queries: Tensor, row: AttentionRow, spec: AttentionSpec) -> Tensor:
    """queries [1, kv_heads, group, head_dim], and so the result: the query heads of one kv head are the rows of one product.

    All they can see is in the past, so nothing is masked and a window is a shorter context.
    """
    group = queries.shape[2]
    if group == 1 and queries.dtype == torch.bfloat16:
        queries = queries.repeat(
            1, 1, 2, 1
        )  # a product of one bfloat16 row is four times as slow as one of two (torch 2.13, x86)
    low = 0 if spec.window is None else max(0, row.start + 1 - spec.window)
    parts = [_attend(queries, segment, spec.scale) for segment in _between(row.segments, low, row.start + 1)]
    return _merged(parts)[:, :, :group]


def _chunk(queries: Tensor, past: Iterable[Segment], own: Segment, scale: float) -> Tensor:
    """queries [tokens, kv_heads, group, head_dim], and so the result: the past is seen whole, the chunk itself causally."""
    heads = queries.flatten(1, 2).transpose(0, 1).unsqueeze(0)  # [1, heads, tokens, head_dim]
    seen = (_attend(heads, segment, scale) for segment in past)
    return _merged(chain(seen, [_attend(heads, own, scale, is_causal=True)])).squeeze(0).transpose(0, 1).reshape(queries.shape)


def _attend(queries: Tensor, segment: Segment, scale: float, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    key, value = segment.key.transpose(0, 1).unsqueeze(0), segment.value.transpose(0, 1).unsqueeze(0)
    result: tuple[Tensor, Tensor] = _flash(queries, key, value, 0.0, is_causal, scale=scale)
    return result


def _merged(parts: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Softmax over several parts of a context from the parts' own: each weighs as the exponential of its log-sum-exp."""
    left = iter(parts)
    result, logsumexp = next(left)
    dtype = result.dtype
    for other, other_logsumexp in left:
        share = torch.sigmoid(other_logsumexp - logsumexp).unsqueeze(-1)
        result = torch.lerp(result.float(), other.float(), share)
        logsumexp = torch.logaddexp(logsumexp, other_logsumexp)
    return result.to(dtype)


def _blockwise(queries: Tensor, row: AttentionRow, spec: AttentionSpec, masked: Masked, step: int) -> Tensor:
    """`step` queries at a time over all that any of them sees, with a mask. queries, result [tokens, kv_heads, group, head_dim]."""
    end = row.start + row.num_tokens
    results = []
    for first in range(row.start, end, step):
        last = min(first + step, end)
        low = 0 if spec.window is None else max(0, first + 1 - spec.window)
        mask = visible(torch.arange(first, last), torch.arange(low, last), spec.window)
        context = _joined(_between(row.segments, low, last))
        results.append(masked(queries[first - row.start : last - row.start], context, mask, spec))
    return torch.cat(results)


def _masked_flash(queries: Tensor, context: Segment, mask: Tensor, spec: AttentionSpec) -> Tensor:
    heads = queries.flatten(1, 2).transpose(0, 1).unsqueeze(0)
    bias = torch.zeros(mask.shape, dtype=queries.dtype).masked_fill_(~mask, -torch.inf)
    key, value = context.key.transpose(0, 1).unsqueeze(0), context.value.transpose(0, 1).unsqueeze(0)
    result: Tensor = _flash(heads, key, value, 0.0, False, attn_mask=bias, scale=spec.scale)[0]
    return result.squeeze(0).transpose(0, 1).reshape(queries.shape)


def _explicit(queries: Tensor, context: Segment, mask: Tensor, spec: AttentionSpec) -> Tensor:
    """Scores written out in float32: the only way to bend them before the softmax."""
    scores = torch.einsum("qkgd,ckd->kgqc", queries.float(), context.key.float()).mul_(spec.scale)
    weights = capped(scores, spec.softcap).masked_fill_(~mask, -torch.inf).softmax(-1)
    return torch.einsum("kgqc,ckd->qkgd", weights, context.value.float()).to(queries.dtype)


def _between(segments: Rows[Segment], start: int, end: int) -> list[Segment]:
    """The parts of these segments at positions `[start, end)`, as views."""
    parts = []
    for segment in segments:
        low, high = max(start, segment.position), min(end, segment.position + len(segment.key))
        if (low, high - low) == (segment.position, len(segment.key)):
            parts.append(segment)
        elif low < high:
            offset = low - segment.position
            parts.append(Segment(segment.key.narrow(0, offset, high - low), segment.value.narrow(0, offset, high - low), low))
    return parts


def _joined(segments: list[Segment]) -> Segment:
    if len(segments) == 1:
        return segments[0]
    keys, values = [segment.key for segment in segments], [segment.value for segment in segments]
    return Segment(torch.cat(keys), torch.cat(values), segments[0].position)
