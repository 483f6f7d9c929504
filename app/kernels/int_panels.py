"""Linear forms of our own in four and eight bits: panels of codes with scales, multiplied by activations that are int8 too.

Layout and arithmetic are described in `csrc/ops.h`; how a weight becomes codes is `rounding.py`'s business. One packed form serves one row
and five hundred, and a row's result never depends on how many others there are. Its twin multiplies by what the codes mean.
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

_STREAM_ROWS = 2048  # outputs rounded at a time
_PICK_TASKS = 64  # csrc/ops.h


@dataclass(frozen=True, slots=True)
class IntPacking:
    """How such a form is made: `bits` 4 or 8, and how many inputs share a scale; `group` None: all of an output's."""

    bits: int
    group: int | None
    zero_points: bool = False
    keeps_weight: ClassVar[bool] = False

    @property
    def layout(self) -> PanelLayout:
        return PanelLayout(self.bits, self.group, self.zero_points)

    def suits(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        return has(Code.LINEAR_INT)

    def room(self, outputs: int, inputs: int, bias: Tensor | None) -> IntPanels:
        """An empty form, which `fill` brings the weight."""
        return IntPanels(self, outputs, inputs, bias)

    def part_bytes(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """Of what a form of this size is made of, as `parts` gives it."""
        return (self.layout.nbytes(outputs, inputs),)

    def restored(self, outputs: int, inputs: int, bias: Tensor | None, parts: Sequence[Tensor]) -> IntPanels:
        """A form out of `parts` that were kept."""
        (panels,) = parts
        return IntPanels(self, outputs, inputs, bias, panels)

    def pack(self, weight: Tensor, bias: Tensor | None) -> IntPanels:
        """weight [out, in] of any float dtype."""
        form = self.room(weight.shape[0], weight.shape[1], bias)
        for first in range(0, weight.shape[0], _STREAM_ROWS):
            form.fill(first, weight[first : first + _STREAM_ROWS])
        return form


class IntPanels:
    """A weight [out, in] in panels."""

    __slots__ = ("bias", "group", "inputs", "outputs", "packing", "padded", "panels")

    def __init__(self, packing: IntPacking, outputs: int, inputs: int, bias: Tensor | None, panels: Tensor | None = None) -> None:
        """`panels`: packed before (a cache); None: room for them, zeros."""
        self.packing, self.outputs, self.inputs = packing, outputs, inputs
        self.group = packing.layout.group_of(inputs)
        self.padded = -(-inputs // self.group) * self.group
        self.bias = None if bias is None else bias.to(torch.float32, copy=True)
        self.panels = weights_bytes(self.panels_bytes).zero_() if panels is None else panels
        assert self.panels.numel() == self.panels_bytes and self.panels.data_ptr() % 64 == 0, (
            "panels of this weight, on a cache line"
        )

    @property
    def panels_bytes(self) -> int:
        return self.packing.layout.nbytes(self.outputs, self.inputs)

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """What can be kept, uint8: all but the bias."""
        return (self.panels,)

    def fill(self, first: int, rows: Tensor, bonds: Bonds | None = None) -> None:
        """rows [n, in], any float dtype: outputs `[first, first + n)`, each brought once. They may be reused afterwards.

        `bonds` say which inputs belong together (compensate.py); four bits make use of it.
        """
        assert first + len(rows) <= self.outputs, "rows of this weight"
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
        assert library is not None, "suits() was asked"
        library.armature_pack_int(ctypes.byref(arguments))

    def _eight_bits(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Codes int8 [n, padded] and scales [n, groups]; what is padded is 0."""
        if self.padded != self.inputs:
            rows = torch.nn.functional.pad(rows, (0, self.padded - self.inputs))
        eight = quantise_int8(rows.reshape(-1, self.group))
        return eight.codes.view(len(rows), self.padded), eight.scales.view(len(rows), -1)

    def takes(self, rows: int) -> int:
        """Activations come quantised, with one scale for each of this many inputs."""
        return self.group

    def multiply(self, x: Tensor | Quantised) -> Tensor:
        """x [tokens, in] to [tokens, out] bf16, summed in fp32."""
        return self.activated(x, "identity")

    def activated(self, x: Tensor | Quantised, activation: str) -> Tensor:
        """act(the product), of the sums before they are rounded."""
        x = x if isinstance(x, Quantised) else quantise(x, self.group)
        y = empty((x.rows, self.outputs), torch.bfloat16)
        self._run(x, y, Output.BF16, ACTIVATIONS[activation])
        return y

    def add_to(self, hidden: Tensor, x: Tensor | Quantised) -> None:
        """hidden [tokens, out] fp32 += the product."""
        x = x if isinstance(x, Quantised) else quantise(x, self.group)
        self._run(x, hidden, Output.ADD_FP32)

    def best(self, x: Tensor | Quantised, wanted: Wanted, softcap: float | None = None) -> Best:
        """Each row's best outputs (at most `MOST_BEST`), without the others ever being written; summed and compared in fp32.

        With a soft cap, of softcap · tanh(logit / softcap).
        """
        k = wanted.k
        assert 1 <= k <= min(MOST_BEST, self.outputs), "as many as a kernel keeps"
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
        assert (x.size, x.group) == (self.inputs, self.group), "rows quantised for this weight"
        bias = None if self.bias is None else self.bias.data_ptr()
        return LinearInt(
            self.panels.data_ptr(), bias, x.codes.data_ptr(), x.scales.data_ptr(), x.sums.data_ptr(), y, stride,
            x.rows, self.padded, self.outputs, self.group, x.height, self.packing.bits, self.packing.zero_points, output,
        )  # fmt: skip

    def rows(self, ids: Tensor, factor: Factor = 1.0) -> Tensor:
        """Rows of the weight as the codes mean it, fp32 [n, in], for ids [n] int64: a tied embedding needs no second copy."""
        form, zero_points = Form(self.packing.bits), self.packing.zero_points
        return Table(self.panels, form, self.outputs, self.inputs, self.padded, self.group, zero_points).rows(ids, factor)

    def dequantised(self) -> Tensor:
        """The weight as the codes mean it, fp32 [out, in]."""
        return self.rows(torch.arange(self.outputs))

    def multiply_torch(self, x: Tensor) -> Tensor:
        """The twin of `multiply`, fp32: activations rounded as ours are, times what the codes mean."""
        codes, scales = quantise_torch(x, self.group)
        rounded = (codes.float() * scales[..., None]).flatten(1)[:, : self.inputs]
        product = rounded @ self.dequantised().T
        return product if self.bias is None else product + self.bias
