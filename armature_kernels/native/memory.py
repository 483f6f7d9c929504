"""Memory for kernels: large weights on huge pages where available, and int64 buffers at fixed addresses."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

_HUGE_PAGE = 2 * 2**20
_MIN_HUGE_BYTES = 2 * _HUGE_PAGE  # smaller sizes waste too much by rounding up to whole huge pages


def allocate_weights(nbytes: int) -> Tensor:
    """Allocate uint8 [nbytes], 64-byte aligned and not yet touched.

    On huge pages a first touch costs less than half as much (packing at 0.9 instead of 0.4 GB/s on a Zen 5 guest).
    """
    if nbytes < _MIN_HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return aligned_bytes(nbytes)
    region = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, ValueError):  # a kernel or a sandbox may refuse what is only advice
        region.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + nbytes]


_REGION_BYTES = 16 * _HUGE_PAGE
_region_lock = threading.Lock()
_region: list[tuple[Tensor, int]] = []  # the region that is being filled, and the bytes of it that are used


def allocate_packed(nbytes: int) -> Tensor:
    """Allocate uint8 [nbytes] of zeros for packed weights that are kept, 64-byte aligned and not yet touched.

    A new mapping is zero without a first write, so the threads that pack touch it, and not this one. Small ones share
    regions on huge pages, which are released with the last of them: one row reads an expert's weights 8% faster there
    (Sapphire Rapids).
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return allocate_weights(nbytes).zero_()
    if nbytes >= _MIN_HUGE_BYTES:
        return allocate_weights(nbytes)
    # Regions outlive the mode in which they begin: tensors of the inference mode cannot be written outside it.
    with _region_lock, torch.inference_mode(False):
        whole, used = _region.pop() if _region else (allocate_weights(_REGION_BYTES), 0)
        if used + nbytes > len(whole):
            whole, used = allocate_weights(_REGION_BYTES), 0
        _region.append((whole, used + -(-nbytes // 64) * 64))
        return whole[used : used + nbytes]


Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


class _Allocators(threading.local):
    """The allocators of a thread, of which the last one is used."""

    def __init__(self) -> None:
        self.used: list[Allocate] = []


_allocators = _Allocators()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate an uninitialised result of a kernel.

    It begins at a cache line if torch's allocator provides that, as it does on a CPU.
    """
    return _allocators.used[-1](shape, dtype) if _allocators.used else torch.empty(shape, dtype=dtype)


@contextmanager
def use_allocator(allocate: Allocate) -> Iterator[None]:
    """Use this allocator for the results of kernels within the context."""
    _allocators.used.append(allocate)
    try:
        yield
    finally:
        _allocators.used.pop()


def aligned_bytes(nbytes: int) -> Tensor:
    """Allocate uint8 [nbytes] that begins at a cache line."""
    whole = torch.empty(nbytes + 64, dtype=torch.uint8)
    start = -whole.data_ptr() % 64
    return whole[start : start + nbytes]


_MAX_VIEWS = 1024  # lengths of which a view is kept; steps have any number of tokens


class Int64Buffer:
    """A buffer of int64 values whose address does not change while the values fit its capacity.

    Code that knows the address reads new values there.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._kept = self._current = _Int64Array.allocate(capacity)
        # Views of the fixed buffer by length: creating one costs more than filling it.
        self._views: dict[int, Tensor] = {}

    @property
    def stays(self) -> bool:
        """True if the last values were stored in the fixed buffer."""
        return self._current is self._kept

    @property
    def address(self) -> int:
        """Address of the first value."""
        return ctypes.addressof(self._current.values)

    @property
    def tensor(self) -> Tensor:
        """The whole buffer as an int64 tensor."""
        return self._current.tensor

    def fill(self, values: list[int]) -> Tensor:
        """Store these values from the beginning of the buffer and return a view of them.

        Values that exceed the capacity are stored in another buffer until the next call. The fixed buffer is kept.
        """
        count = len(values)
        self._current = self._kept if count <= len(self._kept.values) else _Int64Array.allocate(count)
        self._current.values[:count] = values  # type: ignore[assignment]  # ctypes takes numbers
        if not self.stays:
            return self._current.tensor[:count]
        if count not in self._views:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            self._views[count] = self._current.tensor[:count]
        return self._views[count]

    def set(self, index: int, value: int) -> None:
        """Store one value."""
        self._current.values[index] = value


@dataclass(frozen=True, slots=True)
class _Int64Array:
    """An array of int64 values, and the same memory as a tensor."""

    values: ctypes.Array[ctypes.c_int64]
    tensor: Tensor

    @classmethod
    def allocate(cls, capacity: int) -> _Int64Array:
        values = (ctypes.c_int64 * capacity)()
        return cls(values, torch.frombuffer(values, dtype=torch.int64))
