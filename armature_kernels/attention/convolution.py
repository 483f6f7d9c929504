"""Short convolutions, as in LFM2: each channel is filtered over the last positions of its sequence.

Their inputs are cached like keys and values, a row for each token: the channels are the keys of all heads, then their
values. So a prefix that sequences share, a preempted sequence and a rejected draft token need nothing of their own. A
gate for each channel takes the place of the query.

`csrc/convolve.h` has the kernels of a CPU. The functions whose names end in `_torch` are the reference implementation and
serve elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from armature_kernels.attention.attention import AttentionSequence, AttentionStep, KvRows, supports_kv
from armature_kernels.attention.paged import PAGE_TOKENS, PagedStep
from armature_kernels.linear.activations import ROW_DTYPES
from armature_kernels.native.arguments import ConvolveArguments, ConvolvedRowsArguments, OpCode
from armature_kernels.native.memory import empty
from armature_kernels.native.operations import has_kernel, run_operation

_MAX_HEAD_DIM = 512  # csrc/turn.h


def convolved_rows(x: Tensor) -> Tensor:
    """Return (b, a * c) [tokens, 2 * size] of x = (a, b, c) [tokens, 3 * size]: gates, and what is cached."""
    plain = x.dtype in ROW_DTYPES and x.stride(1) == 1 and x.device.type == "cpu"
    if not (plain and has_kernel(OpCode.CONVOLVED_ROWS)):
        return convolved_rows_torch(x)
    rows, size = len(x), x.shape[1] // 3
    out = empty((rows, 2 * size), x.dtype)
    arguments = ConvolvedRowsArguments(x.data_ptr(), out.data_ptr(), x.stride(0), rows, size, x.dtype == torch.float32)
    run_operation(arguments, out.numel())
    return out


def convolved_rows_torch(x: Tensor) -> Tensor:
    """Compute the rows by torch."""
    first, second, third = x.chunk(3, -1)
    return torch.cat((second, first * third), -1)


def convolve(query: Tensor, kv: KvRows, step: AttentionStep, filters: Tensor) -> Tensor:
    """Return query * the filtered channels, in the shape and dtype of query [tokens, heads, head_dim].

    Args:
        query: The gates; all channels of the cached rows.
        kv: The cached rows of the layer, with those of this step.
        step: The sequences of the step.
        filters: fp32 [width, channels]; the last one is that of a token's own position.
    """
    tokens, blocks, head_dim = query.shape
    plain = supports_kv(query.dtype, kv) and query.stride(2) == 1 and query.stride(1) == head_dim <= _MAX_HEAD_DIM
    if not (plain and has_kernel(OpCode.CONVOLVE)):
        return convolve_torch(query, kv, step.rows, filters)
    out = empty((tokens, blocks, head_dim), query.dtype)
    sizes = (query.stride(0), blocks * head_dim, blocks // 2, head_dim, len(filters), query.dtype == torch.float32)
    addresses = (query.data_ptr(), out.data_ptr(), step.address, kv.addresses(), filters.data_ptr())
    run_operation(ConvolveArguments(*addresses, *sizes))
    return out


def convolve_torch(query: Tensor, kv: KvRows, rows: Sequence[AttentionSequence], filters: Tensor) -> Tensor:
    """Convolve the sequences of a step on a CPU by torch."""
    result, width = torch.empty_like(query), len(filters)
    for row in rows:
        parts = [torch.cat(kv.read(run.first, run.num_tokens), 1).flatten(1).float() for run in row.runs]
        context = torch.cat([parts[0].new_zeros(width - 1, parts[0].shape[1]), *parts])
        windows = context[row.start :].unfold(0, width, 1).transpose(1, 2)
        own = slice(row.first, row.first + row.num_tokens)
        result[own] = (gated(query[own], windows, filters)).to(query.dtype)
    return result


def gated(query: Tensor, windows: Tensor, filters: Tensor) -> Tensor:
    """Return query [tokens, heads, head_dim] times the sums of windows [tokens, width, channels] fp32 times filters."""
    return query.float() * (windows * filters).sum(1).view(query.shape)


def paged_convolve_torch(query: Tensor, kv: KvRows, step: PagedStep, filters: Tensor) -> Tensor:
    """Convolve the sequences of a step over pages; rows of padding have any result."""
    rows, width = torch.arange(len(query), device=query.device), len(filters)
    ends = step.starts[1:].long()
    which = torch.searchsorted(ends, rows, right=True).clamp_(max=len(ends) - 1)
    position = step.lengths[which].long() - ends[which] + rows
    positions = position[:, None] + torch.arange(1 - width, 1, device=query.device)
    at = positions.clamp(0, step.tables.shape[1] * PAGE_TOKENS - 1)
    pages = step.tables[step.slots[which].long()].long().gather(1, at // PAGE_TOKENS)
    cached = pages * PAGE_TOKENS + at % PAGE_TOKENS
    channels = torch.cat((kv.keys[cached], kv.values[cached]), 2).flatten(2).float()
    return gated(query, channels.masked_fill((positions < 0)[..., None], 0.0), filters).to(query.dtype)
