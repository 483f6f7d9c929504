"""Weights in eight-bit floats (E4M3) on an NVIDIA GPU, with a scale for each block of outputs and inputs.

A block may be one output or the whole weight. Few rows are multiplied by the codes with 16-bit activations (W8A16), on
any GPU. Many rows are quantized too (W8A8) if torch multiplies them on this GPU: with one scale for each row if the weight
has one for each output (from compute capability 8.9 on), and with one for each 128 elements if the weight has blocks of
128 x 128 (on 9.0; pytorch/pytorch#158037). Otherwise the weight is dequantized.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from armature_kernels.linear.device import copy_bias_to_device
from armature_kernels.linear.device_int4 import shared_scratch
from armature_kernels.linear.device_int8 import DeviceInt8Factory, DeviceInt8Linear
from armature_kernels.linear.device_trial import find_few_rows
from armature_kernels.linear.layout import BLOCKS_CAPABILITY, MAX_CODE_ROWS, MIN_FP8_CAPABILITY, device_fp8_bytes
from armature_kernels.triton.support import relative_difference, triton_usable

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_ALIGNMENT = 16  # elements, in both sizes of a weight that `torch._scaled_mm` multiplies
_BLOCK = 128  # elements of a row with one scale, and outputs and inputs, of weights that it multiplies in blocks
_MIN_BLOCKS = 4  # of the inputs of such a weight, or a multiple of it, and the rows that it multiplies


@dataclass(frozen=True, slots=True)
class DeviceFp8Factory(DeviceInt8Factory):
    """Holds weights in E4M3 on `device`, for activations of `dtype`.

    `block`: how many outputs and inputs share a scale in the checkpoint, whose codes are kept; None: each output has a
    scale, and the weight is quantized.
    """

    block: tuple[int, int] | None = None

    def empty_form(self, outputs: int, inputs: int, bias: Tensor | None) -> DeviceFp8Linear:
        """Return an uninitialised form [outputs, inputs] that `fill` or `fill_stored` completes."""
        shared_scratch(self.device, self.dtype).reserve(outputs, inputs)
        return DeviceFp8Linear((outputs, inputs), bias, self)

    def pack(self, weight: Tensor, bias: Tensor | None) -> DeviceFp8Linear:
        """Quantize weight [out, in] of any float dtype; with blocks, whose scales are stored, they all have the scale 1."""
        form = self.empty_form(weight.shape[0], weight.shape[1], bias)
        if self.block is None:
            form.fill(0, weight)
        else:
            codes = weight.to(self.device, torch.float8_e4m3fn).view(torch.uint8)
            form.fill_stored(0, codes, torch.ones(len(weight), form.scales.shape[1]))
        return form

    def weight_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a weight without its bias; a product of few rows reads all of them."""
        return device_fp8_bytes(outputs, inputs, self.block)


