"""Embedding rows, widened to fp32, from a packed linear form or from a table as the checkpoint stores it.

`embedding_rows_torch` is the reference implementation, which serves without the native library and Triton. An id out
of range is never read; its row is NaN, or with `absent_first` that of id 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from armature_kernels.linear.layout import PanelHeader
from armature_kernels.native.arguments import EmbeddingArguments, OpCode
from armature_kernels.native.memory import empty
from armature_kernels.native.operations import has_kernel, run_operation
from armature_kernels.triton.support import triton_usable

RowFactor = float | Tensor  # one factor for all rows, or one per input: fp32 [inputs]


class TableLayout(IntEnum):
    """Table layouts, equal to the `enum` in csrc/ops.h."""

    INT4 = 4
    INT8 = 8
    BF16_PANELS = 16
    STORED_BF16 = 17
    STORED_FP16 = 18
    STORED_FP32 = 19
    FP32_PANELS = 20


_STORED: Mapping[torch.dtype, TableLayout] = {
    torch.bfloat16: TableLayout.STORED_BF16,
    torch.float16: TableLayout.STORED_FP16,
    torch.float32: TableLayout.STORED_FP32,
}


@dataclass(frozen=True, slots=True)
class EmbeddingTable:
    """The memory layout of a weight [outputs, inputs]; csrc/ops.h describes the layouts."""

    weight: Tensor
    form: TableLayout
    outputs: int
    inputs: int
    padded: int = 0
    group: int = 0
    header: PanelHeader = PanelHeader.SCALES

    def rows(self, ids: Tensor, factor: RowFactor = 1.0) -> Tensor:
        """Return rows fp32 [n, inputs] for ids [n] int64, times a factor."""
        out = empty((len(ids), self.inputs), torch.float32)
        self.write(out, ids, factor)
        return out

    def write(
        self, out: Tensor, ids: Tensor, factor: RowFactor = 1.0, add: bool = False, absent_first: bool = False
    ) -> None:
        """Write those rows to out [n, inputs] fp32, or add them if `add` is True."""
        ids = ids if ids.is_contiguous() else ids.contiguous()
        assert out.is_contiguous() and out.shape == (len(ids), self.inputs), (
            "out must be contiguous with shape [n, inputs]"
        )
        factors, times = (factor.data_ptr(), 1.0) if isinstance(factor, Tensor) else (None, factor)
        sizes = (len(ids), self.outputs, self.inputs, self.padded, self.group, self.form, self.header, add)
        addresses = (self.weight.data_ptr(), ids.data_ptr(), factors, out.data_ptr())
        arguments = EmbeddingArguments(*addresses, *sizes, times, absent_first)
        run_operation(arguments, OpCode.EMBEDDING, len(ids) * self.inputs)


def embedding_rows(weight: Tensor, ids: Tensor, factor: RowFactor = 1.0, absent_first: bool = False) -> Tensor:
    """Return rows fp32 [n, inputs] of a stored weight [outputs, inputs] for ids [n] int64, times a factor."""
    table = _native_table(weight)
    if table is not None:
        out = empty((len(ids), table.inputs), torch.float32)
        table.write(out, ids, factor, absent_first=absent_first)
        return out
    if absent_first:
        ids = ids.where((ids >= 0) & (ids < len(weight)), 0)
    if triton_usable(weight):
        from armature_kernels.triton import elementwise

        return elementwise.embedding_rows(weight, ids, factor)
    return embedding_rows_torch(weight, ids, factor)


def add_embedding_rows(hidden: Tensor, weight: Tensor, ids: Tensor, factor: RowFactor = 1.0) -> None:
    """Add those rows to hidden [n, inputs] fp32, contiguous, in place."""
    table = _native_table(weight)
    if table is not None:
        table.write(hidden, ids, factor, add=True)
    elif triton_usable(weight):
        from armature_kernels.triton import elementwise

        elementwise.add_embedding_rows(hidden, weight, ids, factor)
    else:
        hidden += embedding_rows_torch(weight, ids, factor)


def _native_table(weight: Tensor) -> EmbeddingTable | None:
    """Return the weight as a table of the native library, or None if the library does not support it."""
    form = _STORED.get(weight.dtype)
    if form is None or weight.device.type != "cpu" or not weight.is_contiguous() or not has_kernel(OpCode.EMBEDDING):
        return None
    return EmbeddingTable(weight, form, *weight.shape)


def embedding_rows_torch(weight: Tensor, ids: Tensor, factor: RowFactor = 1.0) -> Tensor:
    """Return rows fp32 [n, inputs] by torch, with NaN for ids out of range."""
    known = (ids >= 0) & (ids < len(weight))
    rows = F.embedding(ids.where(known, 0), weight).to(torch.float32, copy=True)
    rows = rows.masked_fill_(~known[:, None], torch.nan)
    return rows.mul_(factor) if isinstance(factor, Tensor) or factor != 1.0 else rows
