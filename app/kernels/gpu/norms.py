"""Norms of the residual stream on a GPU, one program per row: RMSNorm, RMSNorm added to the stream, and LayerNorm.

Gemma adds the norm of a branch to the stream. LayerNorm can also run in place. Sums are in fp32 for any dtype. A
whole row is held in a program's registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST = 32768  # most elements of a row: 64 for each of 512 threads


def suits(x: Tensor) -> bool:
    """Return True if x is a matrix with contiguous rows that are not too long for these kernels."""
    return x.dim() == 2 and x.stride(1) == 1 and x.shape[1] <= LONGEST


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Compute the RMSNorm of hidden [tokens, size] in `dtype`; weight [size] fp32."""
    rows, size = hidden.shape
    out = torch.empty(rows, size, dtype=dtype, device=hidden.device)
    if rows:
        block = triton.next_power_of_2(size)
        _rms_norm[(rows,)](hidden, weight, out, hidden.stride(0), eps, size, block, num_warps=warps(block))
    return out


def add_rms_norm(hidden: Tensor, branch: Tensor, weight: Tensor, eps: float) -> None:
    """Add the RMSNorm of branch [tokens, size] to hidden [tokens, size] fp32 in place."""
    rows, size = hidden.shape
    if rows:
        block = triton.next_power_of_2(size)
        strides = (hidden.stride(0), branch.stride(0))
        _add_rms_norm[(rows,)](hidden, branch, weight, *strides, eps, size, block, num_warps=warps(block))


def layer_norm(
    hidden: Tensor, norm: tuple[Tensor, Tensor | None, float], dtype: torch.dtype | None, in_place: bool
) -> Tensor | None:
    """Compute the LayerNorm of hidden [tokens, size].

    The result is in `dtype`, or None if `dtype` is None. If `in_place` is True, hidden is overwritten by its norm
    as well.
    """
    weight, bias, eps = norm
    rows, size = hidden.shape
    out = None if dtype is None else torch.empty(rows, size, dtype=dtype, device=hidden.device)
    if rows:
        block = triton.next_power_of_2(size)
        given = (hidden, weight, bias, out, hidden.stride(0), eps, size, block, in_place)
        _layer_norm[(rows,)](*given, num_warps=warps(block))
    return out


def warps(block: int) -> int:
    """Return the number of warps (32 threads) for a block of this size: 8 elements per thread, at most 16 warps."""
    return min(16, max(1, block // 256))


@triton.jit
def _rms_norm(hidden, weight, out, stride, eps, size: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < size
    x = tl.load(hidden + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    result = x * scale * tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + row * size + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm(hidden, branch, weight, stride, branch_stride, eps, size: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < size
    x = tl.load(branch + row * branch_stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    normed = x * scale * tl.load(weight + at, mask=inside, other=0.0)
    before = tl.load(hidden + row * stride + at, mask=inside, other=0.0)
    tl.store(hidden + row * stride + at, before + normed, mask=inside)


@triton.jit
def _layer_norm(hidden, weight, bias, out, stride, eps, size: tl.constexpr, block: tl.constexpr, in_place: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < size
    x = tl.load(hidden + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, x - tl.sum(x, 0) / size, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / size + eps)
    normed = centred * scale * tl.load(weight + at, mask=inside, other=0.0)
    if bias is not None:
        normed += tl.load(bias + at, mask=inside, other=0.0)
    if in_place:
        tl.store(hidden + row * stride + at, normed, mask=inside)
    if out is not None:
        tl.store(out + row * size + at, normed.to(out.dtype.element_ty), mask=inside)
