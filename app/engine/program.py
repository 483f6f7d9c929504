"""Runs an exported program as an engine.

Rows of several requests share a batch, the oldest first. A bad request fails alone.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from app.engine.encode_pace import EncodePace
from app.engine.tensors import array_of, made_up, tensor_of
from app.errors import InvalidRequest, RequestError, StepFailed
from app.hardware.throttling import Stretch
from app.measured import Snapshot, StepStats
from app.messages import Abort, ArraysReady, Event, Infer, RequestFailed, Signature, Timings
from app.models.program import Program

log = logging.getLogger(__name__)

FAILURES = (RuntimeError, IndexError, ValueError)  # raised by torch's operators for inputs that they cannot compute
Tensors = Mapping[str, Tensor]
# shapes of a request's inputs without the batch dimension; requests with equal shapes share a step
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Served:
    """A program with its signature.

    `gives` are the indices of the graph's outputs that the signature names. `fewest` is the smallest number of
    rows that the program accepts.
    """

    program: Program
    signature: Signature
    gives: Sequence[int]
    fewest: int = 1

    def run(self, inputs: Tensors) -> dict[str, Tensor]:
        """Return the outputs by name, with as many rows as the inputs.

        If the program was exported for more rows, the last row is repeated.
        """
        rows = len(next(iter(inputs.values())))
        missing = self.fewest - rows
        if missing > 0:
            inputs = {
                name: torch.cat((tensor, tensor[-1:].expand(missing, *tensor.shape[1:]))) for name, tensor in inputs.items()
            }
        with torch.inference_mode():
            results = self.program.run(inputs)
        return {spec.name: results[index][:rows] for spec, index in zip(self.signature.outputs, self.gives, strict=True)}


class Runner(Protocol):
    """Computes outputs by name from inputs by name."""

    def run(self, inputs: Tensors) -> dict[str, Tensor]:
        """Return the outputs, one row for each row of the inputs."""
        ...


@dataclass(slots=True)
class Waiting:
    """A request in the engine. Rows `[done, rows)` are still to be computed."""

    order: Infer
    inputs: Tensors
    rows: int
    shapes: Shapes
    done: int = 0
    began: float | None = None
    parts: dict[str, list[Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Share:
    """`rows` rows of a request in one step."""

    request: Waiting
    rows: int

    def of(self, name: str) -> Tensor:
        """Return the rows of the input `name` that belong to this step."""
        return self.request.inputs[name][self.request.done : self.request.done + self.rows]


class ProgramEngine:
    """The engine of programs, as the worker calls it. `stats` describes the last step; rows are counted as tokens."""

    patience_seconds = 0.0

    def __init__(self, served: Served, pace: EncodePace, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without requests. A step has up to `pace.target_tokens` rows."""
        self.stats: StepStats | None = None
        self.runner: Runner = served
        self.stretch = Stretch()
        self._signature, self._pace, self._clock = served.signature, pace, clock
        self._waiting: deque[Waiting] = deque()
        self._batch: list[Share] = []  # shares of the current step, or of the step that raised
        self._model_seconds = 0.0  # seconds of that step in the program itself

    @property
    def has_work(self) -> bool:
        """True if requests are queued."""
        return bool(self._waiting)

    def add(self, order: Infer) -> list[Event]:
        """Queue a request."""
        inputs = {name: tensor_of(array) for name, array in order.inputs.items()}
        shapes = tuple(tuple(inputs[spec.name].shape[1:]) for spec in self._signature.inputs)
        self._waiting.append(Waiting(order, inputs, len(next(iter(inputs.values()))), shapes))
        return []

    def abort(self, command: Abort) -> list[Event]:
        """Drop a request. It gets no event, since its client has gone."""
        self._waiting = deque(one for one in self._waiting if one.order.request_id != command.request_id)
        return []

    def step(self) -> list[Event]:
        """Compute the next batch and return the events for its clients."""
        started = self._clock()
        self.stretch.begin()
        self._batch, self._model_seconds = self._next_batch(), 0.0
        shares = self._batch
        for share in shares:
            share.request.began = started if share.request.began is None else share.request.began
        try:
            events = self._deal(shares, self._compute(shares))
        except FAILURES as error:
            alone = len(shares) == 1
            events = [self._refuse(shares[0], error)] if alone else [event for share in shares for event in self._alone(share)]
        self._batch = []
        rows = sum(share.rows for share in shares)
        seconds = self._clock() - started
        self.stats = StepStats(
            seconds,
            num_sequences=len(shares),
            model_seconds=self._model_seconds,
            encode_tokens=rows,
            num_encode_sequences=rows,
            stretch=self.stretch.of(seconds),
        )
        self._pace.observe(self.stats)
        return events

    def fail(self) -> list[Event]:
        """Handle a step that raised: the requests of its batch end, the others continue."""
        shares, self._batch = self._batch, []
        error = StepFailed("The step that computed this request failed; the server's log says why. It may be sent again.")
        return [self._end(share.request, error) for share in shares] if shares else self.fail_all(error)

    def check(self) -> None:
        """Compute one synthetic row. Raises if that fails."""
        self.runner.run(made_up(self._signature, 1))

    def fail_all(self, error: RequestError) -> list[Event]:
        """End every request with this error."""
        return [self._end(request, error) for request in list(self._waiting)]

    def snapshot(self) -> Snapshot:
        """Return the state of the queue for the service and the metrics."""
        begun = sum(request.began is not None for request in self._waiting)
        return Snapshot(
            num_running=begun,
            num_waiting=len(self._waiting) - begun,
            stepped_at=self._clock(),
            queue=tuple(request.rows - request.done for request in self._waiting),
            tempo=self._pace.tempo,
        )

    def _next_batch(self) -> list[Share]:
        """Take rows of the oldest request, then rows of other requests whose inputs have the same shapes."""
        shapes, left = self._waiting[0].shapes, self._pace.target_tokens
        shares = []
        for request in self._waiting:
            if not left:
                break
            if request.shapes == shapes:
                shares.append(Share(request, min(left, request.rows - request.done)))
                left -= shares[-1].rows
        return shares

    def _compute(self, shares: Sequence[Share]) -> dict[str, Tensor]:
        names = [spec.name for spec in self._signature.inputs]
        parts = {name: [share.of(name) for share in shares] for name in names}
        inputs = {name: each[0] if len(each) == 1 else torch.cat(each) for name, each in parts.items()}
        began = self._clock()
        try:
            return self.runner.run(inputs)
        finally:
            self._model_seconds += self._clock() - began

    def _deal(self, shares: Sequence[Share], outputs: Mapping[str, Tensor]) -> list[Event]:
        """Give each request its rows, and return the answers that are complete."""
        events: list[Event] = []
        first = 0
        for share in shares:
            request = share.request
            for name in request.order.outputs:
                request.parts.setdefault(name, []).append(outputs[name][first : first + share.rows])
            first += share.rows
            request.done += share.rows
            if request.done == request.rows:
                events.append(self._answer(request))
        return events

    def _alone(self, share: Share) -> list[Event]:
        """Compute a share alone after a shared step failed.

        Only a request that the program cannot compute gets an error; the others get their answers.
        """
        try:
            return self._deal([share], self._compute([share]))
        except FAILURES as error:
            return [self._refuse(share, error)]

    def _refuse(self, share: Share, error: Exception) -> RequestFailed:
        """Return an error for one request.

        It is not a failed engine step, since a client's inputs must not end the process.
        """
        log.warning("the program failed on the inputs of one request: %s", error)
        return self._end(share.request, refusal(error))

    def _answer(self, request: Waiting) -> ArraysReady:
        self._waiting.remove(request)
        specs = {spec.name: spec for spec in self._signature.outputs}
        arrays = {name: array_of(torch.cat(parts), specs[name].datatype) for name, parts in request.parts.items()}
        began = request.began or 0.0
        timings = Timings(queue_seconds=began - request.order.arrived_at, encode_seconds=self._clock() - began)
        return ArraysReady(request.order.request_id, arrays, timings, request.rows)

    def _end(self, request: Waiting, error: RequestError) -> RequestFailed:
        self._waiting.remove(request)
        return RequestFailed(request.order.request_id, error)


def refusal(error: Exception) -> RequestError:
    """Return the client's error for an index out of range, and an internal error for anything else."""
    if isinstance(error, IndexError):
        return InvalidRequest(f"The program cannot compute these inputs: {str(error).splitlines()[0][:200]}.")
    return StepFailed("The program failed to compute these inputs; the server's log says why.")
