"""Dynamic batching of an encoder: the queue decides which texts go together, the runner computes them, answers are put together again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any, Protocol

from app.engine.encode_pace import EncodePace
from app.engine.encode_room import StepRoom
from app.engine.texts import Encoding, TextQueue, TextSpan
from app.errors import ContextLengthExceeded, InvalidRequest, RequestError, StepFailed, WrongModelKind
from app.hardware.throttling import Stretch
from app.measured import Snapshot, StepStats
from app.messages import Abort, ArraysReady, Encode, Event, RequestFailed, Text, Timings


class Runner(Protocol):
    """Texts in, rows of fp32 out: of each text, by output, little-endian bytes."""

    @property
    def model_seconds(self) -> float:
        """Of the last batch, in the model's forward pass."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether a batch may be launched while another is under way."""
        ...

    def launch(self, spans: Items[TextSpan]) -> Any:
        """Begins with a batch; what `wait` takes, in the order of launching."""
        ...

    def wait(self, flight: Any) -> Items[Mapping[str, bytes]]: ...

    def survives(self, error: Exception) -> bool:
        """Whether that was a want of memory, which a smaller batch may not have."""
        ...


@dataclass(frozen=True, slots=True)
class _Launched:
    """A batch under way, since when."""

    spans: tuple[TextSpan, ...]
    flight: Any
    at: float


@dataclass(frozen=True, slots=True)
class EncodeLimits:
    """What an order may ask for: texts of at most so many tokens, and these outputs. The service refuses the same, in a client's words.

    A step has at most so many texts.
    """

    max_model_len: int
    max_running_seqs: int
    outputs: tuple[str, ...]

    def refusal(self, order: Encode) -> RequestError | None:
        """Why this can never be computed; None where it can."""
        if not order.texts or not order.outputs:
            return InvalidRequest("There is nothing to encode.", field="input")
        missing = next((name for name in order.outputs if name not in self.outputs), None)
        if missing is not None:
            return WrongModelKind(f"This model has no {missing}: it gives {', '.join(self.outputs)}.")
        for text in order.texts:
            if not text.token_ids or len(text.type_ids) not in (0, len(text.token_ids)):
                return InvalidRequest("A text has no tokens, or types for some of them only.", field="input")
            if len(text.token_ids) > self.max_model_len:
                told = f"A text has {len(text.token_ids)} tokens, and this model reads {self.max_model_len}."
                return ContextLengthExceeded(told, field="input")
        return None


