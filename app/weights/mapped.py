"""Memory-mapped tensors: read without a copy, with pages released after use.

The mapping is private and read-only: nothing can write to the checkpoint, and the kernel may drop its pages at any
time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from app.errors import CheckpointInvalid
from app.weights.headers import TensorEntry

TORCH_DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, which Python's mmap does not define
_FETCH_BYTES = 8 * 2**20  # the call holds the interpreter's lock, so it must be short


class MappedFiles:
    """The checkpoint's files, each mapped on first use. A tensor keeps its mapping alive."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._streams: dict[Path, BinaryIO] = {}

    def tensor(self, entry: TensorEntry) -> Tensor:
        """Return the tensor as stored: a view of the file."""
        return self.span(entry, entry.shape)

    def span(self, first: TensorEntry, shape: tuple[int, ...]) -> Tensor:
        """Return a view of this shape that starts at the first entry.

        It covers the entry itself, or several entries that are stored end to end.
        """
        dtype, count = TORCH_DTYPES[first.dtype], 1
        for size in shape:
            count *= size
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # read-only on purpose
            if first.start % dtype.itemsize:  # kernels need aligned elements, which the format does not guarantee
                unaligned = torch.frombuffer(
                    self._map(first.file), dtype=torch.uint8, count=count * dtype.itemsize, offset=first.start
                )
                return unaligned.clone().view(dtype).view(shape)
            return torch.frombuffer(self._map(first.file), dtype=dtype, count=count, offset=first.start).view(shape)

    def read(self, entry: TensorEntry, row: int, target: Tensor) -> None:
        """Copy rows of a 2-D tensor into `target`, starting at `row`, and convert their dtype if needed.

        The rows are read, not accessed through the mapping: a page table entry for each 4 KiB costs more than the
        copy (2.4 GB took 1.6 s mapped and 0.3 s read).
        """
        rows, columns = target.shape
        stored = TORCH_DTYPES[entry.dtype]
        direct = stored == target.dtype and target.is_contiguous()
        buffer = target if direct else torch.empty(rows, columns, dtype=stored)
        view = memoryview((ctypes.c_char * buffer.nbytes).from_address(buffer.data_ptr())).cast("B")
        offset, done = entry.start + row * columns * stored.itemsize, 0
        while done < len(view):  # a read may return early; it releases the interpreter's lock
            count = os.preadv(self._descriptor(entry.file), [view[done:]], offset + done)
            if count == 0:
                raise CheckpointInvalid(f"{entry.file.name} became shorter while it was read. Was it being replaced?")
            done += count
        if not direct:
            target.copy_(buffer)

    def fetch(self, file: Path, start: int, end: int) -> None:
        """Read these bytes ahead of a kernel that accesses them in blocks.

        This takes one call per 8 MiB instead of a page fault per 16 pages.
        """
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        for at in range(first, end, _FETCH_BYTES):
            try:
                self._map(file).madvise(_POPULATE_READ, at, min(_FETCH_BYTES, end - at))
            except (OSError, ValueError):
                return  # an older kernel does not support it; page faults do the same, slower

    def drop(self, file: Path, start: int, end: int) -> None:
        """Release the pages that are completely within `[start, end)` of the file.

        Reading them again works and costs a page fault.
        """
        page = mmap.PAGESIZE
        first, last = -(-start // page) * page, end // page * page
        if first < last and hasattr(mmap, "MADV_DONTNEED"):
            self._map(file).madvise(mmap.MADV_DONTNEED, first, last - first)

    def close(self) -> None:
        """Close the files that `read` opened; mapped tensors stay valid."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def _descriptor(self, file: Path) -> int:
        if file not in self._streams:
            self._streams[file] = file.open("rb", buffering=0)
        return self._streams[file].fileno()

    def _map(self, file: Path) -> mmap.mmap:
        mapped = self._maps.get(file)
        if mapped is None:
            with file.open("rb") as stream:
                mapped = mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
            self._maps[file] = mapped
        return mapped
