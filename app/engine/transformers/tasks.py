"""The engine of tasks besides generation: inputs are split into items, items of all clients are computed together.

A task is two functions around the model's call: `split` makes the items of an input, and `finish` the result of their
outputs. Where the library has a pipeline for the task, these are its `preprocess` and `postprocess`.
"""

from __future__ import annotations

import inspect
import json
import logging
import struct
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from app.engine.encoder.batching import BatchingDelay, RequestQueue
from app.engine.queue_engine import QueueEngine
from app.engine.transformers.loading import LIBRARY_ERRORS, first_line
from app.errors import InvalidRequest, RequestError, StepFailed
from app.hardware.step_times import ThrottleCorrection
from app.messages import Array, ArraysReady, Event, RequestFailed, RunTask

_LOG = logging.getLogger(__name__)
MAX_ITEMS = 2_048  # of one request, as texts of an encoder
_NOT_FINITE = (
    "The model's output for this request is not finite, so there is no result. Other requests are not affected."
)

Item = Mapping[str, Any]  # the model's inputs as tensors [1, ...], and what `finish` needs besides
Parameters = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """`outputs` of the model go to `finish`, beside what else an item has; those in `by_token` have a row per token.

    `check` computes an input that no client sent. `call`, if there is one, computes items in place of the model's own
    call: items with equal parameters whose `key`, or whose shapes, are equal. A step takes `least_items` of any size.
    """

    split: Callable[[Any, Parameters], Sequence[Item]]
    finish: Callable[[list[Item], Parameters], Any]
    check: Any
    outputs: tuple[str, ...] = ("logits",)
    by_token: tuple[str, ...] = ()
    call: Callable[[Sequence[Item], Parameters], Sequence[Item]] | None = None
    key: Callable[[Item], Hashable] | None = None
    least_items: int = 1
    check_parameters: Parameters = field(default_factory=dict)


