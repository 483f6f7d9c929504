"""Tensors of the Open Inference Protocol: JSON or binary data to `Array`s and back, and the wire format of `infer`.

Datatype, shape, number of values and number of bytes of a client's tensor must agree; otherwise it is refused. A body
is JSON followed by binary tensors, or one bare tensor; responses likewise.
"""

from __future__ import annotations

import array
import asyncio
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from app.api.bodies import MAX_BODY_BYTES, TENSOR_HEADER
from app.api.encoders.vectors import to_json_list
from app.api.oip.schemas import InferBody, InferParameters, InputTensor, OutputTensor
from app.api.schemas import ReportIgnored, parse_body
from app.api.streaming import server_timing
from app.errors import BodyTooLarge, InvalidRequest
from app.messages import Array, Timings

# Bytes of one value. BYTES elements have a length prefix. BF16 is only in the protocol's binary extension.
VALUE_BYTES = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
    "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8,
}  # fmt: skip
# Type codes of Python's `array` and of numpy. All supported machines are little-endian, as the protocol requires.
_TYPE_CODES = {
    "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q",
    "FP32": "f", "FP64": "d",
}  # fmt: skip
_NUMPY = {datatype: f"<{code}" for datatype, code in _TYPE_CODES.items()}
_JSON_TYPES: dict[str, tuple[str, frozenset[type]]] = {
    "BOOL": ("booleans", frozenset({bool})),
    "BYTES": ("strings", frozenset({str})),
    "FP32": ("numbers", frozenset({int, float})),
    "FP64": ("numbers", frozenset({int, float})),
}
_INTEGERS = ("whole numbers", frozenset({int}))
LARGEST_FP32 = float.fromhex("0x1.fffffep127")
MAX_STRINGS = 4_096  # limit per tensor: twice the texts of a request; each takes an iteration of a Python loop
MAX_JSON_VALUES = 2**22  # limit per output: as Python objects they take 32 times the 4 bytes of an FP32
# JSON before binary tensors: how much of it is kept, and of how many forms; without values it has some hundred bytes.
_MAX_KNOWN_BYTES, _MAX_KNOWN_HEADS = 4_096, 64
SLICE_VALUES = 2**14  # written as JSON in about a millisecond, after which the event loop may run other tasks


def from_json(name: str, datatype: str, shape: tuple[int, ...], values: Any) -> Array:
    """Return a tensor given as a JSON list, flat or nested according to its shape."""
    count = _num_values(name, datatype, shape)
    if datatype in ("FP16", "BF16"):
        raise _input_error(name, f"{datatype} cannot be sent as JSON: send it as binary data")
    flat = _flatten(name, shape, values)
    if len(flat) != count:
        raise _input_error(name, f"the shape {list(shape)} has {count} values, and data has {len(flat)}")
    type_name, types = _JSON_TYPES.get(datatype, _INTEGERS)
    if not types.issuperset(map(type, flat)):
        raise _input_error(name, f"data of datatype {datatype} must be {type_name}")
    return Array(datatype, shape, _to_bytes(name, datatype, flat))


def from_binary(name: str, datatype: str, shape: tuple[int, ...], data: bytes) -> Array:
    """Return a tensor given as little-endian bytes in row-major order.

    Each element of BYTES follows its length, a number of four bytes.
    """
    count = _num_values(name, datatype, shape)
    if datatype == "BYTES":
        if sum(4 + len(element) for element in _elements(name, data, count)) != len(data):
            raise _input_error(name, f"the shape {list(shape)} has {count} elements, and its binary data has more")
    elif len(data) != count * VALUE_BYTES[datatype]:
        num_bytes = count * VALUE_BYTES[datatype]
        raise _input_error(
            name, f"{datatype} of shape {list(shape)} is {num_bytes} bytes, and binary_data_size says {len(data)}"
        )
    elif datatype == "BOOL" and data.translate(None, b"\0\1"):
        raise _input_error(name, "a BOOL is one byte, 0 or 1")
    return Array(datatype, shape, data)


def to_strings(name: str, tensor: Array) -> list[str]:
    """Return the elements of a BYTES tensor, each of which must be UTF-8 text."""
    try:
        return [element.decode() for element in _elements(name, tensor.data, math.prod(tensor.shape))]
    except UnicodeDecodeError as error:
        raise _input_error(name, "its elements must be text in UTF-8") from error


def to_elements(name: str, tensor: Array) -> list[bytes]:
    """Return the elements of a BYTES tensor."""
    return list(_elements(name, tensor.data, math.prod(tensor.shape)))


