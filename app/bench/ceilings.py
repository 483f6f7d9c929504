"""Samples of this machine's two ceilings (kernels/ceilings.py), taken between rounds of work and held against it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from app.backends.base import Device
from app.bench.stats import Figure, percentile
from app.kernels.ceilings import ProductCeiling, ReadCeiling
from app.kernels.device_ceilings import COPY_BYTES, FREE_SHARE, CopyCeiling, DeviceProductCeiling

DTYPES = (torch.float32, torch.bfloat16, torch.int8)  # int8 by int8, summed in int32


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes read and operations (of one dtype) a second, as they were just now."""

    read: float
    product: float


def between(before: Ceilings, after: Ceilings) -> Ceilings:
    """The ceilings while the work ran: the mean of both sides. (The larger would count a shared machine's drift against the work.)"""
    return Ceilings((before.read + after.read) / 2, (before.product + after.product) / 2)


@dataclass(slots=True)
class Samples:
    """Of one piece of work that reads `num_bytes` and takes `operations` each time: seconds, and each round's share of the two ceilings."""

    num_bytes: float
    operations: float
    seconds: list[float] = field(default_factory=list)
    read_shares: list[float] = field(default_factory=list)
    product_shares: list[float] = field(default_factory=list)

    def hold(self, seconds: list[float], ceilings: Ceilings) -> None:
        """One round's samples, against the ceilings that stood on both sides of it."""
        middle = statistics.median(seconds)
        self.seconds += seconds
        self.read_shares.append(self.num_bytes / middle / ceilings.read)
        self.product_shares.append(self.operations / middle / ceilings.product)

    @property
    def middle(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p99(self) -> float:
        return percentile(self.seconds, 0.99)

    @property
    def read_share(self) -> float:
        return statistics.median(self.read_shares)

    @property
    def product_share(self) -> float:
        return statistics.median(self.product_shares)

    @property
    def bound(self) -> tuple[str, float]:
        """The ceiling that is nearer, and how near."""
        read, product = self.read_share, self.product_share
        return ("memory read", read) if read >= product else ("product rate", product)


class Sampled(Protocol):
    """Where the two ceilings come from."""

    @property
    def products(self) -> Mapping[torch.dtype, list[float]]:
        """All samples of product rates."""
        ...

    def sample(self) -> Ceilings: ...

    def sample_other_dtypes(self) -> None:
        """For people's information: the engine does not multiply in these."""
        ...

    def figures(self) -> Iterator[Figure]:
        """Medians of what was sampled."""
        ...

    def close(self) -> None: ...


class DeviceMachine:
    """The ceilings of a device with memory of its own: what a copy moves, and its product in the dtype of activations."""

    def __init__(self, backend: Device) -> None:
        self._dtype = backend.dtype
        self._copying = CopyCeiling(backend.device, backend.synchronize, min(COPY_BYTES, backend.free_bytes() // FREE_SHARE))
        self._multiplying = DeviceProductCeiling(backend.device, backend.synchronize, backend.dtype)
        self.reads: list[float] = []
        self.products: dict[torch.dtype, list[float]] = {backend.dtype: []}

    def sample(self) -> Ceilings:
        self.reads.append(self._copying.sample())
        self.products[self._dtype].append(self._multiplying.sample())
        return Ceilings(self.reads[-1], self.products[self._dtype][-1])

    def sample_other_dtypes(self) -> None:
        """There is one."""

    def figures(self) -> Iterator[Figure]:
        if self.reads:
            yield Figure("memory copy, both ways", statistics.median(self.reads) / 1e9, "GB/s")
            rate = statistics.median(self.products[self._dtype])
            yield Figure(f"products, {str(self._dtype).removeprefix('torch.')}", rate / 1e9, "GFLOP/s")

    def close(self) -> None:
        """Its memory goes with it."""


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

    def figures(self) -> Iterator[Figure]:
        """Medians of what was sampled."""
        if self.reads:
            yield Figure("memory read", statistics.median(self.reads) / 1e9, "GB/s")
        for dtype, rates in self.products.items():
            if rates:
                unit = "GOP/s" if dtype == torch.int8 else "GFLOP/s"
                yield Figure(f"products, {str(dtype).removeprefix('torch.')}", statistics.median(rates) / 1e9, unit)

    def close(self) -> None:
        self._reading.close()
