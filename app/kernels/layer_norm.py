"""LayerNorm of the residual stream: what the next product reads and, where a layer normalises what it has added to, the stream itself.

The twin is torch's, and serves for FP32 and where there is no library.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from app.kernels.activations import Activations, destination, quantise
from app.kernels.operations import Code, LayerNorm, has, run


def layer_norm(
    hidden: Tensor,
    norm: tuple[Tensor, Tensor | None, float],
    dtype: torch.dtype,
    group: int | None = None,
    in_place: bool = False,
) -> Activations:
    """hidden [tokens, size] fp32 to (hidden - mean) / deviation * weight + bias in `dtype`, or quantised where a group is given.

    `norm` is weight [size] fp32, bias likewise or None, and eps. `in_place`: hidden becomes its norm as well.
    """
    if dtype != torch.bfloat16 or hidden.dtype != torch.float32 or hidden.stride(1) != 1 or not has(Code.LAYER_NORM):
        normed = layer_norm_torch(hidden, norm)
        if in_place:
            hidden.copy_(normed)
        return normed.to(dtype) if group is None else quantise(normed, group)
    rows, size = hidden.shape
    weight, bias, eps = norm
    out, sink = destination(rows, size, group)
    addresses = (hidden.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr())
    run(LayerNorm(*addresses, hidden.stride(0), rows, size, in_place, eps, sink), Code.LAYER_NORM, rows * size)
    return out


def layer_norm_torch(hidden: Tensor, norm: tuple[Tensor, Tensor | None, float]) -> Tensor:
    weight, bias, eps = norm
    return F.layer_norm(hidden.float(), weight.shape, weight, bias, eps)
