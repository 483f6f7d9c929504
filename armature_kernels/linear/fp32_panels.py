"""Native linear forms in panels of `PANEL_OUTPUTS` outputs of floats, and those of them whose products are in fp32.

The latter have fp32 weights, or bf16 weights that are widened while they are read (`csrc/tile_fp32.h`); torch's
`F.linear` is the reference implementation. They serve on every instruction set level. A row is summed in the order of
inputs, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from armature_kernels.elementwise.activations import TopLogits, TopLogitsRequest, empty_top_logits, top_logits_of
from armature_kernels.elementwise.embedding import EmbeddingTable, RowFactor, TableLayout
from armature_kernels.linear.activations import Activations, RowGroups, unquantised
from armature_kernels.linear.layout import PANEL_OUTPUTS
from armature_kernels.native.arguments import ACTIVATION_CODES, LinearFp32Arguments, OpCode, ProductOutput
from armature_kernels.native.library import native_library
from armature_kernels.native.memory import allocate_weights, empty
from armature_kernels.native.operations import has_kernel, run_operation

_LOGIT_ROWS = 64  # rows whose logits are in memory at a time


@dataclass(frozen=True, slots=True)
class Fp32PanelFactory:
    """Packs weights in `dtype`, fp32 or bf16, for models whose activations have that dtype."""

    dtype: torch.dtype
    keeps_weight: ClassVar[bool] = False

    def supports(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return True for activations of this dtype if the native library has the fp32 product."""
        return dtype == self.dtype and has_kernel(OpCode.LINEAR_FP32)

    def empty_form(self, outputs: int, inputs: int, bias: Tensor | None) -> Fp32PanelLinear:
        """Return an empty form [outputs, inputs] that `fill` completes."""
        return Fp32PanelLinear(self.dtype, outputs, inputs, bias)

    def pack(self, weight: Tensor, bias: Tensor | None) -> Fp32PanelLinear:
        """Pack weight [out, in] of any float dtype."""
        form = self.empty_form(weight.shape[0], weight.shape[1], bias)
        form.fill(0, weight)
        return form