def json_array(name: str, tensor: Array) -> Any:
    """Return a tensor as a numpy array whose values JSON can represent. Raises `InvalidRequest`."""
    if tensor.datatype in ("FP16", "BF16"):
        raise _output_error(name, f"{tensor.datatype} cannot be sent as JSON")
    if math.prod(tensor.shape) > MAX_JSON_VALUES:
        raise _output_error(name, f"{math.prod(tensor.shape)} values are too many for JSON")
    values = numpy.frombuffer(tensor.data, "?" if tensor.datatype == "BOOL" else _NUMPY[tensor.datatype])
    if tensor.datatype in ("FP32", "FP64") and not numpy.isfinite(values).all():
        raise _output_error(name, "it has values that are not finite, which JSON cannot represent")
    return values.reshape(tensor.shape)


def from_strings(elements: Sequence[str], shape: tuple[int, ...]) -> Array:
    return Array("BYTES", shape, _to_bytes("", "BYTES", elements))


def check_json_datatype(name: str, datatype: str) -> None:
    """Check that JSON can represent an output's values; of floating-point ones, the finite ones."""
    if datatype in ("FP16", "BF16"):
        raise _output_error(name, f"{datatype} cannot be sent as JSON")


def json_slices(name: str, tensor: Array) -> Iterator[bytes]:
    """Yield the inside of a JSON list of the values, in slices that take about a millisecond each.

    Raises `InvalidRequest` if JSON cannot represent the values, or there are too many.
    """
    check_json_datatype(name, tensor.datatype)
    if math.prod(tensor.shape) > MAX_JSON_VALUES:
        raise _output_error(
            name, f"{math.prod(tensor.shape)} values are too many for JSON, which takes {MAX_JSON_VALUES}"
        )
    if tensor.datatype == "BYTES":
        yield to_json(to_strings(name, tensor))[1:-1]
        return
    step = SLICE_VALUES * VALUE_BYTES[tensor.datatype]
    for start in range(0, len(tensor.data), step):
        yield (b"," if start else b"") + _json_list(name, tensor.datatype, tensor.data[start : start + step])[1:-1]


def _json_list(name: str, datatype: str, data: bytes) -> bytes:
    if datatype == "BOOL":
        return to_json(list(map(bool, data)))
    values = numpy.frombuffer(data, _NUMPY[datatype])
    if datatype in ("FP32", "FP64") and not numpy.isfinite(values).all():
        raise _output_error(name, "it has values that are not finite, which JSON cannot represent")
    return to_json_list(values) if datatype == "FP32" else to_json(values.tolist())


def _num_values(name: str, datatype: str, shape: tuple[int, ...]) -> int:
    count = math.prod(shape)
    if datatype == "BYTES":
        if count > MAX_STRINGS:
            raise _input_error(name, f"the shape {list(shape)} has {count} elements, and BYTES may have {MAX_STRINGS}")
    elif datatype not in VALUE_BYTES:
        raise _input_error(name, f"{datatype[:20]!r} is not a datatype: use BYTES, {', '.join(VALUE_BYTES)}")
    return count


def _flatten(name: str, shape: tuple[int, ...], values: Any) -> list[Any]:
    """Return the values as a flat list; nested ones must be nested exactly according to the shape."""
    if not isinstance(values, list):
        raise _input_error(name, "data must be a list")
    if not values or type(values[0]) is not list:
        return values
    level = [values]
    for size in shape:
        if any(type(row) is not list or len(row) != size for row in level):
            raise _input_error(name, f"data is not nested as the shape {list(shape)} says")
        level = list(chain.from_iterable(level))
    return level


def _to_bytes(name: str, datatype: str, values: Sequence[Any]) -> bytes:
    try:
        if datatype == "BYTES":
            elements = [value.encode() for value in values]
            return b"".join(struct.pack("<I", len(element)) + element for element in elements)
        if datatype == "BOOL":
            return bytes(values)
        if datatype in ("FP32", "FP64"):
            _check_finite(name, datatype, values)
        return array.array(_TYPE_CODES[datatype], values).tobytes()
    except OverflowError as error:
        raise _input_error(name, f"data has a number that {datatype} cannot hold") from error
    except UnicodeEncodeError as error:
        raise _input_error(name, "data has a string that is not Unicode text") from error


def _check_finite(name: str, datatype: str, values: Sequence[float]) -> None:
    """Check that all values are finite and fit the datatype.

    JSON has no infinity, and a value too large for FP32 would silently become one.
    """
    if not all(map(math.isfinite, values)):
        raise _input_error(name, "data must be finite numbers")
    if datatype == "FP32" and values and max(map(abs, values)) > LARGEST_FP32:
        raise OverflowError


