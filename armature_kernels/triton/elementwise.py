"""Elementwise kernels on a GPU: norms of the residual stream, activations, embedding rows and int4 dequantization.

Norms run one program per row, which is held in registers, with sums in fp32 for any dtype; LayerNorm can also run in
place. Activations, elementwise or gated (act(gate) * up), are computed in fp32 and rounded once. Embedding rows are
widened to fp32 and scaled, and an id out of range gives NaN. Math functions replace those that Triton lacks, or that
must treat NaN like torch does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from armature_kernels.linear.layout import DEVICE_GROUP
from armature_kernels.triton.launch import launch_options, wait_for_inputs


@triton.jit
def tanh(x):
    """Compute tanh with a relative error below 1e-6 everywhere.

    Below 0.1 it uses odd powers, because the quotient of exponentials would lose digits there.
    """
    square = x * x
    near = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    decay = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.1, near, tl.where(x < 0.0, -far, far))


@triton.jit
def apply_activation(x, activation: tl.constexpr):
    """Apply an activation of `ACTIVATION_CODES` like torch does; NaN stays NaN."""
    if activation == "silu":
        result = x / (1.0 + tl.exp(-x))
    elif activation == "gelu":
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif activation == "gelu_tanh":
        # (1 + tanh u) / 2 is the logistic function of 2u.
        result = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif activation == "relu":
        result = tl.where(x < 0.0, 0.0, x)
    elif activation == "relu2":
        result = tl.where(x < 0.0, 0.0, x * x)
    else:
        tl.static_assert(activation == "tanh", "no such activation")
        result = tanh(x)
    return result


MAX_ROW_SIZE = 32768  # most elements of a row: 64 for each of 512 threads


def supports_row_norm(x: Tensor) -> bool:
    """Return True if x is a matrix with contiguous rows that are not too long for these kernels."""
    return x.dim() == 2 and x.stride(1) == 1 and x.shape[1] <= MAX_ROW_SIZE


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Compute the RMSNorm of hidden [tokens, size] in `dtype`; weight [size] fp32."""
    rows, size = hidden.shape
    out = torch.empty(rows, size, dtype=dtype, device=hidden.device)
    if rows:
        block = triton.next_power_of_2(size)
        _rms_norm[(rows,)](hidden, weight, out, hidden.stride(0), eps, size, block, **_row_options(block))
    return out


def add_rms_norm(hidden: Tensor, branch: Tensor, weight: Tensor, eps: float, factor: float = 1.0) -> None:
    """Add the RMSNorm of branch [tokens, size] to hidden [tokens, size] fp32 in place, and multiply by the factor."""
    rows, size = hidden.shape
    if rows:
        block = triton.next_power_of_2(size)
        strides = (hidden.stride(0), branch.stride(0))
        _add_rms_norm[(rows,)](hidden, branch, weight, *strides, eps, factor, size, block, **_row_options(block))


def layer_norm(
    hidden: Tensor, norm: tuple[Tensor, Tensor | None, float], dtype: torch.dtype | None, in_place: bool
) -> Tensor | None:
    """Compute the LayerNorm of hidden [tokens, size].

    The result is in `dtype`, or None if `dtype` is None. If `in_place` is True, hidden is overwritten by its norm
    as well.
    """
    weight, bias, eps = norm
    rows, size = hidden.shape
    out = None if dtype is None else torch.empty(rows, size, dtype=dtype, device=hidden.device)
    if rows:
        block = triton.next_power_of_2(size)
        given = (hidden, weight, bias, out, hidden.stride(0), eps, size, block, in_place)
        _layer_norm[(rows,)](*given, **_row_options(block))
    return out


