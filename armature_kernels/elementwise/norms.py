"""Operations between the products of a layer: RMSNorm, LayerNorm, gated activations and row gathers.

The public functions select a native kernel on a CPU, a Triton kernel on an NVIDIA GPU (armature_kernels/triton/), or the
reference implementation, whose name ends in `_torch`. Results are equal within the rounding of one bf16. With a
`group`, results are quantized rows for the next product; only forms of the native library request that.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from armature_kernels.elementwise.activations import ACTIVATIONS
from armature_kernels.linear.activations import ROW_DTYPES, Activations, RowGroups, allocate_output, quantize
from armature_kernels.native.arguments import (
    ACTIVATION_CODES,
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    GateArguments,
    GatedNormArguments,
    GatherArguments,
    LayerNormArguments,
    NormArguments,
    OpCode,
    RowSink,
)
from armature_kernels.native.memory import empty
from armature_kernels.native.operations import has_kernel, run_operation
from armature_kernels.triton.support import triton_usable


def rms_norm(
    hidden: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, group: RowGroups | None = None
) -> Activations:
    """Compute hidden / rms(hidden) * weight in `dtype`, or quantized; hidden [tokens, size], weight [size] fp32."""
    if dtype not in ROW_DTYPES or not _supports_norm(hidden, ROW_DTYPES):
        return _quantize_if(_rms_norm_elsewhere(hidden, weight, eps, dtype), group)
    rows, size = hidden.shape
    out, sink = allocate_output(rows, size, group, dtype)
    wide, narrow = (hidden, None) if hidden.dtype == torch.float32 else (None, hidden)
    addresses = (None if one is None else one.data_ptr() for one in (wide, narrow, weight))
    run_operation(
        NormArguments(*addresses, hidden.stride(0), rows, size, False, eps, sink),
        rows * size,
    )
    return out


def _rms_norm_elsewhere(hidden: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    if triton_usable(hidden):
        from armature_kernels.triton import elementwise

        if elementwise.supports_row_norm(hidden):
            return elementwise.rms_norm(hidden, weight, eps, dtype)
    return rms_norm_torch(hidden, weight, eps, dtype)


def rms_norm_torch(hidden: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Compute the RMSNorm in fp32 by torch."""
    return F.rms_norm(hidden.float(), weight.shape, weight, eps).to(dtype)


def add_rms_norm(hidden: Tensor, branch: Tensor, weight: Tensor, eps: float, factor: float = 1.0) -> None:
    """Set hidden [tokens, size] fp32 to (hidden + branch / rms(branch) * weight) * factor; branch [tokens, size]."""
    if branch.dtype not in ROW_DTYPES or not branch.is_contiguous() or not _supports_norm(hidden):
        _add_rms_norm_elsewhere(hidden, branch, weight, eps, factor)
        return
    rows, size = hidden.shape
    sizes = (hidden.stride(0), rows, size, branch.dtype == torch.float32)
    run_operation(
        NormArguments(hidden.data_ptr(), branch.data_ptr(), weight.data_ptr(), *sizes, eps, RowSink(), factor),
        rows * size,
    )


def _add_rms_norm_elsewhere(hidden: Tensor, branch: Tensor, weight: Tensor, eps: float, factor: float) -> None:
    if triton_usable(hidden):
        from armature_kernels.triton import elementwise

        if elementwise.supports_row_norm(hidden) and elementwise.supports_row_norm(branch):
            elementwise.add_rms_norm(hidden, branch, weight, eps, factor)
            return
    add_rms_norm_torch(hidden, branch, weight, eps, factor)


def add_rms_norm_torch(hidden: Tensor, branch: Tensor, weight: Tensor, eps: float, factor: float = 1.0) -> None:
    """Add the RMSNorm of branch to hidden, and multiply by the factor, by torch."""
    hidden += rms_norm_torch(branch, weight, eps, torch.float32)
    hidden *= factor


def _supports_norm(hidden: Tensor, dtypes: Collection[torch.dtype] = (torch.float32,)) -> bool:
    plain = hidden.dtype in dtypes and hidden.dim() == 2 and hidden.stride(1) == 1
    return plain and hidden.device.type == "cpu" and has_kernel(OpCode.NORM)


