"""Conversion of the Open Inference Protocol's tensors, as JSON or binary data, to `Array`s and back.

Datatype, shape, number of values and number of bytes of a client's tensor must agree; otherwise it is refused.
"""

from __future__ import annotations

import array
import math
import struct
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy
from pydantic_core import to_json

from app.api.vectors import json_list
from app.errors import InvalidRequest
from app.messages import Array

# Bytes of one value. BYTES elements have a length prefix. BF16 is only in the protocol's binary extension.
SIZES = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
    "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8,
}  # fmt: skip
# Type codes of Python's `array` and of numpy. All supported machines are little-endian, as the protocol requires.
_LETTERS = {
    "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q",
    "FP32": "f", "FP64": "d",
}  # fmt: skip
_NUMPY = {datatype: f"<{letter}" for datatype, letter in _LETTERS.items()}
_WANTED: dict[str, tuple[str, frozenset[type]]] = {
    "BOOL": ("booleans", frozenset({bool})),
    "BYTES": ("strings", frozenset({str})),
    "FP32": ("numbers", frozenset({int, float})),
    "FP64": ("numbers", frozenset({int, float})),
}
_WHOLE = ("whole numbers", frozenset({int}))
LARGEST_FP32 = float.fromhex("0x1.fffffep127")
MAX_STRINGS = 4_096  # limit per tensor: twice the texts of a request; each takes an iteration of a Python loop
MAX_JSON_VALUES = 2**22  # limit per output: as Python objects they take 32 times the 4 bytes of an FP32
SLICE_VALUES = 2**14  # written as JSON in about a millisecond, after which the event loop may run other tasks


def from_json(name: str, datatype: str, shape: tuple[int, ...], values: Any) -> Array:
    """Return a tensor given as a JSON list, flat or nested according to its shape."""
    count = _count(name, datatype, shape)
    if datatype in ("FP16", "BF16"):
        raise _refused(name, f"{datatype} cannot be sent as JSON: send it as binary data")
    flat = _flat(name, shape, values)
    if len(flat) != count:
        raise _refused(name, f"the shape {list(shape)} has {count} values, and data has {len(flat)}")
    called, kinds = _WANTED.get(datatype, _WHOLE)
    if not kinds.issuperset(map(type, flat)):
        raise _refused(name, f"data of datatype {datatype} must be {called}")
    return Array(datatype, shape, _packed(name, datatype, flat))


def from_binary(name: str, datatype: str, shape: tuple[int, ...], data: bytes) -> Array:
    """Return a tensor given as little-endian bytes in row-major order.

    Each element of BYTES follows its length, a number of four bytes.
    """
    count = _count(name, datatype, shape)
    if datatype == "BYTES":
        if sum(4 + len(element) for element in _elements(name, data, count)) != len(data):
            raise _refused(name, f"the shape {list(shape)} has {count} elements, and its binary data has more")
    elif len(data) != count * SIZES[datatype]:
        wanted = count * SIZES[datatype]
        raise _refused(name, f"{datatype} of shape {list(shape)} is {wanted} bytes, and binary_data_size says {len(data)}")
    elif datatype == "BOOL" and data.translate(None, b"\0\1"):
        raise _refused(name, "a BOOL is one byte, 0 or 1")
    return Array(datatype, shape, data)


def strings(name: str, tensor: Array) -> list[str]:
    """Return the elements of a BYTES tensor, each of which must be UTF-8 text."""
    try:
        return [element.decode() for element in _elements(name, tensor.data, math.prod(tensor.shape))]
    except UnicodeDecodeError as error:
        raise _refused(name, "its elements must be text in UTF-8") from error


def of_strings(elements: Sequence[str], shape: tuple[int, ...]) -> Array:
    """Return a BYTES tensor of the texts."""
    return Array("BYTES", shape, _packed("", "BYTES", elements))


