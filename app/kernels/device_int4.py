"""Four bits in groups of 64 on a device with memory of its own, by torch's product for it: tinygemm on CUDA, Metal's on Apple.

Few rows multiply by the codes; for many, the weight is written out once in the activations' dtype and multiplied as it is. How torch lays
codes out is its own business and differs by device: the order is learnt from numbers that are packed once. The twins serve on a processor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from app.kernels.activations import Activations, plain
from app.kernels.device_linear import on_device
from app.kernels.gpu.available import usable
from app.kernels.layout import DEVICE_GROUP, device_int4_bytes, device_int4_suits
from app.kernels.rounding import quantise_int4

# Up to so many rows the codes multiply. Tinygemm reads them once for every 16 rows: 2.25 bytes a weight at 64, against 4.6 where they are
# written out in BF16 and read again. Metal's product is one of a single row, repeated: 0.56 bytes a row.
MOST_FEW: Mapping[str, int] = {"cuda": 64, "mps": 8}
_USUAL_MOST_FEW = 64
# What torch's product takes beside it: tinygemm knows BF16 alone.
_DTYPES: Mapping[str, tuple[torch.dtype, ...]] = {"cuda": (torch.bfloat16,)}
_USUAL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TILE = 8  # outputs whose codes lie in one piece, on every device
_ROOM_ELEMENTS = 2**22  # of a weight that is written out at a time by torch's twin, which holds some copies of it


@dataclass(frozen=True, slots=True)
class DeviceInt4Packing:
    """On `device`, beside activations of `dtype`."""

    device: torch.device
    dtype: torch.dtype
    keeps_weight: ClassVar[bool] = False

    def suits(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        taken = dtype == self.dtype and dtype in _DTYPES.get(self.device.type, _USUAL_DTYPES)
        return taken and device_int4_suits(rows, columns)

    def room(self, outputs: int, inputs: int, bias: Tensor | None) -> DeviceInt4Linear:
        shared_scratch(self.device, self.dtype).reserve(outputs, inputs)
        return DeviceInt4Linear((outputs, inputs), bias, self)

    def pack(self, weight: Tensor, bias: Tensor | None) -> DeviceInt4Linear:
        form = self.room(weight.shape[0], weight.shape[1], bias)
        form.fill(0, weight)
        return form

    def held_bytes(self, outputs: int, inputs: int) -> int:
        """Of a weight without its bias, all of which a product of few rows reads."""
        return device_int4_bytes(outputs, inputs)


class DeviceInt4Linear:
    """weight = (code - 8) * scale + zero; `scales` [groups, out, 2] holds both. Codes are packed when the last row has come."""

    __slots__ = ("_digits", "_left", "bias", "most_few", "packed", "scales", "scratch", "shape")

    def __init__(self, shape: tuple[int, int], bias: Tensor | None, packing: DeviceInt4Packing) -> None:
        (outputs, inputs), device = shape, packing.device
        self.shape, self.most_few = shape, MOST_FEW.get(device.type, _USUAL_MOST_FEW)
        self.scratch = shared_scratch(device, packing.dtype)
        self.scales = torch.empty(inputs // DEVICE_GROUP, outputs, 2, dtype=packing.dtype, device=device)
        self.bias = on_device(bias, self.scales)
        self.packed = torch.empty(0, dtype=torch.int32, device=device)
        self._digits, self._left = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=device), outputs

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def fill(self, first: int, rows: Tensor) -> None:
        """Rounded where they are to lie: a device does that a hundred times as fast as a processor."""
        own = slice(first, first + len(rows))
        codes, self.scales[:, own] = rounded_int4(rows.to(self.scales.device), self.scales.dtype)
        self._digits[own] = _paired(codes)
        self._left -= len(rows)
        if self._left == 0:
            self.packed = pack_digits(self._digits, _inner_tiles(self.shape[1]))
            self._digits = self._digits.new_empty(0)

    def takes(self, rows: int) -> None:
        """Activations come as they are."""

    def multiply(self, x: Activations) -> Tensor:
        rows = plain(x)
        if len(rows) > self.most_few:
            return F.linear(rows, self.written_out(), self.bias)
        if len(rows) == 0:  # a grid of no blocks cannot be launched
            return rows.new_empty(0, self.shape[0])
        product = multiply_packed(rows.contiguous(), self.packed, self.scales)
        return product if self.bias is None else product.add_(self.bias)

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """hidden [tokens, out] fp32 += the product."""
        hidden += self.multiply(x)

    def written_out(self) -> Tensor:
        """The weight [out, in] in the scratch: until the next form asks for it."""
        out, order = self.scratch.view(*self.shape), self.scratch.order(self.shape[1])
        if usable(out):
            from app.kernels.gpu.int4 import write_out

            write_out(self.packed, order, self.scales, out)
        else:
            write_out_torch(self.packed, order, self.scales, out)
        return out


# ---- the weight in the activations' dtype ------------------------------------------------------------------------------


class Scratch:
    """Room for the largest of the weights, filled anew for each product of many rows. All of them follow each other on one stream.

    Its place stays once all forms are made, so that a recorded step finds it again.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._room = torch.empty(0, dtype=dtype, device=device)
        self._orders: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Without the orders, which are small."""
        return self._room.nbytes

    def reserve(self, outputs: int, inputs: int) -> None:
        if self._room.numel() < outputs * inputs:
            self._room = self._room.new_empty(0)  # the old one goes before the new one comes
            self._room = self._room.new_empty(outputs * inputs)
        if inputs not in self._orders:
            self._orders[inputs] = learnt_order(inputs, self._room.device)

    def view(self, outputs: int, inputs: int) -> Tensor:
        return self._room[: outputs * inputs].view(outputs, inputs)

    def order(self, inputs: int) -> Tensor:
        return self._orders[inputs]


@cache
def shared_scratch(device: torch.device, dtype: torch.dtype) -> Scratch:
    """One for all forms there."""
    return Scratch(device, dtype)


def learnt_order(inputs: int, device: torch.device) -> Tensor:
    """Where the codes of eight outputs lie: at [o * inputs + i] the place of output o's input i among them. int32 [8 * inputs].

    A code has four bits, so each place's own number is packed in parts of four bits and read back.
    """
    numbers = torch.arange(_TILE * inputs, device=device)
    found = torch.zeros_like(numbers)
    for shift in range(0, (_TILE * inputs - 1).bit_length(), 4):
        digits = ((numbers >> shift) & 15).to(torch.uint8).view(_TILE, inputs)
        found |= _unpaired(pack_digits(_paired(digits), _inner_tiles(inputs))).flatten().long() << shift
    assert torch.equal(found.sort().values, numbers), "torch packs every code of eight outputs once, and in one piece"
    order = torch.empty_like(numbers)
    order[found] = numbers
    return order.int()


def write_out_torch(packed: Tensor, order: Tensor, scales: Tensor, out: Tensor) -> None:
    """The twin: out [outputs, inputs] in the dtype of scales becomes what the codes mean."""
    outputs, inputs = out.shape
    step = max(_TILE, _ROOM_ELEMENTS // inputs // _TILE * _TILE)
    for first in range(0, outputs, step):
        last = min(first + step, outputs)
        codes = _unpaired(packed[first // _TILE : last // _TILE]).index_select(1, order)
        values = codes.view(last - first, -1, DEVICE_GROUP).to(out.dtype) - 8
        scale, zero = scales[:, first:last].transpose(0, 1).unsqueeze(2).unbind(-1)  # [outputs, groups, 1]
        torch.addcmul(zero, values, scale, out=out[first:last].view(values.shape))


# ---- codes -------------------------------------------------------------------------------------------------------------


def rounded_int4(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """rows [n, in] to codes uint8 [n, in] and, in `dtype`, scales and zeros [groups, n, 2], to which codes are the nearest as rounded."""
    near = quantise_int4(rows, DEVICE_GROUP, zero_points=True)
    assert near.minimums is not None, "asked for"
    scale = near.scales.to(dtype).float()
    zero = (near.minimums.float() + 8 * scale).to(dtype).float()
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    values = rows.float().view(*scale.shape, DEVICE_GROUP)
    codes = ((values - zero[..., None]) * inverse[..., None]).round_().add_(8).clamp_(0, 15)
    return codes.to(torch.uint8).flatten(1), torch.stack((scale, zero), -1).transpose(0, 1).to(dtype)


def _paired(codes: Tensor) -> Tensor:
    """Two codes to a byte, the first in its upper half: uint8 [n, in / 2]."""
    return (codes[:, ::2] << 4) | codes[:, 1::2]


def _unpaired(packed: Tensor) -> Tensor:
    """Packed int32 [tiles, ...] to the codes in their places, uint8 [tiles, 8 * inputs]: a byte's lower half is the first."""
    pairs = packed.view(torch.uint8).view(len(packed), -1)
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)


