"""Runs an exported program as an engine, and builds that engine: weights, row independence check, and warm-up."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.backends.selection import select_host_backend
from app.engine.build import BuildRequest, BuiltEngine, percent_reporter, prepare_device
from app.engine.encoder.batching import BatchingDelay, RequestQueue
from app.engine.onnx.conversion import NotConvertible, convert
from app.engine.onnx.session import OnnxProgram, RunsGraph
from app.engine.queue_engine import QueueEngine
from app.engine.scheduler.policy import share_in_order
from app.errors import CheckpointInvalid, InvalidRequest, RequestError, StepFailed
from app.hardware.plan.plan import ServingPlan
from app.hardware.step_times import ThrottleCorrection
from app.messages import Array, ArraysReady, Event, Infer, Signature, TensorSpec
from app.models.program import Program
from app.models.program_graph import SAMPLE_SIZE
from app.weights.load import ARCHIVE_VALUES, ProgramValues, load_program, program_states
from app.weights.onnx_file import OnnxCheckpoint
from app.weights.packs import Progress
from app.weights.program import ProgramCheckpoint, library_version

log = logging.getLogger(__name__)

# Raised by torch's operators, and by arithmetic on sizes and values, for inputs that they cannot compute.
INPUT_ERRORS = (RuntimeError, LookupError, ValueError, TypeError, ArithmeticError, AttributeError)

Tensors = Mapping[str, Tensor]

# shapes of a request's inputs without the batch dimension; requests with equal shapes share a step
InputShapes = tuple[tuple[int, ...], ...]
_NO_MEMORY = "DefaultCPUAllocator"  # in the RuntimeError of a CPU tensor that does not fit the memory
EQUAL = 1e-5  # most difference of ONNX Runtime from torch, relative to the largest value of an output
_MIN_GAIN = 1.05  # least speedup for which ONNX Runtime is used
_TIMED_ROWS, _TIMED_RUNS = 8, 5  # most rows of a timed step besides one; the fastest of so many runs counts
_RELATIVE_TOLERANCE = 0.05  # relative to the largest value, since products round differently for another number of rows
DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class RunnableProgram:
    """A program with its signature.

    `output_indices` are the indices of the graph's outputs that the signature names. `min_rows` is the smallest number
    of rows that the program accepts.
    """

    program: RunsGraph
    signature: Signature
    output_indices: Sequence[int]
    min_rows: int = 1

    def run(self, inputs: Tensors) -> dict[str, Tensor]:
        """Return the outputs by name, with as many rows as the inputs; the last row is repeated up to `min_rows`."""
        rows = next(iter(inputs.values())).shape[0]
        missing = self.min_rows - rows
        if missing > 0:
            inputs = {
                name: torch.cat((tensor, tensor[-1:].expand(missing, *tensor.shape[1:])))
                for name, tensor in inputs.items()
            }
        results, outputs = self.program.run(inputs), dict[str, Tensor]()
        for spec, index in zip(self.signature.outputs, self.output_indices, strict=True):
            result = results[index]
            if not _is_of(spec, result, max(rows, self.min_rows)):
                raise ValueError(f"the output {spec.name!r} is {_shown(result)}, and the program states {spec.shape}")
            outputs[spec.name] = result[:rows] if missing > 0 else result
        return outputs


def _is_of(spec: TensorSpec, result: Any, rows: int) -> bool:
    if not isinstance(result, Tensor):
        return False
    shape = result.shape
    if shape == (rows, *spec.shape[1:]):
        return True
    alike = len(shape) == len(spec.shape) and shape[0] == rows
    return alike and all(size in (-1, found) for size, found in zip(spec.shape, shape, strict=True))


def _shown(result: Any) -> str:
    return f"of the shape {tuple(result.shape)}" if isinstance(result, Tensor) else "not a tensor"


@dataclass(slots=True)
class InferState:
    """A request in the engine. Rows `[done, rows)` are still to be computed. `parts` are rows of outputs as bytes."""

    message: Infer
    rows: int
    shapes: InputShapes
    done: int = 0
    started_at: float | None = None
    parts: dict[str, list[Array]] = field(default_factory=dict)

    @property
    def tokens_left(self) -> int:
        return self.rows - self.done


@dataclass(frozen=True, slots=True)
class RowShare:
    request: InferState
    rows: int

    def input_rows(self, name: str) -> bytes | memoryview:
        request = self.request
        return _rows_of(request.message.inputs[name].data, request.rows, request.done, self.rows)


def _rows_of(data: bytes, num_rows: int, first: int, rows: int) -> bytes | memoryview:
    if rows == num_rows:
        return data
    size = len(data) // num_rows
    return memoryview(data)[first * size : (first + rows) * size]


class ProgramEngine(QueueEngine[InferState]):
    """The engine of programs, as the worker calls it. Rows are counted as tokens."""

    def __init__(
        self,
        served: RunnableProgram,
        delay: BatchingDelay,
        clock: Callable[[], float] = time.monotonic,
        throttle_correction: ThrottleCorrection | None = None,
    ) -> None:
        super().__init__(RequestQueue(), delay, clock, throttle_correction)
        self.runner, self._signature = served, served.signature
        self._model_seconds = 0.0  # seconds of the last step in the program itself

    def add(self, message: Infer) -> list[Event]:
        shapes = [message.inputs[spec.name].shape for spec in self._signature.inputs]
        self.queue.push(InferState(message, shapes[0][0], tuple(shape[1:] for shape in shapes)))
        return []

    def step(self) -> list[Event]:
        started = self._clock()
        self.throttle_correction.begin()
        shares, self._model_seconds = self._next_batch(), 0.0
        self._begin((share.request for share in shares), started)
        try:
            events = self._distribute(shares, self._compute(shares))
        except INPUT_ERRORS as error:
            alone = len(shares) == 1
            events = (
                self._reject(shares[0], error)
                if alone
                else [event for share in shares for event in self._compute_alone(share)]
            )
        rows = sum(share.rows for share in shares)
        self._observe(started, self._model_seconds, rows, rows)
        return events

    def check(self) -> None:
        self.runner.run(synthetic_inputs(self._signature, 1))

    def _next_batch(self) -> list[RowShare]:
        shapes = self.queue.oldest.shapes
        alike = (request for request in self.queue.requests if request.shapes == shapes)
        shares = share_in_order(alike, self._delay.target_tokens, lambda request: request.tokens_left)
        return [RowShare(request, rows) for request, rows in shares]

    def _compute(self, shares: Sequence[RowShare]) -> dict[str, Tensor]:
        rows = sum(share.rows for share in shares)
        # Bytes are joined before they become a tensor: for a small program the calls of torch take longer than the step.
        inputs = {
            spec.name: _tensor(
                bytearray().join(share.input_rows(spec.name) for share in shares), spec.datatype, (rows, *shape)
            )
            for spec, shape in zip(self._signature.inputs, shares[0].request.shapes, strict=True)
        }
        began = self._clock()
        try:
            return self.runner.run(inputs)
        finally:
            self._model_seconds += self._clock() - began

    def _distribute(self, shares: Sequence[RowShare], outputs: Mapping[str, Tensor]) -> list[Event]:
        events: list[Event] = []
        first, rows = 0, sum(share.rows for share in shares)
        wanted = {name for share in shares for name in share.request.message.outputs}
        arrays = {
            spec.name: to_array(outputs[spec.name], spec.datatype)
            for spec in self._signature.outputs
            if spec.name in wanted
        }
        for share in shares:
            request = share.request
            for name in request.message.outputs:
                array = arrays[name]
                part = bytes(_rows_of(array.data, rows, first, share.rows))
                request.parts.setdefault(name, []).append(Array(array.datatype, (share.rows, *array.shape[1:]), part))
            first += share.rows
            request.done += share.rows
            if request.done == request.rows:
                events += self._answer(request)
        return events

    def _compute_alone(self, share: RowShare) -> list[Event]:
        """Compute a share alone after a shared step failed; only a request that cannot be computed gets an error."""
        try:
            return self._distribute([share], self._compute([share]))
        except INPUT_ERRORS as error:
            return self._reject(share, error)

    def _reject(self, share: RowShare, error: Exception) -> list[Event]:
        """Return an error for one request, which is the client's if the program still computes synthetic inputs."""
        log.warning("the program failed on the inputs of one request: %s", error)
        return self._end([share.request], program_error(error, self._computes()))

    def _computes(self) -> bool:
        try:
            self.check()
        except INPUT_ERRORS:
            return False
        return True

    def _answer(self, request: InferState) -> list[Event]:
        try:
            arrays = {name: _joined(parts, request.rows) for name, parts in request.parts.items()}
        except ValueError as error:
            return self._end([request], program_error(error, computes_others=True))
        self.queue.remove(request.message.request_id)
        return [ArraysReady(request.message.request_id, arrays, self._timings(request, self._clock()), request.rows)]


