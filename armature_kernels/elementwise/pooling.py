"""Pooling of packed texts to one vector each, and vectors of unit length, each with its PyTorch reference.

The native kernel adds the rows of a text in their order, like the reference. torch's two calls took 181 and 110 us for
one text of 12 tokens whose forward pass took 1,200: they start a pool of threads and look for kernels of any layout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from armature_kernels.native.arguments import OpCode, PoolArguments
from armature_kernels.native.memory import empty
from armature_kernels.native.operations import has_kernel, run_operation

SUM, MEAN = 0, 1  # modes, equal to those of torch.embedding_bag


def pool_rows(hidden: Tensor, starts: Tensor, mode: int, skipped: Tensor | None = None) -> Tensor:
    """Return the sum or mean of the rows of each text, FP32 [texts, size].

    hidden is FP32 [tokens, size]. Text i is rows [starts[i], starts[i + 1]), without its first `skipped` [texts] rows
    (None: all count); starts is int64 [texts + 1]. A text of which no row counts becomes zeros.
    """
    if not _is_native(hidden):
        return pool_rows_torch(hidden, starts, mode, skipped)
    starts, skipped = starts.contiguous(), None if skipped is None else skipped.contiguous()
    out = empty((len(starts) - 1, hidden.shape[1]), torch.float32)
    _run(hidden, out, starts, skipped, mean=mode == MEAN, unit=False)
    return out


def pool_rows_torch(
    hidden: Tensor, starts: Tensor, mode: int, skipped: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Compute `pool_rows` by torch on any device, with each row weighted by `weights` [tokens] in a sum.

    `torch.embedding_bag` sums rows in order without intermediate results (2,048 x 384: 0.2 ms, segment_reduce takes
    10 ms). The skipped rows of a text form a bag of their own.
    """
    if skipped is not None:
        begins = torch.stack((starts[:-1], starts[:-1] + skipped), 1)
        starts = torch.cat((begins.flatten(), starts[-1:]))
    tokens = torch.arange(len(hidden), device=hidden.device)
    bags: Tensor = torch.embedding_bag(hidden, tokens, starts, False, mode, False, weights, True)[0]
    return bags if skipped is None else bags[1::2]


def unit_rows(rows: Tensor) -> Tensor:
    """Return rows FP32 [n, size] divided by their lengths; a row of zeros stays zeros."""
    if not _is_native(rows):
        return F.normalize(rows, dim=-1)
    out = empty((len(rows), rows.shape[1]), torch.float32)
    _run(rows, out, None, None, mean=False, unit=True)
    return out


def _is_native(rows: Tensor) -> bool:
    is_plain = rows.dtype == torch.float32 and rows.device.type == "cpu" and rows.stride(1) == 1
    return is_plain and has_kernel(OpCode.POOL)


def _run(x: Tensor, out: Tensor, starts: Tensor | None, skipped: Tensor | None, *, mean: bool, unit: bool) -> None:
    """Run the native operation; without `starts` each row is a text of its own."""
    addresses = (0 if borders is None else borders.data_ptr() for borders in (starts, skipped))
    sizes = (out.shape[0], x.stride(0), x.shape[1])
    run_operation(PoolArguments(x.data_ptr(), *addresses, out.data_ptr(), *sizes, mean, unit), OpCode.POOL, x.numel())
