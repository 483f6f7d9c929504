"""A four-bit linear form by Arm's KleidiAI, which torch contains on 64-bit Arm; used without the native library.

Activations are quantised inside the product with one scale per row, so its result differs from `IntPanelLinear` in
rounding. The packed layout is opaque and cannot be saved to a file. The reference implementation multiplies by the
dequantised weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from app.kernels.activations import Activations, plain
from app.kernels.rounding import Int4Weight, quantise_int4

_MULTIPLE = 32  # inputs, and groups, must be a multiple of what the kernels read at a time


@cache
def _is_available() -> bool:
    """Return True if this build of torch has KleidiAI, which only builds for 64-bit Arm have.

    On other platforms its operators use a slow reference implementation.
    """
    available: bool = torch.backends.kleidiai.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.aten, "_dyn_quant_matmul_4bit")


@dataclass(frozen=True, slots=True)
class KleidiPacking:
    """Packs weights with `group` inputs per scale (None: all inputs of an output)."""

    group: int | None
    keeps_weight: ClassVar[bool] = False

    def suits(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return True if KleidiAI is available and the number of inputs is a multiple of its group."""
        return _is_available() and columns % (self.group or _MULTIPLE) == 0

    def room(self, outputs: int, inputs: int, bias: Tensor | None) -> None:
        """Return None: weights can only be packed whole."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> KleidiLinear:
        """Pack weight [out, in] of any float dtype."""
        return KleidiLinear(quantise_int4(weight, self.group or weight.shape[1], zero_points=False), bias)


class KleidiLinear:
    """A weight [out, in] and its bias, packed by KleidiAI."""

    __slots__ = ("group", "inputs", "outputs", "packed")

    def __init__(self, weight: Int4Weight, bias: Tensor | None) -> None:
        (self.outputs, columns), self.inputs, self.group = weight.codes.shape, weight.inputs, weight.group
        assert columns == self.inputs and weight.minimums is None, "inputs must be a multiple of the group, without zero points"
        # Two inputs per byte, the first in the low half. Scales per group are BF16, scales per output FP32.
        codes = weight.codes[:, 1::2] << 4 | weight.codes[:, ::2]
        scales = weight.scales.float() if self.group == self.inputs else weight.scales
        self.packed: Tensor = torch.ops.aten._dyn_quant_pack_4bit_weight(
            codes, scales.contiguous(), None if bias is None else bias.float(), self.group, self.inputs, self.outputs
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight and bias."""
        return self.packed.nbytes

    def takes(self, rows: int) -> None:
        """Return None: activations are not quantised before the product."""

    def multiply(self, x: Activations) -> Tensor:
        """Multiply x [tokens, in] to [tokens, out] in its dtype; bf16 is converted to fp32, which groups require."""
        return self._multiplied(x).to(plain(x).dtype)

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """Add the product to hidden [tokens, out] fp32 in place."""
        hidden += self._multiplied(x)

    def _multiplied(self, x: Activations) -> Tensor:
        rows = plain(x).float().contiguous()
        if len(rows) == 0:
            return rows.new_empty(0, self.outputs)
        product: Tensor = torch.ops.aten._dyn_quant_matmul_4bit(rows, self.packed, self.group, self.inputs, self.outputs)
        return product
