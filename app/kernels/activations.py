"""Activations as integer products read them: int8 codes in tiles, with a scale and a sum for each group of a row (csrc/ops.h).

Kernels that finish a row (norm, gate, quantise) write them; `unpacked` gives them back as they mean, for twins and tests.
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
    """`rows` rows of `size` inputs, padded to `padded`, a multiple of `group`. Tiles have `height` rows, the last may have fewer."""

    codes: Tensor  # int8, in tiles
    scales: Tensor  # fp32
    sums: Tensor  # int32, negated
    rows: int
    size: int
    group: int
    height: int

    @property
    def padded(self) -> int:
        return -(-self.size // self.group) * self.group

    def sink(self) -> Sink:
        """Where a kernel is to write these rows."""
        return Sink(None, self.codes.data_ptr(), self.scales.data_ptr(), self.sums.data_ptr(), self.group, self.height)


Activations = Tensor | Quantised  # what a product reads: rows in the model's dtype, or quantised where its form asks for that


def plain(x: Activations) -> Tensor:
    """Rows that a form reads which never asks for quantised ones."""
    assert isinstance(x, Tensor), "rows are quantised only for a form whose `takes` names a group"
    return x


def room(rows: int, size: int, group: int) -> Quantised:
    """Room for quantised rows, not initialised."""
    assert group % 32 == 0 and 0 < group <= _MOST_GROUP, "what kernels take at a time, and what they keep on their stack"
    align = native().align
    groups, most = -(-size // group), -(-rows // align) * align
    return Quantised(
        empty((most * groups * group,), torch.int8), empty((most * groups,), torch.float32), empty((most * groups,), torch.int32),
        rows, size, group, tile_height(rows),
    )  # fmt: skip


def destination(rows: int, size: int, group: int | None) -> tuple[Activations, Sink]:
    """Room for a kernel's rows, bf16 or quantised, and how the kernel is told of it."""
    if group is None:
        out = empty((rows, size), torch.bfloat16)
        return out, Sink(out.data_ptr(), None, None, None, 0, 0)
    quantised = room(rows, size, group)
    return quantised, quantised.sink()


def tile_height(rows: int) -> int:
    """Rows of each tile but the last: tiles are as equal as they can be."""
    chosen = native()
    num_tiles = max(1, -(-rows // chosen.tile_rows))
    height = max(1, -(-rows // num_tiles))  # a step whose rows nobody asks for has none
    return -(-height // chosen.align) * chosen.align


def quantise(x: Tensor, group: int) -> Quantised:
    """x [rows, size] bf16 to codes with one scale a row and group."""
    if x.stride(-1) != 1 or x.dtype != torch.bfloat16:
        x = x.to(torch.bfloat16).contiguous()
    result = room(x.shape[0], x.shape[1], group)
    run(Quantise(x.data_ptr(), x.stride(0), x.shape[0], x.shape[1], result.sink()), Code.QUANTISE, x.numel())
    return result


def quantise_torch(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """The twin: codes int8 [rows, groups, group] and scales fp32 [rows, groups]; codes are rounded to nearest, ties to even.

    A group whose largest magnitude is below 1e-35 is zero; one that is not finite has the scale NaN and codes 0.
    """
    rows, size = x.shape
    groups = -(-size // group)
    values = torch.zeros(rows, groups * group)
    values[:, :size] = x.float()
    values = values.view(rows, groups, group)
    largest = values.abs().amax(-1)
    finite = values.isfinite().all(-1)
    used = finite & (largest > 1e-35)
    hundred = torch.full_like(
        largest, 127.0
    )  # a tensor: torch divides a number by a tensor through the reciprocal, which rounds twice
    inverse = torch.where(used, torch.div(hundred, largest), 0.0)
    codes = torch.where(used[..., None], values * inverse[..., None], 0.0).round().to(torch.int8)
    scales = torch.where(used, torch.div(largest, hundred), torch.where(finite, 0.0, torch.nan))
    return codes, scales


def unpacked(x: Quantised) -> tuple[Tensor, Tensor]:
    """Codes int8 [rows, groups, group] and scales fp32 [rows, groups] of quantised rows, out of their tiles."""
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
