"""A weight as it is, in the memory of a device that has its own: brought there some rows at a time, multiplied by torch's product there.

Nothing here names a kind of device: the twin of one is the processor itself.
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
    """On `device`, in `dtype`, which is that of activations too."""

    device: torch.device
    dtype: torch.dtype
    keeps_weight: ClassVar[bool] = False

    def suits(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        return dtype == self.dtype

    def room(self, outputs: int, inputs: int, bias: Tensor | None) -> DeviceLinear:
        weight = torch.empty(outputs, inputs, dtype=self.dtype, device=self.device)
        return DeviceLinear(weight, on_device(bias, weight))

    def pack(self, weight: Tensor, bias: Tensor | None) -> DeviceLinear:
        form = self.room(weight.shape[0], weight.shape[1], bias)
        form.fill(0, weight)
        return form

    def held_bytes(self, outputs: int, inputs: int) -> int:
        """Of a weight without its bias, all of which a product reads."""
        return outputs * inputs * self.dtype.itemsize


class DeviceLinear:
    """weight [out, in] and bias [out] on the device. It gives its rows back: an embedding tied to it is this very tensor."""

    __slots__ = ("adds", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.adds = bias is None and adds_to_wider(weight.device, weight.dtype)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def fill(self, first: int, rows: Tensor) -> None:
        """The copy has ended when this returns: whoever brought the rows may reuse their memory."""
        self.weight[first : first + len(rows)].copy_(rows)

    def takes(self, rows: int) -> None:
        """Activations come as they are."""

    def multiply(self, x: Activations) -> Tensor:
        return F.linear(plain(x), self.weight, self.bias)

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """hidden [tokens, out] fp32 += the product."""
        if self.adds:
            add_product(hidden, plain(x), self.weight)
        else:
            hidden += self.multiply(x)

    def rows(self, ids: Tensor, factor: Factor = 1.0) -> Tensor:
        return stored_rows(self.weight, ids, factor)


def on_device(bias: Tensor | None, weight: Tensor) -> Tensor | None:
    """A copy of the bias where the weight is, in its dtype."""
    return None if bias is None else bias.to(weight.device, weight.dtype, copy=True)
