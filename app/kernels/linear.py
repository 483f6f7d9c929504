"""One linear layer, several forms its weight may be held in: a form packs once, multiplies, and says how many bytes it holds.

Which forms a machine is offered is the recipes' business; adding one touches nothing but this folder and the recipes.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.kernels.activate import activate
from app.kernels.activations import Activations, plain, quantise
from app.kernels.best import Best, Picking, Wanted
from app.kernels.device_int4 import DeviceInt4Packing
from app.kernels.device_linear import DevicePacking
from app.kernels.int_panels import IntPacking
from app.kernels.kleidi import KleidiPacking
from app.kernels.layout import LAYOUTS
from app.kernels.panels import FixedPacking, PanelLinear
from app.kernels.table import Factor
from app.kernels.torch_int import TorchInt4Packing, TorchInt8Packing


class LinearForm(Protocol):
    """A weight [out, in] and a bias [out], ready to multiply."""

    @property
    def nbytes(self) -> int:
        """Bytes held, wherever they lie: a mapped file counts as well as memory of our own."""
        ...

    def takes(self, rows: int) -> int | None:
        """What it reads at this many rows: None is a tensor in the model's dtype, a number quantised rows with groups of this size."""
        ...

    def multiply(self, x: Activations) -> Tensor:
        """x [tokens, in] to [tokens, out], in the model's dtype."""
        ...

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """hidden [tokens, out] fp32 += the product, in one go where the form can."""
        ...


class EmptyForm(LinearForm, Protocol):
    """A form that was made empty, and is brought its weight some rows at a time."""

    def fill(self, first: int, rows: Tensor) -> None:
        """rows [n, in], any float dtype: outputs `[first, first + n)`, each brought once. They may be reused afterwards."""
        ...


@runtime_checkable
class Activating(Protocol):
    """A form whose product is activated on its way out."""

    def activated(self, x: Activations, activation: str) -> Tensor:
        """act(the product), x [tokens, in] to [tokens, out]; see activate.py."""
        ...


class TableForm(Protocol):
    """A form that gives its rows back: an embedding tied to it needs no table of its own."""

    def rows(self, ids: Tensor, factor: Factor = 1.0) -> Tensor:
        """Rows of the weight, fp32 [n, in], for ids [n] int64, times a factor."""
        ...


class Packing(Protocol):
    """How a form is made. `keeps_weight` says that it holds on to the very tensor it was given, which then must not be reused."""

    @property
    def keeps_weight(self) -> bool: ...

    def suits(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Whether this machine can multiply a weight of this size by activations of this dtype in this form, and gains by it."""
        ...

    def pack(self, weight: Tensor, bias: Tensor | None) -> LinearForm: ...

    def room(self, outputs: int, inputs: int, bias: Tensor | None) -> EmptyForm | None:
        """An empty form; None where a weight can only be packed whole."""
        ...


class PlainLinear:
    """The weight as it is, multiplied by torch's own product. Always there; a weight that the file stores like this stays mapped."""

    keeps_weight: ClassVar[bool] = True

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    @classmethod
    def suits(cls, rows: int, columns: int, dtype: torch.dtype) -> bool:
        return True

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> PlainLinear:
        return cls(weight, bias)

    @classmethod
    def room(cls, outputs: int, inputs: int, bias: Tensor | None) -> None:
        """It can only be packed whole."""

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def takes(self, rows: int) -> int | None:
        return None

    def multiply(self, x: Activations) -> Tensor:
        return F.linear(plain(x), self.weight, self.bias)

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        hidden += self.multiply(x)


class OneDnnLinear:
    """The weight in the blocked layout that oneDNN's products read, packed once instead of in every product.

    8192 x 2048 in BF16 on two Zen 5 cores: 750 us against 1,700 for one row, 958 against 1,886 for sixteen; ahead at every row count.
    """

    keeps_weight: ClassVar[bool] = False
    # Below this, a call costs more than the product: 256 x 256 takes 13 us instead of 5 in FP32 (one core, one row).
    smallest: ClassVar[int] = 2**16

    __slots__ = ("bias", "packed")

    def __init__(self, packed: Tensor, bias: Tensor | None) -> None:
        self.packed, self.bias = packed, bias

    @classmethod
    def suits(cls, rows: int, columns: int, dtype: torch.dtype) -> bool:
        return rows * columns > cls.smallest and _onednn_packs(dtype)

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> OneDnnLinear:
        # The layout may depend on the rows expected; packed for one row it is as quick as any at 512 (measured as above).
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight, 1), None if bias is None else bias.clone())

    @classmethod
    def room(cls, outputs: int, inputs: int, bias: Tensor | None) -> None:
        """It can only be packed whole."""

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def takes(self, rows: int) -> int | None:
        return None

    def multiply(self, x: Activations) -> Tensor:
        return self._multiplied(x, "none", "")

    def activated(self, x: Activations, activation: str) -> Tensor:
        return self._multiplied(x, *_POINTWISE[activation])

    def _multiplied(self, x: Activations, pointwise: str, algorithm: str) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(plain(x), self.packed, self.bias, pointwise, [], algorithm)
        return product

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        hidden += self.multiply(x)


