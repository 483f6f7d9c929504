"""A linear layer and the forms its weight can have.

A form packs a weight once, multiplies by it and reports its bytes. The caller decides which forms a
machine is offered.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armature_kernels.elementwise.activations import TopLogits, TopLogitsForm, TopLogitsRequest, activate
from armature_kernels.elementwise.embedding import RowFactor
from armature_kernels.linear.activations import Activations, RowGroups, quantize, unquantized
from armature_kernels.linear.bf16_panels import Bf16PanelLinear, FixedOrderFactory
from armature_kernels.linear.device import DeviceFactory
from armature_kernels.linear.device_fp8 import DeviceFp8Factory
from armature_kernels.linear.device_int4 import DeviceInt4Factory
from armature_kernels.linear.device_int8 import DeviceInt8Factory
from armature_kernels.linear.device_lora import DeviceLoraProduct
from armature_kernels.linear.fp32_panels import Fp32PanelFactory, Fp32PanelLinear
from armature_kernels.linear.int_panels import IntPanelFactory
from armature_kernels.linear.layout import LAYOUTS
from armature_kernels.linear.lora import LoraProduct
from armature_kernels.native.memory import allocate_weights


class LinearForm(Protocol):
    """A weight [out, in] and a bias [out] in a layout that is ready to multiply."""

    @property
    def nbytes(self) -> int:
        """Bytes of the form, in allocated memory or in a mapped file."""
        ...

    def activation_group(self, rows: int) -> RowGroups | None:
        """Return the quantization group of the activations at this many rows.

        None means a tensor in the model's dtype.
        """
        ...

    def multiply(self, x: Activations) -> Tensor:
        """Multiply x [tokens, in] to [tokens, out] in the model's dtype."""
        ...

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """Add the product to hidden [tokens, out] fp32 in place, in the product's kernel if the form supports that."""
        ...


class EmptyForm(LinearForm, Protocol):
    """A form created without a weight, which is filled some rows at a time."""

    def fill(self, first: int, rows: Tensor) -> None:
        """Set outputs `[first, first + n)` from rows [n, in] of any float dtype, each given once.

        `rows` may be reused afterwards.
        """
        ...


@runtime_checkable
class FewRowsForm(Protocol):
    """A form that multiplies few rows together with what is before and behind the product (device.py)."""

    def takes_unnormed(self, rows: int) -> bool:
        """Return True if `multiply` takes so many `UnnormedRows`."""
        ...

    def multiply_gated(self, x: Activations, activation: str) -> Tensor | None:
        """Return act(gate) * up [tokens, out / 2] for the outputs gate, then up; None for too many rows."""
        ...


@runtime_checkable
class ActivatingForm(Protocol):
    """A form whose product can apply an activation to its output."""

    def multiply_activated(self, x: Activations, activation: str) -> Tensor:
        """Return act(x times the weight), [tokens, in] to [tokens, out]; `ACTIVATION_CODES` lists activations."""
        ...


class EmbeddingForm(Protocol):
    """A form that can return rows of its weight, so a tied embedding needs no table."""

    def rows(self, ids: Tensor, factor: RowFactor = 1.0) -> Tensor:
        """Return rows of the weight, fp32 [n, in], for ids [n] int64, times a factor."""
        ...


