"""Native linear forms in four and eight bits: panels of codes with scales, multiplied by int8 activations.

Layout and arithmetic are described in `csrc/ops.h`. The `rounding` module computes the codes. One packed form
serves any number of rows, and a row's result does not depend on the number of other rows. The reference
implementation multiplies by the dequantised weight.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from app.kernels.activations import Quantised, quantise, quantise_torch
from app.kernels.best import MOST_BEST, Best, Wanted
from app.kernels.compensate import Bonds, compensated_int4
from app.kernels.layout import PanelLayout
from app.kernels.memory import empty, weights_bytes
from app.kernels.native import native
from app.kernels.operations import ACTIVATIONS, Code, LinearInt, Output, Pack, Pick, has, run
from app.kernels.rounding import quantise_int4, quantise_int8
from app.kernels.table import Factor, Form, Table

_STREAM_ROWS = 2048  # outputs quantised at a time
_PICK_TASKS = 64  # csrc/ops.h


@dataclass(frozen=True, slots=True)
class IntPacking:
    """Packs weights to `bits` 4 or 8, with `group` inputs per scale (None: all inputs of an output)."""

    bits: int
    group: int | None
    zero_points: bool = False
    keeps_weight: ClassVar[bool] = False

    @property
    def layout(self) -> PanelLayout:
        """Sizes of the packed panels."""
        return PanelLayout(self.bits, self.group, self.zero_points)

    def suits(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return True if the native library has the integer product."""
        return has(Code.LINEAR_INT)

    def room(self, outputs: int, inputs: int, bias: Tensor | None) -> IntPanels:
        """Return an empty form [outputs, inputs] that `fill` completes."""
        return IntPanels(self, outputs, inputs, bias)

    def part_bytes(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """Return the bytes of each tensor in `IntPanelLinear.parts`."""
        return (self.layout.nbytes(outputs, inputs),)

    def restored(self, outputs: int, inputs: int, bias: Tensor | None, parts: Sequence[Tensor]) -> IntPanels:
        """Build a form from saved `parts`."""
        (panels,) = parts
        return IntPanels(self, outputs, inputs, bias, panels)

    def pack(self, weight: Tensor, bias: Tensor | None) -> IntPanels:
        """Pack weight [out, in] of any float dtype."""
        form = self.room(weight.shape[0], weight.shape[1], bias)
        for first in range(0, weight.shape[0], _STREAM_ROWS):
            form.fill(first, weight[first : first + _STREAM_ROWS])
        return form


class IntPanels:
    """A quantised weight [out, in] in panels."""

    __slots__ = ("bias", "group", "inputs", "outputs", "packing", "padded", "panels")

    def __init__(self, packing: IntPacking, outputs: int, inputs: int, bias: Tensor | None, panels: Tensor | None = None) -> None:
        """Create the form from `panels` packed before (a cache), or with zeroed panels if None."""
        self.packing, self.outputs, self.inputs = packing, outputs, inputs
        self.group = packing.layout.group_of(inputs)
        self.padded = -(-inputs // self.group) * self.group
        self.bias = None if bias is None else bias.to(torch.float32, copy=True)
        self.panels = weights_bytes(self.panels_bytes).zero_() if panels is None else panels
        assert self.panels.numel() == self.panels_bytes and self.panels.data_ptr() % 64 == 0, (
            "panels must have the size of this weight and begin at a cache line"
        )

    @property
    def panels_bytes(self) -> int:
        """Bytes of the panels, without the bias."""
        return self.packing.layout.nbytes(self.outputs, self.inputs)

    @property
    def nbytes(self) -> int:
        """Bytes of panels and bias."""
        return self.panels.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that can be saved, uint8: all but the bias."""
        return (self.panels,)

    def fill(self, first: int, rows: Tensor, bonds: Bonds | None = None) -> None:
        """Quantise rows [n, in] of any float dtype as outputs `[first, first + n)`, each given once.

        `rows` may be reused afterwards. Four-bit weights are rounded by GPTQ if `gptq_factors` are given.
        """
        assert first + len(rows) <= self.outputs, "the rows exceed the weight's outputs"
        if self.packing.bits == 4:
            zero_points = self.packing.zero_points
            if bonds is None:
                four = quantise_int4(rows, self.group, zero_points)
            else:
                four = compensated_int4(rows, self.group, zero_points, bonds)
            codes, scales, minimums = four.codes, four.scales, four.minimums
        else:
            codes, scales, minimums = *self._eight_bits(rows), None
        codes, scales = codes.contiguous(), scales.contiguous()
        arguments = Pack(
            codes.data_ptr(), scales.data_ptr(), None if minimums is None else minimums.data_ptr(), self.panels.data_ptr(),
            len(rows), first, self.padded, self.group, self.packing.bits,
        )  # fmt: skip
        library = native().library
        assert library is not None, "the form requires the native library"
        library.armature_pack_int(ctypes.byref(arguments))

    def _eight_bits(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise rows to codes int8 [n, padded] and scales [n, groups]; padding is 0."""
        if self.padded != self.inputs:
            rows = torch.nn.functional.pad(rows, (0, self.padded - self.inputs))
        eight = quantise_int8(rows.reshape(-1, self.group))
        return eight.codes.view(len(rows), self.padded), eight.scales.view(len(rows), -1)

    def takes(self, rows: int) -> int:
        """Return the number of inputs that share a scale: activations must be quantised in such groups."""
        return self.group

    def multiply(self, x: Tensor | Quantised) -> Tensor:
        """Multiply x [tokens, in] to [tokens, out] bf16, summed in fp32."""
        return self.activated(x, "identity")

    def activated(self, x: Tensor | Quantised, activation: str) -> Tensor:
        """Return act(x times the weight) [tokens, out] bf16; the activation is applied before rounding."""
        x = x if isinstance(x, Quantised) else quantise(x, self.group)
        y = empty((x.rows, self.outputs), torch.bfloat16)
        self._run(x, y, Output.BF16, ACTIVATIONS[activation])
        return y

    def add_to(self, hidden: Tensor, x: Tensor | Quantised) -> None:
        """Add the product to hidden [tokens, out] fp32 in place."""
        x = x if isinstance(x, Quantised) else quantise(x, self.group)
        self._run(x, hidden, Output.ADD_FP32)

    def best(self, x: Tensor | Quantised, wanted: Wanted, softcap: float | None = None) -> Best:
        """Return each row's top outputs without writing the others; sums and comparisons are in fp32.

        At most `MAX_TOP_LOGITS` outputs are supported. With a soft cap, values are softcap · tanh(logit / softcap).
        """
        k = wanted.k
        assert 1 <= k <= min(MOST_BEST, self.outputs), "k must be between 1 and what the kernel keeps"
        x = x if isinstance(x, Quantised) else quantise(x, self.group)
        best = Best(
            empty((x.rows, k), torch.float32),
            empty((x.rows, k), torch.int64),
            empty((x.rows,), torch.float32) if wanted.with_logsumexp else None,
        )
        scratch = empty((_PICK_TASKS * x.rows * (8 * k + 16),), torch.uint8)
        logsumexp = None if best.logsumexp is None else best.logsumexp.data_ptr()
        product = self.product(x, None, 0, Output.FP32)
        run(
            Pick(product, best.values.data_ptr(), best.ids.data_ptr(), logsumexp, scratch.data_ptr(), k, softcap or 0.0),
            Code.PICK,
        )
        return best

    def _run(self, x: Quantised, y: Tensor, output: Output, activation: int = 0) -> None:
        product = self.product(x, y.data_ptr(), y.stride(0), output)
        product.activation = activation
        run(product, Code.LINEAR_INT)

    def product(self, x: Quantised, y: int | None, stride: int, output: Output) -> LinearInt:
        """Return the arguments of the native product of x; `y` is the output's address and `stride` its row stride."""
        assert (x.size, x.group) == (self.inputs, self.group), "activations must have the weight's inputs and group"
        bias = None if self.bias is None else self.bias.data_ptr()
        return LinearInt(
            self.panels.data_ptr(), bias, x.codes.data_ptr(), x.scales.data_ptr(), x.sums.data_ptr(), y, stride,
            x.rows, self.padded, self.outputs, self.group, x.height, self.packing.bits, self.packing.zero_points, output,
        )  # fmt: skip

    def rows(self, ids: Tensor, factor: Factor = 1.0) -> Tensor:
        """Return rows of the dequantised weight, fp32 [n, in], for ids [n] int64, times a factor.

        A tied embedding therefore needs no second copy.
        """
        form, zero_points = Form(self.packing.bits), self.packing.zero_points
        return Table(self.panels, form, self.outputs, self.inputs, self.padded, self.group, zero_points).rows(ids, factor)

    def dequantised(self) -> Tensor:
        """Return the dequantised weight, fp32 [out, in]."""
        return self.rows(torch.arange(self.outputs))

    def multiply_torch(self, x: Tensor) -> Tensor:
        """Multiply in fp32 by torch, with quantised activations and the dequantised weight.

        This is the reference implementation of `multiply`.
        """
        codes, scales = quantise_torch(x, self.group)
        rounded = (codes.float() * scales[..., None]).flatten(1)[:, : self.inputs]
        product = rounded @ self.dequantised().T
        return product if self.bias is None else product + self.bias
