"""Native linear forms: bf16 weights in panels, and a weight in two quantized forms, selected by the number of rows.

Panels are read in the same order for any number of rows; `csrc/tile_bf16.h` describes layout and product, and torch's
`F.linear` is the reference implementation. Of the two quantized forms, four bits serve few rows, where memory
bandwidth is the bottleneck, and eight bits serve many rows, where arithmetic is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from armature_kernels.elementwise.activations import TopLogits, TopLogitsRequest
from armature_kernels.elementwise.embedding import RowFactor
from armature_kernels.linear.activations import Activations, RowGroups, rows_of
from armature_kernels.linear.bf16_product import PackedWeight, run_bf16_product
from armature_kernels.linear.fp32_panels import FloatPanelLinear
from armature_kernels.linear.int_panels import IntPanelFactory, IntPanelLinear
from armature_kernels.linear.quantization import GptqFactors, Int4Weight, Int8Weight
from armature_kernels.linear.row_split import RowSplitFactory, RowSplitLinear
from armature_kernels.native.arguments import OpCode, ProductOutput
from armature_kernels.native.operations import has_kernel

PANEL_WIDTH = 32  # outputs


class Bf16PanelLinear(FloatPanelLinear):
    """A bf16 weight [out, in] in panels of `PANEL_WIDTH` outputs.

    At one row it reads at memory speed (0.98 of a plain read loop). Compared with oneDNN's packed bf16 it is
    faster up to 32 rows, and within a tenth of it at 512 (8192 x 2048, two Zen 5 cores).
    """

    __slots__ = ("fixed",)

    def __init__(self, outputs: int, inputs: int, bias: Tensor | None, fixed: bool = False) -> None:
        """Allocate panels for a weight [outputs, inputs] that `fill` completes.

        With `fixed`, the summation order of a row does not depend on the number of other rows.
        """
        super().__init__(torch.bfloat16, outputs, inputs, bias)
        self.fixed = fixed

    @classmethod
    def supports(cls, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return True for bf16 if the native library has the bf16 product."""
        return dtype == torch.bfloat16 and has_kernel(OpCode.LINEAR_BF16)

    @classmethod
    def empty_form(cls, outputs: int, inputs: int, bias: Tensor | None) -> Bf16PanelLinear:
        """Return an empty form [outputs, inputs] that `fill` completes."""
        return cls(outputs, inputs, bias)

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> Bf16PanelLinear:
        """Pack weight [out, in] bf16."""
        form = cls.empty_form(weight.shape[0], weight.shape[1], bias)
        form.fill(0, weight)
        return form

    def _run(self, x: Tensor, y: Tensor, output: ProductOutput, activation: int = 0) -> None:
        weight = PackedWeight(self.panels, self.bias, self.outputs, self.inputs, fixed=self.fixed)
        run_bf16_product(weight, x, y, 0, output, activation)


