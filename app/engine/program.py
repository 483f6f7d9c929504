"""An exported program as an engine: rows of many requests share a batch, the oldest first; a bad request ends alone."""

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

FAILURES = (RuntimeError, IndexError, ValueError)  # what torch's operators raise where inputs do not suit them
Tensors = Mapping[str, Tensor]
Shapes = tuple[tuple[int, ...], ...]  # of a request's inputs, without the batch: requests that agree in them share a step


@dataclass(frozen=True, slots=True)
class Served:
    """A program with what goes in and comes out. `gives`: which of its graph's outputs those are; `fewest`: rows that it wants."""

    program: Program
    signature: Signature
    gives: Sequence[int]
    fewest: int = 1

    def run(self, inputs: Tensors) -> dict[str, Tensor]:
        """Outputs by name, as many rows as came in. Where the program was exported for more rows than came, the last one is repeated."""
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
    """Computes outputs by name for inputs by name."""

    def run(self, inputs: Tensors) -> dict[str, Tensor]: ...


@dataclass(slots=True)
class Waiting:
    """A request that is in the engine: rows `[done, rows)` are still to be computed."""

    order: Infer
    inputs: Tensors
    rows: int
    shapes: Shapes
    done: int = 0
    began: float | None = None
    parts: dict[str, list[Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Share:
    """So many rows of a request in one step."""

    request: Waiting
    rows: int

    def of(self, name: str) -> Tensor:
        return self.request.inputs[name][self.request.done : self.request.done + self.rows]


class ProgramEngine:
    """The worker's face. `stats` is the last step's, in which rows count as tokens."""

    patience_seconds = 0.0

    def __init__(self, served: Served, pace: EncodePace, clock: Callable[[], float] = time.monotonic) -> None:
        """A step has up to `pace.target_tokens` rows."""
        self.stats: StepStats | None = None
        self.runner: Runner = served
        self.stretch = Stretch()
        self._signature, self._pace, self._clock = served.signature, pace, clock
        self._waiting: deque[Waiting] = deque()
        self._batch: list[Share] = []  # of the step that is under way, or that raised
        self._model_seconds = 0.0  # of that step, in the program itself

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def add(self, order: Infer) -> list[Event]:
        inputs = {name: tensor_of(array) for name, array in order.inputs.items()}
        shapes = tuple(tuple(inputs[spec.name].shape[1:]) for spec in self._signature.inputs)
        self._waiting.append(Waiting(order, inputs, len(next(iter(inputs.values()))), shapes))
        return []

    def abort(self, command: Abort) -> list[Event]:
        self._waiting = deque(one for one in self._waiting if one.order.request_id != command.request_id)
        return []

    def step(self) -> list[Event]:
        """Computes the next batch and returns what its clients are to be told."""
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
        """After `step` raised: who was in its batch ends, the others go on."""
        shares, self._batch = self._batch, []
        error = StepFailed("The step that computed this request failed; the server's log says why. It may be sent again.")
        return [self._end(share.request, error) for share in shares] if shares else self.fail_all(error)

    def check(self) -> None:
        """A row that nobody sent."""
        self.runner.run(made_up(self._signature, 1))

    def fail_all(self, error: RequestError) -> list[Event]:
        return [self._end(request, error) for request in list(self._waiting)]

    def snapshot(self) -> Snapshot:
        begun = sum(request.began is not None for request in self._waiting)
        return Snapshot(
            num_running=begun,
            num_waiting=len(self._waiting) - begun,
            stepped_at=self._clock(),
            queue=tuple(request.rows - request.done for request in self._waiting),
            tempo=self._pace.tempo,
        )

    def _next_batch(self) -> list[Share]:
        """The oldest request's rows, and behind it those of others whose inputs have the same shapes."""
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
        """To each its rows; who has all of them has ended."""
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
        """After a step of several failed: whose inputs the program cannot compute is told so, the neighbours get their answers."""
        try:
            return self._deal([share], self._compute([share]))
        except FAILURES as error:
            return [self._refuse(share, error)]

    def _refuse(self, share: Share, error: Exception) -> RequestFailed:
        """What a client sent is not to end the process, so this is no failed step of the engine."""
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
    """An index that lies outside of a table is the client's; anything else may be ours."""
    if isinstance(error, IndexError):
        return InvalidRequest(f"The program cannot compute these inputs: {str(error).splitlines()[0][:200]}.")
    return StepFailed("The program failed to compute these inputs; the server's log says why.")