def gate(
    gate_up: Tensor, activation: str, group: RowGroups | None = None, deviations: float | None = None
) -> Activations:
    """Compute act(gate) * up [tokens, size] from gate_up [tokens, 2 * size], in its dtype or quantized.

    With `deviations`, most gates become 0 first: each is lowered by the mean of the row's gates plus so many of their
    standard deviations, and is at least 0.
    """
    if not _supports_gate(gate_up):
        return _quantize_if(_gate_elsewhere(gate_up, activation, deviations), group)
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    cutoffs = None if deviations is None else empty((rows,), torch.float32)
    lowered = (None if cutoffs is None else cutoffs.data_ptr(), 0, deviations or 0.0)
    out, sink = allocate_output(rows, size, group, gate_up.dtype)
    sizes = (rows, size, ACTIVATION_CODES[activation], gate_up.dtype == torch.float32)
    run_operation(GateArguments(gate_up.data_ptr(), *sizes, sink, None, *lowered), rows * size)
    return out


def gate_with(gates: Tensor, up: Tensor, activation: str, group: RowGroups | None = None) -> Activations:
    """Compute act(gates) * up [tokens, size] in the dtype of the gates or quantized; up [tokens, size] fp32."""
    if not (_supports_gate(gates) and up.dtype == torch.float32 and up.stride(1) == 1):
        return _quantize_if((ACTIVATIONS[activation](gates.float()) * up).to(gates.dtype), group)
    rows, size = gates.shape
    out, sink = allocate_output(rows, size, group, gates.dtype)
    sizes = (rows, size, ACTIVATION_CODES[activation], gates.dtype == torch.float32)
    factors = (up.data_ptr(), None, up.stride(0), 0.0)
    run_operation(GateArguments(gates.data_ptr(), *sizes, sink, *factors), rows * size)
    return out


def _supports_gate(x: Tensor) -> bool:
    plain = x.dtype in ROW_DTYPES and x.is_contiguous() and x.device.type == "cpu"
    return plain and has_kernel(OpCode.GATE)


def _gate_elsewhere(gate_up: Tensor, activation: str, deviations: float | None) -> Tensor:
    has_kernel_there = activation in ACTIVATIONS and deviations is None and gate_up.stride(1) == 1
    if has_kernel_there and triton_usable(gate_up):
        from armature_kernels.triton import elementwise

        return elementwise.gate(gate_up, activation)
    return gate_torch(gate_up, activation, deviations)


def gate_torch(gate_up: Tensor, activation: str, deviations: float | None = None) -> Tensor:
    """Compute act(gate) * up by torch; `swiglu_oai` is the clamped gate of gpt-oss."""
    first, second = gate_up.chunk(2, -1)
    if deviations is not None:
        wide = first.float()
        spread, mean = torch.std_mean(wide, -1, correction=0, keepdim=True)
        return (ACTIVATIONS[activation](F.relu(wide - mean - deviations * spread)) * second).to(gate_up.dtype)
    if activation == "swiglu_oai":
        bounded = first.clamp(max=SWIGLU_LIMIT)
        return bounded * (bounded * SWIGLU_ALPHA).sigmoid() * (second.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1)
    return ACTIVATIONS[activation](first).mul_(second)


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """x * act(gate_scale * gate), `silu` or `sigmoid`, with an RMSNorm of each `group` elements of x; 0: without a norm.

    `weight` fp32, a multiple of a group, is repeated over a row. `gate_first`: the product is normalized.
    """

    activation: str = "silu"
    group: int = 0
    weight: Tensor | None = None
    eps: float = 0.0
    gate_first: bool = False
    gate_scale: float = 1.0


def gated_norm(
    x: Tensor, gates: Tensor, norm: GatedNorm, dtype: torch.dtype, group: RowGroups | None = None
) -> Activations:
    """Return x times gates, both [tokens, size], in `dtype`, or quantized if `group` is given."""
    plain = all(one.dtype in ROW_DTYPES and one.stride(1) == 1 and one.device.type == "cpu" for one in (x, gates))
    if not (plain and dtype in ROW_DTYPES and has_kernel(OpCode.GATED_NORM)):
        return _quantize_if(gated_norm_torch(x, gates, norm).to(dtype), group)
    rows, size = x.shape
    out, sink = allocate_output(rows, size, group, dtype)
    addresses = (x.data_ptr(), gates.data_ptr(), None if norm.weight is None else norm.weight.data_ptr())
    sizes = (x.stride(0), gates.stride(0), rows, size, norm.group, size if norm.weight is None else len(norm.weight))
    wide = (x.dtype == torch.float32, gates.dtype == torch.float32)
    options = (norm.gate_first, norm.activation == "sigmoid", *wide, norm.eps, norm.gate_scale)
    run_operation(GatedNormArguments(*addresses, *sizes, *options, sink), rows * size)
    return out


