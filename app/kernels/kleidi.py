"""A linear form in four bits by Arm's KleidiAI, which torch carries on 64-bit Arm: for where ours (`int_panels.py`) is not to be had.

Activations are quantised inside the product, one scale a row, so its result differs from ours in rounding. What it packs is opaque: it
cannot be kept in a file. Its twin multiplies by what the codes mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from app.kernels.activations import Activations, plain
from app.kernels.rounding import Int4Weight, quantise_int4

_MULTIPLE = 32  # of inputs, and of a group: what its kernels take at a time


@cache
def _is_available() -> bool:
    """Whether this build of torch has KleidiAI; only builds for 64-bit Arm do. Elsewhere its operators are a slow reference."""
    available: bool = torch.backends.kleidiai.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.aten, "_dyn_quant_matmul_4bit")


@dataclass(frozen=True, slots=True)
class KleidiPacking:
    """How such a form is made: how many inputs share a scale; `group` None: all of an output's."""

    group: int | None
    keeps_weight: ClassVar[bool] = False

    def suits(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        return _is_available() and columns % (self.group or _MULTIPLE) == 0

    def room(self, outputs: int, inputs: int, bias: Tensor | None) -> None:
        """It can only be packed whole."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> KleidiLinear:
        """weight [out, in] of any float dtype."""
        return KleidiLinear(quantise_int4(weight, self.group or weight.shape[1], zero_points=False), bias)


class KleidiLinear:
    """A weight [out, in] as KleidiAI packs it, its bias within."""

    __slots__ = ("group", "inputs", "outputs", "packed")

    def __init__(self, weight: Int4Weight, bias: Tensor | None) -> None:
        (self.outputs, columns), self.inputs, self.group = weight.codes.shape, weight.inputs, weight.group
        assert columns == self.inputs and weight.minimums is None, "suits() was asked"
        # Two inputs a byte, the first in its low half; scales in BF16 by group, in FP32 by output.
        codes = weight.codes[:, 1::2] << 4 | weight.codes[:, ::2]
        scales = weight.scales.float() if self.group == self.inputs else weight.scales
        self.packed: Tensor = torch.ops.aten._dyn_quant_pack_4bit_weight(
            codes, scales.contiguous(), None if bias is None else bias.float(), self.group, self.inputs, self.outputs
        )

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def takes(self, rows: int) -> None:
        """Activations come as they are."""

    def multiply(self, x: Activations) -> Tensor:
        """x [tokens, in] to [tokens, out], in its dtype. BF16 goes through FP32, which groups ask for."""
        return self._multiplied(x).to(plain(x).dtype)

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """hidden [tokens, out] fp32 += the product."""
        hidden += self._multiplied(x)

    def _multiplied(self, x: Activations) -> Tensor:
        rows = plain(x).float().contiguous()
        if len(rows) == 0:
            return rows.new_empty(0, self.outputs)
        product: Tensor = torch.ops.aten._dyn_quant_matmul_4bit(rows, self.packed, self.group, self.inputs, self.outputs)
        return product
