"""One weight in two forms, the number of rows deciding which multiplies: four bits where memory is the cost, eight where products are."""

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
    """Both forms of one weight, made at once: `few` up to `most_few` rows, `many` beyond."""

    few: IntPacking
    many: IntPacking
    most_few: int
    keeps_weight: ClassVar[bool] = False

    def suits(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        return self.few.suits(rows, columns, dtype) and self.many.suits(rows, columns, dtype)

    def room(self, outputs: int, inputs: int, bias: Tensor | None) -> HybridLinear:
        few, many = self.few.room(outputs, inputs, bias), self.many.room(outputs, inputs, bias)
        return HybridLinear(few, many, self.most_few)

    def part_bytes(self, outputs: int, inputs: int) -> tuple[int, ...]:
        return (*self.few.part_bytes(outputs, inputs), *self.many.part_bytes(outputs, inputs))

    def restored(self, outputs: int, inputs: int, bias: Tensor | None, parts: Sequence[Tensor]) -> HybridLinear:
        few, many = self.few.restored(outputs, inputs, bias, parts[:1]), self.many.restored(outputs, inputs, bias, parts[1:])
        return HybridLinear(few, many, self.most_few)

    def pack(self, weight: Tensor, bias: Tensor | None) -> HybridLinear:
        return HybridLinear(self.few.pack(weight, bias), self.many.pack(weight, bias), self.most_few)


class HybridLinear:
    """`few` multiplies up to `most_few` rows, `many` beyond; rows of an embedding come out of `few`."""

    __slots__ = ("few", "many", "most_few")

    def __init__(self, few: IntPanels, many: IntPanels, most_few: int) -> None:
        self.few, self.many, self.most_few = few, many, most_few

    @property
    def nbytes(self) -> int:
        return self.few.nbytes + self.many.nbytes

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (*self.few.parts, *self.many.parts)

    def fill(self, first: int, rows: Tensor, bonds: Bonds | None = None) -> None:
        self.few.fill(first, rows, bonds)
        self.many.fill(first, rows, bonds)

    def _form(self, rows: int) -> IntPanels:
        return self.few if rows <= self.most_few else self.many

    def takes(self, rows: int) -> int:
        return self._form(rows).takes(rows)

    def multiply(self, x: Tensor | Quantised) -> Tensor:
        return self._form(_rows(x)).multiply(x)

    def activated(self, x: Tensor | Quantised, activation: str) -> Tensor:
        return self._form(_rows(x)).activated(x, activation)

    def add_to(self, hidden: Tensor, x: Tensor | Quantised) -> None:
        self._form(_rows(x)).add_to(hidden, x)

    def best(self, x: Tensor | Quantised, wanted: Wanted, softcap: float | None = None) -> Best:
        return self._form(_rows(x)).best(x, wanted, softcap)

    def rows(self, ids: Tensor, factor: Factor = 1.0) -> Tensor:
        return self.few.rows(ids, factor)


def _rows(x: Tensor | Quantised) -> int:
    return x.shape[0] if isinstance(x, torch.Tensor) else x.rows
