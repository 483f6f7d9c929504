"""Linear forms in four and eight bits by torch's products and Arm's KleidiAI, used without the native library.

torch's products do not quantise activations. KleidiAI, which torch contains on 64-bit Arm, quantises them inside the
product with one scale per row, so its result differs from `IntPanelLinear` in rounding; its packed layout is opaque
and cannot be saved to a file. The reference implementations in the tests multiply by the dequantised weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from app.kernels.linear.activations import Activations, unquantised
from app.kernels.linear.quantization import Int4Weight, quantise_int4, quantise_int8

_OUTPUTS = 16  # torch packs this many outputs at a time (aten, Int4mmKernel.cpp)
# The eight-bit kernel reads past the end of rows that are not whole vectors (120 inputs: segmentation fault in
# torch 2.13).
_INPUTS = 64
_GROUPS = (32, 64, 128, 256)  # group sizes that the kernel supports


@dataclass(frozen=True, slots=True)
class TorchInt4Factory:
    """Packs weights to four bits with `group` inputs per scale."""

    group: int
    keeps_weight: ClassVar[bool] = False

    def supports(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return True if this torch has the int4 product and it supports this size and group."""
        here = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
        return here and rows % _OUTPUTS == 0 and columns % self.group == 0 and self.group in _GROUPS

    def empty_form(self, outputs: int, inputs: int, bias: Tensor | None) -> None:
        """Return None: weights can only be packed whole."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> TorchInt4Linear:
        """Pack weight [out, in] of any float dtype."""
        rounded = quantise_int4(weight, self.group, zero_points=False)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(rounded.codes.int(), 1)
        scales = torch.stack((rounded.scales, torch.zeros_like(rounded.scales)), -1)  # value = scale * (code - 8) + 0
        return TorchInt4Linear(packed, scales.transpose(0, 1).contiguous(), self.group, bias)


class TorchInt4Linear:
    """A four-bit weight as torch packs it; `scales` [groups, out, 2] contains scales and zeros."""

    __slots__ = ("bias", "group", "packed", "scales")

    def __init__(self, packed: Tensor, scales: Tensor, group: int, bias: Tensor | None) -> None:
        self.packed, self.scales, self.group = packed, scales, group
        self.bias = None if bias is None else bias.to(torch.float32, copy=True)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and bias."""
        return self.packed.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def activation_group(self, rows: int) -> None:
        """Return None: activations are not quantised."""

    def multiply(self, x: Activations) -> Tensor:
        """Multiply x [tokens, in] to [tokens, out] in its dtype."""
        rows = unquantised(x)
        if len(rows) == 0:  # the kernel divides by the number of rows
            return rows.new_empty(0, self.scales.shape[1])
        scales = self.scales.to(rows.dtype)
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(rows.contiguous(), self.packed, self.group, scales)
        return _with_bias(product, self.bias)

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """Add the product to hidden [tokens, out] fp32 in place."""
        hidden += self.multiply(x)


@dataclass(frozen=True, slots=True)
class TorchInt8Factory:
    """Packs weights to eight bits with one scale per output."""

    keeps_weight: ClassVar[bool] = False

    def supports(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return True if this torch has the int8 product and it supports this size."""
        here = hasattr(torch.ops.aten, "_weight_int8pack_mm")
        return here and rows % _OUTPUTS == 0 and columns % _INPUTS == 0

    def empty_form(self, outputs: int, inputs: int, bias: Tensor | None) -> None:
        """Return None: weights can only be packed whole."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> TorchInt8Linear:
        """Pack weight [out, in] of any float dtype."""
        rounded = quantise_int8(weight)
        return TorchInt8Linear(rounded.codes, rounded.scales.flatten(), bias)


class TorchInt8Linear:
    """An eight-bit weight: codes [out, in] and scales [out]."""

    __slots__ = ("bias", "codes", "scales")

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self.codes, self.scales = codes, scales
        self.bias = None if bias is None else bias.to(torch.float32, copy=True)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and bias."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def activation_group(self, rows: int) -> None:
        """Return None: activations are not quantised."""

    def multiply(self, x: Activations) -> Tensor:
        """Multiply x [tokens, in] to [tokens, out] in its dtype."""
        rows = unquantised(x)
        if len(rows) == 0:  # the kernel divides by the number of rows
            return rows.new_empty(0, len(self.codes))
        product = torch.ops.aten._weight_int8pack_mm(rows.contiguous(), self.codes, self.scales.to(rows.dtype))
        return _with_bias(product, self.bias)

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """Add the product to hidden [tokens, out] fp32 in place."""
        hidden += self.multiply(x)


def _with_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product.add_(bias)


_MULTIPLE = 32  # inputs, and groups, must be a multiple of what the kernels read at a time


@cache
def _is_available() -> bool:
    """Return True if this build of torch has KleidiAI, which only builds for 64-bit Arm have.

    On other platforms its operators use a slow reference implementation.
    """
    available: bool = torch.backends.kleidiai.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.aten, "_dyn_quant_matmul_4bit")


@dataclass(frozen=True, slots=True)
class KleidiFactory:
    """Packs weights with `group` inputs per scale (None: all inputs of an output)."""

    group: int | None
    keeps_weight: ClassVar[bool] = False

    def supports(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return True if KleidiAI is available and the number of inputs is a multiple of its group."""
        return _is_available() and columns % (self.group or _MULTIPLE) == 0

    def empty_form(self, outputs: int, inputs: int, bias: Tensor | None) -> None:
        """Return None: weights can only be packed whole."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> KleidiLinear:
        """Pack weight [out, in] of any float dtype."""
        return KleidiLinear(quantise_int4(weight, self.group or weight.shape[1], zero_points=False), bias)


class KleidiLinear:
    """A weight [out, in] and its bias, packed by KleidiAI."""

    __slots__ = ("group", "inputs", "outputs", "packed")

    def __init__(self, weight: Int4Weight, bias: Tensor | None) -> None:
        (self.outputs, columns), self.inputs, self.group = weight.codes.shape, weight.inputs, weight.group
        assert columns == self.inputs and weight.minimums is None, (
            "inputs must be a multiple of the group, without zero points"
        )
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

    def activation_group(self, rows: int) -> None:
        """Return None: activations are not quantised before the product."""

    def multiply(self, x: Activations) -> Tensor:
        """Multiply x [tokens, in] to [tokens, out] in its dtype; bf16 is converted to fp32, which groups require."""
        return self._multiplied(x).to(unquantised(x).dtype)

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """Add the product to hidden [tokens, out] fp32 in place."""
        hidden += self._multiplied(x)

    def _multiplied(self, x: Activations) -> Tensor:
        rows = unquantised(x).float().contiguous()
        if len(rows) == 0:
            return rows.new_empty(0, self.outputs)
        product: Tensor = torch.ops.aten._dyn_quant_matmul_4bit(
            rows, self.packed, self.group, self.inputs, self.outputs
        )
        return product