class TaskModel:
    """A model and its tasks. `pad_id` None: texts of different lengths are not computed together."""

    def __init__(self, model: PreTrainedModel, tasks: Mapping[str, Task], pad_id: int | None) -> None:
        self.model, self.tasks, self.pad_id = model, tasks, pad_id
        accepted = inspect.signature(model.forward).parameters
        self._accepted = frozenset(accepted)
        self._options = {"use_cache": False} if "use_cache" in accepted else {}

    def key(self, task: str, item: Item, parameters: Parameters) -> Hashable:
        """Return what items have in common that are computed together; padding at most doubles a text."""
        inputs = self._inputs(item)
        described = self.tasks[task]
        if described.call is not None:
            shapes = tuple((name, tuple(value.shape)) for name, value in inputs.items())
            alike = shapes if described.key is None else described.key(item)
            return task, alike, json.dumps(parameters, sort_keys=True, default=str)
        if "input_ids" in inputs and self.pad_id is not None:
            return *sorted(inputs), (item["input_ids"].shape[1] - 1).bit_length()
        return (*((name, tuple(value.shape)) for name, value in inputs.items()),)

    def compute(self, task: str, items: Sequence[Item], parameters: Parameters) -> Sequence[Item]:
        """Return the items with their outputs. `parameters` are those of every item if the task has its own call."""
        described = self.tasks[task]
        with torch.no_grad():
            if described.call is not None:
                return described.call(items, parameters)
            inputs = {name: self._join(name, [item[name] for item in items]) for name in self._inputs(items[0])}
            found = self.model(**inputs, **self._options)
        outputs = {name: found[name].float().cpu() for name in described.outputs}
        if not all(bool(value.isfinite().all()) for value in outputs.values()):
            raise StepFailed(_NOT_FINITE)
        return [
            {**item, **{name: self._row(described, name, value, row, item) for name, value in outputs.items()}}
            for row, item in enumerate(items)
        ]

    def _inputs(self, item: Item) -> dict[str, Tensor]:
        return {name: value for name, value in item.items() if name in self._accepted and isinstance(value, Tensor)}

    def _join(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        if parts[0].dim() == 2:
            longest = max(part.shape[1] for part in parts)
            filling = self.pad_id or 0 if name == "input_ids" else 0
            parts = [torch.nn.functional.pad(part, (0, longest - part.shape[1]), value=filling) for part in parts]
        joined = torch.cat(list(parts)).to(self.model.device)
        return joined.to(self.model.dtype) if joined.is_floating_point() else joined

    @staticmethod
    def _row(task: Task, name: str, values: Tensor, row: int, item: Item) -> Tensor:
        own = values[row : row + 1]
        return own[:, : item["input_ids"].shape[1]] if name in task.by_token else own


@dataclass(slots=True)
class TaskState:
    """A request in the engine. Its items from `done` on are still to be computed."""

    message: RunTask
    parameters: Parameters
    items: list[tuple[int, Item, Hashable]]  # with the input that it belongs to
    num_inputs: int
    num_tokens: int
    tokens_left: int
    results: list[Item] = field(default_factory=list)
    started_at: float | None = None

    @property
    def done(self) -> int:
        return len(self.results)

    def next_items(self, key: Hashable) -> Iterator[Item]:
        for _, item, own in self.items[self.done :]:
            if own != key:
                return
            yield item

    @property
    def key(self) -> Hashable:
        return self.items[self.done][2]


class TaskEngine(QueueEngine[TaskState]):
    """The engine of tasks, as the worker calls it. A step that fails is tried again request by request."""

    def __init__(
        self,
        model: TaskModel,
        delay: BatchingDelay,
        clock: Callable[[], float] = time.monotonic,
        throttle_correction: ThrottleCorrection | None = None,
    ) -> None:
        super().__init__(RequestQueue(), delay, clock, throttle_correction)
        self.model = model

    def add(self, message: RunTask) -> list[Event]:
        """Read the inputs and queue the request; return its failure if they cannot be read."""
        try:
            self.queue.push(self._read(message))
        except RequestError as error:
            return [RequestFailed(message.request_id, error)]
        except LIBRARY_ERRORS as error:
            _LOG.warning("the inputs of a request could not be read: %s", error)
            reason = f"These inputs cannot be read for {message.task}: {first_line(error).rstrip('.')}."
            known = isinstance(error, ValueError)  # the library's own words about inputs
            found = InvalidRequest(reason, field="inputs") if known else StepFailed("The inputs could not be read.")
            return [RequestFailed(message.request_id, found)]
        return []

    def step(self) -> list[Event]:
        started = self._clock()
        self.throttle_correction.begin()
        batch = self._next_batch()
        self._begin((state for state, _ in batch), started)
        events: list[Event] = []
        try:
            self._compute(batch)
        except (*LIBRARY_ERRORS, StepFailed) as error:
            if len(batch) == 1:
                events = self._reject(batch[0][0], error)
            else:
                events = [event for one in batch for event in self._compute_alone(one)]
        model_seconds = self._clock() - started
        for state, _ in batch:
            if state.done == len(state.items):
                events += self._answer(state)
        items = [item for _, chosen in batch for item in chosen]
        self._observe(started, model_seconds, len(items), sum(map(size_of, items)))
        return events

    def check(self) -> None:
        """Compute an input that no client sent. Raises if that fails, or is not finite."""
        for name, task in self.model.tasks.items():
            items = task.split(task.check, task.check_parameters)
            json.dumps(
                task.finish(compute_items(self.model, name, items, task.check_parameters), task.check_parameters),
                default=plain,
            )

    def _read(self, message: RunTask) -> TaskState:
        task, parameters = self.model.tasks[message.task], json.loads(message.parameters)
        inputs = json.loads(message.inputs)
        items: list[tuple[int, Item, Hashable]] = []
        for index, given in enumerate(inputs):
            name = f"inputs[{index}]" if message.is_batch else "inputs"
            try:
                made = task.split(message.files[given] if isinstance(given, int) else given, parameters)
            except RequestError as error:
                if error.field == "inputs" and message.is_batch:
                    error.field, error.message = name, error.message.replace("inputs", name, 1)
                raise
            items += [(index, item, self.model.key(message.task, item, parameters)) for item in made]
            if len(items) > MAX_ITEMS:
                raise InvalidRequest(f"The inputs are more than {MAX_ITEMS} texts or windows for the model.", "inputs")
        num_tokens = sum(size_of(item) for _, item, _ in items)
        return TaskState(message, parameters, items, len(inputs), num_tokens, num_tokens)

    def _next_batch(self) -> list[tuple[TaskState, list[Item]]]:
        """Return the next items of the oldest request, and of others with the same key, as far as a step has room."""
        oldest, room, batch = self.queue.oldest, self._delay.target_tokens, []
        key, least = oldest.key, self.model.tasks[oldest.message.task].least_items
        for state in self.queue.requests:
            if state.message.task != oldest.message.task:
                continue
            chosen = []
            for item in state.next_items(key):
                if room <= 0 and least <= 0:
                    break
                chosen.append(item)
                room, least = room - size_of(item), least - 1
            if chosen:
                batch.append((state, chosen))
        return batch

    def _compute(self, batch: Sequence[tuple[TaskState, list[Item]]]) -> None:
        first = batch[0][0]
        items = [item for _, chosen in batch for item in chosen]
        outputs = iter(self.model.compute(first.message.task, items, first.parameters))
        for state, chosen in batch:
            state.results += [next(outputs) for _ in chosen]
            state.tokens_left -= sum(map(size_of, chosen))

    def _compute_alone(self, one: tuple[TaskState, list[Item]]) -> list[Event]:
        try:
            self._compute([one])
        except (*LIBRARY_ERRORS, StepFailed) as error:
            return self._reject(one[0], error)
        return []

    def _reject(self, state: TaskState, error: Exception) -> list[Event]:
        _LOG.warning("the model failed on the inputs of one request: %s", error)
        reason = "The model failed to compute these inputs; the server's log says why."
        return self._end([state], error if isinstance(error, StepFailed) else StepFailed(reason))

    def _answer(self, state: TaskState) -> list[Event]:
        task, message = self.model.tasks[state.message.task], state.message
        places = [index for index, _, _ in state.items]
        try:
            results = [
                task.finish(
                    [out for at, out in zip(places, state.results, strict=True) if at == index], state.parameters
                )
                for index in range(state.num_inputs)
            ]
            content = json.dumps(results if message.is_batch else results[0], default=plain, allow_nan=False).encode()
        except RequestError as error:
            return self._end([state], error)
        except LIBRARY_ERRORS as error:
            return self._reject(state, error)
        self.queue.remove(message.request_id)
        arrays = {"result": Array("BYTES", (1,), content)}
        if seconds := sum(item.get("seconds", 0.0) for item in state.results):
            arrays["audio_seconds"] = Array("FP64", (1,), struct.pack("<d", seconds))
        return [ArraysReady(message.request_id, arrays, self._timings(state, self._clock()), state.num_tokens)]


def size_of(item: Item) -> int:
    """Return the tokens of a text, or what takes about as long."""
    ids = item.get("input_ids")
    return int(item.get("size", 1)) if ids is None else int(ids.shape[1])


def plain(value: Any) -> Any:
    """Return a number of numpy as Python's, for JSON."""
    return value.item()


def compute_items(runner: TaskModel, task: str, items: Sequence[Item], parameters: Parameters) -> list[Item]:
    """Return the items with their outputs, each computed alone."""
    return [runner.compute(task, [item], parameters)[0] for item in items]
