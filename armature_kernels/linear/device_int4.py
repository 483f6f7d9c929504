"""Four-bit weights in groups of 64 on a device with separate memory, multiplied by torch's int4 product.

That product is tinygemm on CUDA and a Metal kernel on Apple devices. Few rows are multiplied by the codes
directly. For many rows the weight is dequantized to the activations' dtype first. Torch's packed layout is not
documented and differs by device, so the order of codes is found by packing known numbers once. On a CPU the
reference implementations are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from armature_kernels.linear.device import CodesAndScales, DeviceForm, copy_bias_to_device
from armature_kernels.linear.device_trial import find_few_rows
from armature_kernels.linear.layout import DEVICE_GROUP, device_int4_bytes, supports_device_int4
from armature_kernels.linear.quantization import quantize_int4
from armature_kernels.triton.support import triton_usable

# Most rows that are multiplied by the codes. Tinygemm reads them once per 16 rows: 2.25 bytes per weight at 64,
# against 4.6 if they are dequantized to BF16 and read again. Metal's product repeats that of a single row: 0.56
# bytes per weight and row.
MAX_CODE_ROWS: Mapping[str, int] = {"cuda": 64, "mps": 8}
_DEFAULT_MAX_CODE_ROWS = 64
# Dtypes of activations that torch's product supports: tinygemm supports only BF16.
_DTYPES: Mapping[str, tuple[torch.dtype, ...]] = {"cuda": (torch.bfloat16,)}
_DEFAULT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TILE = 8  # outputs whose codes are contiguous, on every device
# Elements that the reference implementation dequantizes at a time; it needs a few copies of them.
_CHUNK_ELEMENTS = 2**22


@dataclass(frozen=True, slots=True)
class DeviceInt4Factory:
    """Packs weights to four bits on `device`, for activations of `dtype`."""

    device: torch.device
    dtype: torch.dtype
    keeps_weight: ClassVar[bool] = False

    def supports(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return True if torch's int4 product supports a weight [rows, columns] with activations of this dtype."""
        taken = dtype == self.dtype and dtype in _DTYPES.get(self.device.type, _DEFAULT_DTYPES)
        return taken and supports_device_int4(rows, columns)

    def empty_form(self, outputs: int, inputs: int, bias: Tensor | None) -> DeviceInt4Linear:
        """Return an empty form [outputs, inputs] that `fill` completes.

        The shared scratch memory is enlarged if necessary.
        """
        scratch = shared_scratch(self.device, self.dtype)
        scratch.reserve(outputs, inputs)
        scratch.find_order(inputs)
        return DeviceInt4Linear((outputs, inputs), bias, self)

    def pack(self, weight: Tensor, bias: Tensor | None) -> DeviceInt4Linear:
        """Pack weight [out, in] of any float dtype."""
        form = self.empty_form(weight.shape[0], weight.shape[1], bias)
        form.fill(0, weight)
        return form

    def weight_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a weight without its bias; a product of few rows reads all of them."""
        return device_int4_bytes(outputs, inputs)


class DeviceCodesLinear(DeviceForm):
    """A weight [out, in] on a device as codes with `scales`: few rows multiply by them, many by the dequantized weight."""

    __slots__ = ("max_code_rows", "scales", "scratch")
    scales: Tensor
    scratch: DequantizeScratch
    max_code_rows: int

    @property
    def device(self) -> torch.device:
        return self.scales.device

    def multiply_rows(self, rows: Tensor) -> Tensor:
        if len(rows) > self.max_code_rows:
            return self.multiply_many(rows)
        if len(rows) == 0:  # a grid without blocks cannot be launched
            return rows.new_empty(0, self.shape[0])
        product = self.multiply_codes(rows.contiguous())
        return product if self.bias is None else product.add_(self.bias)

    def multiply_codes(self, rows: Tensor) -> Tensor:
        """Multiply rows [n, in], contiguous, by the codes, without the bias."""
        raise NotImplementedError

    def multiply_many(self, rows: Tensor) -> Tensor:
        """Multiply rows [n, in] of any number, with the bias."""
        return F.linear(rows, self.dequantized(), self.bias)

    def dequantized(self) -> Tensor:
        """Return the dequantized weight [out, in] in the scratch memory, valid until the next form uses it."""
        raise NotImplementedError


class DeviceInt4Linear(DeviceCodesLinear):
    """A weight [out, in] as four-bit codes: weight = (code - 8) * scale + zero.

    `scales` [groups, out, 2] contains scales and zeros. Codes are packed when the last row has been filled in.
    """

    __slots__ = ("_code_pairs", "_left", "packed")

    def __init__(self, shape: tuple[int, int], bias: Tensor | None, packing: DeviceInt4Factory) -> None:
        (outputs, inputs), device = shape, packing.device
        self.shape, self.dtype, self.few_rows = shape, packing.dtype, find_few_rows(packing, outputs, inputs)
        self.max_code_rows = MAX_CODE_ROWS.get(device.type, _DEFAULT_MAX_CODE_ROWS)
        self.scratch = shared_scratch(device, packing.dtype)
        self.scales = torch.empty(inputs // DEVICE_GROUP, outputs, 2, dtype=packing.dtype, device=device)
        self.bias = copy_bias_to_device(bias, self.scales)
        self.packed = torch.empty(0, dtype=torch.int32, device=device)
        self._code_pairs, self._left = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=device), outputs

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and bias on the device."""
        return self.packed.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def fill(self, first: int, rows: Tensor) -> None:
        """Quantize rows [n, in] as outputs `[first, first + n)` on the device, a hundred times as fast as on a CPU."""
        own = slice(first, first + len(rows))
        codes, self.scales[:, own] = quantize_device_int4(rows.to(self.scales.device), self.scales.dtype)
        self._code_pairs[own] = _pair_codes(codes)
        self._left -= len(rows)
        if self._left == 0:
            self.packed = pack_code_pairs(self._code_pairs, _inner_tiles(self.shape[1]))
            self._code_pairs = self._code_pairs.new_empty(0)

    def few_rows_weight(self) -> CodesAndScales:
        return self.packed, self.scales, (1, DEVICE_GROUP)

    def multiply_codes(self, rows: Tensor) -> Tensor:
        return multiply_packed(rows, self.packed, self.scales)

    def dequantized(self) -> Tensor:
        out, order = self.scratch.view(*self.shape), self.scratch.order(self.shape[1])
        if triton_usable(out):
            from armature_kernels.triton.elementwise import dequantize

            dequantize(self.packed, order, self.scales, out)
        else:
            dequantize_torch(self.packed, order, self.scales, out)
        return out


