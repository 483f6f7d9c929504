"""Exported programs under load, as measured by `armature bench http --kind infer`, over the Open Inference Protocol.

Synthetic input rows follow the signature that the server reports and are sent as binary tensors.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy

from armature_bench.console import Figure, MeasurementFailed
from armature_bench.http import loops
from armature_bench.http.load import LoadLevel, ServerTarget
from armature_bench.http.loops import LoadRun, RateMetric, RunLimits, ServerRuns, rate_figure
from armature_bench.http.tally import failure_figures, latency_figure, served_model
from armature_bench.http.wire import HttpBody, HttpClient, HttpResponse
from armature_bench.http.workload import LogNormalLengths, UniformLengths

BINARY_HEADER = "Inference-Header-Content-Length"  # length of the JSON header in bytes; the tensors follow it
FREE_SIZE = 16  # default size of a free dimension, as in the server's own calibration
DEFAULT_FREE_LENGTHS = UniformLengths(FREE_SIZE, FREE_SIZE)
MAX_BODIES = 32  # different bodies; after the last one the first is sent again
MAX_TOTAL_BODY_BYTES = 2**26  # total size of all bodies
Shape = tuple[int, ...]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class InferWorkload:
    """Content of every request: `number` rows.

    `free` gives the sizes of dimensions that the caller chooses. Integers are drawn from 0 to `below` - 1.
    """

    number: int
    free: UniformLengths | LogNormalLengths = DEFAULT_FREE_LENGTHS
    below: int = 2  # valid for embedding tables with two or more rows
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One input tensor of the model. `shape` excludes the batch dimension; -1 marks a size that the caller chooses."""

    name: str
    datatype: str
    shape: Shape


def parse_inputs(metadata: Mapping[str, Any], path: str) -> tuple[ModelInput, ...]:
    """Parse the inputs from the answer of `/v2/models/{m}`.

    Raises `MeasurementFailed` if it has no valid inputs, or one of a datatype that cannot be generated.
    """
    try:
        inputs = tuple(
            ModelInput(str(one["name"]), str(one["datatype"]), tuple(map(int, one["shape"][1:])))
            for one in metadata["inputs"]
        )
    except (LookupError, TypeError, ValueError) as error:
        raise MeasurementFailed(f"{path} does not describe the model's inputs: {str(metadata)[:200]}") from error
    unsupported = [one for one in inputs if one.datatype not in _GENERATORS]
    if unsupported or not inputs:
        complaint = (
            f"takes {unsupported[0].name!r} of datatype {unsupported[0].datatype}" if unsupported else "takes no inputs"
        )
        raise MeasurementFailed(
            f"{path}: the model {complaint}; --kind infer generates numbers only (for texts use --kind embed --api oip)"
        )
    return inputs


def build_bodies(inputs: Sequence[ModelInput], rows: InferWorkload) -> tuple[HttpBody, ...]:
    """Build requests with different contents that are identical on every machine.

    They are built before the measurement because building them takes processor time from the server.
    """
    built: list[HttpBody] = []
    source, rng = random.Random(rows.seed), numpy.random.default_rng(rows.seed)
    num_bytes = 0
    while not built or (len(built) < MAX_BODIES and num_bytes + len(built[-1].content) <= MAX_TOTAL_BODY_BYTES):
        built.append(_body(inputs, rows, rows.free.draw(source), rng))
        num_bytes += len(built[-1].content)
    return tuple(built)


def check_answer(answer: HttpResponse, path: str, num_rows: int) -> None:
    """Raise `MeasurementFailed` if no tensor of an answer has `num_rows` rows."""
    length = answer.headers.get(BINARY_HEADER.lower(), "")
    head = answer.body[: int(length)] if length.isdecimal() else answer.body
    try:
        firsts = [int(output["shape"][0]) for output in json.loads(head)["outputs"]]
    except (ValueError, LookupError, TypeError) as error:
        raise MeasurementFailed(f"{path} did not answer with tensors: {head[:200]!r}") from error
    if num_rows not in firsts:
        raise MeasurementFailed(f"{path} answered a request of {num_rows} rows with tensors of {firsts} rows")


def _body(inputs: Sequence[ModelInput], rows: InferWorkload, free: int, rng: numpy.random.Generator) -> HttpBody:
    tensors: list[Json] = []
    parts: list[bytes] = []
    for each in inputs:
        shape = (rows.number, *(free if size < 0 else size for size in each.shape))
        part = _GENERATORS[each.datatype](rng, shape, rows.below).tobytes()
        sizes = {"binary_data_size": len(part)}
        tensors.append({"name": each.name, "datatype": each.datatype, "shape": shape, "parameters": sizes})
        parts.append(part)
    head = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
    return HttpBody(
        b"".join((head, *parts)), f"Content-Type: application/octet-stream\r\n{BINARY_HEADER}: {len(head)}\r\n"
    )


Array = Any
ValueGenerator = Callable[[numpy.random.Generator, Shape, int], Array]


def _bf16_values(rng: numpy.random.Generator, shape: Shape, below: int) -> Array:
    """Return BF16 values as the upper half of FP32 values; numpy has no BF16 type."""
    return (rng.standard_normal(shape, dtype=numpy.float32).view(numpy.uint32) >> 16).astype(numpy.uint16)


def _float_values(dtype: str) -> ValueGenerator:
    return lambda deck, shape, below: deck.standard_normal(shape).astype(dtype)


def _integer_values(dtype: str) -> ValueGenerator:
    return lambda deck, shape, below: deck.integers(0, min(below, int(numpy.iinfo(dtype).max)), shape).astype(dtype)


