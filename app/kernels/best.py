"""The top-k outputs of each row of logits, selected without writing all logits.

The output product keeps them while it runs (csrc/pick.h).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from app.kernels.activations import Activations

MOST_BEST = 64  # most outputs per row that a kernel can keep


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request for each row's k largest outputs, optionally with the log-sum-exp over all outputs."""

    k: int
    with_logsumexp: bool = False


@dataclass(frozen=True, slots=True)
class Best:
    """The largest outputs of each row in descending order, with the lower id first among equals.

    `values` fp32 [rows, k], `ids` int64 [rows, k]. The best value of a row that contains NaN is NaN. `logsumexp`
    fp32 [rows] covers all outputs, and is None if it was not requested.
    """

    values: Tensor
    ids: Tensor
    logsumexp: Tensor | None


@runtime_checkable
class Picking(Protocol):
    """A linear form whose product can return only the top outputs of each row."""

    def best(self, x: Activations, wanted: Wanted, softcap: float | None = None) -> Best:
        """Return the top outputs of x times the weight; `softcap` is applied to the logits first."""
        ...


def best_torch(logits: Tensor, wanted: Wanted) -> Best:
    """Return the top outputs of logits [rows, vocab]; this is the reference implementation."""
    scores = logits.float()
    values, ids = scores.sort(dim=-1, descending=True, stable=True)  # NaN sorts first and is kept
    return Best(values[:, : wanted.k], ids[:, : wanted.k], scores.logsumexp(-1) if wanted.with_logsumexp else None)
