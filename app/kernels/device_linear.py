"""An unquantised weight in the memory of a device, copied there some rows at a time and multiplied by torch.

Nothing here depends on the kind of device. Tests run the same code on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from app.kernels.activations import Activations, plain
from app.kernels.device_adds import add_product, adds_to_wider
from app.kernels.table import Factor, stored_rows


@dataclass(frozen=True, slots=True)
class DevicePacking:
    """Places weights on `device` in `dtype`, which is also the dtype of the activations."""

    device: torch.device
    dtype: torch.dtype
    keeps_weight: ClassVar[bool] = False

    def suits(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return True if activations of this dtype match."""
        return dtype == self.dtype

    def room(self, outputs: int, inputs: int, bias: Tensor | None) -> DeviceLinear:
        """Return an uninitialised form [outputs, inputs] that `fill` completes."""
        weight = torch.empty(outputs, inputs, dtype=self.dtype, device=self.device)
        return DeviceLinear(weight, on_device(bias, weight))

    def pack(self, weight: Tensor, bias: Tensor | None) -> DeviceLinear:
        """Copy weight [out, in] of any float dtype to the device."""
        form = self.room(weight.shape[0], weight.shape[1], bias)
        form.fill(0, weight)
        return form

    def held_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a weight without its bias; a product reads all of them."""
        return outputs * inputs * self.dtype.itemsize


class DeviceLinear:
    """A weight [out, in] and bias [out] on the device; a tied embedding uses the same tensor."""

    __slots__ = ("adds", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.adds = bias is None and adds_to_wider(weight.device, weight.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias on the device."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def fill(self, first: int, rows: Tensor) -> None:
        """Copy rows [n, in] to outputs `[first, first + n)`.

        The copy is complete on return, so `rows` may be reused.
        """
        self.weight[first : first + len(rows)].copy_(rows)

    def takes(self, rows: int) -> None:
        """Return None: activations are not quantised."""

    def multiply(self, x: Activations) -> Tensor:
        """Multiply x [tokens, in] to [tokens, out] in the weight's dtype."""
        return F.linear(plain(x), self.weight, self.bias)

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """Add the product to hidden [tokens, out] fp32 in place."""
        if self.adds:
            add_product(hidden, plain(x), self.weight)
        else:
            hidden += self.multiply(x)

    def rows(self, ids: Tensor, factor: Factor = 1.0) -> Tensor:
        """Return rows of the weight, fp32 [n, in], for ids [n] int64, times a factor."""
        return stored_rows(self.weight, ids, factor)


def on_device(bias: Tensor | None, weight: Tensor) -> Tensor | None:
    """Copy the bias to the weight's device and dtype; None stays None."""
    return None if bias is None else bias.to(weight.device, weight.dtype, copy=True)
