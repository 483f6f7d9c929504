"""Products with quantized weights on a GPU: codes are converted in registers, so that memory holds and sends codes alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CONVERTED = 1024  # inputs of a block that are dequantized or quantized
_FEW_ROWS, _MANY_ROWS, _INPUTS = 16, 64, 128  # of a block
# Outputs of a block: few for small weights, so that each of a large GPU's 130 multiprocessors has blocks.
_FEW_OUTPUTS, _MANY_OUTPUTS, _MANY_BLOCKS = 16, 64, 256


def multiply_codes(x: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply x [rows, inputs] by codes [outputs, inputs] times their scales; the result has x's dtype.

    `block`: the numbers of outputs and inputs that share a scale of scales [outputs / .., inputs / ..]. Codes are int8 or E4M3.
    Sums are in FP32. The reference is `F.linear` with the dequantized weight.
    """
    (rows, inputs), outputs = x.shape, len(codes)
    assert x.is_contiguous() and codes.is_contiguous() and scales.is_contiguous(), (
        "tensors are addressed by their shape"
    )
    out = x.new_empty(rows, outputs)
    height, width = block
    rows_of_block = _FEW_ROWS if rows <= _FEW_ROWS else _MANY_ROWS
    outputs_of_block = _MANY_OUTPUTS if outputs >= _MANY_OUTPUTS * _MANY_BLOCKS else _FEW_OUTPUTS
    grid = (triton.cdiv(outputs, outputs_of_block), triton.cdiv(rows, rows_of_block))
    _multiply_codes[grid](
        x,
        as_bytes(codes),
        scales,
        out,
        rows,
        inputs,
        outputs,
        height,
        width,
        ROWS=rows_of_block,
        OUTPUTS=outputs_of_block,
        INPUTS=inputs_of_block(inputs, width, _INPUTS),
        num_warps=4,
        num_stages=4,
    )
    return out


def dequantize_codes(codes: Tensor, scales: Tensor, block: tuple[int, int], out: Tensor) -> Tensor:
    """Write codes times their scales, as `multiply_codes` has them, to `out` [outputs, inputs] and return it."""
    (outputs, inputs), (height, width) = out.shape, block
    assert codes.is_contiguous() and scales.is_contiguous() and out.is_contiguous(), "addressed by their shape"
    grid = (outputs, triton.cdiv(inputs, _CONVERTED))
    _dequantize_codes[grid](as_bytes(codes), scales, out, inputs, height, width, INPUTS=_CONVERTED)
    return out


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes E4M3 of rows [n, inputs] and their scales FP32 [n, 1]; the reference is `quantize_fp8`."""
    rows, inputs = x.shape
    assert x.is_contiguous(), "rows are addressed by their shape"
    codes, scales = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(rows, 1, dtype=torch.float32)
    _quantize_rows[(rows,)](x, as_bytes(codes), scales, inputs, INPUTS=_CONVERTED)
    return codes, scales


def as_bytes(codes: Tensor) -> Tensor:
    """Return int8 and 16-bit weights as they are, and E4M3 as uint8: Triton reads that type from capability 8.9 on only."""
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes


def inputs_of_block(inputs: int, width: int, most: int) -> int:
    """Return how many inputs a step of a kernel reads: all of them have one scale."""
    return most if width >= inputs else min(most, width & -width)


@triton.jit
def code_values(codes, dtype: tl.constexpr):
    """Return int8 codes, or bytes of E4M3 divided by 256, in `dtype`, which holds them exactly.

    FP16 has one exponent bit more and a bias that is larger by 8: the bits of E4M3 at its place are the value over 256.
    """
    if codes.dtype == tl.uint8:
        bits = codes.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        codes = half.to(tl.float16, bitcast=True)
    return codes.to(tl.float32).to(dtype)


@triton.jit
def _dequantize_codes(
    codes, scales, out, inputs: tl.constexpr, height: tl.constexpr, width: tl.constexpr, INPUTS: tl.constexpr
):
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)
    is_input = place < inputs
    values = code_values(tl.load(codes + row * inputs + place, mask=is_input, other=0), tl.float32)
    factor: tl.constexpr = 256 if codes.dtype.element_ty == tl.uint8 else 1
    scale = tl.load(scales + row // height * tl.cdiv(inputs, width) + place // width, mask=is_input, other=0.0)
    tl.store(out + row * inputs + place, (values * factor * scale).to(out.dtype.element_ty), mask=is_input)


@triton.jit
def _quantize_rows(x, codes, scales, inputs: tl.constexpr, INPUTS: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, INPUTS)
    largest, is_finite = tl.zeros([INPUTS], tl.float32), tl.full([INPUTS], 1, tl.int32)
    for first in range(0, inputs, INPUTS):
        values = tl.load(x + row * inputs + first + at, mask=first + at < inputs, other=0.0).to(tl.float32)
        is_finite = tl.where(values - values == 0.0, is_finite, 0)
        largest = tl.maximum(largest, tl.abs(values))
    scale = tl.div_rn(tl.max(largest, 0), 448.0)
    scale = tl.where(tl.min(is_finite, 0) == 1, tl.maximum(scale, 1.1754943508222875e-38), float("nan"))
    tl.store(scales + row, scale)
    for first in range(0, inputs, INPUTS):
        values = tl.load(x + row * inputs + first + at, mask=first + at < inputs, other=0.0).to(tl.float32)
        scaled = tl.div_rn(values, tl.full([INPUTS], 1.0, tl.float32) * scale)
        tl.store(codes + row * inputs + first + at, _e4m3(scaled), mask=first + at < inputs)


@triton.jit
def _e4m3(values):
    """Return the bytes of values FP32 of up to 448, rounded to nearest, ties to even; Triton's interpreter rounds wrongly."""
    size = tl.abs(values)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # the bias of FP32 is larger by 120
    subnormal = ((size * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    code = tl.where(size < 0.015625, subnormal, normal)
    return (code | ((values.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _multiply_codes(
    x, codes, scales, out, rows, inputs: tl.constexpr, outputs: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there, inside = at < outputs, row < rows
    row_pointers = x + row[:, None] * inputs
    code_pointers = codes + at[None, :].to(tl.int64) * inputs
    scale_pointers = scales + at // height * tl.cdiv(inputs, width)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in range(0, inputs, INPUTS):
        place = first + tl.arange(0, INPUTS)
        is_input = place < inputs
        left = tl.load(row_pointers + place[None, :], mask=inside[:, None] & is_input[None, :], other=0.0)
        right = tl.load(code_pointers + place[:, None], mask=is_input[:, None] & there[None, :], other=0)
        right = code_values(right, left.dtype)
        if width < inputs:
            scale = tl.load(scale_pointers + first // width, mask=there, other=0.0).to(tl.float32)
            total += tl.dot(left, right, input_precision="ieee") * scale[None, :]
        else:
            total = tl.dot(left, right, total, input_precision="ieee")
    if width >= inputs:
        total *= tl.load(scale_pointers, mask=there, other=0.0).to(tl.float32)[None, :]
    if codes.dtype.element_ty == tl.uint8:
        total *= 256
    target = out + row[:, None].to(tl.int64) * outputs + at[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=inside[:, None] & there[None, :])