def json_slices(name: str, tensor: Array) -> Iterator[bytes]:
    """Yield the inside of a JSON list of the values, in slices that take about a millisecond each.

    Raises:
        InvalidRequest: JSON cannot represent the values, or there are too many.
    """
    if tensor.datatype in ("FP16", "BF16"):
        raise _unsayable(name, f"{tensor.datatype} cannot be sent as JSON")
    if math.prod(tensor.shape) > MAX_JSON_VALUES:
        raise _unsayable(name, f"{math.prod(tensor.shape)} values are too many for JSON, which takes {MAX_JSON_VALUES}")
    if tensor.datatype == "BYTES":
        yield to_json(strings(name, tensor))[1:-1]
        return
    step = SLICE_VALUES * SIZES[tensor.datatype]
    for start in range(0, len(tensor.data), step):
        yield (b"," if start else b"") + _written(name, tensor.datatype, tensor.data[start : start + step])[1:-1]


def _written(name: str, datatype: str, data: bytes) -> bytes:
    """Return a JSON list of the values."""
    if datatype == "BOOL":
        return to_json(list(map(bool, data)))
    values = numpy.frombuffer(data, _NUMPY[datatype])
    if datatype in ("FP32", "FP64") and not numpy.isfinite(values).all():
        raise _unsayable(name, "it has values that are not finite, which JSON cannot represent")
    return json_list(values) if datatype == "FP32" else to_json(values.tolist())


def _count(name: str, datatype: str, shape: tuple[int, ...]) -> int:
    count = math.prod(shape)
    if datatype == "BYTES":
        if count > MAX_STRINGS:
            raise _refused(name, f"the shape {list(shape)} has {count} elements, and BYTES may have {MAX_STRINGS}")
    elif datatype not in SIZES:
        raise _refused(name, f"{datatype[:20]!r} is not a datatype: use BYTES, {', '.join(SIZES)}")
    return count


def _flat(name: str, shape: tuple[int, ...], values: Any) -> list[Any]:
    """Return the values as a flat list; nested ones must be nested exactly according to the shape."""
    if not isinstance(values, list):
        raise _refused(name, "data must be a list")
    if not values or type(values[0]) is not list:
        return values
    level = [values]
    for size in shape:
        if any(type(row) is not list or len(row) != size for row in level):
            raise _refused(name, f"data is not nested as the shape {list(shape)} says")
        level = list(chain.from_iterable(level))
    return level


def _packed(name: str, datatype: str, values: Sequence[Any]) -> bytes:
    try:
        if datatype == "BYTES":
            elements = [value.encode() for value in values]
            return b"".join(struct.pack("<I", len(element)) + element for element in elements)
        if datatype == "BOOL":
            return bytes(values)
        if datatype in ("FP32", "FP64"):
            _check_finite(name, datatype, values)
        return array.array(_LETTERS[datatype], values).tobytes()
    except OverflowError as error:
        raise _refused(name, f"data has a number that {datatype} cannot hold") from error
    except UnicodeEncodeError as error:
        raise _refused(name, "data has a string that is not Unicode text") from error


def _check_finite(name: str, datatype: str, values: Sequence[float]) -> None:
    """Check that all values are finite and fit the datatype.

    JSON has no infinity, and a value too large for FP32 would silently become one.
    """
    if not all(map(math.isfinite, values)):
        raise _refused(name, "data must be finite numbers")
    if datatype == "FP32" and values and max(map(abs, values)) > LARGEST_FP32:
        raise OverflowError


def _elements(name: str, data: bytes, count: int) -> Iterator[bytes]:
    """Yield the first `count` elements of binary BYTES data."""
    position = 0
    for _ in range(count):
        start = position + 4
        end = start + int.from_bytes(data[position:start], "little")
        if start > len(data) or end > len(data):
            raise _refused(name, f"its binary data ends within an element: the shape has {count}")
        yield data[start:end]
        position = end


def _refused(name: str, sentence: str) -> InvalidRequest:
    return InvalidRequest(f"Input {name[:100]!r}: {sentence}.", field=name[:100])


def _unsayable(name: str, sentence: str) -> InvalidRequest:
    return InvalidRequest(f"Output {name!r}: {sentence}; ask for it with the parameter binary_data.", field=name)
