"""A weight in two quantised forms, selected by the number of rows.

Four bits serve few rows, where memory bandwidth is the bottleneck. Eight bits serve many rows, where arithmetic
is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from app.kernels.activations import Quantised
from app.kernels.best import Best, Wanted
from app.kernels.compensate import Bonds
from app.kernels.int_panels import IntPacking, IntPanels
from app.kernels.table import Factor


@dataclass(frozen=True, slots=True)
class HybridPacking:
    """Packs both forms of a weight: `few` is used up to `max_few_rows` rows, `many` for more."""

    few: IntPacking
    many: IntPacking
    most_few: int
    keeps_weight: ClassVar[bool] = False

    def suits(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return True if both forms support this weight."""
        return self.few.suits(rows, columns, dtype) and self.many.suits(rows, columns, dtype)

    def room(self, outputs: int, inputs: int, bias: Tensor | None) -> HybridLinear:
        """Return an empty form [outputs, inputs] that `fill` completes."""
        few, many = self.few.room(outputs, inputs, bias), self.many.room(outputs, inputs, bias)
        return HybridLinear(few, many, self.most_few)

    def part_bytes(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """Return the bytes of each tensor in `HybridLinear.parts`."""
        return (*self.few.part_bytes(outputs, inputs), *self.many.part_bytes(outputs, inputs))

    def restored(self, outputs: int, inputs: int, bias: Tensor | None, parts: Sequence[Tensor]) -> HybridLinear:
        """Build a form from saved `parts`."""
        few, many = self.few.restored(outputs, inputs, bias, parts[:1]), self.many.restored(outputs, inputs, bias, parts[1:])
        return HybridLinear(few, many, self.most_few)

    def pack(self, weight: Tensor, bias: Tensor | None) -> HybridLinear:
        """Pack weight [out, in] of any float dtype in both forms."""
        return HybridLinear(self.few.pack(weight, bias), self.many.pack(weight, bias), self.most_few)


class HybridLinear:
    """A linear form that multiplies up to `max_few_rows` rows by `few` and more by `many`.

    Embedding rows are read from `few`.
    """

    __slots__ = ("few", "many", "most_few")

    def __init__(self, few: IntPanels, many: IntPanels, most_few: int) -> None:
        self.few, self.many, self.most_few = few, many, most_few

    @property
    def nbytes(self) -> int:
        """Bytes of both forms."""
        return self.few.nbytes + self.many.nbytes

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that can be saved, uint8: all but the biases."""
        return (*self.few.parts, *self.many.parts)

    def fill(self, first: int, rows: Tensor, bonds: Bonds | None = None) -> None:
        """Quantise rows [n, in] as outputs `[first, first + n)` of both forms."""
        self.few.fill(first, rows, bonds)
        self.many.fill(first, rows, bonds)

    def _form(self, rows: int) -> IntPanels:
        return self.few if rows <= self.most_few else self.many

    def takes(self, rows: int) -> int:
        """Return the quantisation group of the activations for this many rows."""
        return self._form(rows).takes(rows)

    def multiply(self, x: Tensor | Quantised) -> Tensor:
        """Multiply x [tokens, in] to [tokens, out] bf16."""
        return self._form(_rows(x)).multiply(x)

    def activated(self, x: Tensor | Quantised, activation: str) -> Tensor:
        """Return act(x times the weight) [tokens, out] bf16."""
        return self._form(_rows(x)).activated(x, activation)

    def add_to(self, hidden: Tensor, x: Tensor | Quantised) -> None:
        """Add the product to hidden [tokens, out] fp32 in place."""
        self._form(_rows(x)).add_to(hidden, x)

    def best(self, x: Tensor | Quantised, wanted: Wanted, softcap: float | None = None) -> Best:
        """Return the top outputs of each row of the product."""
        return self._form(_rows(x)).best(x, wanted, softcap)

    def rows(self, ids: Tensor, factor: Factor = 1.0) -> Tensor:
        """Return rows of the dequantised weight, fp32 [n, in], for ids [n] int64, times a factor."""
        return self.few.rows(ids, factor)


def _rows(x: Tensor | Quantised) -> int:
    return x.shape[0] if isinstance(x, torch.Tensor) else x.rows