def _joined(parts: Sequence[Array], rows: int) -> Array:
    """Return the rows of several steps as one array. Raises `ValueError` if they differ in shape."""
    first = parts[0]
    if any(part.shape[1:] != first.shape[1:] for part in parts):
        raise ValueError("the rows of an output differ in shape")
    return (
        first
        if len(parts) == 1
        else Array(first.datatype, (rows, *first.shape[1:]), b"".join(part.data for part in parts))
    )


def program_error(error: Exception, computes_others: bool) -> RequestError:
    """Return the client's error if the program computes other inputs and memory sufficed, else an internal one."""
    said = str(error)
    if computes_others and _NO_MEMORY not in said:
        reason = (said.splitlines() or [type(error).__name__])[0][:200].rstrip(".")
        return InvalidRequest(f"The program cannot compute these inputs: {reason}.")
    return StepFailed("The program failed to compute these inputs; the server's log says why.")


def build_program_engine(
    request: BuildRequest[ProgramCheckpoint],
) -> BuiltEngine[ProgramEngine, RunnableProgram, RunsGraph]:
    """Load the program, check it and warm it up. Raises a `StartupError`."""
    checkpoint, plan = request.checkpoint, request.plan
    backend = prepare_device(request, select_host_backend)
    served = load_served(checkpoint, plan, percent_reporter(request.report, "loading weights"), report=request.report)
    request.report("warming up")
    check_row_independence(served)
    max_rows = max_step_rows(checkpoint, plan.memory.batch_target_tokens)
    engine = ProgramEngine(
        served,
        BatchingDelay(max_rows, request.step_time_model, oldest_first=True),
        throttle_correction=ThrottleCorrection(plan.cpu.throttling_quota),
    )
    return BuiltEngine(engine, served, served.program, backend)


