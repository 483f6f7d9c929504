"""Operations between the products of a layer: RMSNorm, LayerNorm, gated activations and row gathers.

The public functions select a native kernel on a CPU, a Triton kernel on an NVIDIA GPU (kernels/triton/), or the
reference implementation, whose name ends in `_torch`. Results are equal within the rounding of one bf16. With a
`group`, results are quantised rows for the next product; only forms of the native library request that.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from app.kernels.elementwise.activations import ACTIVATIONS
from app.kernels.linear.activations import ROW_DTYPES, Activations, allocate_output, quantise
from app.kernels.native.arguments import (
    ACTIVATION_CODES,
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    GateArguments,
    GatherArguments,
    LayerNormArguments,
    NormArguments,
    OpCode,
    RowSink,
)
from app.kernels.native.memory import empty
from app.kernels.native.operations import has_kernel, run_operation
from app.kernels.triton.support import triton_usable


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, group: int | None = None) -> Activations:
    """Compute hidden / rms(hidden) * weight in `dtype`, or quantised; hidden [tokens, size], weight [size] fp32."""
    if dtype not in ROW_DTYPES or not _supports_norm(hidden, ROW_DTYPES):
        return _quantise_if(_rms_norm_elsewhere(hidden, weight, eps, dtype), group)
    rows, size = hidden.shape
    out, sink = allocate_output(rows, size, group, dtype)
    wide, narrow = (hidden, None) if hidden.dtype == torch.float32 else (None, hidden)
    addresses = (None if one is None else one.data_ptr() for one in (wide, narrow, weight))
    run_operation(
        NormArguments(*addresses, hidden.stride(0), rows, size, False, eps, sink),
        OpCode.NORM,
        rows * size,
    )
    return out


def _rms_norm_elsewhere(hidden: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    if triton_usable(hidden):
        from app.kernels.triton import elementwise

        if elementwise.supports_row_norm(hidden):
            return elementwise.rms_norm(hidden, weight, eps, dtype)
    return rms_norm_torch(hidden, weight, eps, dtype)


def rms_norm_torch(hidden: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Compute the RMSNorm in fp32 by torch."""
    return F.rms_norm(hidden.float(), weight.shape, weight, eps).to(dtype)


def add_rms_norm(hidden: Tensor, branch: Tensor, weight: Tensor, eps: float) -> None:
    """Add branch / rms(branch) * weight to hidden [tokens, size] fp32 in place; branch [tokens, size]."""
    if branch.dtype not in ROW_DTYPES or not branch.is_contiguous() or not _supports_norm(hidden):
        _add_rms_norm_elsewhere(hidden, branch, weight, eps)
        return
    rows, size = hidden.shape
    sizes = (hidden.stride(0), rows, size, branch.dtype == torch.float32)
    run_operation(
        NormArguments(hidden.data_ptr(), branch.data_ptr(), weight.data_ptr(), *sizes, eps, RowSink()),
        OpCode.NORM,
        rows * size,
    )


def _add_rms_norm_elsewhere(hidden: Tensor, branch: Tensor, weight: Tensor, eps: float) -> None:
    if triton_usable(hidden):
        from app.kernels.triton import elementwise

        if elementwise.supports_row_norm(hidden) and elementwise.supports_row_norm(branch):
            elementwise.add_rms_norm(hidden, branch, weight, eps)
            return
    add_rms_norm_torch(hidden, branch, weight, eps)


def add_rms_norm_torch(hidden: Tensor, branch: Tensor, weight: Tensor, eps: float) -> None:
    """Add the RMSNorm of branch to hidden by torch."""
    hidden += rms_norm_torch(branch, weight, eps, torch.float32)


def _supports_norm(hidden: Tensor, dtypes: Collection[torch.dtype] = (torch.float32,)) -> bool:
    plain = hidden.dtype in dtypes and hidden.dim() == 2 and hidden.stride(1) == 1
    return plain and hidden.device.type == "cpu" and has_kernel(OpCode.NORM)


def gate(gate_up: Tensor, activation: str, group: int | None = None) -> Activations:
    """Compute act(gate) * up [tokens, size] from gate_up [tokens, 2 * size], in its dtype or quantised."""
    if (
        gate_up.dtype not in ROW_DTYPES
        or not gate_up.is_contiguous()
        or gate_up.device.type != "cpu"
        or not has_kernel(OpCode.GATE)
    ):
        return _quantise_if(_gate_elsewhere(gate_up, activation), group)
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out, sink = allocate_output(rows, size, group, gate_up.dtype)
    sizes = (rows, size, ACTIVATION_CODES[activation], gate_up.dtype == torch.float32)
    run_operation(GateArguments(gate_up.data_ptr(), *sizes, sink), OpCode.GATE, rows * size)
    return out


def _gate_elsewhere(gate_up: Tensor, activation: str) -> Tensor:
    if triton_usable(gate_up) and gate_up.stride(1) == 1:
        from app.kernels.triton import elementwise

        return elementwise.gate(gate_up, activation)
    return gate_torch(gate_up, activation)