# ---- dequantized weight in the activations' dtype ------------------------------------------------------------------


class DequantizeScratch:
    """Memory for the largest dequantized weight, refilled for each product of many rows.

    All products run in order on one stream. The address does not change once all forms are made, so recorded steps
    (CUDA graphs) remain valid.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._memory = torch.empty(0, dtype=dtype, device=device)
        self._orders: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the scratch memory without the code orders, which are small."""
        return self._memory.nbytes

    def reserve(self, outputs: int, inputs: int) -> None:
        """Enlarge the memory to fit [outputs, inputs]."""
        if self._memory.numel() < outputs * inputs:
            self._memory = self._memory.new_empty(0)  # free the old buffer before allocating the new one
            self._memory = self._memory.new_empty(outputs * inputs)

    def find_order(self, inputs: int) -> None:
        """Find the code order of four-bit weights with this number of inputs."""
        if inputs not in self._orders:
            self._orders[inputs] = find_code_order(inputs, self._memory.device)

    def view(self, outputs: int, inputs: int) -> Tensor:
        """Return the beginning of the memory as [outputs, inputs]."""
        return self._memory[: outputs * inputs].view(outputs, inputs)

    def order(self, inputs: int) -> Tensor:
        """Return the code order for weights with this number of inputs (`find_code_order`)."""
        return self._orders[inputs]


@cache
def shared_scratch(device: torch.device, dtype: torch.dtype) -> DequantizeScratch:
    """Return the one scratch memory that all forms of this device and dtype share."""
    return DequantizeScratch(device, dtype)


