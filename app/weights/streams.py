"""Reads a checkpoint's tensors for packing: some rows at a time, or whole for forms that need the whole weight."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from app.weights.headers import TensorEntry
from app.weights.mapped import TORCH_DTYPES, MappedFiles

_COPY_BYTES = 8 * 2**20  # bytes of source pages held while a tensor is converted
_STREAM_BYTES = 4 * 2**20  # bytes read at a time: less than a server's last-level cache, even once converted to FP32


class WeightStreams:
    """The mapped files, and one buffer that is used for all fused and converted tensors."""

    def __init__(self, tensors: Mapping[str, TensorEntry]) -> None:
        self.tensors, self.files = tensors, MappedFiles()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def entries(self, sources: Sequence[str], kind: str = "weight") -> list[TensorEntry]:
        """Return the entries of a layer's source tensors."""
        return [self.tensors[f"{source}.{kind}"] for source in sources]

    def stored(self, entry: TensorEntry) -> Tensor:
        """Return the tensor as stored, mapped."""
        return self.files.tensor(entry)

    def held(self, entry: TensorEntry, device: torch.device | None) -> Tensor:
        """Return the tensor as stored: mapped on the host, or copied to a device."""
        if device is None:
            return self.stored(entry)
        if len(entry.shape) != 2:
            return self.stored(entry).to(device, copy=True)
        table = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device=device)
        for first, rows in self.blocks((entry,)):
            table[first : first + len(rows)].copy_(rows)
        return table

    def blocks(self, entries: Sequence[TensorEntry]) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, rows) of the stacked entries, as stored.

        Each is valid until the next, which reuses the buffer. The buffer fits the processor's cache: neither whole
        tensors nor mapped pages are held.
        """
        first = 0
        for entry in entries:
            rows, columns = entry.shape
            dtype = TORCH_DTYPES[entry.dtype]
            step = max(1, _STREAM_BYTES // (columns * dtype.itemsize))
            for row in range(0, rows, step):
                some = self._room((min(step, rows - row), columns), dtype)
                self.files.read(entry, row, some)
                yield first + row, some
            first += rows

    def whole(self, entries: Sequence[TensorEntry], dtype: torch.dtype, keeps: bool) -> tuple[Tensor, bool]:
        """Return the stacked entries in `dtype`, and True if they are a view of the mapped file.

        That is so if they are stored end to end in this dtype. With `keeps`, the shared buffer is not used, since
        the caller will hold the tensor.
        """
        shape = (sum(entry.shape[0] for entry in entries), entries[0].shape[1])
        if TORCH_DTYPES[entries[0].dtype] == dtype and _lie_end_to_end(entries):
            self.files.fetch(entries[0].file, entries[0].start, entries[-1].end)
            return self.files.span(entries[0], shape), True
        weight = torch.empty(shape, dtype=dtype) if keeps else self._room(shape, dtype)
        row = 0
        for entry in entries:
            self._copy(entry, weight[row : row + entry.shape[0]])
            row += entry.shape[0]
        return weight, False

    def bias(self, sources: Sequence[str], dtype: torch.dtype) -> Tensor:
        """Return the concatenated biases in `dtype`."""
        return torch.cat([self.stored(entry).to(dtype) for entry in self.entries(sources, "bias")])

    def drop(self, entries: Sequence[TensorEntry]) -> None:
        """Release the mapped pages of the entries."""
        for entry in entries:
            self.files.drop(entry.file, entry.start, entry.end)

    def close(self) -> None:
        """Close the files; mapped tensors stay valid."""
        self.files.close()

    def _room(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old buffer before allocating the new one
            self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        return self._buffer[:nbytes].view(dtype).view(shape)

    def _copy(self, entry: TensorEntry, target: Tensor) -> None:
        source, row_bytes = self.stored(entry), entry.nbytes // max(1, entry.shape[0])
        step = max(1, _COPY_BYTES // max(1, row_bytes))
        for row in range(0, entry.shape[0], step):
            target[row : row + step].copy_(source[row : row + step])
            self.files.drop(entry.file, entry.start + row * row_bytes, entry.start + min(row + step, entry.shape[0]) * row_bytes)


def _lie_end_to_end(entries: Sequence[TensorEntry]) -> bool:
    return all((left.file, left.dtype, left.end) == (right.file, right.dtype, right.start) for left, right in pairwise(entries))
