"""RoPE angles on a GPU, and per-head norms, RoPE and the KV cache write between the QKV product and attention.

A program processes some heads of one token. Rotated elements are written to other memory than they are read from: each
element needs its partner, which another thread might already have overwritten. One kernel computes cos and signed sin
of a step's tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from armature_kernels.attention.attention import KvRows, QkvHeads, RopeAngles
from armature_kernels.triton.launch import launch_options, wait_for_inputs

_ELEMENTS = 1024  # per program of four warps


def apply_rope_and_write_kv(heads: QkvHeads, kv: KvRows, written: Tensor, skipped: int = 0) -> Tensor:
    """Return queries [tokens, num_heads, head_dim] and write keys and values to rows `written` [tokens] int64.

    Queries that need no norm and no RoPE are a view of the product. Nothing is done for the first `skipped` tokens.
    """
    query = heads.split()[0] if heads.is_final else _empty_heads(heads, heads.num_heads)
    if skipped:
        angles = None if heads.angles is None else (heads.angles[0][skipped:], heads.angles[1][skipped:])
        heads = replace(heads, product=heads.product[skipped:], angles=angles)
    _launch(heads, query[skipped:], kv, written[skipped:].contiguous())
    return query


def apply_rope(heads: QkvHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [tokens, heads, head_dim]; unchanged ones are views of the product."""
    query, key, value = heads.split()
    if heads.is_final:
        return query, key, value
    query, key = _empty_heads(heads, heads.num_heads + heads.num_kv_heads).tensor_split((heads.num_heads,), 1)
    _launch(heads, query, KvRows(key, key, 0), None)
    return query, key, value


def _empty_heads(heads: QkvHeads, count: int) -> Tensor:
    product = heads.product
    return torch.empty(len(product), count, heads.head_dim, dtype=product.dtype, device=product.device)


