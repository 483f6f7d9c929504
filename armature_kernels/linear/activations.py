"""Quantized activations, the input of integer products: int8 codes in tiles, with scales and sums.

Each group of a row has a scale and a sum, and several groups may have the same scale. The layout is described in
csrc/ops.h. The kernels for norms, gated activations and quantization write it. `unpack_tiles` reads it back for the
reference implementations and the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from armature_kernels.native.arguments import QuantizeArguments, RowSink
from armature_kernels.native.library import native_library
from armature_kernels.native.memory import empty
from armature_kernels.native.operations import run_operation

_MAX_GROUP = 65536  # csrc/sink.h


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Groups of the inputs of a row that is quantized.

    `size` inputs have a sum of their own, as they have a scale of a weight. Each `shared` groups have the same scale: 1,
    or 2, 4 or 8 groups of 32 inputs.
    """

    size: int
    shared: int = 1


@dataclass(frozen=True, slots=True)
class QuantizedActivations:
    """Int8 codes, scales and sums of `rows` rows with `size` inputs each, padded to `padded`, a multiple of `group`.

    Each `shared` groups of a row have the same scale. A tile has `height` rows. The last tile may have fewer.
    """

    codes: Tensor  # int8, in tiles
    scales: Tensor  # fp32
    sums: Tensor  # int32, negated
    rows: int
    size: int
    group: int
    height: int
    shared: int = 1

    @property
    def padded(self) -> int:
        """Inputs of a row, rounded up to a multiple of `group`."""
        return -(-self.size // self.group) * self.group

    def as_sink(self) -> RowSink:
        """Return the C structure that makes a kernel write its rows into this object."""
        return RowSink(
            None,
            self.codes.data_ptr(),
            self.scales.data_ptr(),
            self.sums.data_ptr(),
            self.group,
            self.height,
            None,
            self.shared,
        )


@dataclass(frozen=True, slots=True)
class UnnormedRows:
    """Rows `hidden` [tokens, size] of which a product computes the RMSNorm with a weight FP32 [size] (`takes_unnormed`)."""

    hidden: Tensor
    weight: Tensor
    eps: float


# Input of a product: rows in the model's dtype, or what the form requires or takes instead.
Activations = Tensor | QuantizedActivations | UnnormedRows


def rows_of(x: Activations) -> int:
    """Return the number of rows of x."""
    if isinstance(x, QuantizedActivations):
        return x.rows
    return len(x.hidden if isinstance(x, UnnormedRows) else x)


def unquantized(x: Activations) -> Tensor:
    """Return x as a tensor, for forms that read neither quantized rows nor rows without their norm."""
    assert isinstance(x, Tensor), "rows are quantized or unnormed only for a form that asks for them"
    return x


def empty_quantized(rows: int, size: int, groups: RowGroups) -> QuantizedActivations:
    """Allocate quantized rows without initialising them."""
    group = groups.size
    assert group % 32 == 0 and 0 < group <= _MAX_GROUP, (
        "kernels read 32 inputs at a time, and keep at most 65536 on their stack"
    )
    align = native_library().align
    count, most = -(-size // group), -(-rows // align) * align
    return QuantizedActivations(
        empty((most * count * group,), torch.int8), empty((most * count,), torch.float32), empty((most * count,), torch.int32),
        rows, size, group, tile_height(rows), groups.shared,
    )  # fmt: skip


ROW_DTYPES = (torch.bfloat16, torch.float32)  # dtypes of rows that the kernels between products read and write


def allocate_output(
    rows: int, size: int, groups: RowGroups | None, dtype: torch.dtype = torch.bfloat16
) -> tuple[Activations, RowSink]:
    """Allocate the output of a kernel and return it with the C structure that describes it.

    It is quantized if `groups` are given, else of `dtype`, one of `ROW_DTYPES`.
    """
    if groups is None:
        out = empty((rows, size), dtype)
        narrow, wide = (out.data_ptr() if dtype == one else None for one in ROW_DTYPES)
        return out, RowSink(narrow, None, None, None, 0, 0, wide, 1)
    quantized = empty_quantized(rows, size, groups)
    return quantized, quantized.as_sink()


def tile_height(rows: int) -> int:
    """Return the number of rows of each tile except the last; tiles are as equal in height as possible."""
    chosen = native_library()
    num_tiles = max(1, -(-rows // chosen.tile_rows))
    height = max(1, -(-rows // num_tiles))  # a step may have no rows
    return -(-height // chosen.align) * chosen.align


def quantize(x: Tensor, groups: RowGroups) -> QuantizedActivations:
    """Quantize x [rows, size] to int8 codes with a scale for each group of a row, or for several.

    Rows of another dtype than bf16 are converted to bf16 first.
    """
    if x.stride(-1) != 1 or x.dtype != torch.bfloat16:
        x = x.to(torch.bfloat16).contiguous()
    result = empty_quantized(x.shape[0], x.shape[1], groups)
    run_operation(
        QuantizeArguments(x.data_ptr(), x.stride(0), x.shape[0], x.shape[1], result.as_sink()),
        x.numel(),
    )
    return result


def quantize_torch(x: Tensor, groups: RowGroups) -> tuple[Tensor, Tensor]:
    """Quantize x [rows, size] in plain torch; this is the reference implementation of `quantize`.

    Codes are rounded to nearest, ties to even. Groups of one scale are zero if their largest magnitude is below 1e-35. If
    they contain a value that is not finite, their scale is NaN and their codes are 0.

    Returns:
        Codes int8 [rows, groups, group] and scales fp32 [rows, groups].
    """
    rows, size = x.shape
    count, together = -(-size // groups.size), groups.size * groups.shared
    values = torch.zeros(rows, -(-size // together) * together)
    values[:, :size] = x.float()
    scaled = values.view(rows, -1, together)
    largest = scaled.abs().amax(-1).repeat_interleave(groups.shared, 1)[:, :count]
    finite = scaled.isfinite().all(-1).repeat_interleave(groups.shared, 1)[:, :count]
    values = values[:, : count * groups.size].reshape(rows, count, groups.size)
    used = finite & (largest > 1e-35)
    # A tensor, because torch divides a Python number by a tensor through the reciprocal, which rounds twice.
    hundred = torch.full_like(largest, 127.0)
    inverse = torch.where(used, torch.div(hundred, largest), 0.0)
    codes = torch.where(used[..., None], values * inverse[..., None], 0.0).round().to(torch.int8)
    scales = torch.where(used, torch.div(largest, hundred), torch.where(finite, 0.0, torch.nan))
    return codes, scales


def unpack_tiles(x: QuantizedActivations) -> tuple[Tensor, Tensor]:
    """Read quantized rows out of their tiles: codes int8 [rows, groups, group] and scales fp32 [rows, groups]."""
    block, align = native_library().block, native_library().align
    groups = x.padded // x.group
    codes, scales = torch.empty(x.rows, x.padded, dtype=torch.int8), torch.empty(x.rows, groups)
    for first in range(0, x.rows, x.height):
        valid_rows = min(x.height, x.rows - first)
        padded_rows = -(-valid_rows // align) * align
        tile = x.codes[first * x.padded : (first + padded_rows) * x.padded].view(x.padded // block, padded_rows, block)
        codes[first : first + valid_rows] = tile.transpose(0, 1).reshape(padded_rows, x.padded)[:valid_rows]
        scales[first : first + valid_rows] = (
            x.scales[first * groups : (first + padded_rows) * groups].view(groups, padded_rows).T[:valid_rows]
        )
    return codes.view(x.rows, groups, x.group), scales
