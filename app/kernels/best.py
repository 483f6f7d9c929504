"""What is left of a row of logits when only the best are wanted: the output product keeps them as it goes (csrc/pick.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from app.kernels.activations import Activations

MOST_BEST = 64  # a row's best outputs that a kernel keeps


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many of each row's best outputs, and whether the logarithm of the sum of all exponentials beside them."""

    k: int
    with_logsumexp: bool = False


@dataclass(frozen=True, slots=True)
class Best:
    """Each row's best outputs, best first, the lower id first among equals: fp32 [rows, k] and int64 [rows, k].

    A row with a NaN has NaN as its best value. `logsumexp` [rows] is over all outputs, where it was asked for.
    """

    values: Tensor
    ids: Tensor
    logsumexp: Tensor | None


@runtime_checkable
class Picking(Protocol):
    """A form that can do that."""

    def best(self, x: Activations, wanted: Wanted, softcap: float | None = None) -> Best: ...


def best_torch(logits: Tensor, wanted: Wanted) -> Best:
    """The twin, from logits [rows, vocab]."""
    scores = logits.float()
    values, ids = scores.sort(dim=-1, descending=True, stable=True)  # NaN comes first, and stays
    return Best(values[:, : wanted.k], ids[:, : wanted.k], scores.logsumexp(-1) if wanted.with_logsumexp else None)
