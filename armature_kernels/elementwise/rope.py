"""Per-head norms, RoPE and the KV cache write, between the QKV product and attention, in one kernel.

The `*_torch` functions are the reference implementations. They serve for other dtypes, and without the native
library and Triton.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from armature_kernels.attention.attention import KvRows, QkvHeads, RopeAngles, supports_kv
from armature_kernels.native.arguments import OpCode, RopeAnglesArguments, RopeArguments
from armature_kernels.native.memory import empty
from armature_kernels.native.operations import has_kernel, run_operation
from armature_kernels.triton.support import triton_usable

_MAX_HEAD_DIM = 512  # csrc/turn.h


def rope_angles(positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> RopeAngles:
    """Compute RoPE angles: cos and signed sin, fp32 [tokens, 1, dim], multiplied by `scale`.

    Args:
        positions: int64 [tokens].
        frequencies: fp32 [dim / 2].
        scale: Factor of cos and sin, for example YaRN's attention factor.
    """
    if positions.device.type != "cpu" or not has_kernel(OpCode.ROPE_ANGLES):
        return _rope_angles_elsewhere(positions, frequencies, scale)
    positions = positions if positions.is_contiguous() else positions.contiguous()
    tokens, half = len(positions), len(frequencies)
    cos, sin = (empty((tokens, 1, 2 * half), torch.float32) for _ in range(2))
    addresses = (positions.data_ptr(), frequencies.data_ptr(), cos.data_ptr(), sin.data_ptr())
    run_operation(RopeAnglesArguments(*addresses, tokens, half, scale), tokens * half)
    return cos, sin


def _rope_angles_elsewhere(positions: Tensor, frequencies: Tensor, scale: float) -> RopeAngles:
    if triton_usable(positions):
        from armature_kernels.triton import rope as triton_rope

        return triton_rope.rope_angles(positions, frequencies, scale)
    return rope_angles_torch(positions, frequencies, scale)


def rope_angles_torch(positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> RopeAngles:
    """Compute RoPE angles by torch (reference implementation)."""
    # sin(-a) = -sin(a): negative frequencies give the first half the sign that RoPE needs.
    angle = positions.to(torch.float32)[:, None, None] * torch.cat((-frequencies, frequencies))
    cos, sin = angle.cos(), angle.sin()
    return (cos, sin) if scale == 1.0 else (cos.mul_(scale), sin.mul_(scale))


def rope_angles_of_axes(positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> RopeAngles:
    """Compute RoPE angles as `rope_angles`, where each frequency has positions of its own, int64 [tokens, dim / 2]."""
    half = positions.to(torch.float32) * frequencies
    angle = torch.cat((-half, half), 1)[:, None]
    return angle.cos().mul_(scale), angle.sin().mul_(scale)


def apply_rope_and_write_kv(heads: QkvHeads, kv: KvRows, written: Tensor) -> Tensor:
    """Return queries [tokens, num_heads, head_dim] for attention; write keys and values to rows `written`.

    `written` is int64 [tokens]. The product may be overwritten, and the queries may be a view of it.
    """
    product = heads.product
    plain = supports_kv(product.dtype, kv) and product.stride(1) == 1 and heads.head_dim <= _MAX_HEAD_DIM
    plain = plain and product.device.type == "cpu"
    if not (plain and has_kernel(OpCode.ROPE)):
        return _apply_rope_elsewhere(heads, kv, written)
    cos, sin = heads.angles if heads.angles is not None else (None, None)
    tensors = (product, heads.query_norm, heads.key_norm, cos, sin, written)
    assert all(tensor is None or tensor.stride(-1) == 1 for tensor in tensors), "rows must be contiguous"
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    tokens, dim = len(product), 0 if cos is None else cos.shape[-1]
    wide = product.dtype == torch.float32
    sizes = (product.stride(0), tokens, heads.num_heads, heads.num_kv_heads, heads.head_dim, dim, wide)
    scales = empty((tokens, 2), torch.float32) if heads.together and heads.query_norm is not None else None
    own = heads.query_norm is not None and heads.query_norm.numel() > (1 + heads.norm_bias) * heads.head_dim
    norm = (None if scales is None else scales.data_ptr(), own, heads.subtracts_mean, heads.norm_after_rope)
    values = None if heads.value_norm is None else heads.value_norm.data_ptr()
    run_operation(RopeArguments(*addresses, kv.addresses(), *sizes, heads.eps, *norm, values, heads.norm_bias))
    return product[:, : heads.num_heads * heads.head_dim].view(tokens, heads.num_heads, heads.head_dim)


def _apply_rope_elsewhere(heads: QkvHeads, kv: KvRows, written: Tensor) -> Tensor:
    if triton_usable(heads.product) and heads.has_plain_norm:
        from armature_kernels.triton import rope

        return rope.apply_rope_and_write_kv(heads, kv, written)
    query, key, value = apply_rope_to_qkv_torch(heads)
    if heads.num_kv_heads:
        kv.write(written, key, value)
    return query


def apply_rope_to_qkv(heads: QkvHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of texts without a KV cache, [tokens, heads, head_dim] each.

    Some or all of them are views of the product.
    """
    if triton_usable(heads.product) and heads.has_plain_norm and heads.value_norm is None:
        from armature_kernels.triton import rope

        return rope.apply_rope(heads)
    return apply_rope_to_qkv_torch(heads)


def apply_rope_to_qkv_torch(heads: QkvHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, [tokens, heads, head_dim] each, in the product's dtype (reference)."""
    query, key, value = heads.split()
    if heads.value_norm is not None:
        value = F.rms_norm(value.float(), heads.value_norm.shape, heads.value_norm, heads.eps).to(value.dtype)
    return _norm_and_rope(query, heads.query_norm, heads), _norm_and_rope(key, heads.key_norm, heads), value


def _norm_and_rope(x: Tensor, norm: Tensor | None, heads: QkvHeads) -> Tensor:
    if norm is None and heads.angles is None:
        return x
    wide = x.float()
    if norm is not None and not heads.norm_after_rope:
        wide = _normed_heads(wide, norm, heads)
    if heads.angles is not None:
        wide = apply_rope_torch(wide, heads.angles)
    if norm is not None and heads.norm_after_rope:
        wide = _normed_heads(wide, norm, heads)
    return wide.to(x.dtype)


def _normed_heads(x: Tensor, norm: Tensor, heads: QkvHeads) -> Tensor:
    """Return the norm of x [tokens, heads, head_dim] fp32, with the statistics of each head or of all together."""
    if heads.subtracts_mean:
        x = x - x.mean(-1, keepdim=True)
    squares = x.square().mean((-2, -1) if heads.together else -1, keepdim=True)
    if heads.norm_bias:
        weight, bias = norm.chunk(2)
        return x * torch.rsqrt(squares + heads.eps) * weight + bias
    weight = norm if norm.numel() == heads.head_dim else norm.view(x.shape[1:])
    return x * torch.rsqrt(squares + heads.eps) * weight


def apply_rope_torch(x: Tensor, angles: RopeAngles) -> Tensor:
    """Apply RoPE to x in fp32: (a, b) becomes (a cos - b sin, b cos + a sin)."""
    cos, sin = angles
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat((apply_rope_torch(x[..., :dim], angles), x[..., dim:]), -1)
    rotated = x.roll(dim // 2, -1)  # (b, a); sin is (-sin, sin)
    return (x * cos).addcmul_(rotated, sin)
