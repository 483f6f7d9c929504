"""Samples of this machine's two ceilings (kernels/ceilings.py), taken between rounds of work and held against it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from app.kernels.ceilings import ProductCeiling, ReadCeiling

DTYPES = (torch.float32, torch.bfloat16, torch.int8)  # int8 by int8, summed in int32


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes read and operations (of one dtype) a second, as they were just now."""

    read: float
    product: float


def between(before: Ceilings, after: Ceilings) -> Ceilings:
    """The ceilings while the work ran: the mean of both sides. (The larger would count a shared machine's drift against the work.)"""
    return Ceilings((before.read + after.read) / 2, (before.product + after.product) / 2)


class Machine:
    """Samples the ceilings of what is measured, and keeps all samples. `dtype` is what the engine multiplies in."""

    def __init__(self, threads: int, dtype: torch.dtype, kinds: Iterable[torch.dtype] = DTYPES) -> None:
        """`kinds`: of which the product rate is known; sampling others would only take time."""
        self.reads: list[float] = []
        self.products: dict[torch.dtype, list[float]] = {kind: [] for kind in DTYPES}
        self._dtype = dtype
        self._reading = ReadCeiling(threads)
        self._multiplying = {kind: ProductCeiling(kind) for kind in kinds}

    def sample(self) -> Ceilings:
        self.reads.append(self._reading.sample())
        self.products[self._dtype].append(self._multiplying[self._dtype].sample())
        return Ceilings(self.reads[-1], self.products[self._dtype][-1])

    def sample_other_dtypes(self) -> None:
        """For people's information: the engine does not multiply in these."""
        for kind in self._multiplying.keys() - {self._dtype}:
            self.products[kind].append(self._multiplying[kind].sample())

    def close(self) -> None:
        self._reading.close()