class EncoderEngine:
    """The engine's face to the worker for models that read. `stats` is the last step's.

    A step that fails is tried again request by request, each alone: only the one whose texts cannot be computed ends with `StepFailed`.
    One that wants more memory than there is is tried again in parts. Where so many texts wait that the next step is full anyway, a runner
    that overlaps has it launched before this one is waited for: texts are described and answers made while the device computes.
    """

    def __init__(
        self, runner: Runner, limits: EncodeLimits, pace: EncodePace, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.queue = TextQueue()
        self.runner = runner
        self.stretch = Stretch()
        self.stats: StepStats | None = None
        self._limits, self._pace, self._clock = limits, pace, clock
        self._room = StepRoom(limits.max_running_seqs)
        self._spans: tuple[TextSpan, ...] = ()  # of what is under way, or raised
        self._ahead: _Launched | None = None
        self._ended = 0.0  # when the last step did

    @property
    def has_work(self) -> bool:
        return len(self.queue) > 0 or self._ahead is not None

    @property
    def patience_seconds(self) -> float:
        """How long more texts may be waited for, although there are some."""
        if not self.queue or self._ahead is not None:
            return 0.0
        return self._pace.patience_seconds(self.queue.num_tokens, self._clock())

    def add(self, order: Encode) -> list[Event]:
        assert order.request_id not in self.queue, "the service gives each request an id of its own"
        error = self._limits.refusal(order)
        if error is not None:
            return [RequestFailed(order.request_id, error)]
        self._pace.arrived(order.arrived_at, self.queue.add(order).num_tokens)
        return []

    def abort(self, command: Abort) -> list[Event]:
        """Nobody is told: whoever aborts has stopped listening."""
        self.queue.remove(command.request_id)
        return []

    def step(self) -> list[Event]:
        """Computes the next batch; returns the answers that are whole now."""
        self.stretch.begin()
        now, self._ahead = self._ahead or self._launch(), None
        if now is None:
            return []
        self._ahead = self._launch() if self._next_is_full() else None
        rows = self.runner.wait(now.flight)
        ended = self._clock()
        events = self._gather(now.spans, rows, ended)
        self._spans = () if self._ahead is None else self._ahead.spans
        stats = measured(now.spans, ended - max(now.at, self._ended), self.runner.model_seconds)
        self._ended = ended
        self.stats = replace(stats, stretch=self.stretch.of(stats.seconds))
        self._pace.observe(self.stats)
        self._room.worked(self._pace.target_tokens)
        if events:
            self._pace.answered(ended, len(events))
        return events

    def _launch(self) -> _Launched | None:
        """The next batch, under way; a smaller one where there was no memory for it. None: there is none."""
        began = self._clock()
        while spans := self.queue.take(self._room.of(self._pace.target_tokens)):
            self._spans += spans
            try:
                launched = _Launched(spans, self.runner.launch(spans), began)
            except RuntimeError as error:  # torch's want of memory is one
                if not (self.runner.survives(error) and self._room.shrink(spans)):
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
        """Whether waiting could bring the next step no more texts. One that is computed alone has no other beside it."""
        if not self.runner.overlaps or self.queue.num_tokens < self._pace.target_tokens:
            return False
        return not any(request.alone for request in self.queue.requests)

    def fail(self) -> list[Event]:
        """After `step` raised: its requests go back to go alone, and one that was alone already ends. Without a batch, all end."""
        error = StepFailed("The step that computed this request failed; the server's log says why. It may be sent again.")
        spans, self._spans, self._ahead = self._spans, (), None
        if not spans:
            return self.fail_all(error)
        requests = list(dict.fromkeys(span.request for span in spans))
        if len(requests) == 1:
            return self._end(requests, error)
        self._put_back(spans)
        for request in requests:
            request.alone = True
        return []

    def check(self) -> None:
        """A text of one token, beside all requests."""
        order = Encode("check", (Text((0,)),), self._limits.outputs[:1], arrived_at=0.0)
        self.runner.wait(self.runner.launch(Encoding.of(order).spans()))

    def fail_all(self, error: RequestError) -> list[Event]:
        """Every request ends with this error."""
        return self._end(list(self.queue.requests), error)

    def snapshot(self) -> Snapshot:
        requests = self.queue.requests
        running = sum(bool(request.results) for request in requests)
        return Snapshot(
            num_running=running,
            num_waiting=len(self.queue) - running,
            stepped_at=self._clock(),
            queue=tuple(request.tokens_left for request in requests),
            tempo=self._pace.tempo,
        )

    def _gather(self, spans: Items[TextSpan], rows: Items[Mapping[str, bytes]], now: float) -> list[Event]:
        events: list[Event] = []
        for span, own in zip(spans, rows, strict=True):
            request = span.request
            request.results[span.index] = {name: own[name] for name in request.order.outputs}
            if request.is_done and self.queue.remove(request.order.request_id):  # or it was aborted meanwhile
                events.append(_ready(request, now))
        for request in dict.fromkeys(span.request for span in spans):
            request.alone = False
        return events

    def _put_back(self, spans: Items[TextSpan]) -> None:
        for request in dict.fromkeys(span.request for span in spans):
            request.put_back(span for span in spans if span.request is request)

    def _end(self, requests: Items[Encoding], error: RequestError) -> list[Event]:
        ended = [request.order.request_id for request in requests]
        return [RequestFailed(request_id, error) for request_id in ended if self.queue.remove(request_id)]


def _ready(request: Encoding, now: float) -> ArraysReady:
    order, started_at = request.order, request.started_at
    assert started_at is not None, "it was in a step"
    timings = Timings(queue_seconds=max(started_at - order.arrived_at, 0.0), encode_seconds=now - started_at)
    return ArraysReady(order.request_id, request.arrays(), timings, request.num_tokens)


def measured(spans: Items[TextSpan], seconds: float, model_seconds: float) -> StepStats:
    """A step in numbers, for the metrics and the pace."""
    return StepStats(
        seconds=seconds,
        num_sequences=len(spans),
        model_seconds=model_seconds,
        encode_tokens=sum(span.num_tokens for span in spans),
        num_encode_sequences=len(spans),
        encode_pairs=sum(span.num_tokens**2 for span in spans),
    )