def served_program(checkpoint: ProgramCheckpoint, program: RunsGraph) -> RunnableProgram:
    return RunnableProgram(program, checkpoint.signature, checkpoint.output_indices, checkpoint.min_rows)


# ---- native or ONNX Runtime ------------------------------------------------------------------------------------------


def load_served(
    checkpoint: ProgramCheckpoint,
    plan: ServingPlan,
    progress: Progress,
    making: ProgramValues = ARCHIVE_VALUES,
    report: Callable[[str], None] = lambda stage: None,
) -> RunnableProgram:
    """Load the program with the engine of the plan: ONNX Runtime, the native one, or whichever is faster here.

    Raises `CheckpointInvalid`.
    """
    if isinstance(checkpoint, OnnxCheckpoint):
        outputs = [
            ref.name if at in checkpoint.output_indices else "" for at, ref in enumerate(checkpoint.graph.outputs)
        ]
        return served_program(checkpoint, OnnxProgram(checkpoint.path, outputs))
    native = served_program(checkpoint, load_program(checkpoint, plan, progress, making))
    engine = plan.weights.engine
    if engine == "native" or plan.weights.precision != "fp32":
        return native
    began = time.monotonic()
    report("converting the program to ONNX")
    try:
        converted = _converted(checkpoint, plan, making)
        gain = math.inf if engine == "onnxruntime" else _gain(checkpoint, native, converted)
    except (NotConvertible, CheckpointInvalid) as error:
        if engine == "onnxruntime":
            raise CheckpointInvalid(f"ONNX Runtime cannot compute the program: {error}.") from error
        log.info("the program is computed by torch's operators, not by ONNX Runtime: %s", error)
        return native
    seconds, library = time.monotonic() - began, f"ONNX Runtime {library_version('onnxruntime')}"
    if gain < _MIN_GAIN:
        log.info("the program is computed by torch's operators: %s has %.2f times their speed", library, gain)
        return native
    said = "" if gain == math.inf else f", at {gain:.2f} times the speed of torch's operators"
    log.info("the program is computed by %s%s; its results are equal (prepared in %.1f s)", library, said, seconds)
    return converted


def _converted(checkpoint: ProgramCheckpoint, plan: ServingPlan, making: ProgramValues) -> RunnableProgram:
    """Return the program in ONNX Runtime after comparing it with torch. Raises `NotConvertible`."""
    states = program_states(checkpoint, lambda done, total: None, making)
    folder = plan.weights.pack_folder
    example = synthetic_inputs(checkpoint.signature, _possible_rows(checkpoint, 3))
    converted = served_program(
        checkpoint, convert(checkpoint, states, example, None if folder is None else Path(folder))
    )
    if making is ARCHIVE_VALUES:  # synthetic weights have values that are no model's
        exact = served_program(checkpoint, Program(checkpoint.graph, states, {}))
        for rows in sorted({_possible_rows(checkpoint, rows) for rows in (1, 2, 5)}):
            _check_equal(exact, converted, synthetic_inputs(checkpoint.signature, rows))
    return converted


