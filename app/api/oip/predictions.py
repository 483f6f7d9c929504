"""What clients send and read besides tensors: pictures, instances of version 1, and classes in place of values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from pydantic_core import to_json

from app.api.oip.tensors import from_binary, from_json, from_strings, json_array, to_elements
from app.errors import InvalidRequest
from app.messages import Array, TensorSpec
from app.service.program_pictures import picture_file
from app.service.served_model import ServedProgram

_TORCHSERVE_CLASSES = 5  # of TorchServe's image_classifier


# ---- pictures ----------------------------------------------------------------------------------------------------------


def split_pictures(
    model: ServedProgram, inputs: Mapping[str, Array]
) -> tuple[dict[str, Array], dict[str, tuple[bytes, ...]]]:
    """Return the tensors, and the files of BYTES tensors for inputs that are described as pictures."""
    known = model.description.pictures
    files = {name: array for name, array in inputs.items() if array.datatype == "BYTES" and name in known}
    for name, array in files.items():
        if len(array.shape) != 1:
            raise InvalidRequest(f"Input {name!r}: pictures have the shape [n], not {list(array.shape)}.", field=name)
    pictures = {
        name: tuple(picture_file(one, f"{name}[{at}]") for at, one in enumerate(to_elements(name, array)))
        for name, array in files.items()
    }
    return {name: array for name, array in inputs.items() if name not in files}, pictures


def picture_input(model: object, body: bytes) -> dict[str, Array]:
    """Return the single input of a body that is a picture. Raises `InvalidRequest`."""
    known = list(model.description.pictures) if isinstance(model, ServedProgram) else []
    if len(known) != 1:
        raise InvalidRequest(
            "The body is a picture, and this model has no single input that takes one: send tensors."
            if not known
            else f"The body is a picture, and several inputs take one ({', '.join(known)}): send a JSON object."
        )
    return {known[0]: from_binary(known[0], "BYTES", (1,), len(body).to_bytes(4, "little") + body)}


# ---- version 1 -------------------------------------------------------------------------------------------------------


def instance_inputs(model: ServedProgram, instances: Sequence[Any]) -> dict[str, Array]:
    """Return the tensors of instances. Raises `InvalidRequest`, with the input."""
    specs = model.signature.inputs
    names = {spec.name for spec in specs}
    is_named = all(isinstance(one, dict) and "b64" not in one for one in instances)
    if not is_named and len(specs) > 1:
        raise InvalidRequest(
            f"An instance must be an object with {', '.join(spec.name for spec in specs)}.", field="instances"
        )
    columns: dict[str, list[Any]] = {spec.name: [] for spec in specs}
    for at, instance in enumerate(instances):
        values = instance if is_named else {specs[0].name: instance}
        if values.keys() != names:
            odd = min(names ^ values.keys())
            raise InvalidRequest(
                f"instances[{at}] must have the inputs {', '.join(sorted(names))}, and nothing else ({odd[:100]}).",
                field=f"instances[{at}]",
            )
        for name, value in values.items():
            columns[name].append(value)
    return {spec.name: _column(model, spec, columns[spec.name]) for spec in specs}


def _column(model: ServedProgram, spec: TensorSpec, values: list[Any]) -> Array:
    if all(isinstance(value, dict) for value in values):
        if spec.name not in model.description.pictures:
            raise InvalidRequest(f"Input {spec.name!r} does not take pictures.", field=spec.name)
        texts = [value.get("b64") for value in values]
        if not all(isinstance(text, str) and len(value) == 1 for text, value in zip(texts, values, strict=True)):
            raise InvalidRequest(f'Input {spec.name!r}: a picture is {{"b64": "..."}}.', field=spec.name)
        return from_strings([text for text in texts if text is not None], (len(texts),))
    return from_json(spec.name, spec.datatype, _nested_shape(values), values)


def _nested_shape(values: Any) -> tuple[int, ...]:
    shape = []
    while isinstance(values, list):
        shape.append(len(values))
        values = values[0] if values else None
    return tuple(shape)


def predictions(arrays: Mapping[str, Array]) -> bytes:
    """Return the response of version 1 as JSON: rows of the only output, or objects with a row of each."""
    rows = {name: json_array(name, array).tolist() for name, array in arrays.items()}
    if len(rows) == 1:
        return to_json({"predictions": next(iter(rows.values()))})
    return to_json({"predictions": [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]})


# ---- classes ---------------------------------------------------------------------------------------------------------


def check_classes(spec: TensorSpec, count: int) -> None:
    """Raise `InvalidRequest` if an output has no such number of classes in each row."""
    if spec.datatype not in ("FP32", "FP64") or len(spec.shape) != 2:
        raise InvalidRequest(
            f"Output {spec.name!r} is {spec.datatype} of the shape {list(spec.shape)}: classification needs a row of FP32 for"
            " each row of the batch.",
            field=spec.name,
        )
    if 0 <= spec.shape[1] < count:
        raise InvalidRequest(
            f"Output {spec.name!r} has {spec.shape[1]} classes, not {count}: ask for fewer by classification.",
            field=spec.name,
        )


def class_strings(array: Array, count: int, labels: Sequence[str] = ()) -> Array:
    """Return the largest values of each row as Triton's `value:index:label`, BYTES [rows, count]."""
    rows = _values(array)
    order = numpy.argsort(-rows, axis=1, kind="stable")[:, :count]
    texts = [
        f"{rows[row, at]:f}:{at}" + (f":{labels[at]}" if labels else "")
        for row, best in enumerate(order)
        for at in best
    ]
    return from_strings(texts, order.shape)


def best_labels(model: ServedProgram, arrays: Mapping[str, Array]) -> bytes:
    """Return TorchServe's answer to one picture: probabilities of its best labels, else the values."""
    name = next((name for name in arrays if name in model.description.labels), None)
    if name is None:
        values = [json_array(one, array).tolist()[0] for one, array in arrays.items()]
        return to_json(values[0] if len(values) == 1 else dict(zip(arrays, values, strict=True)))
    labels, row = model.description.labels[name], _values(arrays[name])[0].astype(numpy.float64)
    powers = numpy.exp(row - row.max())
    shares = powers / powers.sum()
    best = numpy.argsort(-shares, kind="stable")[:_TORCHSERVE_CLASSES]
    return to_json({labels[at]: float(shares[at]) for at in best if math.isfinite(shares[at])})


def _values(array: Array) -> Any:
    return numpy.frombuffer(array.data, "<f8" if array.datatype == "FP64" else "<f4").reshape(array.shape)
