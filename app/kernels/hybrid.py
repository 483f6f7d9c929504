"""One weight in two forms, the number of rows deciding which multiplies: four bits where memory is the cost, eight where products are."""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.activations import Quantised
from app.kernels.int_panels import IntPanels


class HybridLinear:
    """`few` multiplies up to `most_few` rows, `many` beyond; rows of an embedding come out of `few`."""

    __slots__ = ("few", "many", "most_few")

    def __init__(self, few: IntPanels, many: IntPanels, most_few: int) -> None:
        self.few, self.many, self.most_few = few, many, most_few

    @property
    def nbytes(self) -> int:
        return self.few.nbytes + self.many.nbytes

    def fill(self, first: int, rows: Tensor) -> None:
        self.few.fill(first, rows)
        self.many.fill(first, rows)

    def _form(self, rows: int) -> IntPanels:
        return self.few if rows <= self.most_few else self.many

    def takes(self, rows: int) -> int:
        return self._form(rows).takes(rows)

    def multiply(self, x: Tensor | Quantised) -> Tensor:
        return self._form(_rows(x)).multiply(x)

    def add_to(self, hidden: Tensor, x: Tensor | Quantised) -> None:
        self._form(_rows(x)).add_to(hidden, x)

    def rows(self, ids: Tensor) -> Tensor:
        return self.few.rows(ids)


def _rows(x: Tensor | Quantised) -> int:
    return x.shape[0] if isinstance(x, torch.Tensor) else x.rows