def gated_norm_torch(x: Tensor, gates: Tensor, norm: GatedNorm) -> Tensor:
    """Compute `gated_norm` in fp32 by torch."""
    scaled, wide = gates.float() * norm.gate_scale, x.float()
    gate = scaled.sigmoid() if norm.activation == "sigmoid" else F.silu(scaled)
    if norm.gate_first:
        wide = wide * gate
    if norm.group:
        wide = F.rms_norm(wide.view(len(wide), -1, norm.group), (norm.group,), None, norm.eps).flatten(1)
    if norm.weight is not None:
        wide = wide * norm.weight.repeat(wide.shape[-1] // len(norm.weight))
    return wide if norm.gate_first else wide * gate


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """Return rows [n] int64 of x [tokens, size]; indices must be in range, because the kernel does not check them."""
    if not _supports_gather(x):
        return x.index_select(0, rows)
    return _gathered(x, rows if rows.is_contiguous() else rows.contiguous())


def contiguous(x: Tensor) -> Tensor:
    """Return x [tokens, size], for example some columns of a tensor, as a new tensor without gaps between its rows."""
    return _gathered(x, None) if _supports_gather(x) else x.contiguous()


def empty_rows(x: Tensor, size: int) -> Tensor:
    """Return uninitialised rows fp32 [tokens, size], as many as x has and where x is."""
    if x.device.type == "cpu":
        return empty((len(x), size), torch.float32)
    return torch.empty((len(x), size), dtype=torch.float32, device=x.device)


def copy_rows(out: Tensor, x: Tensor) -> None:
    """Copy x [tokens, size] to out [tokens, size] of the same dtype, for example some columns of a tensor."""
    if _supports_gather(x) and _supports_gather(out):
        _gathered(x, None, out)
    else:
        out.copy_(x)


def _supports_gather(x: Tensor) -> bool:
    whole = (x.shape[1] * x.itemsize) % 4 == 0 and (x.stride(0) * x.itemsize) % 4 == 0 and x.stride(1) == 1
    return whole and x.device.type == "cpu" and has_kernel(OpCode.GATHER)


def _gathered(x: Tensor, rows: Tensor | None, out: Tensor | None = None) -> Tensor:
    out = empty((len(x) if rows is None else len(rows), x.shape[1]), x.dtype) if out is None else out
    ids = None if rows is None else rows.data_ptr()
    # The kernel copies four bytes at a time as fp32, for any dtype.
    words = [elements * x.itemsize // 4 for elements in (x.stride(0), x.shape[1], out.stride(0))]
    sizes = (words[0], len(out), *words[1:])
    run_operation(GatherArguments(x.data_ptr(), ids, out.data_ptr(), *sizes), out.numel())
    return out


def _quantize_if(rows: Tensor, group: RowGroups | None) -> Activations:
    return rows if group is None else quantize(rows, group)


LayerNormWeights = tuple[Tensor, Tensor | None, float]  # weight and bias [size] fp32, eps


def layer_norm(
    hidden: Tensor,
    norm: LayerNormWeights,
    dtype: torch.dtype,
    group: RowGroups | None = None,
    in_place: bool = False,
) -> Activations:
    """Compute (hidden - mean) / deviation * weight + bias of hidden [tokens, size] fp32.

    The result is in `dtype`, or quantized if `group` is given. If `in_place` is True, hidden is overwritten by its
    norm as well.
    """
    if dtype not in ROW_DTYPES or not _supports(hidden):
        normed = _layer_norm_elsewhere(hidden, norm, dtype, in_place)
        return normed if group is None else quantize(normed, group)
    rows, size = hidden.shape
    out, sink = allocate_output(rows, size, group, dtype)
    _run(hidden, norm, in_place, sink)
    return out


def layer_norm_in_place(hidden: Tensor, norm: LayerNormWeights) -> None:
    """Overwrite hidden [tokens, size] fp32 by its norm, without another output."""
    if _supports(hidden):
        _run(hidden, norm, True, RowSink())
    elif _on_gpu(hidden):
        from armature_kernels.triton import elementwise

        elementwise.layer_norm(hidden, norm, None, True)
    else:
        hidden.copy_(layer_norm_torch(hidden, norm))


def _layer_norm_elsewhere(hidden: Tensor, norm: LayerNormWeights, dtype: torch.dtype, in_place: bool) -> Tensor:
    if _on_gpu(hidden):
        from armature_kernels.triton import elementwise

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
    from armature_kernels.triton import elementwise

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
        rows * size,
    )


def layer_norm_torch(hidden: Tensor, norm: LayerNormWeights) -> Tensor:
    """Compute the LayerNorm in fp32 by torch."""
    weight, bias, eps = norm
    return F.layer_norm(hidden.float(), weight.shape, weight, bias, eps)
