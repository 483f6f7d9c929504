"""An `infer` as it lies on the wire: JSON with the bytes of binary tensors behind it, or one bare tensor; and its answer likewise."""

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
VERSION = "1"  # of the one model that a process serves


@dataclass(frozen=True, slots=True)
class Inference:
    """What a client asks: tensors by name. `outputs` None: all; else which, each with whether it is wanted as binary (None: not said)."""

    inputs: Mapping[str, Array]
    outputs: Mapping[str, bool | None] | None = None
    id: str | None = None
    parameters: InferParameters = field(default_factory=InferParameters)

    def is_binary(self, output: str) -> bool:
        """An output's own word overrides the request's."""
        own = (self.outputs or {}).get(output)
        return bool(self.parameters.binary_data_output) if own is None else own


def split(request: Request, body: bytes) -> tuple[bytes, bytes | None]:
    """The JSON and what is behind it, which is None where the request does not speak of binary tensors."""
    declared = request.headers.get(HEADER)
    if declared is None:
        return body, None
    length = int(declared) if declared.isascii() and declared.isdigit() and len(declared) < 20 else len(body) + 1
    if length > len(body):
        raise InvalidRequest(f"{HEADER} must be the JSON's bytes, at most the body's {len(body)}, not {declared[:40]!r}.")
    if length > MAX_BODY_BYTES:
        raise BodyTooLarge(f"The JSON before binary tensors may have {MAX_BODY_BYTES} bytes at the most.")
    return body[:length], body[length:]


def read_inference(head: bytes, tail: bytes | None) -> Inference:
    """Checks every tensor against its own datatype, shape and bytes; what a model wants is held against it later."""
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
            raise _wrong(name, "it stands in inputs twice")
        if (size is None) == (tensor.data is None):
            raise _wrong(name, "it needs either data or the parameter binary_data_size")
        if size is None:
            inputs[name] = from_json(name, tensor.datatype, tensor.shape, tensor.data)
            continue
        data = _part(name, tail, position, size)
        inputs[name] = from_binary(name, tensor.datatype, tensor.shape, data)
        position += size
    if tail is not None and position != len(tail):
        raise InvalidRequest(
            f"Behind the JSON are {len(tail)} bytes, of which the inputs' binary_data_size account for {position}."
        )
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
    """An empty list asks for nothing in particular, as none at all does."""
    if not tensors:
        return None
    outputs = {tensor.name: tensor.parameters.binary_data if tensor.parameters else None for tensor in tensors}
    if len(outputs) < len(tensors):
        raise InvalidRequest("An output stands in outputs twice.", field="outputs")
    return outputs


@dataclass(frozen=True, slots=True)
class Answered:
    """What comes back: arrays in their order, and what the answer's own `parameters` say."""

    arrays: Mapping[str, Array]
    timings: Timings
    parameters: Mapping[str, int] = field(default_factory=dict)


async def render(model_name: str, asked: Inference, answered: Answered) -> Response:
    """The arrays as JSON, or as bytes behind it, whichever each was asked for."""
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
    """What the answer's JSON says of an output. Many values are written with pauses, in which other requests are served."""
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