def _elements(name: str, data: bytes, count: int) -> Iterator[bytes]:
    position = 0
    for _ in range(count):
        start = position + 4
        end = start + int.from_bytes(data[position:start], "little")
        if start > len(data) or end > len(data):
            raise _input_error(name, f"its binary data ends within an element: the shape has {count}")
        yield data[start:end]
        position = end


def _input_error(name: str, sentence: str) -> InvalidRequest:
    return InvalidRequest(f"Input {name[:100]!r}: {sentence}.", field=name[:100])


def _output_error(name: str, sentence: str) -> InvalidRequest:
    return InvalidRequest(f"Output {name!r}: {sentence}; ask for it with the parameter binary_data.", field=name)


HEADER = TENSOR_HEADER.decode()
VERSION = "1"  # version of the served model


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A parsed `infer` request with its tensors by name.

    `outputs` maps each requested output to whether it is requested as binary (None: not specified); None: all.
    `classes` is the number of classes that are requested in place of an output's values. `known` is set if its JSON was
    parsed before.
    """

    inputs: Mapping[str, Array]
    outputs: Mapping[str, bool | None] | None = None
    id: str | None = None
    parameters: InferParameters = field(default_factory=InferParameters)
    classes: Mapping[str, int] = field(default_factory=dict)
    known: KnownHead | None = None

    def is_binary(self, output: str) -> bool:
        """Return True if the output is sent as binary data. An output's own parameter overrides the request's."""
        requested = (self.outputs or {}).get(output)
        return bool(self.parameters.binary_data_output) if requested is None else requested


def split_body(request: Request, body: bytes | bytearray) -> tuple[bytes | bytearray, bytes | None]:
    """Return the JSON part of the body and the rest, which is None without the header for binary tensors."""
    declared = request.headers.get(HEADER)
    if declared is None:
        return body, None
    length = int(declared) if declared.isascii() and declared.isdigit() and len(declared) < 20 else len(body) + 1
    if length > len(body):
        raise InvalidRequest(
            f"{HEADER} must be the number of the JSON's bytes, at most the body's {len(body)}, not {declared[:40]!r}."
        )
    if length > MAX_BODY_BYTES:
        raise BodyTooLarge(f"The JSON before binary tensors may have at most {MAX_BODY_BYTES} bytes.")
    return body[:length], bytes(memoryview(body)[length:])


def parse_infer_request(
    head: bytes | bytearray, tail: bytes | None, report: ReportIgnored | None = None
) -> InferRequest:
    """Parse the body and check every tensor's datatype, shape and bytes for consistency.

    The model's own requirements are checked later. Clients repeat the JSON of binary tensors, and only the bytes differ:
    such JSON is parsed once.
    """
    key = bytes(head) if tail is not None and len(head) <= _MAX_KNOWN_BYTES else b""
    known = _known_heads.get(key)
    if known is not None and tail is not None and len(tail) == known.num_bytes:
        return known.request_for(tail)
    if not head.strip():
        raise InvalidRequest("The body is empty: send a JSON object with inputs.")
    ignored: list[str] = []
    body = parse_body(InferBody, head, lambda _, names: ignored.extend(names))
    if ignored and report is not None:
        report(InferBody.API, ignored)
    request = InferRequest(
        _inputs(body.inputs, tail),
        _outputs(body.outputs),
        body.id,
        body.parameters or InferParameters(),
        {one.name: count for one in body.outputs or () if one.parameters and (count := one.parameters.classification)},
    )
    if (
        key
        and not ignored
        and not any(one.datatype in ("BYTES", "BOOL") or one.binary_size is None for one in body.inputs)
    ):
        if len(_known_heads) >= _MAX_KNOWN_HEADS:
            _known_heads.clear()
        _known_heads[key] = KnownHead(request)
    return request


class KnownHead:
    """The JSON of a request whose tensors are binary, and may have any values.

    `model` is the last one that accepted its tensors, and `outputs` are the names of the outputs that it then returns.
    """

    def __init__(self, request: InferRequest) -> None:
        self._request = replace(request, inputs={})  # without the first values, which may be many
        self._places: list[tuple[str, str, tuple[int, ...], int, int]] = []
        self.num_bytes = 0
        for name, tensor in request.inputs.items():
            end = self.num_bytes + len(tensor.data)
            self._places.append((name, tensor.datatype, tensor.shape, self.num_bytes, end))
            self.num_bytes = end
        self.model: object = None
        self.outputs: tuple[str, ...] = ()

    def request_for(self, tail: bytes) -> InferRequest:
        """Return the request with other values."""
        inputs = {name: Array(kind, shape, tail[start:end]) for name, kind, shape, start, end in self._places}
        same = self._request
        return InferRequest(inputs, same.outputs, same.id, same.parameters, same.classes, self)


_known_heads: dict[bytes, KnownHead] = {}


def _inputs(tensors: tuple[InputTensor, ...], tail: bytes | None) -> dict[str, Array]:
    inputs: dict[str, Array] = {}
    position = 0
    for tensor in tensors:
        name, size = tensor.name, tensor.binary_size
        if name in inputs:
            raise _body_error(name, "it is given twice in inputs")
        if (size is None) == (tensor.data is None):
            raise _body_error(name, "it needs either data or the parameter binary_data_size")
        if size is None:
            inputs[name] = from_json(name, tensor.datatype, tensor.shape, tensor.data)
            continue
        data = _binary_part(name, tail, position, size)
        inputs[name] = from_binary(name, tensor.datatype, tensor.shape, data)
        position += size
    if tail is not None and position != len(tail):
        raise InvalidRequest(
            f"The JSON is followed by {len(tail)} bytes, but the inputs' binary_data_size add up to {position}."
        )
    return inputs


def _binary_part(name: str, tail: bytes | None, position: int, size: int) -> bytes:
    if tail is None:
        raise _body_error(name, f"binary_data_size needs the header {HEADER}, which says where the JSON ends")
    if size < 0:
        raise _body_error(name, f"binary_data_size must be 0 or more, not {size}")
    if position + size > len(tail):
        raise _body_error(
            name, f"binary_data_size is {size}, and only {len(tail) - position} bytes are left of the body"
        )
    return tail[position : position + size]


def _outputs(tensors: tuple[OutputTensor, ...] | None) -> dict[str, bool | None] | None:
    """Return the requested outputs; None for an empty list, which means the same as an absent one."""
    if not tensors:
        return None
    outputs = {tensor.name: tensor.parameters.binary_data if tensor.parameters else None for tensor in tensors}
    if len(outputs) < len(tensors):
        raise InvalidRequest("An output is given twice in outputs.", field="outputs")
    return outputs


@dataclass(frozen=True, slots=True)
class InferResult:
    arrays: Mapping[str, Array]
    timings: Timings
    parameters: Mapping[str, int] = field(default_factory=dict)


async def render_response(model_name: str, inference: InferRequest, result: InferResult) -> Response:
    """Return the response, with each array as JSON or as bytes after the JSON, as requested."""
    arrays = result.arrays
    binary = {name: array for name, array in arrays.items() if inference.is_binary(name)}
    headers = server_timing([result.timings], "queue", "encode")
    outputs = [
        _binary_json(name, array.datatype, array.shape, len(array.data))
        if name in binary
        else await _output_json(name, array)
        for name, array in arrays.items()
    ]
    head = _start_json(model_name, inference.id, result.parameters) + b",".join(outputs) + b"]}"
    if not binary:
        return Response(head, media_type="application/json", headers=headers)
    return Response(
        b"".join([head, *(array.data for array in binary.values())]),
        media_type="application/octet-stream",
        headers={**headers, HEADER: str(len(head))},
    )


def _start_json(model_name: str, identity: str | None, parameters: Mapping[str, int]) -> bytes:
    body: dict[str, Any] = {"model_name": model_name, "model_version": VERSION}
    body |= {} if identity is None else {"id": identity}
    body |= {"parameters": parameters} if parameters else {}
    return to_json(body)[:-1] + b',"outputs":['


@lru_cache(maxsize=_MAX_KNOWN_HEADS)
def _binary_json(name: str, datatype: str, shape: tuple[int, ...], num_bytes: int) -> bytes:
    body = {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": num_bytes}}
    return to_json(body)


async def _output_json(name: str, array: Array) -> bytes:
    """Return the JSON of one output. Many values are written in slices; the event loop serves requests between them."""
    body = {"name": name, "datatype": array.datatype, "shape": array.shape}
    slices: list[bytes] = []
    for written in json_slices(name, array):
        if slices:
            await asyncio.sleep(0)
        slices.append(written)
    return to_json(body)[:-1] + b',"data":[' + b"".join(slices) + b"]}"


def _body_error(name: str, sentence: str) -> InvalidRequest:
    return InvalidRequest(f"Input {name[:100]!r}: {sentence}.", field=name[:100])
