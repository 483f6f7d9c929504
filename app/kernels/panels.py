"""A native linear form: bf16 weights in panels, read in the same order for any number of rows.

Layout and product are described in `csrc/tile_bf16.h`. The reference implementation is torch's `F.linear`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from app.kernels.activations import Activations, plain
from app.kernels.memory import empty, weights_bytes
from app.kernels.native import native
from app.kernels.operations import ACTIVATIONS, Code, LinearBf16, Output, has, run
from app.kernels.table import Factor, Form, Table

PANEL_WIDTH = 32  # outputs


class PanelLinear:
    """A bf16 weight [out, in] in panels of `PANEL_WIDTH` outputs.

    At one row it reads at memory speed (0.98 of a plain read loop). Compared with oneDNN's packed bf16 it is
    faster up to 32 rows, and within a tenth of it at 512 (8192 x 2048, two Zen 5 cores).
    """

    keeps_weight: ClassVar[bool] = False

    __slots__ = ("bias", "fixed", "inputs", "outputs", "panels")

    def __init__(self, outputs: int, inputs: int, bias: Tensor | None, fixed: bool = False) -> None:
        """Allocate panels for a weight [outputs, inputs] that `fill` completes.

        With `fixed`, the summation order of a row does not depend on the number of other rows.
        """
        self.fixed = fixed
        num_panels = -(-outputs // PANEL_WIDTH)
        self.outputs, self.inputs = outputs, inputs
        self.bias = None if bias is None else bias.to(torch.float32, copy=True)
        self.panels = weights_bytes(num_panels * PANEL_WIDTH * -(-inputs // 2) * 4)
        if outputs % PANEL_WIDTH:  # the last panel is padded with zeros
            self.panels[-self.panels.numel() // num_panels :].zero_()

    @classmethod
    def suits(cls, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return True for bf16 if the native library has the bf16 product."""
        return dtype == torch.bfloat16 and has(Code.LINEAR_BF16)

    @classmethod
    def room(cls, outputs: int, inputs: int, bias: Tensor | None) -> PanelLinear:
        """Return an empty form [outputs, inputs] that `fill` completes."""
        return cls(outputs, inputs, bias)

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> PanelLinear:
        """Pack weight [out, in] bf16."""
        form = cls.room(weight.shape[0], weight.shape[1], bias)
        form.fill(0, weight)
        return form

    def fill(self, first: int, rows: Tensor) -> None:
        """Pack contiguous rows [n, in] of any float dtype as outputs `[first, first + n)`.

        `rows` may be reused afterwards.
        """
        assert rows.is_contiguous() and first + len(rows) <= self.outputs, (
            "rows must be contiguous and within the weight's outputs"
        )
        rows = rows.to(torch.bfloat16)
        library = native().library
        assert library is not None, "the form requires the native library"
        library.armature_pack_bf16(rows.data_ptr(), self.panels.data_ptr(), len(rows), self.inputs, first)

    @property
    def nbytes(self) -> int:
        """Bytes of panels and bias."""
        return self.panels.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def takes(self, rows: int) -> int | None:
        """Return None: activations are not quantised."""
        return None

    def multiply(self, x: Activations) -> Tensor:
        """Multiply x [tokens, in] bf16 to [tokens, out] bf16, summed in fp32."""
        return self.activated(x, "identity")

    def activated(self, x: Activations, activation: str) -> Tensor:
        """Return act(x times the weight) [tokens, out] bf16; the activation is applied before rounding."""
        y = empty((plain(x).shape[0], self.outputs), torch.bfloat16)
        self._run(plain(x), y, Output.BF16, ACTIVATIONS[activation])
        return y

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """Add the product to hidden [tokens, out] fp32 in place."""
        self._run(plain(x), hidden, Output.ADD_FP32)

    def _run(self, x: Tensor, y: Tensor, output: Output, activation: int = 0) -> None:
        if x.stride(-1) != 1:
            x = x.contiguous()
        rows, bias = x.shape[0], None if self.bias is None else self.bias.data_ptr()
        tiles = empty((rows * -(-self.inputs // 2),), torch.int32)
        addresses = (x.data_ptr(), self.panels.data_ptr(), bias, tiles.data_ptr(), y.data_ptr())
        run(
            LinearBf16(*addresses, x.stride(0), y.stride(0), rows, self.inputs, self.outputs, output, self.fixed, activation),
            Code.LINEAR_BF16,
        )

    def rows(self, ids: Tensor, factor: Factor = 1.0) -> Tensor:
        """Return rows of the weight, fp32 [n, in], for ids [n] int64, times a factor.

        A tied embedding therefore needs neither a second copy nor the file.
        """
        return Table(self.panels, Form.BF16_PANELS, self.outputs, self.inputs).rows(ids, factor)


@dataclass(frozen=True, slots=True)
class FixedPacking:
    """Packs `Bf16PanelLinear` with one summation order for any number of rows.

    A single row then does not use its faster kernel, which sums in four partial sums.
    """

    keeps_weight: ClassVar[bool] = False

    def suits(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return True if `Bf16PanelLinear` supports the weight."""
        return PanelLinear.suits(rows, columns, dtype)

    def room(self, outputs: int, inputs: int, bias: Tensor | None) -> PanelLinear:
        """Return an empty form [outputs, inputs] that `fill` completes."""
        return PanelLinear(outputs, inputs, bias, fixed=True)

    def pack(self, weight: Tensor, bias: Tensor | None) -> PanelLinear:
        """Pack weight [out, in] bf16."""
        form = self.room(weight.shape[0], weight.shape[1], bias)
        form.fill(0, weight)
        return form