def _inner_tiles(inputs: int) -> int:
    """Tiles of 16 inputs that lie together: the most that torch takes and the inputs allow."""
    return 8 if inputs % 128 == 0 else 4


def pack_digits(digits: Tensor, inner_tiles: int) -> Tensor:
    """Pairs uint8 [out, in / 2] as torch wants them: int32 [out / 8, in / (16 * inner_tiles), 32, inner_tiles / 2]."""
    if digits.device.type != "cpu":
        packed: Tensor = torch.ops.aten._convert_weight_to_int4pack(digits.contiguous(), inner_tiles)
        return packed
    swapped = ((digits & 15) << 4) | (digits >> 4)  # the twin's: row by row
    return swapped.view(torch.int32).view(len(digits) // _TILE, -1, 32, inner_tiles // 2)


def multiply_packed(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """x [rows, in] contiguous times what is packed, in x's dtype."""
    if x.device.type != "cpu":
        product: Tensor = torch.ops.aten._weight_int4pack_mm(x, packed, DEVICE_GROUP, scales)
        return product
    codes = _unpaired(packed).view(scales.shape[1], -1, DEVICE_GROUP).float() - 8
    scale, zero = scales.float().transpose(0, 1).unsqueeze(2).unbind(-1)
    return F.linear(x.float(), (codes * scale + zero).flatten(1)).to(x.dtype)
