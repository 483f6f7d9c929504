"""Reads and validates headers of safetensors files, which are untrusted. Torch is not needed.

The format: 8 bytes little-endian length, that many bytes of JSON (name to dtype, shape, offsets), then the tensors,
end to end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import CheckpointInvalid
from app.weights.files import remedy

# Bytes per element, by the format's dtype names; sub-byte types are not supported.
DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the format's limit


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The location of one tensor: bytes `[start, end)` of `file`. `dtype` is the format's name, such as BF16."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Number of stored bytes."""
        return self.end - self.start

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return the location of every tensor by name.

    Raises:
        CheckpointInvalid: The file is damaged, truncated or not in this format.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointInvalid(
                f"{file.name} is not a whole safetensors file: {size} bytes cannot hold a header of {length}. {remedy(file)}"
            )
        text = stream.read(length)
    entries = {
        name: _entry(file, name, item, 8 + length)
        for name, item in _objects(file, text).items()
        if name != "__metadata__"
    }
    _check_tiling(file, entries, 8 + length, size)
    return entries


def _objects(file: Path, text: bytes) -> Mapping[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointInvalid(f"{file.name}: its header is not JSON ({str(error)[:80]}). {remedy(file)}") from error
    if not isinstance(header, dict):
        raise CheckpointInvalid(f"{file.name}: its header is not a JSON object. {remedy(file)}")
    return header


def _entry(file: Path, name: str, item: Any, data_start: int) -> TensorEntry:
    if not isinstance(item, dict):
        raise CheckpointInvalid(f"{file.name}: the header's entry for {name[:80]} is not an object. {remedy(file)}")
    dtype: Any = item.get("dtype")
    shape: Any = item.get("shape")
    offsets: Any = item.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointInvalid(
            f"{file.name}: tensor {name[:80]} has dtype {dtype!r}; known are {', '.join(DTYPE_BYTES)}."
        )
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise CheckpointInvalid(f"{file.name}: tensor {name[:80]} has no proper shape and offsets. {remedy(file)}")
    start, end = offsets
    if end - start != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise CheckpointInvalid(
            f"{file.name}: tensor {name[:80]} of shape {shape} in {dtype} cannot be {end - start} bytes. {remedy(file)}"
        )
    return TensorEntry(file, dtype, tuple(shape), data_start + start, data_start + end)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_tiling(file: Path, entries: Mapping[str, TensorEntry], data_start: int, size: int) -> None:
    """Check that the tensors fill the file from header to end without overlap, hole or truncation."""
    at = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != at:
            what = "overlaps the tensor before it" if entry.start < at else "leaves a hole before it"
            raise CheckpointInvalid(f"{file.name}: tensor {name[:80]} {what}. {remedy(file)}")
        at = entry.end
    if at != size:
        what = "has been cut short" if at > size else "is longer than its header says"
        raise CheckpointInvalid(
            f"{file.name} {what}: it has {size} bytes and its header describes {at}. {remedy(file)}"
        )
