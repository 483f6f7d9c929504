"""Activations on a GPU, elementwise or gated (act(gate) * up), computed in fp32 and rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.kernels.gpu.mathematics import activated

_BLOCK = 1024  # elements per program of four warps


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """Compute act(gate) * up [tokens, size] from gate_up [tokens, 2 * size]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _gate[(rows, triton.cdiv(size, _BLOCK))](gate_up, out, gate_up.stride(0), size, activation, _BLOCK, num_warps=4)
    return out


def activate(x: Tensor, activation: str) -> Tensor:
    """Compute act(x) of x [tokens, size] in its dtype."""
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows:
        _activate[(rows, triton.cdiv(size, _BLOCK))](x, out, x.stride(0), size, activation, _BLOCK, num_warps=4)
    return out


@triton.jit
def _gate(gate_up, out, stride, size: tl.constexpr, activation: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < size
    first = tl.load(gate_up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(gate_up + row * stride + size + at, mask=inside, other=0.0).to(tl.float32)
    result = activated(first, activation) * second
    tl.store(out + row * size + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _activate(x, out, stride, size: tl.constexpr, activation: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < size
    result = activated(tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32), activation)
    tl.store(out + row * size + at, result.to(out.dtype.element_ty), mask=inside)
