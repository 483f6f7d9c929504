"""RoPE angles of a step's tokens on a GPU: cos and signed sin, computed by one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.kernels.heads import Angles


def angles(positions: Tensor, frequencies: Tensor, scale: float) -> Angles:
    """Compute cos and signed sin [tokens, 1, 2 * half] fp32, multiplied by `scale`.

    `positions` is int64 [tokens]. `frequencies` is fp32 [half].
    """
    tokens, half = len(positions), len(frequencies)
    cos, sin = (torch.empty(tokens, 1, 2 * half, dtype=torch.float32, device=positions.device) for _ in range(2))
    if tokens:
        given = (positions.contiguous(), frequencies, cos, sin, float(scale), half, triton.next_power_of_2(half))
        _angles[(tokens,)](*given, num_warps=1)
    return cos, sin


@triton.jit(do_not_specialize_on_alignment=["positions"])  # views of a step's buffer have any alignment
def _angles(positions, frequencies, cos, sin, scale, half: tl.constexpr, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < half
    turned = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + at, mask=inside, other=0.0)
    cosine, sine = tl.cos(turned) * scale, tl.sin(turned) * scale
    first = token * (2 * half) + at
    tl.store(cos + first, cosine, mask=inside)
    tl.store(cos + first + half, cosine, mask=inside)
    tl.store(sin + first, -sine, mask=inside)
    tl.store(sin + first + half, sine, mask=inside)