# What oneDNN calls an activation that it applies on the way out, and by which algorithm.
_POINTWISE = {
    "relu": ("relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
    "tanh": ("tanh", ""),
}


def _onednn_packs(dtype: torch.dtype) -> bool:
    """Whether this build of torch has oneDNN's packed products and this processor has instructions for the dtype."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not (available and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


def host_architecture() -> str:
    """`x86_64` or `arm64`, as facts and recipes spell it."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "aarch64": "arm64"}.get(machine, machine)


# In the model's own precision, by the names that recipes use.
FORMS: Mapping[str, Packing] = {
    "plain": PlainLinear,
    "onednn": OneDnnLinear,
    "panels": PanelLinear,
    "panels/fixed": FixedPacking(),
}
# Rounded to fewer bits: what they multiply is not quite the checkpoint's weight.
ROUNDED_FORMS: Mapping[str, Packing] = {
    **{name: IntPacking(layout.bits, layout.group, layout.zero_points) for name, layout in LAYOUTS.items()},
    **{f"kleidi int4/{group}": KleidiPacking(group) for group in (32, 64, 128)},
    **{f"torch int4/{group}": TorchInt4Packing(group) for group in (32, 64, 128)},
    "torch int8": TorchInt8Packing(),
}
# In the memory of a device that has its own, beside activations of some dtype.
DEVICE_FORMS: Mapping[str, Callable[[torch.device, torch.dtype], DevicePacking | DeviceInt4Packing]] = {
    "device": DevicePacking,
    "device int4/64": DeviceInt4Packing,
}


class Linear(nn.Module):
    """[tokens, in_features] to [tokens, out_features] through the form that the loader packs.

    `sources` name the checkpoint's tensors, without `.weight`, whose rows lie below each other in the product: q, k and v, say.
    """

    form: LinearForm

    def __init__(self, sources: tuple[str, ...], in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.sources, self.in_features, self.out_features, self.has_bias = sources, in_features, out_features, bias

    def forward(self, x: Activations) -> Tensor:
        return self.form.multiply(x)

    def takes(self, rows: int) -> int | None:
        """What to give it at this many rows: None is a plain tensor, a number quantised rows with groups of this size."""
        return self.form.takes(rows)

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """hidden [tokens, out_features] fp32 += the product."""
        self.form.add_to(hidden, x)

    def activated(self, x: Activations, activation: str, feeds: Linear) -> Activations:
        """act(the product), as `feeds` takes it at this many rows."""
        if not isinstance(self.form, Activating):
            product = self.form.multiply(x)
            return activate(product, activation, feeds.takes(len(product)))
        rows = self.form.activated(x, activation)
        group = feeds.takes(len(rows))
        return rows if group is None else quantise(rows, group)

    @property
    def picks(self) -> bool:
        """Whether the form gives each row's best outputs without writing all of them."""
        return isinstance(self.form, Picking)

    def best(self, x: Activations, wanted: Wanted, softcap: float | None = None) -> Best | None:
        """Each row's best outputs; None where the form can only write all of them."""
        return self.form.best(x, wanted, softcap) if isinstance(self.form, Picking) else None
