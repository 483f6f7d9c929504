"""Synthetic input rows for a model served over the Open Inference Protocol.

Rows follow the signature that the server reports and are sent as binary tensors.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from app.bench.stats import MeasurementFailed
from app.bench.wire import Answer, Body
from app.bench.workload import Lengths, LogNormal

HEADER = "Inference-Header-Content-Length"  # length of the JSON header in bytes; the tensors follow it
FREE_SIZE = 16  # default size of a free dimension, as in the server's own calibration
USUAL_FREE = Lengths(FREE_SIZE, FREE_SIZE)
MOST_BODIES = 32  # different bodies; after the last one the first is sent again
MOST_BYTES = 2**26  # total size of all bodies
Shape = tuple[int, ...]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """Content of every request: `number` rows.

    `free` gives the sizes of dimensions that the caller chooses. Integers are drawn from 0 to `below` - 1.
    """

    number: int
    free: Lengths | LogNormal = USUAL_FREE
    below: int = 2  # valid for embedding tables with two or more rows
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Input:
    """One input tensor of the model. `shape` excludes the batch dimension; -1 marks a size that the caller chooses."""

    name: str
    datatype: str
    shape: Shape


def inputs_of(metadata: Mapping[str, Any], path: str) -> tuple[Input, ...]:
    """Parse the inputs from the answer of `/v2/models/{m}`.

    Raises:
        MeasurementFailed: The answer has no valid inputs, or one of a datatype that cannot be generated.
    """
    try:
        inputs = tuple(
            Input(str(one["name"]), str(one["datatype"]), tuple(map(int, one["shape"][1:]))) for one in metadata["inputs"]
        )
    except (LookupError, TypeError, ValueError) as error:
        raise MeasurementFailed(f"{path} does not describe the model's inputs: {str(metadata)[:200]}") from error
    strange = [one for one in inputs if one.datatype not in _MAKERS]
    if strange or not inputs:
        told = f"takes {strange[0].name!r} of datatype {strange[0].datatype}" if strange else "takes no inputs"
        raise MeasurementFailed(
            f"{path}: the model {told}; --kind infer generates numbers only (for texts use --kind embed --api oip)"
        )
    return inputs


def bodies(inputs: Sequence[Input], rows: Rows) -> tuple[Body, ...]:
    """Build requests with different contents that are identical on every machine.

    They are built before the measurement because building them takes processor time from the server.
    """
    made: list[Body] = []
    source, deck = random.Random(rows.seed), numpy.random.default_rng(rows.seed)
    num_bytes = 0
    while not made or (len(made) < MOST_BODIES and num_bytes + len(made[-1].content) <= MOST_BYTES):
        made.append(_body(inputs, rows, rows.free.draw(source), deck))
        num_bytes += len(made[-1].content)
    return tuple(made)


def check_answer(answer: Answer, path: str, num_rows: int) -> None:
    """Check that an answer has a tensor with `num_rows` rows.

    Raises:
        MeasurementFailed: The answer is not a list of tensors, or none has `num_rows` rows.
    """
    length = answer.headers.get(HEADER.lower(), "")
    head = answer.body[: int(length)] if length.isdecimal() else answer.body
    try:
        firsts = [int(output["shape"][0]) for output in json.loads(head)["outputs"]]
    except (ValueError, LookupError, TypeError) as error:
        raise MeasurementFailed(f"{path} did not answer with tensors: {head[:200]!r}") from error
    if num_rows not in firsts:
        raise MeasurementFailed(f"{path} answered a request of {num_rows} rows with tensors of {firsts} rows")


def _body(inputs: Sequence[Input], rows: Rows, free: int, deck: numpy.random.Generator) -> Body:
    told: list[Json] = []
    parts: list[bytes] = []
    for each in inputs:
        shape = (rows.number, *(free if size < 0 else size for size in each.shape))
        part = _MAKERS[each.datatype](deck, shape, rows.below).tobytes()
        sizes = {"binary_data_size": len(part)}
        told.append({"name": each.name, "datatype": each.datatype, "shape": shape, "parameters": sizes})
        parts.append(part)
    head = json.dumps({"inputs": told, "parameters": {"binary_data_output": True}}).encode()
    return Body(b"".join((head, *parts)), f"Content-Type: application/octet-stream\r\n{HEADER}: {len(head)}\r\n")


Array = Any
Make = Callable[[numpy.random.Generator, Shape, int], Array]


def _brain(deck: numpy.random.Generator, shape: Shape, below: int) -> Array:
    """Return BF16 values as the upper half of FP32 values; numpy has no BF16 type."""
    return (deck.standard_normal(shape, dtype=numpy.float32).view(numpy.uint32) >> 16).astype(numpy.uint16)


def _floating(dtype: str) -> Make:
    return lambda deck, shape, below: deck.standard_normal(shape).astype(dtype)


def _whole(dtype: str) -> Make:
    return lambda deck, shape, below: deck.integers(0, min(below, int(numpy.iinfo(dtype).max)), shape).astype(dtype)


def _makers() -> Iterator[tuple[str, Make]]:
    for bits in (8, 16, 32, 64):
        yield f"INT{bits}", _whole(f"int{bits}")
        yield f"UINT{bits}", _whole(f"uint{bits}")
    for bits in (16, 32, 64):
        yield f"FP{bits}", _floating(f"float{bits}")
    yield "BF16", _brain
    yield "BOOL", lambda deck, shape, below: deck.integers(0, 2, shape).astype("bool")


_MAKERS: Mapping[str, Make] = dict(_makers())
