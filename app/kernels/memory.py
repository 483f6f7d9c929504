"""Memory for kernels: large weights on huge pages where the system gives them, and words whose address stays."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

_HUGE_PAGE = 2 * 2**20
_WORTH_HUGE = 2 * _HUGE_PAGE  # below this, rounding up to whole huge pages wastes too much


def weights_bytes(nbytes: int) -> Tensor:
    """Uint8 [nbytes], 64-byte aligned, not yet touched.

    On huge pages a first touch costs less than half as much (packing at 0.9 against 0.4 GB/s on a Zen 5 guest).
    """
    if nbytes < _WORTH_HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return aligned(nbytes)
    region = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + nbytes]


Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
_allocators: list[Allocate] = []  # of the worker thread


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Room for a kernel's result, on a cache line where torch's own allocator gives that (it does on a processor); not initialised."""
    return _allocators[-1](shape, dtype) if _allocators else torch.empty(shape, dtype=dtype)


@contextmanager
def allocating(allocate: Allocate) -> Iterator[None]:
    """Kernels' results come from this allocator meanwhile."""
    _allocators.append(allocate)
    try:
        yield
    finally:
        _allocators.pop()


def aligned(nbytes: int) -> Tensor:
    """Uint8 [nbytes] that begins at a cache line."""
    whole = torch.empty(nbytes + 64, dtype=torch.uint8)
    start = -whole.data_ptr() % 64
    return whole[start : start + nbytes]


class Words:
    """Int64 words at an address that stays as long as there is room: whoever knows it reads here what is described anew."""

    def __init__(self, room: int = 1024) -> None:
        self._kept = self._now = _Block.of(room)
        self._views: dict[int, Tensor] = {}  # of what stays, by length: making one costs more than filling it

    @property
    def stays(self) -> bool:
        """Whether what was filled in last lies where it always does."""
        return self._now is self._kept

    @property
    def address(self) -> int:
        return ctypes.addressof(self._now.words)

    @property
    def tensor(self) -> Tensor:
        return self._now.tensor

    def fill(self, values: list[int]) -> Tensor:
        """These values from the first word on, as a view. What has no room lies elsewhere until the next call, and the room stays."""
        count = len(values)
        self._now = self._kept if count <= len(self._kept.words) else _Block.of(count)
        self._now.words[:count] = values  # type: ignore[assignment]  # ctypes takes numbers
        if not self.stays:
            return self._now.tensor[:count]
        if count not in self._views:
            self._views[count] = self._now.tensor[:count]
        return self._views[count]

    def set(self, index: int, value: int) -> None:
        self._now.words[index] = value


@dataclass(frozen=True, slots=True)
class _Block:
    """Words, and the same memory as a tensor int64."""

    words: ctypes.Array[ctypes.c_int64]
    tensor: Tensor

    @classmethod
    def of(cls, room: int) -> _Block:
        words = (ctypes.c_int64 * room)()
        return cls(words, torch.frombuffer(words, dtype=torch.int64))
