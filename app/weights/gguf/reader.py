"""Reads and validates the header of GGUF files, which are untrusted. Torch is not needed.

The format (`docs/gguf.md` of ggml): magic, version, the number of tensors and of key-value pairs, the pairs, a table of
tensors (name, sizes, type, offset), and the tensors at multiples of `general.alignment`. Every count is compared with
the rest of the file before anything is allocated for it.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from app.errors import CheckpointInvalid
from app.weights.files import files_in, open_regular, remedy

# Names of the types that are not supported, for messages.
TYPE_NAMES: Mapping[int, str] = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
}  # fmt: skip
MAGIC, SUFFIX = b"GGUF", ".gguf"
VERSIONS = (2, 3)
MAX_PAIRS = 2**16
MAX_TENSORS = 2**20
MAX_PARTS = 2**10
MAX_ARRAY_VALUES = 2**22  # a vocabulary of 262,144 tokens has about twice as many merges
MAX_NAME_BYTES = 2**10
MAX_HEADER_BYTES = 2**28  # Gemma 3's is about 10 MB
_MAX_SIZES = 4  # dimensions of a tensor
_DEFAULT_ALIGNMENT, _MAX_ALIGNMENT = 32, 2**16
_PART_NAME = re.compile(r"^(?P<stem>.*)-(?P<part>[0-9]{5})-of-(?P<parts>[0-9]{5})\.gguf$")
# Codes of `struct` by type of value; strings are 8, arrays 9.
_SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type: each block of `values` neighbours in a row is stored in `nbytes`."""

    name: str
    values: int
    nbytes: int

    @property
    def is_quantized(self) -> bool:
        """True if a block's values share a scale."""
        return self.values > 1


# Sizes: ggml-common.h of llama.cpp.
TENSOR_TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    30: TensorType("BF16", 1, 2),
    8: TensorType("Q8_0", 32, 34),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    39: TensorType("MXFP4", 32, 17),
}
TYPES: Mapping[str, TensorType] = {kind.name: kind for kind in TENSOR_TYPES.values()}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The location of one tensor: bytes `[start, end)` of `file`. `shape` is in torch's order, not the file's."""

    file: Path
    kind: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufModel:
    """Metadata and tensors of a GGUF file, or of all parts of a divided one. `file` is the first."""

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(file: Path) -> GgufModel:
    """Return metadata and location of every tensor, of all parts. Raises `CheckpointInvalid` or `OSError`."""
    files = part_files(file)
    missing = [part for part in files if not part.is_file()]
    if missing:
        raise CheckpointInvalid(
            f"{file.parent} lacks {len(missing)} of {len(files)} parts of this model: {missing[0].name}"
            f"{' and others' if len(missing) > 1 else ''}. Copy or download them too."
        )
    parts = [_read_part(part) for part in files]
    metadata, tensors = parts[0].metadata, dict[str, GgufTensor]()
    for part in parts:
        twice = [name for name in part.tensors if name in tensors]
        if twice:
            raise CheckpointInvalid(f"{part.file.name}: tensor {twice[0]} is in an earlier part too. {remedy(file)}")
        tensors.update(part.tensors)
    expected = metadata.get("split.tensors.count", len(tensors))
    if metadata.get("split.count", len(files)) not in (0, len(files)) or expected != len(tensors):
        raise CheckpointInvalid(
            f"{files[0].name} belongs to a model of {metadata.get('split.count')} parts with {expected} tensors, and "
            f"{len(files)} with {len(tensors)} are here. Keep the names of the parts, NAME-00001-of-0000N.gguf."
        )
    return GgufModel(files[0], metadata, tensors)


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file of a path: itself, or a directory's only model. Raises `CheckpointInvalid` or `OSError`."""
    if path.is_file():
        return path if path.suffix == SUFFIX else None
    if not path.is_dir() or files_in(path, "*.safetensors"):
        return None
    # A name with `mmproj` is that of a model's picture part.
    files = [file for file in files_in(path, f"*{SUFFIX}") if "mmproj" not in file.name.lower()]
    models = {part_files(file)[0]: file for file in reversed(files)}
    if len(models) > 1:
        shown = sorted(model.name for model in models)
        raise CheckpointInvalid(f"{path} has {len(models)} GGUF models: give one of them, such as {path / shown[0]}.")
    return files[0] if files else None


