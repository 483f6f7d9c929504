"""Dynamic batching of an encoder: the queue selects a step's texts, the runner computes, the engine answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy

from app.engine.encoder.batching import BatchingDelay, EncodeState, TextBudget, TextQueue, TextSpan
from app.engine.queue_engine import QueueEngine, step_failed
from app.errors import ContextLengthExceeded, InvalidRequest, RequestError, StepFailed, WrongModelKind
from app.hardware.step_times import ThrottleCorrection
from app.messages import ArraysReady, Encode, Event, RequestFailed, Text
from app.metrics.steps import StepStats

_NOT_FINITE_MESSAGE = (
    "The model's output for this request is not finite, so there is no result: its weights do not suit a token of these "
    "texts. Other requests are not affected."
)


class TextRunner(Protocol):
    """Computes texts: for each text, rows of little-endian FP32 bytes by output name."""

    @property
    def model_seconds(self) -> float: ...

    @property
    def overlaps(self) -> bool:
        """True if a batch may be launched while another is in flight."""

    @property
    def is_native(self) -> bool: ...

    def launch(self, spans: Items[TextSpan]) -> Any:
        """Start a batch and return what `wait` takes; wait in the order of launching."""

    def wait(self, in_flight: Any) -> Items[Mapping[str, bytes]]: ...

    def survives(self, error: Exception) -> bool:
        """Return True if the error was a lack of memory that a smaller batch may avoid."""


@dataclass(frozen=True, slots=True)
class _InFlightBatch:
    spans: tuple[TextSpan, ...]
    in_flight: Any
    launched_at: float


@dataclass(frozen=True, slots=True)
class EncoderLimits:
    """The limits of a request: the most tokens of a text, the texts of a step, and the outputs that exist."""

    max_model_len: int
    max_running_seqs: int
    outputs: tuple[str, ...]

    def refusal(self, message: Encode) -> RequestError | None:
        if not message.texts or not message.outputs:
            return InvalidRequest("There is nothing to encode.", field="input")
        missing = next((name for name in message.outputs if name not in self.outputs), None)
        if missing is not None:
            return WrongModelKind(f"This model has no {missing}: it gives {', '.join(self.outputs)}.")
        for text in message.texts:
            if not text.token_ids or len(text.type_ids) not in (0, len(text.token_ids)):
                return InvalidRequest("A text has no tokens, or types for some of them only.", field="input")
            if len(text.token_ids) > self.max_model_len:
                reason = f"A text has {len(text.token_ids)} tokens, but this model reads at most {self.max_model_len}."
                return ContextLengthExceeded(reason, field="input")
        return None


class EncoderEngine(QueueEngine[EncodeState]):
    """The engine of encoders, as the worker calls it.

    A step that fails is tried again request by request. A step that needs too much memory is tried again in parts. If
    enough texts are queued to fill the next step, a runner that overlaps launches it before this one is waited for:
    texts are described and answers are assembled while the device computes.
    """

    queue: TextQueue

    def __init__(
        self,
        runner: TextRunner,
        limits: EncoderLimits,
        delay: BatchingDelay,
        clock: Callable[[], float] = time.monotonic,
        throttle_correction: ThrottleCorrection | None = None,
    ) -> None:
        super().__init__(TextQueue(), delay, clock, throttle_correction)
        self.runner, self._limits = runner, limits
        self._budget = TextBudget(limits.max_running_seqs)
        self._spans: tuple[TextSpan, ...] = ()  # texts of the batches that are in flight, or that raised
        self._launched_ahead: _InFlightBatch | None = None
        self._ended = 0.0  # end of the last step

    @property
    def has_work(self) -> bool:
        return len(self.queue) > 0 or self._launched_ahead is not None

    @property
    def batching_delay_seconds(self) -> float:
        if not self.queue or self._launched_ahead is not None:
            return 0.0
        return self._delay.batching_delay_seconds(self.queue.num_tokens, self._clock())

    def add(self, message: Encode) -> list[Event]:
        """Queue a request; return its failure if it can never be computed."""
        assert message.request_id not in self.queue, "request ids are unique"
        error = self._limits.refusal(message)
        if error is not None:
            return [RequestFailed(message.request_id, error)]
        self._delay.observe_arrival(message.arrived_at, self.queue.add(message).num_tokens)
        return []

    def step(self) -> list[Event]:
        self.throttle_correction.begin()
        now, self._launched_ahead = self._launched_ahead or self._launch(), None
        if now is None:
            return []
        self._launched_ahead = self._launch() if self._next_is_full() else None
        rows = self.runner.wait(now.in_flight)
        ended = self._clock()
        events = self._gather(now.spans, rows, ended)
        self._spans = () if self._launched_ahead is None else self._launched_ahead.spans
        stats = encode_step_stats(now.spans, ended - max(now.launched_at, self._ended), self.runner.model_seconds)
        self._ended = ended
        correction = self.throttle_correction.of(stats.seconds)
        self.stats = replace(stats, throttle_correction=correction, is_native=self.runner.is_native)
        self._delay.observe(self.stats)
        self._budget.succeeded(self._delay.target_tokens)
        if events:
            self._delay.observe_answers(ended, len(events))
        return events

    def _launch(self) -> _InFlightBatch | None:
        began = self._clock()
        while spans := self.queue.take(self._budget.capacity(self._delay.target_tokens)):
            self._spans += spans
            try:
                launched = _InFlightBatch(spans, self.runner.launch(spans), began)
            except RuntimeError as error:  # torch's out-of-memory error is one
                if not (self.runner.survives(error) and self._budget.shrink(spans)):
                    raise
                self._spans = self._spans[: -len(spans)]
                self._put_back(spans)
                continue
            for span in spans:
                if span.request.started_at is None:
                    span.request.started_at = began
            return launched
        return None

    def _next_is_full(self) -> bool:
        """Return True if waiting cannot add texts to the next step."""
        if not self.runner.overlaps or self.queue.num_tokens < self._delay.target_tokens:
            return False
        return not any(request.runs_alone for request in self.queue.requests)

    def fail(self) -> list[Event]:
        """Queue again the requests of a step that raised, to run alone; one that was alone already ends."""
        error = step_failed()
        spans, self._spans, self._launched_ahead = self._spans, (), None
        if not spans:
            return self.fail_all(error)
        requests = list(dict.fromkeys(span.request for span in spans))
        if len(requests) == 1:
            return self._end(requests, error)
        self._put_back(spans)
        for request in requests:
            request.runs_alone = True
        return []

    def check(self) -> None:
        """Compute a text of one token, without touching the queue. Raises if that fails, or is not finite."""
        message = Encode("check", (Text((0,)),), self._limits.outputs[:1], arrived_at=0.0)
        (rows,) = self.runner.wait(self.runner.launch(EncodeState.from_message(message).spans()))
        if not all(are_finite(rows[name]) for name in message.outputs):
            raise StepFailed("The outputs for a text of one token are not finite.")

    def _gather(self, spans: Items[TextSpan], rows: Items[Mapping[str, bytes]], now: float) -> list[Event]:
        events: list[Event] = []
        for span, own in zip(spans, rows, strict=True):
            request = span.request
            request.results[span.index] = {name: own[name] for name in request.message.outputs}
            if request.is_done and self.queue.remove(request.message.request_id):  # false if it was aborted meanwhile
                events.append(self._ending(request, now))
        for request in dict.fromkeys(span.request for span in spans):
            request.runs_alone = False
        return events

    def _put_back(self, spans: Items[TextSpan]) -> None:
        for request in dict.fromkeys(span.request for span in spans):
            request.put_back(span for span in spans if span.request is request)

    def _ending(self, request: EncodeState, now: float) -> ArraysReady | RequestFailed:
        message, arrays = request.message, request.arrays()
        if not all(are_finite(array.data) for array in arrays.values()):
            return RequestFailed(message.request_id, StepFailed(_NOT_FINITE_MESSAGE))
        return ArraysReady(message.request_id, arrays, self._timings(request, now), request.num_tokens)


def are_finite(rows: bytes) -> bool:
    return bool(numpy.isfinite(numpy.frombuffer(rows, "<f4")).all())


def encode_step_stats(spans: Items[TextSpan], seconds: float, model_seconds: float) -> StepStats:
    return StepStats(
        seconds=seconds,
        num_sequences=len(spans),
        model_seconds=model_seconds,
        encode_tokens=sum(span.num_tokens for span in spans),
        num_encode_sequences=len(spans),
        encode_pairs=sum(span.num_tokens**2 for span in spans),
    )