class DeviceFp8Linear(DeviceInt8Linear):
    """A weight [out, in] as codes E4M3 [out, in] and FP32 scales of blocks [out / height, in / width]."""

    __slots__ = ("multiplies_codes",)

    def __init__(self, shape: tuple[int, int], bias: Tensor | None, packing: DeviceFp8Factory) -> None:
        (outputs, inputs), device = shape, packing.device
        self.shape, self.max_code_rows = shape, MAX_CODE_ROWS
        self.dtype, self.few_rows = packing.dtype, find_few_rows(packing, *shape)
        self.scratch, self.block = shared_scratch(device, packing.dtype), packing.block or (1, inputs)
        height, width = self.block
        grid = (-(-outputs // height), -(-inputs // width))
        self.codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
        self.scales = torch.empty(grid, dtype=torch.float32, device=device)
        self.bias = copy_bias_to_device(bias, torch.empty(0, dtype=packing.dtype, device=device))
        if self.block == (_BLOCK, _BLOCK):
            is_aligned = outputs % _BLOCK == inputs % (_BLOCK * _MIN_BLOCKS) == 0
            self.multiplies_codes = is_aligned and multiplies_blocks(device, packing.dtype)
        else:
            is_aligned = grid[1] == 1 and outputs % _ALIGNMENT == inputs % _ALIGNMENT == 0
            self.multiplies_codes = is_aligned and multiplies_fp8(device, packing.dtype)

    def fill(self, first: int, rows: Tensor) -> None:
        """Quantize rows [n, in] as outputs `[first, first + n)` on the device, a scale for each."""
        own = slice(first, first + len(rows))
        self.codes[own], self.scales[own] = quantize_fp8(rows.to(self.codes.device))

    def fill_stored(self, first: int, codes: Tensor, scales: Tensor) -> None:
        """Copy codes uint8 [n, in] as outputs `[first, first + n)`, and their scales [n, in / width]."""
        device = self.codes.device
        self.codes[first : first + len(codes)].view(torch.uint8).copy_(codes)
        self.scales[torch.arange(first, first + len(codes), device=device) // self.block[0]] = scales.to(device)

    def multiply_many(self, rows: Tensor) -> Tensor:
        if not self.multiplies_codes:
            return super().multiply_many(rows)
        if self.block[1] == _BLOCK:
            codes, scales = quantized_rows(rows.contiguous(), _BLOCK, -len(rows) % _MIN_BLOCKS)
            product = product_of_blocks(codes, scales, self.codes, self.scales)[: len(rows)]
            return product if self.bias is None else product.add_(self.bias)
        codes, scales = quantized_rows(rows.contiguous(), self.shape[1])
        own = self.scales.repeat_interleave(self.block[0], 0)[: self.shape[0]]
        return scaled_product(codes, scales, self.codes, own, self.bias)

    def dequantized(self) -> Tensor:
        out = self.scratch.view(*self.shape)
        if not triton_usable(out) or not self.agrees(1):
            return self.dequantized_torch()
        from armature_kernels.triton.linear import dequantize_codes

        return dequantize_codes(self.codes, self.scales, self.block, out)

    def difference(self, rows: int) -> float:
        from armature_kernels.triton.linear import dequantize_codes

        weight, codes, scales = self.first_outputs()
        out = dequantize_codes(codes, scales, self.block, torch.empty_like(weight))
        return max(relative_difference(out, weight), super().difference(rows))

    def dequantized_torch(self) -> Tensor:
        out, (height, width) = self.scratch.view(*self.shape), self.block
        out.copy_(self.codes)
        scales = self.scales.repeat_interleave(height, 0)[: len(out)]
        for group in range(scales.shape[1]):
            out[:, group * width : (group + 1) * width].mul_(scales[:, group, None])
        return out


def quantized_rows(rows: Tensor, group: int, padding: int = 0) -> tuple[Tensor, Tensor]:
    """Quantize rows as `quantize_fp8`, by Triton if that is there, and append rows of padding of any value."""
    if not triton_usable(rows):
        return quantize_fp8(torch.cat((rows, rows[:1].expand(padding, -1))), group)
    from armature_kernels.triton.linear import quantize_rows

    return quantize_rows(rows, group, padding)


def quantize_fp8(rows: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
    """Quantize rows [n, in] to E4M3, with a scale FP32 [n, in / group] for each group; None: for each row.

    The largest element of a group has the largest code. Scales of a group are contiguous, as torch multiplies them.
    """
    values = rows.float().view(len(rows), -1, group or rows.shape[1])
    scales = (values.abs().amax(2) / _LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    codes = (values / scales[..., None]).to(torch.float8_e4m3fn).view(rows.shape)
    return codes, scales.t().contiguous().t()


def scaled_product(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply codes [n, in] with scales [n, 1] by a weight [out, in] with scales [out, 1]; the result is BF16."""
    product: Tensor = torch._scaled_mm(
        codes, weight.t(), scale_a=scales, scale_b=weight_scales.view(1, -1), bias=bias, out_dtype=torch.bfloat16
    )
    return product


def product_of_blocks(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """Multiply codes [n, in] with scales [n, in / 128] by a weight with scales [out / 128, in / 128]; the result is BF16."""
    product: Tensor = torch._scaled_mm(
        codes, weight.t(), scale_a=scales, scale_b=weight_scales.t(), out_dtype=torch.bfloat16
    )
    return product


@cache
def multiplies_blocks(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if this GPU and this torch multiply E4M3 with scales of blocks; tested as in `multiplies_fp8`."""
    is_known = device.type == "cuda" and dtype == torch.bfloat16
    if not is_known or torch.cuda.get_device_capability(device) != BLOCKS_CAPABILITY:
        return False
    inputs = _BLOCK * _MIN_BLOCKS
    numbers = torch.arange(1, 3 * _MIN_BLOCKS + 1, device=device)  # a factor for each block, so that none is mistaken
    codes, scales = quantize_fp8(numbers.view(3, -1).repeat_interleave(_BLOCK, 1).repeat(_MIN_BLOCKS, 1), _BLOCK)
    weight = torch.ones(2 * _BLOCK, inputs, device=device).to(torch.float8_e4m3fn)
    own = numbers[: 2 * _MIN_BLOCKS].view(2, -1).float()
    expected = (scales * _LARGEST * _BLOCK) @ own.repeat_interleave(_BLOCK, 0).t()
    try:
        product = product_of_blocks(codes, scales, weight, own)
    except RuntimeError:  # not for this GPU or in this build
        return False
    return bool(((product - expected).abs() < 2**-7 * expected).all())


@cache
def multiplies_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if this GPU and this torch multiply E4M3 with a scale for each row.

    The test waits for the device, so it runs while weights are loaded and never during a step.
    """
    if (
        device.type != "cuda"
        or dtype != torch.bfloat16
        or torch.cuda.get_device_capability(device) < MIN_FP8_CAPABILITY
    ):
        return False
    codes, scales = quantize_fp8(torch.ones(2 * _ALIGNMENT, _ALIGNMENT, device=device))
    try:
        product = scaled_product(codes, scales, codes, scales, None)
    except RuntimeError:  # not for this GPU or in this build
        return False
    return bool((product == _ALIGNMENT).all())
