"""Embedding rows on a GPU, widened to fp32 and scaled, written or added; an id out of range gives NaN."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # elements per program of four warps


def rows(weight: Tensor, ids: Tensor, factor: float | Tensor) -> Tensor:
    """Return fp32 [n, inputs], rows of weight [outputs, inputs] for ids [n] int64.

    `factor` is one number for all rows, or fp32 [inputs].
    """
    out = torch.empty(len(ids), weight.shape[1], dtype=torch.float32, device=weight.device)
    _write(out, weight, ids, factor, False)
    return out


def add_rows(hidden: Tensor, weight: Tensor, ids: Tensor, factor: float | Tensor) -> None:
    """Add rows of weight [outputs, inputs] for ids [n] int64 to hidden [n, inputs] fp32 in place."""
    _write(hidden, weight, ids, factor, True)


def _write(out: Tensor, weight: Tensor, ids: Tensor, factor: float | Tensor, add: bool) -> None:
    (outputs, inputs), count = weight.shape, len(ids)
    factors, times = (factor, 1.0) if isinstance(factor, Tensor) else (None, float(factor))
    if count:
        given = (out, weight, ids.contiguous(), factors, times, out.stride(0), weight.stride(0), outputs, inputs, _BLOCK, add)
        _rows[(count, triton.cdiv(inputs, _BLOCK))](*given, num_warps=4)


@triton.jit(do_not_specialize_on_alignment=["ids"])  # views of a step's buffer have any alignment
def _rows(
    out, weight, ids, factors, times, out_stride, stride,
    outputs: tl.constexpr, inputs: tl.constexpr, block: tl.constexpr, add: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < inputs
    index = tl.load(ids + row)
    known = (index >= 0) & (index < outputs)
    values = tl.load(weight + index * stride + at, mask=inside & known, other=0.0).to(tl.float32) * times
    if factors is not None:
        values *= tl.load(factors + at, mask=inside, other=0.0)
    values = tl.where(known, values, float("nan"))
    if add:
        values += tl.load(out + row * out_stride + at, mask=inside, other=0.0)
    tl.store(out + row * out_stride + at, values, mask=inside)
