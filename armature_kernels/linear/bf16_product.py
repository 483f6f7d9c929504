"""The native product of bf16 rows with packed weights: panels of bf16, or of integers that are widened to bf16.

`csrc/linear_bf16.h` and `csrc/linear_amx.h` describe it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from armature_kernels.native.arguments import LinearBf16Arguments, OpCode, ProductOutput
from armature_kernels.native.library import native_library
from armature_kernels.native.memory import empty
from armature_kernels.native.operations import run_operation

_BLOCK_BYTES, _BLOCK_INPUTS, _BLOCK_ROWS = 64, 32, 16  # of the copy of the rows that a product makes (csrc/ops.h)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed weight [outputs, inputs]. Integer panels have `bits`, `group` and `header`; panels of bf16 have none.

    `fixed`: a single row is summed in the same order as many.
    """

    panels: Tensor
    bias: Tensor | None
    outputs: int
    inputs: int
    bits: int = 0
    group: int = 0
    header: int = 0
    fixed: bool = False


class WideRows(Enum):
    """When integer weights are multiplied with rows of bf16, on levels that can, and not with rows of int8.

    MANY is fastest, but a row's result then depends on the number of rows. NEVER suits few rows, ALWAYS many.
    """

    NEVER = auto()
    MANY = auto()
    ALWAYS = auto()

    def applies(self, rows: int) -> bool:
        """Return True if this many rows are multiplied in bf16."""
        least = native_library().wide_rows
        return least > 0 and (self is WideRows.ALWAYS or (self is WideRows.MANY and rows >= least))


def run_bf16_product(
    weight: PackedWeight, x: Tensor, y: Tensor, first: int, output: ProductOutput, activation: int = 0
) -> None:
    """Write act(x times the weight) to columns `[first, first + outputs)` of y, whose dtype is that of `output`.

    Args:
        weight: The packed weight.
        x: [rows, inputs]; rows of another dtype than bf16 are converted first.
        y: [rows, at least first + outputs].
        first: The first column.
        output: Whether y is bf16 or fp32, and whether the product is added to it.
        activation: Code of the activation.
    """
    if x.stride(-1) != 1 or x.dtype != torch.bfloat16:
        x = x.to(torch.bfloat16).contiguous()
    rows, bias = x.shape[0], None if weight.bias is None else weight.bias.data_ptr()
    step = _BLOCK_ROWS if rows > _BLOCK_ROWS else 2
    padded = -(-rows // step) * step
    tiles = empty((padded * -(-weight.inputs // _BLOCK_INPUTS) * _BLOCK_BYTES,), torch.uint8)
    run_operation(
        LinearBf16Arguments(
            x.data_ptr(), weight.panels.data_ptr(), bias, tiles.data_ptr(), y.data_ptr() + first * y.element_size(),
            x.stride(0), y.stride(0), rows, weight.inputs, weight.outputs, output, weight.fixed, activation,
            weight.bits, weight.group, weight.header,
        ),
        OpCode.LINEAR_BF16,
    )  # fmt: skip