class FormFactory(Protocol):
    """A factory of forms."""

    @property
    def keeps_weight(self) -> bool:
        """True if the form keeps the tensor it was given, which then must not be reused."""
        ...

    def supports(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return True if this machine can multiply a weight of this size and dtype in this form, and gains by it.

        `dtype` is the dtype of the activations.
        """
        ...

    def pack(self, weight: Tensor, bias: Tensor | None) -> LinearForm:
        """Pack weight [out, in] and bias [out]."""
        ...

    def empty_form(self, outputs: int, inputs: int, bias: Tensor | None) -> EmptyForm | None:
        """Return an empty form, or None if weights can only be packed whole."""
        ...


class PlainLinear:
    """The weight as stored, multiplied by torch's product; always available.

    A weight that the checkpoint file stores in this form stays memory-mapped.
    """

    keeps_weight: ClassVar[bool] = True

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    @classmethod
    def supports(cls, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return True: torch multiplies any weight."""
        return True

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> PlainLinear:
        """Wrap the weight without copying it."""
        return cls(weight, bias)

    @classmethod
    def empty_form(cls, outputs: int, inputs: int, bias: Tensor | None) -> None:
        """Return None: weights can only be packed whole."""

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def activation_group(self, rows: int) -> RowGroups | None:
        """Return None: activations are not quantized."""
        return None

    def multiply(self, x: Activations) -> Tensor:
        """Multiply x [tokens, in] to [tokens, out] in the weight's dtype."""
        return F.linear(unquantized(x), self.weight, self.bias)

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """Add the product to hidden [tokens, out] fp32 in place."""
        hidden += self.multiply(x)


_MOST_COPIED = 2**27  # weights of which `ExactLinear` keeps an FP32 copy: 512 MiB
_CHUNK_ELEMENTS = 2**24  # weights converted to FP32 at a time without a copy: 64 MiB


class ExactLinear:
    """A linear form that multiplies in FP32 by the checkpoint's stored tensors, whatever their dtype.

    The copy that multiplies is made by the first product and lasts until `release`: panels of BF16 if the weights are
    stored so and the native library has the product, else FP32. Large weights are converted in every product. `unmap` is
    called whenever the stored weights were read: their pages are not needed soon.
    `scales` [in]: the inputs are x / scales, because the norm before the layer was already divided by them.
    """

    __slots__ = ("_panels", "_unmap", "_weight", "bias", "scales", "weights")

    def __init__(
        self, weights: Sequence[Tensor], bias: Tensor | None, unmap: Callable[[], None] = lambda: None
    ) -> None:
        self.weights, self.bias, self._unmap = tuple(weights), None if bias is None else bias.float(), unmap
        self.scales: Tensor | None = None
        self._weight: Tensor | None = None
        self._panels: Fp32PanelLinear | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors."""
        return sum(weight.nbytes for weight in self.weights)

    def release(self) -> None:
        """Free the copy."""
        self._weight = self._panels = None

    def activation_group(self, rows: int) -> None:
        """Return None: activations are not quantized."""

    def multiply(self, x: Activations) -> Tensor:
        """Multiply x [tokens, in] to [tokens, out] in its dtype."""
        return self._multiplied(x).to(unquantized(x).dtype)

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """Add the product to hidden [tokens, out] fp32 in place."""
        hidden += self._multiplied(x)

    def _multiplied(self, x: Activations) -> Tensor:
        rows = unquantized(x).float()
        rows = rows if self.scales is None else rows * self.scales
        if self._panels is None and self._weight is None and sum(map(Tensor.numel, self.weights)) <= _MOST_COPIED:
            self._copy(rows.shape[1])
        if self._panels is not None:
            return self._panels.multiply_wide(rows)
        if self._weight is not None:
            return F.linear(rows, self._weight, self.bias)
        step = max(1, _CHUNK_ELEMENTS // rows.shape[1])
        scratch = _fp32((step, rows.shape[1]))
        product, first = rows.new_empty(len(rows), sum(map(len, self.weights))), 0
        for part in (part for weight in self.weights for part in torch.split(weight, step)):
            product[:, first : first + len(part)] = rows @ _copied((part,), scratch[: len(part)]).T
            first += len(part)
            self._unmap()
        return product if self.bias is None else product + self.bias

    def _copy(self, inputs: int) -> None:
        """Make the copy that multiplies."""
        outputs, narrow = sum(map(len, self.weights)), Fp32PanelFactory(torch.bfloat16)
        is_narrow = all(weight.dtype == torch.bfloat16 for weight in self.weights)
        if is_narrow and narrow.supports(outputs, inputs, torch.bfloat16):
            self._panels, first = narrow.empty_form(outputs, inputs, self.bias), 0
            for part in self.weights:
                self._panels.fill(first, part)
                first += len(part)
        else:
            self._weight = _copied(self.weights, _fp32((outputs, inputs)))
        self._unmap()


def _fp32(shape: tuple[int, int]) -> Tensor:
    """Return an empty matrix on huge pages: touching others the first time takes longer than converting to FP32."""
    return allocate_weights(4 * shape[0] * shape[1]).view(torch.float32).view(shape)


def _copied(weights: Sequence[Tensor], out: Tensor) -> Tensor:
    """Copy the rows of all weights to `out`."""
    for part, weight in zip(torch.split(out, [*map(len, weights)]), weights, strict=True):
        part.copy_(weight)
    return out


class OneDnnLinear:
    """The weight in oneDNN's blocked layout, packed once instead of in every product.

    8192 x 2048 in BF16 on two Zen 5 cores: 750 us instead of 1,700 for one row, 958 instead of 1,886 for sixteen.
    It is faster at every row count.
    """

    keeps_weight: ClassVar[bool] = False
    # Up to this many weights a call costs more than it saves: 256 x 256 takes 13 us instead of 5 in FP32 (one
    # core, one row).
    smallest: ClassVar[int] = 2**16

    __slots__ = ("bias", "packed")

    def __init__(self, packed: Tensor, bias: Tensor | None) -> None:
        self.packed, self.bias = packed, bias

    @classmethod
    def supports(cls, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return True if oneDNN can pack the weight and it is large enough to gain by that."""
        return rows * columns > cls.smallest and _onednn_packs(dtype)

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> OneDnnLinear:
        """Pack weight [out, in] into oneDNN's layout and copy the bias."""
        # The layout may depend on the expected number of rows; packed for one row it is as fast as any other at
        # 512 (measured as above).
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight, 1), None if bias is None else bias.clone())

    @classmethod
    def empty_form(cls, outputs: int, inputs: int, bias: Tensor | None) -> None:
        """Return None: weights can only be packed whole."""

    @property
    def nbytes(self) -> int:
        """Bytes of packed weight and bias."""
        return self.packed.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def activation_group(self, rows: int) -> RowGroups | None:
        """Return None: activations are not quantized."""
        return None

    def multiply(self, x: Activations) -> Tensor:
        """Multiply x [tokens, in] to [tokens, out] in its dtype."""
        return self._multiplied(x, "none", "")

    def multiply_activated(self, x: Activations, activation: str) -> Tensor:
        """Return act(x times the weight) [tokens, out]; oneDNN applies the activation to its output."""
        product = self._multiplied(x, *_ONEDNN_ACTIVATIONS[activation])
        return product.square_() if activation == "relu2" else product

    def _multiplied(self, x: Activations, pointwise: str, algorithm: str) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            unquantized(x), self.packed, self.bias, pointwise, [], algorithm
        )
        return product

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """Add the product to hidden [tokens, out] fp32 in place."""
        hidden += self.multiply(x)


