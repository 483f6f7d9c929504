"""Linear forms in four and eight bits by torch's own products: what serves where our library was not built. Activations stay as they are.

Twins multiply by what the codes mean, like those of our own forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from app.kernels.activations import Activations, plain
from app.kernels.rounding import quantise_int4, quantise_int8

_OUTPUTS = 16  # torch packs so many at a time (aten, Int4mmKernel.cpp)
_INPUTS = 64  # its eight-bit kernel reads past the end of rows that are no whole vectors (120 inputs: a segmentation fault in torch 2.13)
_GROUPS = (32, 64, 128, 256)  # and knows these


@dataclass(frozen=True, slots=True)
class TorchInt4Packing:
    """Groups of `group` inputs share a scale."""

    group: int
    keeps_weight: ClassVar[bool] = False

    def suits(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        here = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
        return here and rows % _OUTPUTS == 0 and columns % self.group == 0 and self.group in _GROUPS

    def room(self, outputs: int, inputs: int, bias: Tensor | None) -> None:
        """It can only be packed whole."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> TorchInt4Linear:
        """weight [out, in] of any float dtype."""
        rounded = quantise_int4(weight, self.group, zero_points=False)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(rounded.codes.int(), 1)
        scales = torch.stack((rounded.scales, torch.zeros_like(rounded.scales)), -1)  # value = scale * (code - 8) + 0
        return TorchInt4Linear(packed, scales.transpose(0, 1).contiguous(), self.group, bias)


class TorchInt4Linear:
    """A weight as torch packs it; scales and zeros [groups, out, 2]."""

    __slots__ = ("bias", "group", "packed", "scales")

    def __init__(self, packed: Tensor, scales: Tensor, group: int, bias: Tensor | None) -> None:
        self.packed, self.scales, self.group = packed, scales, group
        self.bias = None if bias is None else bias.to(torch.float32, copy=True)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def takes(self, rows: int) -> None:
        """Activations come as they are."""

    def multiply(self, x: Activations) -> Tensor:
        """x [tokens, in] to [tokens, out], in its dtype."""
        rows = plain(x)
        if len(rows) == 0:  # its kernel divides by their number
            return rows.new_empty(0, self.scales.shape[1])
        scales = self.scales.to(rows.dtype)
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(rows.contiguous(), self.packed, self.group, scales)
        return _with_bias(product, self.bias)

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """hidden [tokens, out] fp32 += the product."""
        hidden += self.multiply(x)


@dataclass(frozen=True, slots=True)
class TorchInt8Packing:
    """One scale an output."""

    keeps_weight: ClassVar[bool] = False

    def suits(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        here = hasattr(torch.ops.aten, "_weight_int8pack_mm")
        return here and rows % _OUTPUTS == 0 and columns % _INPUTS == 0

    def room(self, outputs: int, inputs: int, bias: Tensor | None) -> None:
        """It can only be packed whole."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> TorchInt8Linear:
        """weight [out, in] of any float dtype."""
        rounded = quantise_int8(weight)
        return TorchInt8Linear(rounded.codes, rounded.scales.flatten(), bias)


class TorchInt8Linear:
    """Codes [out, in] and scales [out]."""

    __slots__ = ("bias", "codes", "scales")

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self.codes, self.scales = codes, scales
        self.bias = None if bias is None else bias.to(torch.float32, copy=True)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def takes(self, rows: int) -> None:
        """Activations come as they are."""

    def multiply(self, x: Activations) -> Tensor:
        """x [tokens, in] to [tokens, out], in its dtype."""
        rows = plain(x)
        if len(rows) == 0:  # its kernel divides by their number
            return rows.new_empty(0, len(self.codes))
        product = torch.ops.aten._weight_int8pack_mm(rows.contiguous(), self.codes, self.scales.to(rows.dtype))
        return _with_bias(product, self.bias)

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """hidden [tokens, out] fp32 += the product."""
        hidden += self.multiply(x)


def _with_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product.add_(bias)
