"""A linear form whose outputs are held in several integer forms: ranges of rows with different precisions.

Queries, keys and values are one product. Values need more bits than queries and keys, so their rows are packed to
eight bits and the others to four. All forms read the same quantized activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from armature_kernels.linear.activations import (
    Activations,
    QuantizedActivations,
    RowGroups,
    quantize,
    rows_of,
    unquantized,
)
from armature_kernels.linear.int_panels import IntPanelFactory, IntPanelLinear
from armature_kernels.linear.quantization import GptqFactors, Int4Weight, Int8Weight
from armature_kernels.native.arguments import ACTIVATION_CODES, ProductOutput
from armature_kernels.native.memory import empty


@dataclass(frozen=True, slots=True)
class RowSplitFactory:
    """Packs consecutive ranges of outputs, each with its number of rows and its packing.

    All packings have the same group of inputs.
    """

    ranges: tuple[tuple[int, IntPanelFactory], ...]
    keeps_weight: ClassVar[bool] = False

    def supports(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return True if every packing supports its part and they read the same activations."""
        groups = {packing.layout.group_of(columns) for _, packing in self.ranges}
        return len(groups) == 1 and all(packing.supports(part, columns, dtype) for part, packing in self.ranges)

    def empty_form(self, outputs: int, inputs: int, bias: Tensor | None) -> RowSplitLinear:
        """Return an empty form [outputs, inputs] that `fill` completes."""
        biases = self._biases(outputs, bias)
        return RowSplitLinear(
            [packing.empty_form(rows, inputs, own) for (rows, packing), own in zip(self.ranges, biases, strict=True)]
        )

    def part_bytes(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """Return the bytes of each tensor in `RowSplitLinear.parts`."""
        return tuple(nbytes for rows, packing in self.ranges for nbytes in packing.part_bytes(rows, inputs))

    def from_parts(self, outputs: int, inputs: int, bias: Tensor | None, parts: Sequence[Tensor]) -> RowSplitLinear:
        """Build a form from saved `parts`."""
        biases = self._biases(outputs, bias)
        return RowSplitLinear(
            [
                packing.from_parts(rows, inputs, own, [part])
                for (rows, packing), own, part in zip(self.ranges, biases, parts, strict=True)
            ]
        )

    def pack(self, weight: Tensor, bias: Tensor | None) -> RowSplitLinear:
        """Pack weight [out, in] of any float dtype."""
        form = self.empty_form(weight.shape[0], weight.shape[1], bias)
        form.fill(0, weight)
        return form

    def _biases(self, outputs: int, bias: Tensor | None) -> Sequence[Tensor | None]:
        sizes = [rows for rows, _ in self.ranges]
        assert sum(sizes) == outputs, "the ranges must cover all outputs"
        return [None] * len(sizes) if bias is None else torch.split(bias, sizes)


class RowSplitLinear:
    """A weight [out, in] whose consecutive outputs are in `forms`."""

    __slots__ = ("forms", "outputs")

    def __init__(self, forms: Sequence[IntPanelLinear]) -> None:
        self.forms = tuple(forms)
        self.outputs = sum(form.outputs for form in forms)

    @property
    def nbytes(self) -> int:
        """Bytes of all forms."""
        return sum(form.nbytes for form in self.forms)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that can be saved, uint8: all but the biases."""
        return tuple(part for form in self.forms for part in form.parts)

    def fill(
        self,
        first: int,
        rows: Tensor,
        gptq_factors: Sequence[GptqFactors] = (),
        stored: Int4Weight | Int8Weight | None = None,
    ) -> None:
        """Quantize rows [n, in] as outputs `[first, first + n)`, which may lie in several forms, or take their codes."""
        begin = 0
        for form in self.forms:
            start, end = max(first, begin), min(first + len(rows), begin + form.outputs)
            if start < end:
                codes = None if stored is None else _rows(stored, start - first, end - first)
                form.fill(start - begin, rows[start - first : end - first], gptq_factors, codes)
            begin += form.outputs

    def activation_group(self, rows: int) -> RowGroups | None:
        """Return the groups of activations, whose scales are those that the most exact form needs; None for a tensor."""
        groups = [form.activation_group(rows) for form in self.forms]
        return None if None in groups else min((one for one in groups if one), key=lambda one: one.shared)

    def multiply(self, x: Activations) -> Tensor:
        """Multiply x [tokens, in] to [tokens, out] bf16."""
        return self.multiply_activated(x, "identity")

    def multiply_activated(self, x: Activations, activation: str) -> Tensor:
        """Return act(x times the weight) [tokens, out] bf16."""
        y = empty((rows_of(x), self.outputs), torch.bfloat16)
        self._run(x, y, ProductOutput.BF16, ACTIVATION_CODES[activation])
        return y

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """Add the product to hidden [tokens, out] fp32 in place."""
        self._run(x, hidden, ProductOutput.ADD_FP32)

    def dequantized(self) -> Tensor:
        """Return the dequantized weight, fp32 [out, in]."""
        return torch.cat([form.dequantized() for form in self.forms])

    def _run(self, x: Activations, y: Tensor, output: ProductOutput, activation: int = 0) -> None:
        group, first = self.activation_group(rows_of(x)), 0
        if not isinstance(x, QuantizedActivations) and group is not None:
            x = quantize(unquantized(x), group)
        for form in self.forms:
            form.multiply_into(y, first, x, output, activation)
            first += form.outputs


def _rows(stored: Int4Weight | Int8Weight, start: int, end: int) -> Int4Weight | Int8Weight:
    """Return outputs `[start, end)` of codes whose scales are not quantized."""
    if isinstance(stored, Int8Weight):
        return Int8Weight(stored.codes[start:end], stored.scales[start:end])
    assert stored.double_scales is None, "only plain scales are divided"
    minimums = None if stored.minimums is None else stored.minimums[start:end]
    return Int4Weight(stored.codes[start:end], stored.scales[start:end], minimums, stored.group, stored.inputs)
