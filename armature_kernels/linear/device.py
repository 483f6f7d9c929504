"""Weights in the memory of a device, copied there some rows at a time; an unquantized one is multiplied by torch.

Nothing here depends on the kind of device; tests run the same code on the CPU. `fused_addmm` adds a half-precision
product to an fp32 stream in one kernel (CUDA's `addmm` with a wider `out_dtype`), which saves one kernel launch and
one rounding. Older versions of torch and other devices do not support it, so support is tested once per device.

Few rows have a kernel of ours for every kind of weight, which also computes the norm before the product, and the gate or
the sum behind it (triton/linear.py). It is used where it was right and faster in a trial on the device (device_trial.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from armature_kernels.elementwise.activations import ACTIVATIONS
from armature_kernels.elementwise.embedding import RowFactor, embedding_rows
from armature_kernels.linear.activations import Activations, UnnormedRows, rows_of, unquantized
from armature_kernels.linear.device_trial import find_few_rows


@dataclass(frozen=True, slots=True)
class DeviceFactory:
    """Places weights on `device` in `dtype`, which is also the dtype of the activations."""

    device: torch.device
    dtype: torch.dtype
    keeps_weight: ClassVar[bool] = False

    def supports(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return True if activations of this dtype match."""
        return dtype == self.dtype

    def empty_form(self, outputs: int, inputs: int, bias: Tensor | None) -> DeviceLinear:
        """Return an uninitialised form [outputs, inputs] that `fill` completes."""
        weight = torch.empty(outputs, inputs, dtype=self.dtype, device=self.device)
        return DeviceLinear(weight, copy_bias_to_device(bias, weight), find_few_rows(self, outputs, inputs))

    def pack(self, weight: Tensor, bias: Tensor | None) -> DeviceLinear:
        """Copy weight [out, in] of any float dtype to the device."""
        form = self.empty_form(weight.shape[0], weight.shape[1], bias)
        form.fill(0, weight)
        return form

    def weight_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a weight without its bias; a product reads all of them."""
        return outputs * inputs * self.dtype.itemsize


# Codes, their scales, and how many outputs and inputs share one, as `multiply_few` reads them.
CodesAndScales = tuple[Tensor, Tensor | None, tuple[int, int]]


class DeviceForm:
    """A weight [out, in] and bias [out] on a device. `few_rows`: the most rows of the kernel for few rows; 0: none."""

    __slots__ = ("bias", "dtype", "few_rows", "shape")
    bias: Tensor | None
    dtype: torch.dtype  # of the activations
    few_rows: int
    shape: tuple[int, int]

    def activation_group(self, rows: int) -> None:
        """Return None: activations are not quantized."""

    def takes_unnormed(self, rows: int) -> bool:
        """Return True if `multiply` takes so many `UnnormedRows`."""
        return 0 < rows <= self.few_rows

    def multiply(self, x: Activations) -> Tensor:
        """Multiply x [tokens, in] to [tokens, out] in the activations' dtype."""
        if self.takes_unnormed(rows_of(x)):
            return self._multiply_few(x, self._empty(rows_of(x), self.shape[0]))
        return self.multiply_rows(unquantized(x))

    def multiply_gated(self, x: Activations, activation: str) -> Tensor | None:
        """Return act(gate) * up [tokens, out / 2] for the outputs gate, then up; None for too many rows."""
        if activation not in ACTIVATIONS or not self.takes_unnormed(rows_of(x)):
            return None
        return self._multiply_few(x, self._empty(rows_of(x), self.shape[0] // 2), activation)

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """Add the product to hidden [tokens, out] fp32 in place."""
        if self.takes_unnormed(rows_of(x)) and hidden.stride(1) == 1:
            self._multiply_few(x, hidden, adds=True)
        else:
            self.add_rows_to(hidden, unquantized(x))

    def _empty(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=self.dtype, device=self.device)

    def _multiply_few(self, x: Activations, out: Tensor, activation: str = "", adds: bool = False) -> Tensor:
        from armature_kernels.triton.linear import multiply_few

        norm, rows = None, x
        if isinstance(x, UnnormedRows):
            norm, rows = (x.weight, x.eps), x.hidden
        return multiply_few(unquantized(rows), self.few_rows_weight(), out, norm, self.bias, activation, adds)

    @property
    def device(self) -> torch.device:
        """The device of the weight."""
        raise NotImplementedError

    def few_rows_weight(self) -> CodesAndScales:
        """Return the weight as the kernel for few rows reads it."""
        raise NotImplementedError

    def multiply_rows(self, rows: Tensor) -> Tensor:
        """Multiply rows [n, in] of any number, without that kernel."""
        raise NotImplementedError

    def add_rows_to(self, hidden: Tensor, rows: Tensor) -> None:
        """Add the product of rows [n, in] of any number to hidden [n, out] fp32, without that kernel."""
        hidden += self.multiply_rows(rows)


class DeviceLinear(DeviceForm):
    """An unquantized weight; a tied embedding uses the same tensor."""

    __slots__ = ("fuses_add", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, few_rows: int = 0) -> None:
        self.weight, self.bias, self.few_rows = weight, bias, few_rows
        self.shape, self.dtype = (weight.shape[0], weight.shape[1]), weight.dtype
        self.fuses_add = bias is None and supports_fused_add(weight.device, weight.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias on the device."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def fill(self, first: int, rows: Tensor) -> None:
        """Copy rows [n, in] to outputs `[first, first + n)`.

        The copy is complete on return, so `rows` may be reused.
        """
        self.weight[first : first + len(rows)].copy_(rows)

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def few_rows_weight(self) -> CodesAndScales:
        return self.weight, None, (1, 1)

    def multiply_rows(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.weight, self.bias)

    def add_rows_to(self, hidden: Tensor, rows: Tensor) -> None:
        if self.fuses_add:
            fused_addmm(hidden, rows, self.weight)
        else:
            hidden += self.multiply_rows(rows)

    def rows(self, ids: Tensor, factor: RowFactor = 1.0) -> Tensor:
        """Return rows of the weight, fp32 [n, in], for ids [n] int64, times a factor."""
        return embedding_rows(self.weight, ids, factor)


class StackedWeights(NamedTuple):
    """The weights of all experts: [experts, outputs, inputs], biases and, with codes, scales and `block` (device_int8.py)."""

    weights: Tensor
    biases: Tensor | None = None
    scales: Tensor | None = None
    block: tuple[int, int] | None = None


def copy_bias_to_device(bias: Tensor | None, weight: Tensor) -> Tensor | None:
    """Copy the bias to the weight's device and dtype; None stays None."""
    return None if bias is None else bias.to(weight.device, weight.dtype, copy=True)


@cache
def supports_fused_add(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if `fused_addmm` works on this device and dtype.

    The test waits for the device, so it runs while weights are loaded and never during a step.
    """
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return all(
        _adds_correctly(rows, device, dtype) for rows in (1, 16)
    )  # torch may treat a single row as a bias, which is another code path


def _adds_correctly(rows: int, device: torch.device, dtype: torch.dtype) -> bool:
    ones, stream = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(rows, 16, device=device)
    try:
        fused_addmm(stream, ones[:rows], ones)
    except RuntimeError:  # not supported on this device, or not for an fp32 stream
        return False
    return bool((stream == 17).all())


def fused_addmm(hidden: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add x [tokens, in] times weight [out, in], both of one half precision, to hidden [tokens, out] fp32 in place."""
    # Nothing is copied (out= is the input), and beta = 1 adds.
    torch.addmm(hidden, x, weight.t(), out_dtype=torch.float32, out=hidden)
