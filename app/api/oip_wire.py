"""Wire format of `infer`: JSON followed by binary tensors, or one bare tensor; and the same for responses."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from app.api.door import MAX_BODY_BYTES, TENSOR_HEADER
from app.api.fold import server_timing
from app.api.oip_schemas import InferBody, InferParameters, InputTensor, OutputTensor
from app.api.oip_tensors import from_binary, from_json, json_slices
from app.api.schemas import parse
from app.errors import BodyTooLarge, InvalidRequest
from app.messages import Array, Timings

HEADER = TENSOR_HEADER.decode()
VERSION = "1"  # version of the served model


@dataclass(frozen=True, slots=True)
class Inference:
    """A parsed `infer` request with its tensors by name.

    `outputs` None means all. Otherwise it maps each requested output to whether it is requested as binary (None:
    not specified).
    """

    inputs: Mapping[str, Array]
    outputs: Mapping[str, bool | None] | None = None
    id: str | None = None
    parameters: InferParameters = field(default_factory=InferParameters)

    def is_binary(self, output: str) -> bool:
        """Return True if the output is sent as binary data. An output's own parameter overrides the request's."""
        own = (self.outputs or {}).get(output)
        return bool(self.parameters.binary_data_output) if own is None else own


def split(request: Request, body: bytes) -> tuple[bytes, bytes | None]:
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
    return body[:length], body[length:]


def read_inference(head: bytes, tail: bytes | None) -> Inference:
    """Parse the body and check every tensor's datatype, shape and bytes for consistency.

    The model's own requirements are checked later.
    """
    if not head.strip():
        raise InvalidRequest("The body is empty: send a JSON object with inputs.")
    body = parse(InferBody, head)
    return Inference(_inputs(body.inputs, tail), _outputs(body.outputs), body.id, body.parameters or InferParameters())


def _inputs(tensors: tuple[InputTensor, ...], tail: bytes | None) -> dict[str, Array]:
    inputs: dict[str, Array] = {}
    position = 0
    for tensor in tensors:
        name, size = tensor.name, tensor.binary_size
        if name in inputs:
            raise _wrong(name, "it is given twice in inputs")
        if (size is None) == (tensor.data is None):
            raise _wrong(name, "it needs either data or the parameter binary_data_size")
        if size is None:
            inputs[name] = from_json(name, tensor.datatype, tensor.shape, tensor.data)
            continue
        data = _part(name, tail, position, size)
        inputs[name] = from_binary(name, tensor.datatype, tensor.shape, data)
        position += size
    if tail is not None and position != len(tail):
        raise InvalidRequest(f"The JSON is followed by {len(tail)} bytes, but the inputs' binary_data_size add up to {position}.")
    return inputs


def _part(name: str, tail: bytes | None, position: int, size: int) -> bytes:
    if tail is None:
        raise _wrong(name, f"binary_data_size needs the header {HEADER}, which says where the JSON ends")
    if size < 0:
        raise _wrong(name, f"binary_data_size must be 0 or more, not {size}")
    if position + size > len(tail):
        raise _wrong(name, f"binary_data_size is {size}, and only {len(tail) - position} bytes are left of the body")
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
class Answered:
    """Result of an `infer`: arrays in order, and the response's `parameters`."""

    arrays: Mapping[str, Array]
    timings: Timings
    parameters: Mapping[str, int] = field(default_factory=dict)


async def render(model_name: str, asked: Inference, answered: Answered) -> Response:
    """Return the response, with each array as JSON or as bytes after the JSON, as requested."""
    about: dict[str, Any] = {"model_name": model_name, "model_version": VERSION}
    about |= {} if asked.id is None else {"id": asked.id}
    about |= {"parameters": answered.parameters} if answered.parameters else {}
    arrays = answered.arrays
    outputs = [await _told(name, array, asked.is_binary(name)) for name, array in arrays.items()]
    head = to_json(about)[:-1] + b',"outputs":[' + b",".join(outputs) + b"]}"
    binary = [array.data for name, array in arrays.items() if asked.is_binary(name)]
    headers = server_timing([answered.timings], "queue", "encode")
    if not binary:
        return Response(head, media_type="application/json", headers=headers)
    return Response(b"".join([head, *binary]), media_type="application/octet-stream", headers={**headers, HEADER: str(len(head))})


async def _told(name: str, array: Array, as_binary: bool) -> bytes:
    """Return the JSON of one output.

    Many values are written in slices, between which the event loop serves other requests.
    """
    about = {"name": name, "datatype": array.datatype, "shape": array.shape}
    if as_binary:
        return to_json(about | {"parameters": {"binary_data_size": len(array.data)}})
    slices: list[bytes] = []
    for written in json_slices(name, array):
        if slices:
            await asyncio.sleep(0)
        slices.append(written)
    return to_json(about)[:-1] + b',"data":[' + b"".join(slices) + b"]}"


def _wrong(name: str, sentence: str) -> InvalidRequest:
    return InvalidRequest(f"Input {name[:100]!r}: {sentence}.", field=name[:100])
