"""LayerNorm of the residual stream, as the input of the next product and, if required, of the stream itself.

`layer_norm_torch` is the reference implementation. It serves without the native library and Triton, and for FP32
on a CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from app.kernels.activations import Activations, destination, quantise
from app.kernels.gpu.available import usable
from app.kernels.operations import Code, LayerNorm, Sink, has, run

LayerNormOf = tuple[Tensor, Tensor | None, float]  # weight and bias [size] fp32, eps


def layer_norm(
    hidden: Tensor,
    norm: LayerNormOf,
    dtype: torch.dtype,
    group: int | None = None,
    in_place: bool = False,
) -> Activations:
    """Compute (hidden - mean) / deviation * weight + bias of hidden [tokens, size] fp32.

    The result is in `dtype`, or quantised if `group` is given. If `in_place` is True, hidden is overwritten by its
    norm as well.
    """
    if dtype != torch.bfloat16 or not _suits(hidden):
        normed = _layer_norm_elsewhere(hidden, norm, dtype, in_place)
        return normed if group is None else quantise(normed, group)
    rows, size = hidden.shape
    out, sink = destination(rows, size, group)
    _run(hidden, norm, in_place, sink)
    return out


def layer_norm_in_place(hidden: Tensor, norm: LayerNormOf) -> None:
    """Overwrite hidden [tokens, size] fp32 by its norm, without another output."""
    if _suits(hidden):
        _run(hidden, norm, True, Sink())
    elif _on_gpu(hidden):
        from app.kernels.gpu import norms

        norms.layer_norm(hidden, norm, None, True)
    else:
        hidden.copy_(layer_norm_torch(hidden, norm))


def _layer_norm_elsewhere(hidden: Tensor, norm: LayerNormOf, dtype: torch.dtype, in_place: bool) -> Tensor:
    if _on_gpu(hidden):
        from app.kernels.gpu import norms

        result = norms.layer_norm(hidden, norm, dtype, in_place)
        assert result is not None, "a dtype was given"
        return result
    normed = layer_norm_torch(hidden, norm)
    if in_place:
        hidden.copy_(normed)
    return normed.to(dtype)


def _on_gpu(hidden: Tensor) -> bool:
    if not usable(hidden):
        return False
    from app.kernels.gpu import norms

    return norms.suits(hidden)


def _suits(hidden: Tensor) -> bool:
    return hidden.dtype == torch.float32 and hidden.stride(1) == 1 and hidden.device.type == "cpu" and has(Code.LAYER_NORM)


def _run(hidden: Tensor, norm: LayerNormOf, in_place: bool, sink: Sink) -> None:
    rows, size = hidden.shape
    weight, bias, eps = norm
    addresses = (hidden.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr())
    run(LayerNorm(*addresses, hidden.stride(0), rows, size, in_place, eps, sink), Code.LAYER_NORM, rows * size)


def layer_norm_torch(hidden: Tensor, norm: LayerNormOf) -> Tensor:
    """Compute the LayerNorm in fp32 by torch."""
    weight, bias, eps = norm
    return F.layer_norm(hidden.float(), weight.shape, weight, bias, eps)
