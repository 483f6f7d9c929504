"""Dequantisation of packed four-bit weights on an NVIDIA GPU, in one pass for any order of the codes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.layout import DEVICE_GROUP

_TILE = 8  # outputs whose codes are contiguous
_INPUTS = 256  # inputs per program
_TILES = 8  # tiles per program, which reads the code order once


def write_out(packed: torch.Tensor, order: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Dequantise packed codes into out [outputs, inputs]; equals the reference implementation in `device_int4`.

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
    _write_out[grid](packed, order, scales, out, outputs, inputs, GROUP=DEVICE_GROUP, TILE=_TILE, TILES=_TILES, INPUTS=_INPUTS)


@triton.jit
def _write_out(
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
):
    """Dequantise some tiles; the code at place p of its tile is in bits 4 * (p % 8) of int32 number p // 8.

    A tile has as many int32 numbers as inputs.
    """
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
