"""Tensors that lie in a mapped file: read without a copy, and their pages given back when they have been used.

The mapping is private and read-only: nothing can write to the checkpoint, and the kernel may drop its pages at any time.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from app.weights.headers import TensorEntry

TORCH_DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, which Python's mmap does not name
_FETCH_BYTES = 8 * 2**20  # the call keeps the interpreter's lock, so it is kept short


class MappedFiles:
    """The checkpoint's files, each mapped when first asked for. A tensor keeps its mapping alive by itself."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def tensor(self, entry: TensorEntry) -> Tensor:
        """The tensor as stored: a view of the file."""
        return self.span(entry, entry.shape)

    def span(self, first: TensorEntry, shape: tuple[int, ...]) -> Tensor:
        """A view of this shape from the first entry's place on: the entry itself, or several that lie end to end."""
        dtype, count = TORCH_DTYPES[first.dtype], 1
        for size in shape:
            count *= size
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # as it should be
            if first.start % dtype.itemsize:  # products want aligned elements; the format does not promise them
                unaligned = torch.frombuffer(
                    self._map(first.file), dtype=torch.uint8, count=count * dtype.itemsize, offset=first.start
                )
                return unaligned.clone().view(dtype).view(shape)
            return torch.frombuffer(self._map(first.file), dtype=dtype, count=count, offset=first.start).view(shape)

    def fetch(self, file: Path, start: int, end: int) -> None:
        """Reads these bytes in order, ahead of a product that would read them in blocks: one call instead of a fault for every 16 pages."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        for at in range(first, end, _FETCH_BYTES):
            try:
                self._map(file).madvise(_POPULATE_READ, at, min(_FETCH_BYTES, end - at))
            except (OSError, ValueError):
                return  # the kernel does not know it; faults do the same, slower

    def drop(self, file: Path, start: int, end: int) -> None:
        """Gives back the pages that lie wholly in `[start, end)` of the file; reading them again is harmless and costs a fault."""
        page = mmap.PAGESIZE
        first, last = -(-start // page) * page, end // page * page
        if first < last and hasattr(mmap, "MADV_DONTNEED"):
            self._map(file).madvise(mmap.MADV_DONTNEED, first, last - first)

    def _map(self, file: Path) -> mmap.mmap:
        mapped = self._maps.get(file)
        if mapped is None:
            with file.open("rb") as stream:
                mapped = mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
            self._maps[file] = mapped
        return mapped