def find_code_order(inputs: int, device: torch.device) -> Tensor:
    """Find the place of each code among the packed codes of eight outputs, int32 [8 * inputs].

    Element [o * inputs + i] is the place of output o's input i. A code has four bits, so each place's number is
    packed in parts of four bits and read back.
    """
    numbers = torch.arange(_TILE * inputs, device=device)
    found = torch.zeros_like(numbers)
    for shift in range(0, (_TILE * inputs - 1).bit_length(), 4):
        digits = ((numbers >> shift) & 15).to(torch.uint8).view(_TILE, inputs)
        found |= _unpair_codes(pack_code_pairs(_pair_codes(digits), _inner_tiles(inputs))).flatten().long() << shift
    assert torch.equal(found.sort().values, numbers), "torch packs every code of eight outputs once, contiguously"
    order = torch.empty_like(numbers)
    order[found] = numbers
    return order.int()


def dequantize_torch(packed: Tensor, order: Tensor, scales: Tensor, out: Tensor) -> None:
    """Dequantize packed codes into out [outputs, inputs] of the scales' dtype (reference implementation)."""
    outputs, inputs = out.shape
    step = max(_TILE, _CHUNK_ELEMENTS // inputs // _TILE * _TILE)
    for first in range(0, outputs, step):
        last = min(first + step, outputs)
        codes = _unpair_codes(packed[first // _TILE : last // _TILE]).index_select(1, order)
        values = codes.view(last - first, -1, DEVICE_GROUP).to(out.dtype) - 8
        scale, zero = scales[:, first:last].transpose(0, 1).unsqueeze(2).unbind(-1)  # [outputs, groups, 1]
        torch.addcmul(zero, values, scale, out=out[first:last].view(values.shape))


# ---- codes ---------------------------------------------------------------------------------------------------------


def quantize_device_int4(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize rows [n, in] to codes uint8 [n, in], with scales and zeros [groups, n, 2] in `dtype`.

    Codes are the nearest for the scales and zeros after these are rounded to `dtype`.
    """
    near = quantize_int4(rows, DEVICE_GROUP, zero_points=True)
    assert near.minimums is not None, "zero points were requested"
    scale = near.scales.to(dtype).float()
    zero = (near.minimums.float() + 8 * scale).to(dtype).float()
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    values = rows.float().view(*scale.shape, DEVICE_GROUP)
    codes = ((values - zero[..., None]) * inverse[..., None]).round_().add_(8).clamp_(0, 15)
    return codes.to(torch.uint8).flatten(1), torch.stack((scale, zero), -1).transpose(0, 1).to(dtype)


def _pair_codes(codes: Tensor) -> Tensor:
    """Put two codes into a byte, the first in the upper half: uint8 [n, in / 2]."""
    return (codes[:, ::2] << 4) | codes[:, 1::2]


def _unpair_codes(packed: Tensor) -> Tensor:
    """Unpack int32 [tiles, ...] to codes in packed order, uint8 [tiles, 8 * inputs].

    A byte's lower half is the first code.
    """
    pairs = packed.view(torch.uint8).view(len(packed), -1)
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)


def _inner_tiles(inputs: int) -> int:
    """Return how many tiles of 16 inputs are packed together: the most that torch supports for `inputs`."""
    return 8 if inputs % 128 == 0 else 4


def pack_code_pairs(digits: Tensor, inner_tiles: int) -> Tensor:
    """Pack pairs uint8 [out, in / 2] to torch's layout.

    The result is int32 [out / 8, in / (16 * inner_tiles), 32, inner_tiles / 2].
    """
    if digits.device.type != "cpu":
        packed: Tensor = torch.ops.aten._convert_weight_to_int4pack(digits.contiguous(), inner_tiles)
        return packed
    swapped = ((digits & 15) << 4) | (digits >> 4)  # reference layout: row by row
    return swapped.view(torch.int32).view(len(digits) // _TILE, -1, 32, inner_tiles // 2)


def multiply_packed(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """Multiply x [rows, in], contiguous, by the packed weight; the result has x's dtype."""
    if x.device.type != "cpu":
        product: Tensor = torch.ops.aten._weight_int4pack_mm(x, packed, DEVICE_GROUP, scales)
        return product
    codes = _unpair_codes(packed).view(scales.shape[1], -1, DEVICE_GROUP).float() - 8
    scale, zero = scales.float().transpose(0, 1).unsqueeze(2).unbind(-1)
    return F.linear(x.float(), (codes * scale + zero).flatten(1)).to(x.dtype)