class FloatPanelLinear:
    """A weight [out, in] in panels of fp32 or bf16, for activations of the same dtype, with sums in fp32.

    A subclass multiplies by `_run`.
    """

    keeps_weight: ClassVar[bool] = False

    __slots__ = ("bias", "dtype", "inputs", "outputs", "panels")

    def __init__(self, dtype: torch.dtype, outputs: int, inputs: int, bias: Tensor | None) -> None:
        """Allocate panels for a weight [outputs, inputs] that `fill` completes."""
        num_panels = -(-outputs // PANEL_OUTPUTS)
        self.dtype, self.outputs, self.inputs = dtype, outputs, inputs
        self.bias = None if bias is None else bias.to(torch.float32, copy=True)
        # bf16 is stored in pairs of inputs.
        elements = num_panels * PANEL_OUTPUTS * (-(-inputs // 2) * 2 if self.is_narrow else inputs)
        self.panels = allocate_weights(elements * dtype.itemsize)
        if outputs % PANEL_OUTPUTS:  # the last panel is padded with zeros
            self.panels[-self.panels.numel() // num_panels :].zero_()

    @property
    def is_narrow(self) -> bool:
        """True if the weight and the activations are bf16."""
        return self.dtype == torch.bfloat16

    def fill(self, first: int, rows: Tensor) -> None:
        """Pack contiguous rows [n, in] of any float dtype as outputs `[first, first + n)`.

        `rows` may be reused afterwards.
        """
        assert rows.is_contiguous() and first + len(rows) <= self.outputs, (
            "rows must be contiguous and within the weight's outputs"
        )
        rows = rows.to(self.dtype)
        library = native_library().library
        assert library is not None, "the form requires the native library"
        pack = library.armature_pack_bf16 if self.is_narrow else library.armature_pack_fp32
        pack(rows.data_ptr(), self.panels.data_ptr(), len(rows), self.inputs, first)

    @property
    def nbytes(self) -> int:
        """Bytes of panels and bias."""
        return self.panels.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def activation_group(self, rows: int) -> RowGroups | None:
        """Return None: activations are not quantised."""
        return None

    def multiply(self, x: Activations) -> Tensor:
        """Multiply x [tokens, in] to [tokens, out] in the same dtype, summed in fp32."""
        return self.multiply_activated(x, "identity")

    def multiply_activated(self, x: Activations, activation: str) -> Tensor:
        """Return act(x times the weight) [tokens, out]; the activation is applied before rounding."""
        rows = unquantised(x)
        y = empty((rows.shape[0], self.outputs), self.dtype)
        output = ProductOutput.BF16 if self.is_narrow else ProductOutput.FP32
        self._run(rows, y, output, ACTIVATION_CODES[activation])
        return y

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """Add the product to hidden [tokens, out] fp32 in place."""
        self._run(unquantised(x), hidden, ProductOutput.ADD_FP32)

    def top_logits(self, x: Activations, request: TopLogitsRequest, softcap: float | None = None) -> TopLogits:
        """Return each row's top outputs; the logits of some rows at a time are in memory."""
        return _top_logits_by_parts(self._logits, unquantised(x), request, softcap)

    def _logits(self, x: Tensor) -> Tensor:
        y = empty((x.shape[0], self.outputs), torch.float32)
        self._run(x, y, ProductOutput.FP32)
        return y

    def _run(self, x: Tensor, y: Tensor, output: ProductOutput, activation: int = 0) -> None:
        raise NotImplementedError

    def rows(self, ids: Tensor, factor: RowFactor = 1.0) -> Tensor:
        """Return rows of the weight, fp32 [n, in], for ids [n] int64, times a factor.

        A tied embedding therefore needs neither a second copy nor the file.
        """
        layout = TableLayout.BF16_PANELS if self.is_narrow else TableLayout.FP32_PANELS
        return EmbeddingTable(self.panels, layout, self.outputs, self.inputs).rows(ids, factor)


class Fp32PanelLinear(FloatPanelLinear):
    """A weight [out, in] in panels of fp32 or bf16 with products in fp32."""

    __slots__ = ()

    def multiply_wide(self, x: Tensor) -> Tensor:
        """Multiply x [tokens, in] fp32 to [tokens, out] fp32, also by a weight in bf16."""
        return self._logits(x)

    def _run(self, x: Tensor, y: Tensor, output: ProductOutput, activation: int = 0) -> None:
        if x.stride(-1) != 1:
            x = x.contiguous()
        rows, bias = x.shape[0], None if self.bias is None else self.bias.data_ptr()
        tiles = empty((rows * -(-self.inputs // 2) * 2,), torch.float32)
        addresses = (x.data_ptr(), self.panels.data_ptr(), bias, tiles.data_ptr(), y.data_ptr())
        sizes = (x.stride(0), y.stride(0), rows, self.inputs, self.outputs, output, activation)
        run_operation(
            LinearFp32Arguments(*addresses, *sizes, x.dtype == torch.bfloat16, self.is_narrow), OpCode.LINEAR_FP32
        )


def _top_logits_by_parts(
    logits: Callable[[Tensor], Tensor], x: Tensor, request: TopLogitsRequest, softcap: float | None
) -> TopLogits:
    """Return each row's top outputs of logits(x) fp32, whose rows are computed `_LOGIT_ROWS` at a time.

    A vocabulary of 150,000 takes 37 MiB then, whatever the number of rows.
    """
    count = x.shape[0]
    if count <= _LOGIT_ROWS:
        return top_logits_of(logits(x), request, softcap)
    best = empty_top_logits(count, request)
    for first in range(0, count, _LOGIT_ROWS):
        part = slice(first, min(first + _LOGIT_ROWS, count))
        sums = None if best.logsumexp is None else best.logsumexp[part]
        top_logits_of(logits(x[part]), request, softcap, TopLogits(best.values[part], best.ids[part], sums), first)
    return best
