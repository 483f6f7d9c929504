"""Products with quantized weights on a GPU: codes are converted in registers, so that memory holds and sends codes alone."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_FEW_ROWS, _MANY_ROWS, _INPUTS = 16, 64, 128  # of a block
# Outputs of a block: few for small weights, so that each of a large GPU's 130 multiprocessors has blocks.
_FEW_OUTPUTS, _MANY_OUTPUTS, _MANY_BLOCKS = 16, 64, 256


def multiply_int8(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Multiply x [rows, inputs] by codes int8 [outputs, inputs] times scales [outputs]; the result has x's dtype.

    Sums are in FP32. The reference is `F.linear` with the dequantized weight.
    """
    (rows, inputs), outputs = x.shape, len(codes)
    assert x.is_contiguous() and codes.is_contiguous(), "tensors are addressed by their shape"
    out = x.new_empty(rows, outputs)
    block = _FEW_ROWS if rows <= _FEW_ROWS else _MANY_ROWS
    width = _MANY_OUTPUTS if outputs >= _MANY_OUTPUTS * _MANY_BLOCKS else _FEW_OUTPUTS
    grid = (triton.cdiv(outputs, width), triton.cdiv(rows, block))
    _multiply_int8[grid](
        x,
        codes,
        scales,
        out,
        rows,
        inputs,
        outputs,
        ROWS=block,
        OUTPUTS=width,
        INPUTS=_INPUTS,
        num_warps=4,
        num_stages=4,
    )
    return out


@triton.jit
def _multiply_int8(
    x, codes, scales, out, rows, inputs: tl.constexpr, outputs: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there, inside = at < outputs, row < rows
    row_pointers = x + row[:, None] * inputs
    code_pointers = codes + at[None, :].to(tl.int64) * inputs
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in range(0, inputs, INPUTS):
        place = first + tl.arange(0, INPUTS)
        is_input = place < inputs
        left = tl.load(row_pointers + place[None, :], mask=inside[:, None] & is_input[None, :], other=0.0)
        right = tl.load(code_pointers + place[:, None], mask=is_input[:, None] & there[None, :], other=0)
        total = tl.dot(left, right.to(tl.float32).to(left.dtype), total, input_precision="ieee")  # codes are exact
    total *= tl.load(scales + at, mask=there, other=0.0).to(tl.float32)[None, :]
    target = out + row[:, None].to(tl.int64) * outputs + at[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=inside[:, None] & there[None, :])
