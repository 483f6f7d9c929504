"""Samples of the machine's two ceilings, read bandwidth and product rate, taken between rounds of measured work.

`armature_kernels/ceilings.py` measures the ceilings themselves.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from app.backends.base import BaseBackend
from armature_bench.console import PRODUCT_RATE, Figure, percentile
from armature_kernels.ceilings import (
    COPY_BYTES,
    FREE_MEMORY_FRACTION,
    CopyBandwidthProbe,
    DeviceMatmulThroughputProbe,
    MatmulThroughputProbe,
    ReadBandwidthProbe,
)

DTYPES = (torch.float32, torch.bfloat16, torch.int8)  # int8 is int8 × int8 with int32 sums


@dataclass(frozen=True, slots=True)
class MachineCeilings:
    """Sampled ceilings: bytes read per second, and operations per second in one dtype."""

    read: float
    product: float


def mean_ceilings(before: MachineCeilings, after: MachineCeilings) -> MachineCeilings:
    """Return the mean of the samples before and after the work.

    The larger of both would count the drift of a shared machine against the work.
    """
    return MachineCeilings((before.read + after.read) / 2, (before.product + after.product) / 2)


@dataclass(slots=True)
class WorkSamples:
    """Measurements of one workload that reads `num_bytes` and performs `operations` each time it runs.

    Holds the seconds of every run, and each round's share of the two ceilings (0 to 1).
    """

    num_bytes: float
    operations: float
    seconds: list[float] = field(default_factory=list)
    read_shares: list[float] = field(default_factory=list)
    product_shares: list[float] = field(default_factory=list)

    def add_round(self, seconds: list[float], ceilings: MachineCeilings) -> None:
        """Add one round: its seconds, compared with the ceilings sampled before and after it."""
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
        """Name of the nearer ceiling, and the share of it that was reached."""
        read, product = self.read_share, self.product_share
        return ("memory read", read) if read >= product else (PRODUCT_RATE, product)


class CeilingSampler(Protocol):
    @property
    def products(self) -> Mapping[torch.dtype, list[float]]:
        """Sampled product rates in operations per second, by dtype."""
        ...

    def sample(self) -> MachineCeilings: ...

    def sample_other_dtypes(self) -> None:
        """Sample product rates of dtypes that the engine does not multiply in, as information for users."""
        ...

    def figures(self) -> Iterator[Figure]: ...

    def close(self) -> None: ...


class DeviceCeilingSampler:
    """Ceilings of a device with its own memory: copy bandwidth, and the product rate in the activation dtype."""

    def __init__(self, backend: BaseBackend) -> None:
        self._dtype = backend.dtype
        self._copying = CopyBandwidthProbe(
            backend.device, backend.synchronize, min(COPY_BYTES, backend.free_bytes() // FREE_MEMORY_FRACTION)
        )
        self._multiplying = DeviceMatmulThroughputProbe(backend.device, backend.synchronize, backend.dtype)
        self.reads: list[float] = []
        self.products: dict[torch.dtype, list[float]] = {backend.dtype: []}

    def sample(self) -> MachineCeilings:
        self.reads.append(self._copying.sample())
        self.products[self._dtype].append(self._multiplying.sample())
        return MachineCeilings(self.reads[-1], self.products[self._dtype][-1])

    def sample_other_dtypes(self) -> None:
        """Do nothing: a device is only sampled in its activation dtype."""

    def figures(self) -> Iterator[Figure]:
        if self.reads:
            yield Figure("memory copy, both ways", statistics.median(self.reads) / 1e9, "GB/s")
            rate = statistics.median(self.products[self._dtype])
            yield Figure(f"products, {str(self._dtype).removeprefix('torch.')}", rate / 1e9, "GFLOP/s")

    def close(self) -> None:
        """Do nothing: the buffers are freed together with this object."""


class CpuCeilingSampler:
    """Ceilings of the processor. Samples them on request and keeps all samples.

    `dtype` is the dtype that the engine multiplies in, and of `MachineCeilings.product`; product rates of `kinds` are
    sampled too.
    """

    def __init__(self, threads: int, dtype: torch.dtype, kinds: Iterable[torch.dtype] = DTYPES) -> None:
        self.reads: list[float] = []
        self.products: dict[torch.dtype, list[float]] = {kind: [] for kind in DTYPES}
        self._dtype = dtype
        self._reading = ReadBandwidthProbe(threads)
        self._multiplying = {kind: MatmulThroughputProbe(kind) for kind in kinds}

    def sample(self) -> MachineCeilings:
        self.reads.append(self._reading.sample())
        self.products[self._dtype].append(self._multiplying[self._dtype].sample())
        return MachineCeilings(self.reads[-1], self.products[self._dtype][-1])

    def sample_other_dtypes(self) -> None:
        for kind in self._multiplying.keys() - {self._dtype}:
            self.products[kind].append(self._multiplying[kind].sample())

    def figures(self) -> Iterator[Figure]:
        if self.reads:
            yield Figure("memory read", statistics.median(self.reads) / 1e9, "GB/s")
        for dtype, rates in self.products.items():
            if rates:
                unit = "GOP/s" if dtype == torch.int8 else "GFLOP/s"
                yield Figure(f"products, {str(dtype).removeprefix('torch.')}", statistics.median(rates) / 1e9, unit)

    def close(self) -> None:
        self._reading.close()
