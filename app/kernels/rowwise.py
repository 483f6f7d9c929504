"""Operations between the products of a layer: RMSNorm, gated activations and row gathers.

The `*_torch` functions are the reference implementations. The public functions select a native kernel on a CPU, a
Triton kernel on an NVIDIA GPU (gpu/), or the reference implementation. Results are equal within the rounding of
one bf16. With a `group`, results are quantised rows for the next product. Only forms of the native library request
that.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from app.kernels import operations
from app.kernels.activate import ACTIVATIONS
from app.kernels.activations import Activations, destination, quantise
from app.kernels.gpu.available import usable
from app.kernels.heads import Angles
from app.kernels.memory import empty
from app.kernels.operations import Code, Gate, Gather, Norm, Sink, has, run

__all__ = ["Angles", "add_rms_norm", "add_rms_norm_torch", "gate", "gate_torch", "gather", "rms_norm", "rms_norm_torch"]


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, group: int | None = None) -> Activations:
    """Compute hidden / rms(hidden) * weight in `dtype`, or quantised; hidden [tokens, size], weight [size] fp32."""
    if dtype != torch.bfloat16 or not _suits_norm(hidden):
        return _as_asked(_rms_norm_elsewhere(hidden, weight, eps, dtype), group)
    rows, size = hidden.shape
    out, sink = destination(rows, size, group)
    run(Norm(hidden.data_ptr(), None, weight.data_ptr(), hidden.stride(0), rows, size, eps, sink), Code.NORM, rows * size)
    return out


def _rms_norm_elsewhere(hidden: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    if usable(hidden):
        from app.kernels.gpu import norms

        if norms.suits(hidden):
            return norms.rms_norm(hidden, weight, eps, dtype)
    return rms_norm_torch(hidden, weight, eps, dtype)


def rms_norm_torch(hidden: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Compute the RMSNorm in fp32 by torch."""
    return F.rms_norm(hidden.float(), weight.shape, weight, eps).to(dtype)


def add_rms_norm(hidden: Tensor, branch: Tensor, weight: Tensor, eps: float) -> None:
    """Add branch / rms(branch) * weight to hidden [tokens, size] fp32 in place; branch [tokens, size]."""
    if branch.dtype != torch.bfloat16 or not branch.is_contiguous() or not _suits_norm(hidden):
        _add_rms_norm_elsewhere(hidden, branch, weight, eps)
        return
    rows, size = hidden.shape
    sizes = (hidden.stride(0), rows, size)
    run(Norm(hidden.data_ptr(), branch.data_ptr(), weight.data_ptr(), *sizes, eps, Sink()), Code.NORM, rows * size)


def _add_rms_norm_elsewhere(hidden: Tensor, branch: Tensor, weight: Tensor, eps: float) -> None:
    if usable(hidden):
        from app.kernels.gpu import norms

        if norms.suits(hidden) and norms.suits(branch):
            norms.add_rms_norm(hidden, branch, weight, eps)
            return
    add_rms_norm_torch(hidden, branch, weight, eps)


def add_rms_norm_torch(hidden: Tensor, branch: Tensor, weight: Tensor, eps: float) -> None:
    """Add the RMSNorm of branch to hidden by torch."""
    hidden += rms_norm_torch(branch, weight, eps, torch.float32)


def _suits_norm(hidden: Tensor) -> bool:
    plain = hidden.dtype == torch.float32 and hidden.dim() == 2 and hidden.stride(1) == 1
    return plain and hidden.device.type == "cpu" and has(Code.NORM)


def gate(gate_up: Tensor, activation: str, group: int | None = None) -> Activations:
    """Compute act(gate) * up [tokens, size] from gate_up [tokens, 2 * size], in its dtype or quantised."""
    if gate_up.dtype != torch.bfloat16 or not gate_up.is_contiguous() or gate_up.device.type != "cpu" or not has(Code.GATE):
        return _as_asked(_gate_elsewhere(gate_up, activation), group)
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out, sink = destination(rows, size, group)
    run(Gate(gate_up.data_ptr(), rows, size, operations.ACTIVATIONS[activation], sink), Code.GATE, rows * size)
    return out


def _gate_elsewhere(gate_up: Tensor, activation: str) -> Tensor:
    if usable(gate_up) and gate_up.stride(1) == 1:
        from app.kernels.gpu import gates

        return gates.gate(gate_up, activation)
    return gate_torch(gate_up, activation)


def gate_torch(gate_up: Tensor, activation: str) -> Tensor:
    """Compute act(gate) * up by torch."""
    first, second = gate_up.chunk(2, -1)
    return ACTIVATIONS[activation](first).mul_(second)


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """Return rows [n] int64 of x [tokens, size]; indices must be in range, because the kernel does not check them."""
    size, stride = x.shape[1] * x.itemsize, x.stride(0) * x.itemsize
    if size % 4 or stride % 4 or x.stride(1) != 1 or x.device.type != "cpu" or not has(Code.GATHER):
        return x.index_select(0, rows)
    rows, out = rows if rows.is_contiguous() else rows.contiguous(), empty((len(rows), x.shape[1]), x.dtype)
    # The kernel copies four bytes at a time as fp32, for any dtype.
    run(Gather(x.data_ptr(), rows.data_ptr(), out.data_ptr(), stride // 4, len(rows), size // 4), Code.GATHER, out.numel())
    return out


def _as_asked(rows: Tensor, group: int | None) -> Activations:
    return rows if group is None else quantise(rows, group)