@dataclass(frozen=True, slots=True)
class FixedOrderFactory:
    """Packs `Bf16PanelLinear` with one summation order for any number of rows.

    A single row then does not use its faster kernel, which sums in four partial sums.
    """

    keeps_weight: ClassVar[bool] = False

    def supports(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return True if `Bf16PanelLinear` supports the weight."""
        return Bf16PanelLinear.supports(rows, columns, dtype)

    def empty_form(self, outputs: int, inputs: int, bias: Tensor | None) -> Bf16PanelLinear:
        """Return an empty form [outputs, inputs] that `fill` completes."""
        return Bf16PanelLinear(outputs, inputs, bias, fixed=True)

    def pack(self, weight: Tensor, bias: Tensor | None) -> Bf16PanelLinear:
        """Pack weight [out, in] bf16."""
        form = self.empty_form(weight.shape[0], weight.shape[1], bias)
        form.fill(0, weight)
        return form


@dataclass(frozen=True, slots=True)
class HybridFactory:
    """Packs both forms of a weight: `few` is used up to `max_few_rows` rows, `many` for more."""

    few: IntPanelFactory | RowSplitFactory
    many: IntPanelFactory
    max_few_rows: int
    keeps_weight: ClassVar[bool] = False

    def supports(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return True if both forms support this weight."""
        return self.few.supports(rows, columns, dtype) and self.many.supports(rows, columns, dtype)

    def empty_form(self, outputs: int, inputs: int, bias: Tensor | None) -> HybridLinear:
        """Return an empty form [outputs, inputs] that `fill` completes."""
        few, many = self.few.empty_form(outputs, inputs, bias), self.many.empty_form(outputs, inputs, bias)
        return HybridLinear(few, many, self.max_few_rows)

    def part_bytes(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """Return the bytes of each tensor in `HybridLinear.parts`."""
        return (*self.few.part_bytes(outputs, inputs), *self.many.part_bytes(outputs, inputs))

    def from_parts(self, outputs: int, inputs: int, bias: Tensor | None, parts: Sequence[Tensor]) -> HybridLinear:
        """Build a form from saved `parts`."""
        few, many = (
            self.few.from_parts(outputs, inputs, bias, parts[:-1]),
            self.many.from_parts(outputs, inputs, bias, parts[-1:]),
        )
        return HybridLinear(few, many, self.max_few_rows)

    def pack(self, weight: Tensor, bias: Tensor | None) -> HybridLinear:
        """Pack weight [out, in] of any float dtype in both forms."""
        return HybridLinear(self.few.pack(weight, bias), self.many.pack(weight, bias), self.max_few_rows)


class HybridLinear:
    """A linear form that multiplies up to `max_few_rows` rows by `few` and more by `many`.

    Embedding rows are read from `few`.
    """

    __slots__ = ("few", "many", "max_few_rows")

    def __init__(self, few: IntPanelLinear | RowSplitLinear, many: IntPanelLinear, most_few: int) -> None:
        self.few, self.many, self.max_few_rows = few, many, most_few

    @property
    def nbytes(self) -> int:
        """Bytes of both forms."""
        return self.few.nbytes + self.many.nbytes

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that can be saved, uint8: all but the biases."""
        return (*self.few.parts, *self.many.parts)

    def fill(
        self,
        first: int,
        rows: Tensor,
        gptq_factors: Sequence[GptqFactors] = (),
        stored: Int4Weight | Int8Weight | None = None,
    ) -> None:
        """Quantize rows [n, in] as outputs `[first, first + n)` of both forms; `few` takes the codes that are given."""
        self.few.fill(first, rows, gptq_factors, stored)
        self.many.fill(first, rows, gptq_factors)

    def _form(self, rows: int) -> IntPanelLinear | RowSplitLinear:
        return self.few if rows <= self.max_few_rows else self.many

    def activation_group(self, rows: int) -> RowGroups | None:
        """Return the quantization group of the activations for this many rows; None for a plain tensor."""
        return self._form(rows).activation_group(rows)

    def multiply(self, x: Activations) -> Tensor:
        """Multiply x [tokens, in] to [tokens, out] bf16."""
        return self._form(rows_of(x)).multiply(x)

    def multiply_activated(self, x: Activations, activation: str) -> Tensor:
        """Return act(x times the weight) [tokens, out] bf16."""
        return self._form(rows_of(x)).multiply_activated(x, activation)

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """Add the product to hidden [tokens, out] fp32 in place."""
        self._form(rows_of(x)).add_to(hidden, x)

    def top_logits(self, x: Activations, request: TopLogitsRequest, softcap: float | None = None) -> TopLogits:
        """Return the top outputs of each row of the product."""
        form = self._form(rows_of(x))
        assert isinstance(form, IntPanelLinear), "an output layer is not split"
        return form.top_logits(x, request, softcap)

    def rows(self, ids: Tensor, factor: RowFactor = 1.0) -> Tensor:
        """Return rows of the dequantized weight, fp32 [n, in], for ids [n] int64, times a factor."""
        assert isinstance(self.few, IntPanelLinear), "an output layer is not split"
        return self.few.rows(ids, factor)
