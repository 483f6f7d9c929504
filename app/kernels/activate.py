"""An activation between two products: what the first has written becomes what the second reads. The twin is torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from app.kernels.activations import Activations, quantise

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh"]
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "tanh": torch.tanh,
}


def activate(x: Tensor, activation: str, group: int | None = None) -> Activations:
    """x [tokens, size] to act(x) in its dtype, or quantised where a group is given. x may be overwritten."""
    result = activate_torch(x, activation)
    return result if group is None else quantise(result, group)


def activate_torch(x: Tensor, activation: str) -> Tensor:
    return ACTIVATIONS[activation](x)
