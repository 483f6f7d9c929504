"""Quantised activations, the input of integer products: int8 codes in tiles, with scales and sums.

Each group of a row has one scale and one sum. The layout is described in csrc/ops.h. The kernels for norms, gated
activations and quantisation write it. `unpack_tiles` reads it back for the reference implementations and the
tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from app.kernels.memory import empty
from app.kernels.native import native
from app.kernels.operations import Code, Quantise, Sink, run

_MOST_GROUP = 65536  # csrc/sink.h


@dataclass(frozen=True, slots=True)
class Quantised:
    """Int8 codes, scales and sums of `rows` rows with `size` inputs each, padded to `padded`, a multiple of `group`.

    A tile has `height` rows. The last tile may have fewer.
    """

    codes: Tensor  # int8, in tiles
    scales: Tensor  # fp32
    sums: Tensor  # int32, negated
    rows: int
    size: int
    group: int
    height: int

    @property
    def padded(self) -> int:
        """Inputs of a row, rounded up to a multiple of `group`."""
        return -(-self.size // self.group) * self.group

    def sink(self) -> Sink:
        """Return the C structure that makes a kernel write its rows into this object."""
        return Sink(None, self.codes.data_ptr(), self.scales.data_ptr(), self.sums.data_ptr(), self.group, self.height)


Activations = Tensor | Quantised  # input of a product: rows in the model's dtype, or quantised if the form requires it


def plain(x: Activations) -> Tensor:
    """Return x as a tensor, for forms that never read quantised rows."""
    assert isinstance(x, Tensor), "rows are quantised only for a form whose `takes` names a group"
    return x


def room(rows: int, size: int, group: int) -> Quantised:
    """Allocate quantised rows without initialising them."""
    assert group % 32 == 0 and 0 < group <= _MOST_GROUP, "kernels read 32 inputs at a time, and keep at most 65536 on their stack"
    align = native().align
    groups, most = -(-size // group), -(-rows // align) * align
    return Quantised(
        empty((most * groups * group,), torch.int8), empty((most * groups,), torch.float32), empty((most * groups,), torch.int32),
        rows, size, group, tile_height(rows),
    )  # fmt: skip


def destination(rows: int, size: int, group: int | None) -> tuple[Activations, Sink]:
    """Allocate the output of a kernel, bf16 or quantised, and return it with the C structure that describes it."""
    if group is None:
        out = empty((rows, size), torch.bfloat16)
        return out, Sink(out.data_ptr(), None, None, None, 0, 0)
    quantised = room(rows, size, group)
    return quantised, quantised.sink()


def tile_height(rows: int) -> int:
    """Return the number of rows of each tile except the last; tiles are as equal in height as possible."""
    chosen = native()
    num_tiles = max(1, -(-rows // chosen.tile_rows))
    height = max(1, -(-rows // num_tiles))  # a step may have no rows
    return -(-height // chosen.align) * chosen.align


def quantise(x: Tensor, group: int) -> Quantised:
    """Quantise x [rows, size] to int8 codes with one scale for each row and group.

    Rows of another dtype than bf16 are converted to bf16 first.
    """
    if x.stride(-1) != 1 or x.dtype != torch.bfloat16:
        x = x.to(torch.bfloat16).contiguous()
    result = room(x.shape[0], x.shape[1], group)
    run(Quantise(x.data_ptr(), x.stride(0), x.shape[0], x.shape[1], result.sink()), Code.QUANTISE, x.numel())
    return result


def quantise_torch(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantise x [rows, size] in plain torch; this is the reference implementation of `quantise`.

    Codes are rounded to nearest, ties to even. A group whose largest magnitude is below 1e-35 is zero. A group
    that contains a value that is not finite has the scale NaN and the codes 0.

    Returns:
        Codes int8 [rows, groups, group] and scales fp32 [rows, groups].
    """
    rows, size = x.shape
    groups = -(-size // group)
    values = torch.zeros(rows, groups * group)
    values[:, :size] = x.float()
    values = values.view(rows, groups, group)
    largest = values.abs().amax(-1)
    finite = values.isfinite().all(-1)
    used = finite & (largest > 1e-35)
    # A tensor, because torch divides a Python number by a tensor through the reciprocal, which rounds twice.
    hundred = torch.full_like(largest, 127.0)
    inverse = torch.where(used, torch.div(hundred, largest), 0.0)
    codes = torch.where(used[..., None], values * inverse[..., None], 0.0).round().to(torch.int8)
    scales = torch.where(used, torch.div(largest, hundred), torch.where(finite, 0.0, torch.nan))
    return codes, scales


def unpacked(x: Quantised) -> tuple[Tensor, Tensor]:
    """Read quantised rows out of their tiles: codes int8 [rows, groups, group] and scales fp32 [rows, groups]."""
    block, align = native().block, native().align
    groups = x.padded // x.group
    codes, scales = torch.empty(x.rows, x.padded, dtype=torch.int8), torch.empty(x.rows, groups)
    for first in range(0, x.rows, x.height):
        own = min(x.height, x.rows - first)
        count = -(-own // align) * align
        tile = x.codes[first * x.padded : (first + count) * x.padded].view(x.padded // block, count, block)
        codes[first : first + own] = tile.transpose(0, 1).reshape(count, x.padded)[:own]
        scales[first : first + own] = x.scales[first * groups : (first + count) * groups].view(groups, count).T[:own]
    return codes.view(x.rows, groups, x.group), scales