def num_warps(block: int) -> int:
    """Return the number of warps (32 threads) for a block of this size: 8 elements per thread, at most 16 warps."""
    return min(16, max(1, block // 256))


def _row_options(block: int) -> dict[str, int]:
    return {"num_warps": num_warps(block), **launch_options()}


@triton.jit
def _rms_norm(hidden, weight, out, stride, eps, size: tl.constexpr, block: tl.constexpr, DEPENDENT: tl.constexpr):
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < size
    x = tl.load(hidden + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    result = x * scale * tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + row * size + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm(
    hidden, branch, weight, stride, branch_stride, eps, factor,
    size: tl.constexpr, block: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < size
    x = tl.load(branch + row * branch_stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    normed = x * scale * tl.load(weight + at, mask=inside, other=0.0)
    before = tl.load(hidden + row * stride + at, mask=inside, other=0.0)
    tl.store(hidden + row * stride + at, (before + normed) * factor, mask=inside)


@triton.jit
def _layer_norm(
    hidden, weight, bias, out, stride, eps,
    size: tl.constexpr, block: tl.constexpr, in_place: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < size
    x = tl.load(hidden + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, x - tl.sum(x, 0) / size, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / size + eps)
    normed = centred * scale * tl.load(weight + at, mask=inside, other=0.0)
    if bias is not None:
        normed += tl.load(bias + at, mask=inside, other=0.0)
    if in_place:
        tl.store(hidden + row * stride + at, normed, mask=inside)
    if out is not None:
        tl.store(out + row * size + at, normed.to(out.dtype.element_ty), mask=inside)


_BLOCK = 1024  # elements per program of four warps


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """Compute act(gate) * up [tokens, size] from gate_up [tokens, 2 * size]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid, options = (rows, triton.cdiv(size, _BLOCK)), launch_options()
        _gate[grid](gate_up, out, gate_up.stride(0), size, activation, _BLOCK, num_warps=4, **options)
    return out


def activate(x: Tensor, activation: str) -> Tensor:
    """Compute act(x) of x [tokens, size] in its dtype."""
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows:
        grid, options = (rows, triton.cdiv(size, _BLOCK)), launch_options()
        _activate[grid](x, out, x.stride(0), size, activation, _BLOCK, num_warps=4, **options)
    return out


@triton.jit
def _gate(
    gate_up, out, stride,
    size: tl.constexpr, activation: tl.constexpr, block: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < size
    first = tl.load(gate_up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(gate_up + row * stride + size + at, mask=inside, other=0.0).to(tl.float32)
    result = apply_activation(first, activation) * second
    tl.store(out + row * size + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _activate(
    x, out, stride, size: tl.constexpr, activation: tl.constexpr, block: tl.constexpr, DEPENDENT: tl.constexpr
):
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < size
    result = apply_activation(tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32), activation)
    tl.store(out + row * size + at, result.to(out.dtype.element_ty), mask=inside)


_EMBEDDING_BLOCK = 1024  # elements per program of four warps


def embedding_rows(weight: Tensor, ids: Tensor, factor: float | Tensor) -> Tensor:
    """Return fp32 [n, inputs], rows of weight [outputs, inputs] for ids [n] int64.

    `factor` is one number for all rows, or fp32 [inputs].
    """
    out = torch.empty(len(ids), weight.shape[1], dtype=torch.float32, device=weight.device)
    _write(out, weight, ids, factor, False)
    return out


def add_embedding_rows(hidden: Tensor, weight: Tensor, ids: Tensor, factor: float | Tensor) -> None:
    """Add rows of weight [outputs, inputs] for ids [n] int64 to hidden [n, inputs] fp32 in place."""
    _write(hidden, weight, ids, factor, True)


def _write(out: Tensor, weight: Tensor, ids: Tensor, factor: float | Tensor, add: bool) -> None:
    (outputs, inputs), count = weight.shape, len(ids)
    factors, times = (factor, 1.0) if isinstance(factor, Tensor) else (None, float(factor))
    if count:
        given = (
            out,
            weight,
            ids.contiguous(),
            factors,
            times,
            out.stride(0),
            weight.stride(0),
            outputs,
            inputs,
            _EMBEDDING_BLOCK,
            add,
        )
        _rows[(count, triton.cdiv(inputs, _EMBEDDING_BLOCK))](*given, num_warps=4, **launch_options())


@triton.jit(do_not_specialize_on_alignment=["ids"])  # views of a step's buffer have any alignment
def _rows(
    out, weight, ids, factors, times, out_stride, stride,
    outputs: tl.constexpr, inputs: tl.constexpr, block: tl.constexpr, add: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < inputs
    index = tl.load(ids + row)
    known = (index >= 0) & (index < outputs)
    values = tl.load(weight + index * stride + at, mask=inside & known, other=0.0).to(tl.float32) * times
    if factors is not None:
        values *= tl.load(factors + at, mask=inside, other=0.0)
    values = tl.where(known, values, float("nan"))
    if add:
        values += tl.load(out + row * out_stride + at, mask=inside, other=0.0)
    tl.store(out + row * out_stride + at, values, mask=inside)


_TILE = 8  # outputs whose codes are contiguous
_INPUTS = 256  # inputs per program
_TILES = 8  # tiles per program, which reads the code order once


def dequantize(packed: torch.Tensor, order: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Dequantize packed codes into out [outputs, inputs]; equals the reference implementation `dequantize_torch`.

    Args:
        packed: int32, as torch packs it.
        order: int32 [8 * inputs], the place of each code.
        scales: Scales and zeros [groups, outputs, 2].
        out: Contiguous; any float dtype.
    """
    outputs, inputs = out.shape
    assert out.is_contiguous() and scales.is_contiguous() and packed.is_contiguous(), (
        "tensors are addressed by their shape, so they must be contiguous"
    )
    assert outputs % _TILE == 0 and inputs % DEVICE_GROUP == 0, "outputs must be a multiple of 8 and inputs of 64"
    grid = (triton.cdiv(outputs // _TILE, _TILES), triton.cdiv(inputs, _INPUTS))
    sizes = {"GROUP": DEVICE_GROUP, "TILE": _TILE, "TILES": _TILES, "INPUTS": _INPUTS}
    _dequantize[grid](packed, order, scales, out, outputs, inputs, **sizes, **launch_options())


@triton.jit
def _dequantize(
    packed,
    order,
    scales,
    out,
    outputs,
    inputs,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    INPUTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Dequantize some tiles; the code at place p of its tile is in bits 4 * (p % 8) of int32 number p // 8.

    A tile has as many int32 numbers as inputs.
    """
    wait_for_inputs(DEPENDENT)
    own = tl.arange(0, TILE)[:, None]
    column = tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)[None, :]
    is_input = column < inputs
    place = tl.load(order + own * inputs + column, mask=is_input, other=0)
    word, shift = place // 8, (place % 8) * 4
    for index in range(TILES):
        tile = tl.program_id(0) * TILES + index
        row = tile * TILE + own
        there = is_input & (row < outputs)
        code = (tl.load(packed + tile.to(tl.int64) * inputs + word, mask=there, other=0) >> shift) & 15
        pair = ((column // GROUP) * outputs + row) * 2
        scale = tl.load(scales + pair, mask=there, other=0.0).to(tl.float32)
        zero = tl.load(scales + pair + 1, mask=there, other=0.0).to(tl.float32)
        value = (code - 8).to(tl.float32) * scale + zero
        tl.store(out + row.to(tl.int64) * inputs + column, value.to(out.dtype.element_ty), mask=there)
