"""What stands between the products of a layer: normalise, gate, turn. Each has a plain torch twin, which serves where ours cannot.

`*_torch` say what is meant; the public names pick. Results are equal within the rounding of one bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from app.kernels.native import native

Angles = tuple[Tensor, Tensor]  # cos and signed sin, each [tokens, 1, dim], fp32

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
_NATIVE_GATES = {"silu": 0, "gelu_tanh": 1}


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, added: Tensor | None = None) -> Tensor:
    """hidden [tokens, size] fp32, to which `added` is added in place; hidden / rms(hidden) * weight in `dtype`."""
    library = native().bf16 if dtype == torch.bfloat16 and hidden.dim() == 2 and hidden.device.type == "cpu" else None
    plain = added is None or (added.dtype == torch.bfloat16 and added.is_contiguous())
    if library is None or hidden.dtype != torch.float32 or hidden.stride(1) != 1 or not plain:
        return rms_norm_torch(hidden, weight, eps, dtype, added)
    rows, size = hidden.shape
    out = torch.empty(rows, size, dtype=torch.bfloat16)
    extra = None if added is None else added.data_ptr()
    library.armature_rms_norm_bf16(hidden.data_ptr(), hidden.stride(0), extra, weight.data_ptr(), eps, out.data_ptr(), rows, size)
    return out


def rms_norm_torch(hidden: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, added: Tensor | None = None) -> Tensor:
    if added is not None:
        hidden += added
    return F.rms_norm(hidden.float(), weight.shape, weight, eps).to(dtype)


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [tokens, 2 * size] to act(gate) * up [tokens, size]."""
    library = native().bf16 if gate_up.dtype == torch.bfloat16 and gate_up.device.type == "cpu" else None
    kind = _NATIVE_GATES.get(activation)
    if library is None or kind is None or not gate_up.is_contiguous():
        return gate_torch(gate_up, activation)
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=torch.bfloat16)
    library.armature_gate_bf16(gate_up.data_ptr(), out.data_ptr(), rows, size, kind)
    return out


def gate_torch(gate_up: Tensor, activation: str) -> Tensor:
    first, second = gate_up.chunk(2, -1)
    return ACTIVATIONS[activation](first).mul_(second)


def turn(x: Tensor, angles: Angles) -> Tensor:
    """Turns the first dim elements of each head of x [tokens, heads, head_dim] by rotary angles; x itself may be overwritten."""
    library = native().bf16 if x.dtype == torch.bfloat16 and x.device.type == "cpu" else None
    cos, sin = angles
    if library is None or x.stride(2) != 1 or x.stride(1) != x.shape[2] or not (cos.is_contiguous() and sin.is_contiguous()):
        return turn_torch(x.float(), angles).to(x.dtype)
    tokens, heads, head_dim = x.shape
    library.armature_turn_bf16(x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), tokens, heads, head_dim, cos.shape[-1])
    return x


def turn_torch(x: Tensor, angles: Angles) -> Tensor:
    """(a, b) to (a cos - b sin, b cos + a sin), x in fp32."""
    cos, sin = angles
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat((turn_torch(x[..., :dim], angles), x[..., dim:]), -1)
    swapped = x.roll(dim // 2, -1)  # (b, a); sin is (-sin, sin)
    return (x * cos).addcmul_(swapped, sin)