# oneDNN's names of the activations that it applies to a product's output, with their algorithms.
_ONEDNN_ACTIVATIONS = {
    "relu": ("relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
    "tanh": ("tanh", ""),
    "relu2": ("relu", ""),
}


def _onednn_packs(dtype: torch.dtype) -> bool:
    """Return True if this torch has oneDNN's packed products and this CPU has instructions for the dtype."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not (available and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


def host_architecture() -> str:
    """Return `x86_64` or `arm64`, as facts and recipes spell it."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "aarch64": "arm64"}.get(machine, machine)


# Forms in the model's precision, by their names in recipes.
FORMS: Mapping[str, FormFactory] = {
    "plain": PlainLinear,
    "onednn": OneDnnLinear,
    "panels": Bf16PanelLinear,
    "panels/fixed": FixedOrderFactory(),
    "panels/widened": Fp32PanelFactory(torch.bfloat16),
    "panels/fp32": Fp32PanelFactory(torch.float32),
}
# Quantized forms: they multiply by an approximation of the checkpoint's weight. Further ones are the configs of torchao,
# by their names (torchao_linear.py).
QUANTIZED_FORMS: Mapping[str, FormFactory] = {
    **{
        name: IntPanelFactory(layout.bits, layout.group, layout.zero_points, layout.double_quantized)
        for name, layout in LAYOUTS.items()
    },
}
# Forms in the memory of a device, by device and dtype of the activations.
DevicePacking = DeviceFactory | DeviceInt4Factory | DeviceInt8Factory
DEVICE_FORMS: Mapping[str, Callable[[torch.device, torch.dtype], DevicePacking]] = {
    "device": DeviceFactory,
    "device int4/64": DeviceInt4Factory,
    "device int8": DeviceInt8Factory,
    "device fp8": DeviceFp8Factory,
}


class Linear(nn.Module):
    """A linear layer, [tokens, in_features] to [tokens, out_features], through the form that the loader packs.

    `sources` names the checkpoint's tensors, without `.weight`, whose rows are concatenated in the product (for
    example q, k and v). `source_rows` are their numbers of rows; if not given, all have equally many. `input_scales`
    [in_features]: the inputs are divided by them, and the packed weight is multiplied by them. `lora` adds the products of
    the adapters of the step's rows; None if the server has no adapters.
    """

    form: LinearForm
    input_scales: Tensor | None = None
    lora: LoraProduct | DeviceLoraProduct | None = None

    def __init__(
        self,
        sources: tuple[str, ...],
        in_features: int,
        out_features: int,
        bias: bool = False,
        source_rows: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.sources, self.in_features, self.out_features, self.has_bias = sources, in_features, out_features, bias
        self.source_rows = source_rows or (out_features // len(sources),) * len(sources)

    def forward(self, x: Activations) -> Tensor:
        """Multiply x [tokens, in_features] to [tokens, out_features]."""
        product = self.form.multiply(x)
        if self.lora is not None:
            self.lora.add(product, x)
        return product

    def multiply_wide(self, x: Tensor) -> Tensor:
        """Multiply x [tokens, in_features] to [tokens, out_features] fp32."""
        if isinstance(self.form, Fp32PanelLinear):
            return self.form.multiply_wide(x)
        product = self.form.multiply(x)
        return product if product.dtype == torch.float32 else product.float()

    def activation_group(self, rows: int) -> RowGroups | None:
        """Return the quantization group of the activations at this many rows; None for a plain tensor."""
        return self.form.activation_group(rows)

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """Add the product to hidden [tokens, out_features] fp32 in place."""
        self.form.add_to(hidden, x)
        if self.lora is not None:
            self.lora.add(hidden, x)

    def takes_unnormed(self, rows: int) -> bool:
        """Return True if the product computes the RMSNorm of so many `UnnormedRows`."""
        return self.lora is None and isinstance(self.form, FewRowsForm) and self.form.takes_unnormed(rows)

    def multiply_gated(self, x: Activations, activation: str) -> Tensor | None:
        """Return act(gate) * up for the outputs gate, then up, in one kernel; None if the form has none for these rows."""
        if self.lora is not None or not isinstance(self.form, FewRowsForm):
            return None
        return self.form.multiply_gated(x, activation)

    def multiply_activated(self, x: Activations, activation: str, feeds: Linear) -> Activations:
        """Return act(x times the weight), in the format that the layer `feeds` reads at this many rows."""
        if self.lora is not None or not isinstance(self.form, ActivatingForm):
            product = self.forward(x)
            return activate(product, activation, feeds.activation_group(len(product)))
        rows = self.form.multiply_activated(x, activation)
        group = feeds.activation_group(len(rows))
        return rows if group is None else quantize(rows, group)

    @property
    def has_top_logits(self) -> bool:
        """True if the form can return each row's top outputs without writing all of them."""
        return isinstance(self.form, TopLogitsForm)

    def top_logits(self, x: Activations, request: TopLogitsRequest, softcap: float | None = None) -> TopLogits | None:
        """Return each row's top outputs, or None if the form can only write all of them."""
        return self.form.top_logits(x, request, softcap) if isinstance(self.form, TopLogitsForm) else None
