"""Eight-bit weights with one scale per output on an NVIDIA GPU, multiplied by 16-bit activations (W8A16).

Few rows are multiplied by the codes, which are converted to the activations' dtype on the way (triton/linear.py). For
many rows the weight is dequantized first, as with four bits (device_int4.py). On a CPU, and without Triton, the
dequantized weight serves all rows: the reference implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from armature_kernels.linear.device import CodesAndScales, copy_bias_to_device
from armature_kernels.linear.device_int4 import DeviceCodesLinear, shared_scratch
from armature_kernels.linear.device_trial import find_few_rows
from armature_kernels.linear.layout import FEW_CODE_ROWS, MAX_CODE_ROWS, device_int8_bytes
from armature_kernels.linear.quantization import quantize_int8
from armature_kernels.triton.support import agrees_with_reference, relative_difference, triton_usable

# Outputs of a weight by which the kernels are compared with torch: as many as their largest blocks are used for.
_COMPARED_OUTPUTS = 2**14


@dataclass(frozen=True, slots=True)
class DeviceInt8Factory:
    """Quantizes weights to eight bits on `device`, for activations of `dtype`."""

    device: torch.device
    dtype: torch.dtype
    keeps_weight: ClassVar[bool] = False

    def supports(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return True if activations of this dtype match."""
        return dtype == self.dtype

    def empty_form(self, outputs: int, inputs: int, bias: Tensor | None) -> DeviceInt8Linear:
        """Return an uninitialised form [outputs, inputs] that `fill` completes."""
        shared_scratch(self.device, self.dtype).reserve(outputs, inputs)
        return DeviceInt8Linear((outputs, inputs), bias, self)

    def pack(self, weight: Tensor, bias: Tensor | None) -> DeviceInt8Linear:
        """Quantize weight [out, in] of any float dtype."""
        form = self.empty_form(weight.shape[0], weight.shape[1], bias)
        form.fill(0, weight)
        return form

    def weight_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a weight without its bias; a product of few rows reads all of them."""
        return device_int8_bytes(outputs, inputs)


class DeviceInt8Linear(DeviceCodesLinear):
    """A weight [out, in] as codes int8 [out, in] and scales bf16 [out]: weight = code * scale."""

    __slots__ = ("block", "codes")
    block: tuple[int, int]  # numbers of outputs and inputs that share a scale
    codes: Tensor

    def __init__(self, shape: tuple[int, int], bias: Tensor | None, packing: DeviceInt8Factory) -> None:
        self.shape, self.block, self.max_code_rows = shape, (1, shape[1]), MAX_CODE_ROWS
        self.dtype, self.few_rows = packing.dtype, find_few_rows(packing, *shape)
        self.scratch = shared_scratch(packing.device, packing.dtype)
        self.codes = torch.empty(shape, dtype=torch.int8, device=packing.device)
        self.scales = torch.empty(shape[0], dtype=torch.bfloat16, device=packing.device)
        self.bias = copy_bias_to_device(bias, torch.empty(0, dtype=packing.dtype, device=packing.device))

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and bias on the device."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def fill(self, first: int, rows: Tensor) -> None:
        """Quantize rows [n, in] as outputs `[first, first + n)` on the device."""
        own, found = slice(first, first + len(rows)), quantize_int8(rows.to(self.codes.device))
        self.codes[own], self.scales[own] = found.codes, found.scales.squeeze(1)

    def few_rows_weight(self) -> CodesAndScales:
        return self.codes, self.scales, self.block

    def multiply_codes(self, rows: Tensor) -> Tensor:
        if not triton_usable(rows) or not self.agrees(len(rows)):
            return F.linear(rows, self.dequantized())
        from armature_kernels.triton.linear import multiply_codes

        return multiply_codes(rows, self.codes, self.scales, self.block)

    def dequantized(self) -> Tensor:
        return self.dequantized_torch()

    def dequantized_torch(self) -> Tensor:
        """Return the dequantized weight in the scratch memory, by torch: the reference implementation."""
        out = self.scratch.view(*self.shape)
        return torch.mul(self.codes, self.scales[:, None].to(out.dtype), out=out)

    def agrees(self, rows: int) -> bool:
        """Return True if the kernels give what torch gives for this kind of weight, few rows or many."""
        case = (type(self), self.shape, self.block, self.dtype, rows > FEW_CODE_ROWS)
        return agrees_with_reference("products with codes", case, lambda: self.difference(rows))

    def difference(self, rows: int) -> float:
        """Return the largest difference of a product of random rows by the kernel and by torch, relative to the largest number."""
        from armature_kernels.triton.linear import multiply_codes

        generator = torch.Generator(self.device).manual_seed(0)
        x = torch.randn(rows, self.shape[1], generator=generator, dtype=self.dtype, device=self.device)
        weight, codes, scales = self.first_outputs()
        return relative_difference(multiply_codes(x, codes, scales, self.block), F.linear(x, weight))

    def first_outputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return so many outputs that comparing them needs little memory: dequantized by torch, codes and scales."""
        count = min(self.shape[0], _COMPARED_OUTPUTS)
        return self.dequantized_torch()[:count], self.codes[:count], self.scales[: -(-count // self.block[0])]