def gate_torch(gate_up: Tensor, activation: str) -> Tensor:
    """Compute act(gate) * up by torch; `swiglu_oai` is the clamped gate of gpt-oss."""
    first, second = gate_up.chunk(2, -1)
    if activation == "swiglu_oai":
        bounded = first.clamp(max=SWIGLU_LIMIT)
        return bounded * (bounded * SWIGLU_ALPHA).sigmoid() * (second.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1)
    return ACTIVATIONS[activation](first).mul_(second)


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """Return rows [n] int64 of x [tokens, size]; indices must be in range, because the kernel does not check them."""
    if not _supports_gather(x):
        return x.index_select(0, rows)
    return _gathered(x, rows if rows.is_contiguous() else rows.contiguous())


def contiguous(x: Tensor) -> Tensor:
    """Return x [tokens, size], for example some columns of a tensor, as a new tensor without gaps between its rows."""
    return _gathered(x, None) if _supports_gather(x) else x.contiguous()


def _supports_gather(x: Tensor) -> bool:
    whole = (x.shape[1] * x.itemsize) % 4 == 0 and (x.stride(0) * x.itemsize) % 4 == 0 and x.stride(1) == 1
    return whole and x.device.type == "cpu" and has_kernel(OpCode.GATHER)


def _gathered(x: Tensor, rows: Tensor | None) -> Tensor:
    out = empty((len(x) if rows is None else len(rows), x.shape[1]), x.dtype)
    ids = None if rows is None else rows.data_ptr()
    # The kernel copies four bytes at a time as fp32, for any dtype.
    sizes = (x.stride(0) * x.itemsize // 4, len(out), x.shape[1] * x.itemsize // 4)
    run_operation(GatherArguments(x.data_ptr(), ids, out.data_ptr(), *sizes), OpCode.GATHER, out.numel())
    return out


def _quantise_if(rows: Tensor, group: int | None) -> Activations:
    return rows if group is None else quantise(rows, group)


LayerNormWeights = tuple[Tensor, Tensor | None, float]  # weight and bias [size] fp32, eps


def layer_norm(
    hidden: Tensor,
    norm: LayerNormWeights,
    dtype: torch.dtype,
    group: int | None = None,
    in_place: bool = False,
) -> Activations:
    """Compute (hidden - mean) / deviation * weight + bias of hidden [tokens, size] fp32.

    The result is in `dtype`, or quantised if `group` is given. If `in_place` is True, hidden is overwritten by its
    norm as well.
    """
    if dtype not in ROW_DTYPES or not _supports(hidden):
        normed = _layer_norm_elsewhere(hidden, norm, dtype, in_place)
        return normed if group is None else quantise(normed, group)
    rows, size = hidden.shape
    out, sink = allocate_output(rows, size, group, dtype)
    _run(hidden, norm, in_place, sink)
    return out


def layer_norm_in_place(hidden: Tensor, norm: LayerNormWeights) -> None:
    """Overwrite hidden [tokens, size] fp32 by its norm, without another output."""
    if _supports(hidden):
        _run(hidden, norm, True, RowSink())
    elif _on_gpu(hidden):
        from app.kernels.triton import elementwise

        elementwise.layer_norm(hidden, norm, None, True)
    else:
        hidden.copy_(layer_norm_torch(hidden, norm))


def _layer_norm_elsewhere(hidden: Tensor, norm: LayerNormWeights, dtype: torch.dtype, in_place: bool) -> Tensor:
    if _on_gpu(hidden):
        from app.kernels.triton import elementwise

        result = elementwise.layer_norm(hidden, norm, dtype, in_place)
        assert result is not None, "a dtype was given"
        return result
    normed = layer_norm_torch(hidden, norm)
    if in_place:
        hidden.copy_(normed)
    return normed.to(dtype)


def _on_gpu(hidden: Tensor) -> bool:
    if not triton_usable(hidden):
        return False
    from app.kernels.triton import elementwise

    return elementwise.supports_row_norm(hidden)


def _supports(hidden: Tensor) -> bool:
    return (
        hidden.dtype == torch.float32
        and hidden.stride(1) == 1
        and hidden.device.type == "cpu"
        and has_kernel(OpCode.LAYER_NORM)
    )


def _run(hidden: Tensor, norm: LayerNormWeights, in_place: bool, sink: RowSink) -> None:
    rows, size = hidden.shape
    weight, bias, eps = norm
    addresses = (hidden.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr())
    run_operation(
        LayerNormArguments(*addresses, hidden.stride(0), rows, size, in_place, eps, sink),
        OpCode.LAYER_NORM,
        rows * size,
    )


def layer_norm_torch(hidden: Tensor, norm: LayerNormWeights) -> Tensor:
    """Compute the LayerNorm in fp32 by torch."""
    weight, bias, eps = norm
    return F.layer_norm(hidden.float(), weight.shape, weight, bias, eps)
