"""Elementwise activation between two linear layers, and the top-k outputs of each row of logits.

A native kernel computes the activation on a CPU and a Triton kernel on an NVIDIA GPU; `activate_torch` is the
reference implementation and the fallback. The top logits are kept by the output product while it runs (csrc/pick.h),
so that not all logits are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from app.kernels.linear.activations import Activations, allocate_output, quantise
from app.kernels.native import operations
from app.kernels.native.operations import ActivateArguments, OpCode, has_kernel, run_operation
from app.kernels.triton.support import triton_usable

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
    if x.dtype != torch.bfloat16 or x.stride(1) != 1 or x.device.type != "cpu" or not has_kernel(OpCode.ACTIVATE):
        result = _activate_elsewhere(x, activation)
        return result if group is None else quantise(result, group)
    rows, size = x.shape
    out, sink = allocate_output(rows, size, group)
    run_operation(
        ActivateArguments(x.data_ptr(), x.stride(0), rows, size, operations.ACTIVATION_CODES[activation], sink),
        OpCode.ACTIVATE,
        rows * size,
    )
    return out


def _activate_elsewhere(x: Tensor, activation: str) -> Tensor:
    if triton_usable(x) and x.dim() == 2 and x.stride(1) == 1:
        from app.kernels.triton import elementwise

        return elementwise.activate(x, activation)
    return activate_torch(x, activation)


def activate_torch(x: Tensor, activation: str) -> Tensor:
    """Return act(x) computed by torch; `activation` is a key of `ACTIVATION_CODES`."""
    return ACTIVATIONS[activation](x)


MAX_TOP_LOGITS = 64  # most outputs per row that a kernel can keep


@dataclass(frozen=True, slots=True)
class TopLogitsRequest:
    """A request for each row's k largest outputs, optionally with the log-sum-exp over all outputs."""

    k: int
    with_logsumexp: bool = False


@dataclass(frozen=True, slots=True)
class TopLogits:
    """The largest outputs of each row in descending order, with the lower id first among equals.

    `values` fp32 [rows, k], `ids` int64 [rows, k]. The best value of a row that contains NaN is NaN. `logsumexp`
    fp32 [rows] covers all outputs, and is None if it was not requested.
    """

    values: Tensor
    ids: Tensor
    logsumexp: Tensor | None


@runtime_checkable
class TopLogitsForm(Protocol):
    """A linear form whose product can return only the top outputs of each row."""

    def top_logits(self, x: Activations, request: TopLogitsRequest, softcap: float | None = None) -> TopLogits:
        """Return the top outputs of x times the weight; `softcap` is applied to the logits first."""
        ...


def top_logits_torch(logits: Tensor, request: TopLogitsRequest) -> TopLogits:
    """Return the top outputs of logits [rows, vocab]; this is the reference implementation."""
    scores = logits.float()
    values, ids = scores.sort(dim=-1, descending=True, stable=True)  # NaN sorts first and is kept
    return TopLogits(
        values[:, : request.k], ids[:, : request.k], scores.logsumexp(-1) if request.with_logsumexp else None
    )
