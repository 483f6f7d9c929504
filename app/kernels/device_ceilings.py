"""Measured peaks of a device with separate memory: bytes copied per second, and operations per second.

Several operations are queued before the host waits for the device, so that launch overhead does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

COPY_BYTES = 2**30  # much larger than any cache
FREE_SHARE = 8  # at most this fraction (1 / FREE_SHARE) of the device's free memory is copied
REPEATS = 3  # the best counts: a peak is the rate that can be reached
QUEUED = 8  # copies, or products, that are queued before one wait
SMALLEST, LARGEST = 1024, 8192  # rows, outputs and inputs of a product
_LONG_SECONDS = 0.002  # a product that takes this long keeps the device busy by itself
_OTHER_CACHE_BYTES = 64 * 2**20  # an Apple chip's last level has 8 to 96 MiB

Synchronize = Callable[[], None]


def cache_bytes(device: torch.device) -> int:
    """Return the size of the device's largest cache; weights must be larger for their reads to reach memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return _OTHER_CACHE_BYTES


class CopyCeiling:
    """Measures the bytes per second that are read and written when one half of a buffer is copied to the other."""

    def __init__(self, device: torch.device, synchronize: Synchronize, num_bytes: int = COPY_BYTES) -> None:
        self._source = torch.ones(num_bytes // 2, dtype=torch.uint8, device=device)
        self._target = torch.empty_like(self._source)
        self._synchronize = synchronize

    def sample(self) -> float:
        """Return the best of a few repeats; each byte counts once as read and once as written."""
        moved = 2 * self._source.numel() * QUEUED
        return max(moved / self._seconds() for _ in range(REPEATS))

    def _seconds(self) -> float:
        return _timed(lambda: self._target.copy_(self._source), self._synchronize)


class DeviceProductCeiling:
    """Measures the operations per second of torch's product in `dtype`; a multiply-add counts as two.

    The size grows until one product keeps the device busy. A small device would need seconds for the largest size.
    """

    def __init__(self, device: torch.device, synchronize: Synchronize, dtype: torch.dtype) -> None:
        self._device, self._synchronize, self._dtype = device, synchronize, dtype
        self.size = SMALLEST
        while self.size < LARGEST and self._seconds(self.size) / QUEUED < _LONG_SECONDS:
            self.size *= 2

    def sample(self) -> float:
        """Return the best rate of a few repeats."""
        return 2.0 * self.size**3 * QUEUED / min(self._seconds(self.size) for _ in range(REPEATS))

    def _seconds(self, size: int) -> float:
        """Time the product of this size, after one untimed product in which torch selects its kernel."""
        x, weight = (torch.full((size, size), 0.01, dtype=self._dtype, device=self._device) for _ in range(2))
        F.linear(x, weight)
        return _timed(lambda: F.linear(x, weight), self._synchronize)


def _timed(work: Callable[[], object], synchronize: Synchronize) -> float:
    synchronize()
    start = time.perf_counter()
    for _ in range(QUEUED):
        work()
    synchronize()
    return time.perf_counter() - start
