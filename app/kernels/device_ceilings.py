"""What a device with memory of its own can do at the most, measured there and now: bytes that a copy moves a second, and multiply-adds.

Work is asked for several times over before it is waited for, so that asking costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

COPY_BYTES = 2**30  # far beyond any cache
FREE_SHARE = 8  # of a device's free memory one part in so many is copied at the most
REPEATS = 3  # the best counts: a ceiling is what can be reached
QUEUED = 8  # copies, or products, that are waited for together
SMALLEST, LARGEST = 1024, 8192  # rows, outputs and inputs of a product
_LONG_SECONDS = 0.002  # a product of this length keeps the device busy by itself
_OTHER_CACHE_BYTES = 64 * 2**20  # an Apple chip's last level has 8 to 96 MiB

Synchronize = Callable[[], None]


def cache_bytes(device: torch.device) -> int:
    """Of the device's largest cache, which weights must exceed for their reading to count."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return _OTHER_CACHE_BYTES


class CopyCeiling:
    """Bytes a second that are read and written where one half of some memory is copied to the other."""

    def __init__(self, device: torch.device, synchronize: Synchronize, num_bytes: int = COPY_BYTES) -> None:
        self._source = torch.ones(num_bytes // 2, dtype=torch.uint8, device=device)
        self._target = torch.empty_like(self._source)
        self._synchronize = synchronize

    def sample(self) -> float:
        """The best of a few; each byte is read once and written once."""
        moved = 2 * self._source.numel() * QUEUED
        return max(moved / self._seconds() for _ in range(REPEATS))

    def _seconds(self) -> float:
        return _timed(lambda: self._target.copy_(self._source), self._synchronize)


class DeviceProductCeiling:
    """Multiply-adds a second, counted as two operations each, of torch's product in `dtype`.

    As large as it takes for one product to keep the device busy, since a small device would be at the largest for seconds.
    """

    def __init__(self, device: torch.device, synchronize: Synchronize, dtype: torch.dtype) -> None:
        self._device, self._synchronize, self._dtype = device, synchronize, dtype
        self.size = SMALLEST
        while self.size < LARGEST and self._seconds(self.size) / QUEUED < _LONG_SECONDS:
            self.size *= 2

    def sample(self) -> float:
        return 2.0 * self.size**3 * QUEUED / min(self._seconds(self.size) for _ in range(REPEATS))

    def _seconds(self, size: int) -> float:
        """The first product of a size chooses its kernel: it is not timed."""
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