def _possible_rows(checkpoint: ProgramCheckpoint, rows: int) -> int:
    return max(checkpoint.min_rows, max_step_rows(checkpoint, rows))


def _check_equal(exact: RunnableProgram, converted: RunnableProgram, inputs: Tensors) -> None:
    try:
        results = converted.run(inputs)
        wanted = exact.run(inputs)
    except INPUT_ERRORS as error:
        raise NotConvertible(f"it cannot be run: {str(error)[:200]}") from error
    for name, result in results.items():
        other = wanted[name]
        if result.dtype != other.dtype or result.shape != other.shape:
            raise NotConvertible(f"its output {name!r} has another type or shape")
        if not other.is_floating_point():
            if not torch.equal(result, other):
                raise NotConvertible(f"its output {name!r} differs")
            continue
        largest = float(other.double().nan_to_num(0.0).abs().max()) if other.numel() else 0.0
        if not torch.allclose(result.double(), other.double(), rtol=0.0, atol=EQUAL * largest, equal_nan=True):
            worst = float((result.double() - other.double()).abs().nan_to_num(math.inf).max()) / max(largest, 1e-30)
            raise NotConvertible(f"its output {name!r} differs by {worst:.1e} of the largest value")


def _gain(checkpoint: ProgramCheckpoint, native: RunnableProgram, converted: RunnableProgram) -> float:
    """Return how many times as fast the converted program is, as the geometric mean over one row and several.

    Raises `NotConvertible` if one of them cannot be run.
    """
    gains = []
    for rows in sorted({_possible_rows(checkpoint, rows) for rows in (1, _TIMED_ROWS)}):
        inputs = synthetic_inputs(checkpoint.signature, rows)
        best = [math.inf, math.inf]
        for _ in range(_TIMED_RUNS):
            for at, one in enumerate((native, converted)):
                began = time.perf_counter()
                try:
                    one.run(inputs)
                except INPUT_ERRORS as error:
                    raise NotConvertible(f"it cannot be run: {str(error)[:200]}") from error
                best[at] = min(best[at], time.perf_counter() - began)
        gains.append(best[0] / best[1])
    return math.prod(gains) ** (1 / len(gains))


def max_step_rows(checkpoint: ProgramCheckpoint, planned: int) -> int:
    """Return the largest number of rows in a step: `planned`, limited by what the program was exported for."""
    return min(planned, checkpoint.max_rows or planned)


def check_row_independence(served: RunnableProgram) -> None:
    """Raise `CheckpointInvalid` unless rows give the same results together as alone, as requests share batches."""
    try:
        both = synthetic_inputs(served.signature, 2)
        together = served.run(both)
        alone = [served.run({name: tensor[row : row + 1] for name, tensor in both.items()}) for row in range(2)]
    except INPUT_ERRORS as error:
        raise cannot_run(error) from error
    for name, result in together.items():
        apart = torch.cat([each[name] for each in alone])
        if result.shape != apart.shape or not _close_enough(result, apart):
            raise CheckpointInvalid(
                f"The program's output {name!r} of a row depends on the other rows of its batch, so requests cannot share one. "
                "Was the model in eval() when it was exported?"
            )


def cannot_run(error: Exception) -> CheckpointInvalid:
    said = (str(error).splitlines() or [""])[0][:300]
    return CheckpointInvalid(f"The program cannot be run: {said or type(error).__name__}")


def _close_enough(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return bool((one == other).float().mean() > 1 - _RELATIVE_TOLERANCE) if one.numel() else True
    one, other = one.float(), other.float()
    largest = float(other.nan_to_num(0.0).abs().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=_RELATIVE_TOLERANCE * max(largest, 1e-6), equal_nan=True)


def _tensor(data: bytearray, datatype: str, shape: tuple[int, ...]) -> Tensor:
    dtype = DTYPES[datatype]
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def to_array(tensor: Tensor, datatype: str = "FP32") -> Array:
    plain = tensor.to(DTYPES[datatype]).contiguous()
    return Array(
        datatype, tuple(plain.shape), plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    )


def synthetic_inputs(signature: Signature, rows: int) -> dict[str, Tensor]:
    """Return synthetic inputs with `rows` different rows: small numbers, and indices that are valid in any table."""
    generator = torch.Generator().manual_seed(0)
    return {spec.name: _synthetic_input(spec, rows, generator) for spec in signature.inputs}


def _synthetic_input(spec: TensorSpec, rows: int, generator: torch.Generator) -> Tensor:
    shape = (rows, *(spec.sample or (SAMPLE_SIZE if size < 0 else size for size in spec.shape[1:])))
    dtype = DTYPES[spec.datatype]
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)
