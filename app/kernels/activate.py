"""Elementwise activation between two linear layers.

A native kernel computes it on a CPU and a Triton kernel on an NVIDIA GPU. `activate_torch` is the reference
implementation and the fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from app.kernels import operations
from app.kernels.activations import Activations, destination, quantise
from app.kernels.gpu.available import usable
from app.kernels.operations import Activate, Code, has, run

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh"]
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "tanh": torch.tanh,
}


def activate(x: Tensor, activation: str, group: int | None = None) -> Activations:
    """Return act(x) in the dtype of x [tokens, size], quantised if `group` is given.

    `group` is the number of inputs that share one scale. x may be overwritten.
    """
    if x.dtype != torch.bfloat16 or x.stride(1) != 1 or x.device.type != "cpu" or not has(Code.ACTIVATE):
        result = _activate_elsewhere(x, activation)
        return result if group is None else quantise(result, group)
    rows, size = x.shape
    out, sink = destination(rows, size, group)
    run(Activate(x.data_ptr(), x.stride(0), rows, size, operations.ACTIVATIONS[activation], sink), Code.ACTIVATE, rows * size)
    return out


def _activate_elsewhere(x: Tensor, activation: str) -> Tensor:
    if usable(x) and x.dim() == 2 and x.stride(1) == 1:
        from app.kernels.gpu import gates

        return gates.activate(x, activation)
    return activate_torch(x, activation)


def activate_torch(x: Tensor, activation: str) -> Tensor:
    """Return act(x) computed by torch; `activation` is a key of `ACTIVATIONS`."""
    return ACTIVATIONS[activation](x)
