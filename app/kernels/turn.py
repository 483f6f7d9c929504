"""Per-head norms, RoPE and the KV cache write, between the QKV product and attention, in one kernel.

The `*_torch` functions are the reference implementations. They serve for other dtypes, and without the native
library and Triton.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from app.kernels.gpu.available import usable
from app.kernels.heads import Angles, Heads
from app.kernels.kv_rows import KVRows
from app.kernels.memory import empty
from app.kernels.operations import Angle, Code, Turn, has, run

__all__ = ["Heads", "angles", "angles_torch", "turn", "turn_torch", "turned", "turned_torch"]
_MAX_HEAD_DIM = 256  # csrc/turn.h


def angles(positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> Angles:
    """Compute RoPE angles: cos and signed sin, fp32 [tokens, 1, dim], multiplied by `scale`.

    Args:
        positions: int64 [tokens].
        frequencies: fp32 [dim / 2].
        scale: Factor of cos and sin, for example YaRN's attention factor.
    """
    if positions.device.type != "cpu" or not has(Code.ANGLES):
        return _angles_elsewhere(positions, frequencies, scale)
    positions = positions if positions.is_contiguous() else positions.contiguous()
    tokens, half = len(positions), len(frequencies)
    cos, sin = (empty((tokens, 1, 2 * half), torch.float32) for _ in range(2))
    addresses = (positions.data_ptr(), frequencies.data_ptr(), cos.data_ptr(), sin.data_ptr())
    run(Angle(*addresses, tokens, half, scale), Code.ANGLES, tokens * half)
    return cos, sin


def _angles_elsewhere(positions: Tensor, frequencies: Tensor, scale: float) -> Angles:
    if usable(positions):
        from app.kernels.gpu import angles as on_gpu

        return on_gpu.angles(positions, frequencies, scale)
    return angles_torch(positions, frequencies, scale)


def angles_torch(positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> Angles:
    """Compute RoPE angles by torch (reference implementation)."""
    # sin(-a) = -sin(a): negative frequencies give the first half the sign that RoPE needs.
    turned = positions.to(torch.float32)[:, None, None] * torch.cat((-frequencies, frequencies))
    cos, sin = turned.cos(), turned.sin()
    return (cos, sin) if scale == 1.0 else (cos.mul_(scale), sin.mul_(scale))


def turn(heads: Heads, kv: KVRows, written: Tensor) -> Tensor:
    """Return queries [tokens, num_heads, head_dim] for attention; write keys and values to rows `written`.

    `written` is int64 [tokens]. The product may be overwritten, and the queries may be a view of it.
    """
    product = heads.product
    plain = product.dtype == torch.bfloat16 and product.stride(1) == 1 and heads.head_dim <= _MAX_HEAD_DIM
    plain = plain and product.device.type == "cpu" and kv.keys.dtype in (torch.bfloat16, torch.int8)
    if not (plain and has(Code.TURN)):
        return _turn_elsewhere(heads, kv, written)
    cos, sin = heads.angles if heads.angles is not None else (None, None)
    tensors = (product, heads.query_norm, heads.key_norm, cos, sin, written)
    assert all(tensor is None or tensor.stride(-1) == 1 for tensor in tensors), "rows must be contiguous"
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    tokens, dim = len(product), 0 if cos is None else cos.shape[-1]
    sizes = (product.stride(0), tokens, heads.num_heads, heads.num_kv_heads, heads.head_dim, dim)
    run(Turn(*addresses, kv.addresses(), *sizes, heads.eps), Code.TURN)
    return product[:, : heads.num_heads * heads.head_dim].view(tokens, heads.num_heads, heads.head_dim)


def _turn_elsewhere(heads: Heads, kv: KVRows, written: Tensor) -> Tensor:
    if usable(heads.product) and kv.key_scales is None:
        from app.kernels.gpu import turning

        return turning.turn(heads, kv, written)
    query, key, value = turned_torch(heads)
    kv.write(written, key, value)
    return query


def turned(heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of texts without a KV cache, [tokens, heads, head_dim] each.

    Some or all of them are views of the product.
    """
    if usable(heads.product):
        from app.kernels.gpu import turning

        return turning.turned(heads)
    return turned_torch(heads)


def turned_torch(heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, [tokens, heads, head_dim] each, in the product's dtype (reference)."""
    query, key, value = heads.split()
    return _turned(query, heads.query_norm, heads), _turned(key, heads.key_norm, heads), value


def _turned(x: Tensor, norm: Tensor | None, heads: Heads) -> Tensor:
    if norm is None and heads.angles is None:
        return x
    wide = x.float()
    if norm is not None:
        wide = F.rms_norm(wide, norm.shape, norm, heads.eps)
    return (wide if heads.angles is None else turn_torch(wide, heads.angles)).to(x.dtype)


def turn_torch(x: Tensor, angles: Angles) -> Tensor:
    """Apply RoPE to x in fp32: (a, b) becomes (a cos - b sin, b cos + a sin)."""
    cos, sin = angles
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat((turn_torch(x[..., :dim], angles), x[..., dim:]), -1)
    swapped = x.roll(dim // 2, -1)  # (b, a); sin is (-sin, sin)
    return (x * cos).addcmul_(swapped, sin)