def _generators() -> Iterator[tuple[str, ValueGenerator]]:
    for bits in (8, 16, 32, 64):
        yield f"INT{bits}", _integer_values(f"int{bits}")
        yield f"UINT{bits}", _integer_values(f"uint{bits}")
    for bits in (16, 32, 64):
        yield f"FP{bits}", _float_values(f"float{bits}")
    yield "BF16", _bf16_values
    yield "BOOL", lambda deck, shape, below: deck.integers(0, 2, shape).astype("bool")


_GENERATORS: Mapping[str, ValueGenerator] = dict(_generators())


@dataclass(frozen=True, slots=True)
class InferTiming:
    """Timing of one answered request, in `time.perf_counter` seconds.

    `intended` is when the request should have been sent; latency starts there. `client` is the index of its client.
    """

    intended: float
    client: int
    started: float
    ended: float
    num_rows: int


class InferTraffic:
    """Requests to one server.

    Bodies are sent in a fixed order, so every server with the same signature receives the same requests.
    """

    def __init__(self, wire: HttpClient, path: str, request_bodies: Sequence[HttpBody], num_rows: int) -> None:
        self._wire, self._path, self._bodies, self._num_rows = wire, path, request_bodies, num_rows
        self._num_sent = 0

    async def run_closed_loop(self, run: LoadRun[InferTiming], num_clients: int, bounds: RunLimits) -> None:
        await loops.run_closed_loop(run, num_clients, bounds, self._one)

    async def run_open_loop(self, run: LoadRun[InferTiming], moments: Iterable[float], bounds: RunLimits) -> None:
        await loops.run_open_loop(run, moments, bounds, self._one)

    async def warm_up(self, num_requests: int) -> None:
        """Send concurrent requests that are not recorded. Errors are ignored: they will occur again when measured."""
        await asyncio.gather(*(self._send_next() for _ in range(num_requests)), return_exceptions=True)

    async def check(self) -> None:
        """Send one request and check its answer; the other answers are not parsed, to save processor time.

        Raises `MeasurementFailed` if the answer does not have the expected tensors.
        """
        check_answer(await self._send_next(), self._path, self._num_rows)

    async def _one(self, run: LoadRun[InferTiming], client: int, intended: float) -> InferTiming:
        started = time.perf_counter()
        await self._send_next()
        ended = time.perf_counter()
        run.num_units += self._num_rows
        return InferTiming(intended, client, started, ended, self._num_rows)

    async def _send_next(self) -> HttpResponse:
        """Send the next body and return the whole answer without parsing it. Raises `HttpRequestFailed`."""
        body = self._bodies[self._num_sent % len(self._bodies)]
        self._num_sent += 1
        return (await self._wire.exchange("POST", self._path, body)).raise_for_status(self._path)


async def infer_traffic_for(wire: HttpClient, model: str | None, rows: InferWorkload) -> InferTraffic:
    """Return the traffic for `model` after one request was answered correctly.

    Raises `MeasurementFailed` if no model is named, its inputs cannot be generated, or the answer has no tensors.
    """
    if model is None:
        raise MeasurementFailed(f"{wire.url} lists no models: name one with --model")
    about = f"/v2/models/{quote(model, safe='')}"
    metadata = _json_object((await wire.get(about)).raise_for_status(about), about)
    traffic = InferTraffic(wire, f"{about}/infer", build_bodies(parse_inputs(metadata, about), rows), rows.number)
    await traffic.check()
    return traffic


def _json_object(answer: HttpResponse, path: str) -> dict[str, Any]:
    try:
        return dict(answer.json())
    except (ValueError, TypeError) as error:
        raise MeasurementFailed(f"{path} did not answer with a JSON object: {answer.body[:200]!r}") from error


LOAD_SECONDS = 10.0  # requests take milliseconds, so a run has thousands of them


def num_rows(answered: InferTiming) -> float:
    return answered.num_rows


ROW_RATE = RateMetric("samples", "row/s", num_rows, requests=True)


@dataclass(frozen=True, slots=True)
class InferBench:
    """Inference workload: each answer arrives at once and has one row of every output per input row."""

    workload: InferWorkload
    unit: str = "row"

    @property
    def seed(self) -> int:
        return self.workload.seed

    def bounds(self, level: LoadLevel) -> RunLimits:
        return RunLimits(seconds=LOAD_SECONDS)

    async def traffic(self, wire: HttpClient, target: ServerTarget) -> tuple[InferTraffic, str]:
        model = target.model or await served_model(wire, target.preferred)
        description = f"generated from the model's signature, integers below {self.workload.below}, free dimensions of {self.workload.free}"
        return await infer_traffic_for(wire, model, self.workload), description

    def figures(self, side: ServerRuns[InferTiming], against: ServerRuns[InferTiming] | None) -> Iterator[Figure]:
        if side.answered:
            yield rate_figure(ROW_RATE, side, against)
            yield latency_figure(f"{side.label} latency", [each.ended - each.intended for each in side.answered])
        yield from failure_figures(side)

    def caveats(self, name: str, answered: Sequence[InferTiming], prompts: str) -> Iterator[str]:
        yield f"{name}: rows are {prompts}."

    def record(self, answered: InferTiming, started: float) -> dict[str, Any]:
        """Return one request for the result file; times are seconds since the run `started` or since it was due."""
        return {
            "client": answered.client,
            "intended": round(answered.intended - started, 6),
            "answered": round(answered.ended - answered.intended, 6),
            "rows": answered.num_rows,
        }

    def details(self) -> dict[str, Any]:
        return {"rows": self.workload.number}