def _launch(heads: QkvHeads, query: Tensor, kv: KvRows, written: Tensor | None) -> None:
    """Start the kernel; without `written`, token i's keys go to row i, and values are not written."""
    keys, values = kv.keys, None if written is None else kv.values
    key_norm = heads.key_norm if heads.num_kv_heads else heads.query_norm
    assert (heads.query_norm is None) == (key_norm is None), "queries and keys must both have a norm, or neither"
    stored = [tensor for tensor in (query, keys, values) if tensor is not None]
    assert all(tensor.stride()[1:] == (heads.head_dim, 1) for tensor in stored), "the heads of a row must be contiguous"
    product, (cos, sin) = heads.product, heads.angles if heads.angles is not None else (None, None)
    assert product.stride(1) == 1 and (cos is None or cos.is_contiguous()), "rows must be contiguous"
    first = heads.num_heads if heads.is_final else 0
    last = heads.num_heads + heads.num_kv_heads * (1 if values is None else 2)
    width = triton.next_power_of_2(heads.head_dim)
    block = max(1, min(triton.next_power_of_2(last - first), _ELEMENTS // width))
    scales = (kv.key_scales, kv.value_scales)
    norms = (heads.query_norm, key_norm, heads.value_norm)
    tensors = (product, *norms, cos, sin, written, query, keys, values, *scales)
    others = (0 if one is None else one.stride(0) for one in (values, kv.key_scales))
    strides = (product.stride(0), query.stride(0), keys.stride(0), *others)
    sizes = (
        first,
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_dim,
        0 if cos is None else cos.shape[-1],
        block,
        width,
    )
    if len(product):
        _apply_rope[(len(product), triton.cdiv(last - first, block))](
            *tensors, *strides, heads.eps, *sizes, num_warps=4, **launch_options()
        )


@triton.jit(do_not_specialize_on_alignment=["written"])  # views of a step's buffer have any alignment
def _apply_rope(
    product, query_norm, key_norm, value_norm, cos, sin, written, query, keys, values, key_scales, value_scales,
    stride, query_stride, key_stride, value_stride, scale_stride, eps,
    first: tl.constexpr, num_heads: tl.constexpr, kv_heads: tl.constexpr,
    head_dim: tl.constexpr, dim: tl.constexpr, block: tl.constexpr, width: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    head = first + tl.program_id(1) * block + tl.arange(0, block)[:, None]
    at = tl.arange(0, width)[None, :]
    is_query = (head < num_heads) & (at < head_dim)
    is_key = (head >= num_heads) & (head < num_heads + kv_heads) & (at < head_dim)
    source = product + token * stride + head * head_dim
    norm = None if query_norm is None else tl.where(head < num_heads, query_norm, key_norm)
    result = load_heads(source, norm, cos, sin, token * dim, at, is_query | is_key, eps, head_dim, dim)
    result = result.to(product.dtype.element_ty)
    row = token if written is None else tl.load(written + token)
    if first == 0:
        at_query = query + token * query_stride + head * head_dim + at
        tl.store(at_query, result.to(query.dtype.element_ty), mask=is_query)
    at_key = keys + row * key_stride + (head - num_heads) * head_dim + at
    if key_scales is None:
        tl.store(at_key, result.to(keys.dtype.element_ty), mask=is_key)
    else:
        at_scale = key_scales + row * scale_stride + head - num_heads
        store_codes(at_key, at_scale, result.to(tl.float32), is_key, is_key)
    if values is not None:
        is_value = (head >= num_heads + kv_heads) & (head < num_heads + 2 * kv_heads) & (at < head_dim)
        value = load_heads(source, value_norm, None, None, 0, at, is_value, eps, head_dim, 0).to(
            product.dtype.element_ty
        )
        at_value = values + row * value_stride + (head - num_heads - kv_heads) * head_dim + at
        if value_scales is None:
            tl.store(at_value, value.to(values.dtype.element_ty), mask=is_value)
        else:
            at_scale = value_scales + row * scale_stride + head - num_heads - kv_heads
            store_codes(at_value, at_scale, value.to(tl.float32), is_value, is_value)


@triton.jit
def load_heads(
    source, norm, cos, sin, angle_offset, at, mask, eps, head_dim: tl.constexpr, dim: tl.constexpr
):  # fmt: skip
    """Load heads [rows, elements] of a product in FP32, with their RMSNorm (unless None) and RoPE of `dim` elements.

    `source` and `norm` point to a head's first element, and `angle_offset` is of its token's first angle; `at` numbers the
    elements. Masked elements are zero; norms and angles are loaded for them too.
    """
    x = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
    result = x
    scale = tl.full((1, 1), 1.0, tl.float32)
    if norm is not None:
        scale = tl.rsqrt(tl.sum(x * x, 1) / head_dim + eps)[:, None]
        result = x * scale * tl.load(norm + at, mask=at < head_dim, other=0.0)
    if dim > 0:
        rotated = mask & (at < dim)
        partner = tl.where(at < dim // 2, at + dim // 2, at - dim // 2)
        other = tl.load(source + partner, mask=rotated, other=0.0).to(tl.float32)
        if norm is not None:
            other = other * scale * tl.load(norm + partner, mask=at < dim, other=0.0)
        cosine = tl.load(cos + angle_offset + at, mask=at < dim, other=1.0)
        sine = tl.load(sin + angle_offset + at, mask=at < dim, other=0.0)
        result = tl.where(rotated, result * cosine + other * sine, result)
    return result


@triton.jit
def store_codes(codes, scales, x, mask, stored):
    """Quantize heads x [heads, elements] fp32 as `quantize_heads`, and store the elements `stored`, and scales of their heads.

    Return the codes in FP32, and the scales [heads].
    """
    x = tl.where(mask, x, 0.0)
    largest = tl.max(tl.abs(x), 1)
    finite = tl.min(tl.where(x - x == 0.0, 1, 0), 1) == 1
    used = finite & (largest > 1e-35)
    most = tl.full(largest.shape, 127.0, tl.float32)
    inverse = tl.where(used, tl.div_rn(most, tl.where(used, largest, 1.0)), 0.0)
    # The sum rounds to the nearest integer, ties to even.
    code = (tl.where(used[:, None], x, 0.0) * inverse[:, None] + 12582912.0) - 12582912.0
    scale = tl.where(used, tl.div_rn(largest, most), tl.where(finite, 0.0, float("nan")))
    tl.store(codes, code.to(tl.int8), mask=stored)
    tl.store(scales, scale[:, None], mask=tl.max(stored.to(tl.int32), 1)[:, None] == 1)
    return code, scale


def rope_angles(positions: Tensor, frequencies: Tensor, scale: float) -> RopeAngles:
    """Compute cos and signed sin [tokens, 1, 2 * half] fp32, multiplied by `scale`.

    `positions` is int64 [tokens]. `frequencies` is fp32 [half].
    """
    tokens, half = len(positions), len(frequencies)
    cos, sin = (torch.empty(tokens, 1, 2 * half, dtype=torch.float32, device=positions.device) for _ in range(2))
    if tokens:
        given = (positions.contiguous(), frequencies, cos, sin, float(scale), half, triton.next_power_of_2(half))
        _rope_angles[(tokens,)](*given, num_warps=1, **launch_options())
    return cos, sin


@triton.jit(do_not_specialize_on_alignment=["positions"])  # views of a step's buffer have any alignment
def _rope_angles(
    positions, frequencies, cos, sin, scale, half: tl.constexpr, block: tl.constexpr, DEPENDENT: tl.constexpr
):
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < half
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + at, mask=inside, other=0.0)
    cosine, sine = tl.cos(angle) * scale, tl.sin(angle) * scale
    first = token * (2 * half) + at
    tl.store(cos + first, cosine, mask=inside)
    tl.store(cos + first + half, cosine, mask=inside)
    tl.store(sin + first, -sine, mask=inside)
    tl.store(sin + first + half, sine, mask=inside)