def part_files(file: Path) -> list[Path]:
    """Return the files of the model that a file belongs to, in order. Raises `CheckpointInvalid`."""
    matched = _PART_NAME.match(file.name)
    if matched is None:
        return [file]
    count = int(matched["parts"])
    if not 1 <= int(matched["part"]) <= count <= MAX_PARTS:
        raise CheckpointInvalid(f"{file.name}: a model has 1 to {MAX_PARTS} parts, counted from 00001.")
    return [file.with_name(f"{matched['stem']}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]


def _read_part(file: Path) -> GgufModel:
    size = file.stat().st_size
    with BufferedReader(open_regular(file)) as stream:
        start = stream.read(8)
        if len(start) < 8 or start[:4] != MAGIC:
            raise CheckpointInvalid(f"{file.name} is not a whole GGUF file: it has {size} bytes. {remedy(file)}")
        version = int.from_bytes(start[4:], "little")
        if version not in VERSIONS:
            swapped = int.from_bytes(start[4:], "big") in VERSIONS
            raise CheckpointInvalid(
                f"{file.name} is GGUF for big-endian machines; a file for little-endian machines is needed."
                if swapped
                else f"{file.name} is GGUF version {version}; supported are {VERSIONS[0]} and {VERSIONS[1]}."
            )
        with mmap.mmap(stream.fileno(), min(size, MAX_HEADER_BYTES), prot=mmap.PROT_READ) as data:
            return _HeaderReader(file, data, size).read()


class _HeaderReader:
    def __init__(self, file: Path, data: mmap.mmap, size: int) -> None:
        self._file, self._data, self._size, self._at = file, data, size, 8
        self._num_values = 0

    def read(self) -> GgufModel:
        num_tensors, num_pairs = self._number("Q"), self._number("Q")
        # A pair takes at least 13 bytes, a tensor 24.
        self._check_count("tensors", num_tensors, MAX_TENSORS, 24)
        self._check_count("key-value pairs", num_pairs, MAX_PAIRS, 13)
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            name = self._text("a key", MAX_NAME_BYTES)
            if name in metadata:
                raise self._damaged(f"{name[:80]} occurs twice")
            metadata[name] = self._value(name, self._number("I"))
        table = [self._table_row() for _ in range(num_tensors)]
        return GgufModel(self._file, metadata, self._locate(table, _alignment(self._file, metadata)))

    def _table_row(self) -> tuple[str, GgufTensor]:
        """Return name and tensor; its place is relative to the end of the header."""
        name = self._text("a tensor's name", MAX_NAME_BYTES)
        num_sizes = self._number("I")
        if not 1 <= num_sizes <= _MAX_SIZES:
            raise self._damaged(f"tensor {name[:80]} has {num_sizes} dimensions, not 1 to {_MAX_SIZES}")
        sizes = [self._number("Q") for _ in range(num_sizes)]
        code, offset = self._number("I"), self._number("Q")
        kind = TENSOR_TYPES.get(code)
        if kind is None:
            said = TYPE_NAMES.get(code, f"number {code}")
            raise CheckpointInvalid(
                f"{self._file.name}: tensor {name[:80]} has type {said}; supported are "
                f"{', '.join(known.name for known in TENSOR_TYPES.values())}."
            )
        if not all(1 <= size < 2**40 for size in sizes) or math.prod(sizes) >= 2**60 or sizes[0] % kind.values:
            raise self._damaged(f"tensor {name[:80]} of type {kind.name} cannot have the sizes {sizes}")
        nbytes = math.prod(sizes) // kind.values * kind.nbytes
        return name, GgufTensor(self._file, kind.name, tuple(reversed(sizes)), offset, offset + nbytes)

    def _locate(self, table: list[tuple[str, GgufTensor]], alignment: int) -> dict[str, GgufTensor]:
        """Return the tensors at their places in the file, which must not overlap or end beyond it."""
        data_start = -(-self._at // alignment) * alignment
        found: dict[str, GgufTensor] = {}
        end = 0
        for name, tensor in sorted(table, key=lambda row: row[1].start):
            if tensor.start % alignment or tensor.start < end:
                fault = "is not aligned" if tensor.start % alignment else "overlaps the tensor before it"
                raise self._damaged(f"tensor {name[:80]} {fault}")
            if name in found:
                raise self._damaged(f"tensor {name[:80]} occurs twice")
            end = tensor.end
            if data_start + end > self._size:
                raise CheckpointInvalid(
                    f"{self._file.name} has been cut short: it has {self._size} bytes, and tensor {name[:80]} ends at "
                    f"{data_start + end}. {remedy(self._file)}"
                )
            place = data_start + tensor.start, data_start + tensor.end
            found[name] = GgufTensor(tensor.file, tensor.kind, tensor.shape, *place)
        return found

    def _value(self, name: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text(name, MAX_HEADER_BYTES)
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            raise self._damaged(f"{name[:80]} has a value of unknown type {kind}")
        kind, count = self._number("I"), self._number("Q")
        if kind != _STRING and kind not in _SCALARS:
            raise self._damaged(f"{name[:80]} is an array of values of type {kind}, which are not supported")
        code = _SCALARS.get(kind, "")
        self._check_count(f"values of {name[:80]}", count, MAX_ARRAY_VALUES, struct.calcsize(f"<{code}") if code else 8)
        self._num_values += count
        if self._num_values > 2 * MAX_ARRAY_VALUES:
            raise self._damaged(f"its arrays have more than {2 * MAX_ARRAY_VALUES} values")
        if not code:
            return tuple(self._text(name, MAX_HEADER_BYTES) for _ in range(count))
        at = self._advance(count * struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{count}{code}", self._data, at)

    def _number(self, code: str) -> Any:
        at = self._advance(struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{code}", self._data, at)[0]

    def _text(self, what: str, max_bytes: int) -> str:
        length = self._number("Q")
        self._check_count(f"bytes of {what[:80]}", length, max_bytes, 1)
        at = self._advance(length)
        try:
            return self._data[at : at + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged(f"{what[:80]} is not UTF-8") from error

    def _advance(self, nbytes: int) -> int:
        at = self._at
        if at + nbytes > len(self._data):
            raise self._damaged("its header is cut short")
        self._at += nbytes
        return at

    def _check_count(self, what: str, count: int, limit: int, each: int) -> None:
        if count > limit or count * each > len(self._data) - self._at:
            raise self._damaged(f"its header claims {count} {what}, and {self._size} bytes cannot hold them")

    def _damaged(self, fault: str) -> CheckpointInvalid:
        return CheckpointInvalid(f"{self._file.name}: {fault}. {remedy(self._file)}")


def _alignment(file: Path, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(value) is not int or not 1 <= value <= _MAX_ALIGNMENT or value & (value - 1):
        raise CheckpointInvalid(f"{file.name}: general.alignment must be a power of two, not {value!r}. {remedy(file)}")
    return value
