"""Reads and validates headers of safetensors files, which are untrusted.

The format: 8 bytes little-endian length, that many bytes of JSON (name to dtype, shape, offsets), then the tensors, end
to end. A weight that torchao quantized is stored as several tensors, with its attributes in the header's metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

from app.errors import CheckpointInvalid
from app.weights.files import open_regular, remedy

# Bytes per element, by the format's dtype names; sub-byte types are not supported.
DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the format's limit
# Tensor classes of torchao whose codes have the weight's shape, so that any rows can be dequantized on any machine.
QUANTIZED_KINDS = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor")
_WEIGHT_PARTS = {"qdata", "scale", "zero_point"}
_VALUE_DTYPES: Mapping[str, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


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
        return self.end - self.start

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def value_bytes(self) -> int:
        """Number of bytes of the values in `dtype`, which differs from `nbytes` if the stored bytes encode them."""
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class EncodedEntry(TensorEntry):
    """A tensor whose values are computed from the stored bytes; `dtype` and `shape` are those of its values."""


@dataclass(frozen=True, slots=True)
class QuantizedEntry(EncodedEntry):
    """A weight that torchao quantized; the location is that of its codes.

    `attributes` is torchao's JSON text, in which `kind` names one of `QUANTIZED_KINDS`. `parts` are its tensors, by
    torchao's names.
    """

    kind: str
    attributes: str
    parts: tuple[tuple[str, TensorEntry], ...]

    @property
    def nbytes(self) -> int:
        return sum(part.end - part.start for _, part in self.parts)


@dataclass(frozen=True, slots=True)
class RearrangedEntry(EncodedEntry):
    """A tensor whose rows are in another order than those of the stored `source`, or which is its transpose.

    `rows` are the rows of the source, or of its transpose, in our order; None: all of them, as they are. `factors`: how many
    of our rows are multiplied by which factor, one after the other.
    """

    source: TensorEntry
    rows: tuple[int, ...] | range | None = field(default=None, repr=False)
    transposed: bool = False
    factors: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ColumnsEntry(EncodedEntry):
    """Some columns of a stored matrix, from column `first` on."""

    source: TensorEntry
    first: int


def join_quantized(found: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors with those that torchao quantized joined to one entry each.

    transformers stores the parts of `a.b.weight` as `a.b._weight_qdata`, `a.b._weight_scale` and so on. Raises
    `CheckpointInvalid`.
    """
    joined, metadata = dict(found), dict[str, str]()
    for file in sorted({entry.file for entry in found.values()}):
        metadata |= _read_metadata(file)
    for name, text in metadata.items():
        values = _attributes(text)
        kind, parts = values.get("_type"), values.get("_tensor_data_names")
        if kind == "Tensor" or not isinstance(kind, str) or not isinstance(parts, list):
            continue
        prefix = "._".join(name.rsplit(".", 1)) + "_"
        stored = tuple((str(part), joined.pop(f"{prefix}{part}")) for part in parts if f"{prefix}{part}" in joined)
        joined[name] = _quantized(name, kind, text, stored)
        if len(stored) < len(parts):
            raise CheckpointInvalid(f"{name[:80]} is quantized, and not all of its parts ({parts}) are stored.")
    return joined


def _quantized(name: str, kind: str, text: str, parts: tuple[tuple[str, TensorEntry], ...]) -> QuantizedEntry:
    if kind not in QUANTIZED_KINDS:
        raise CheckpointInvalid(
            f"{name[:80]} is stored as torchao's {kind[:80]}, whose layout belongs to a device. Supported are "
            f"{', '.join(QUANTIZED_KINDS)}: quantize the original weights again, or serve them with --quantization."
        )
    beside = sorted({part for part, _ in parts} - _WEIGHT_PARTS)
    if beside:
        raise CheckpointInvalid(f"{name[:80]} has {beside[0][:80]}, and scales of activations are not supported.")
    codes, values = dict(parts).get("qdata"), _attributes(text).get("_data")
    dtype = values.get("dtype") if isinstance(values, dict) else None
    stored = _VALUE_DTYPES.get(str(dtype.get("_data"))) if isinstance(dtype, dict) else None
    if codes is None or stored is None or len(codes.shape) != 2:
        raise CheckpointInvalid(f"{name[:80]}: torchao's metadata of this weight is damaged.")
    return QuantizedEntry(codes.file, stored, codes.shape, codes.start, codes.end, kind, text, parts)


def _attributes(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _read_metadata(file: Path) -> dict[str, str]:
    with BufferedReader(open_regular(file)) as stream:
        header = _objects(file, stream.read(int.from_bytes(stream.read(8), "little")))
    values = header.get("__metadata__")
    values = values if isinstance(values, dict) else {}
    return {name: value for name, value in values.items() if isinstance(value, str)}


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return the location of every tensor by name. Raises `CheckpointInvalid`."""
    size = file.stat().st_size
    with BufferedReader(open_regular(file)) as stream:
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
