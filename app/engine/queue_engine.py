"""What engines share that answer each request as a whole: its requests in order of arrival, and how they end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Generic

from app.engine.encoder.batching import BatchingDelay, QueuedT, RequestQueue
from app.errors import RequestError, StepFailed
from app.hardware.step_times import ThrottleCorrection
from app.messages import Abort, Event, RequestFailed, Timings
from app.metrics.steps import EngineSnapshot, StepStats


class QueueEngine(Generic[QueuedT]):
    """The part of an engine, as the worker calls it, that does not depend on what it computes.

    `stats` describes the last step. `in_step` are the requests of the current step, or of the step that raised.
    """

    def __init__(
        self,
        queue: RequestQueue[QueuedT],
        delay: BatchingDelay,
        clock: Callable[[], float] = time.monotonic,
        throttle_correction: ThrottleCorrection | None = None,
    ) -> None:
        self.stats: StepStats | None = None
        self.queue, self.in_step = queue, list[QueuedT]()
        self.throttle_correction = throttle_correction or ThrottleCorrection()
        self._delay, self._clock = delay, clock

    @property
    def has_work(self) -> bool:
        return len(self.queue) > 0

    @property
    def batching_delay_seconds(self) -> float:
        """Seconds that the worker may wait for more texts although some are queued."""
        return 0.0

    def abort(self, command: Abort) -> list[Event]:
        """Drop a request. It gets no event, since its client has gone."""
        self.queue.remove(command.request_id)
        return []

    def fail(self) -> list[Event]:
        error = step_failed()
        requests, self.in_step = self.in_step, []
        return self._end(requests, error) if requests else self.fail_all(error)

    def fail_all(self, error: RequestError) -> list[Event]:
        return self._end(list(self.queue.requests), error)

    def snapshot(self) -> EngineSnapshot:
        requests = self.queue.requests
        begun = sum(request.started_at is not None for request in requests)
        return EngineSnapshot(
            num_running=begun,
            num_waiting=len(self.queue) - begun,
            stepped_at=self._clock(),
            queue=tuple(request.tokens_left for request in requests),
            step_times=self._delay.step_times,
        )

    def _begin(self, requests: Iterable[QueuedT], at: float) -> None:
        self.in_step = list(requests)
        for request in self.in_step:
            request.started_at = at if request.started_at is None else request.started_at

    def _observe(self, started: float, model_seconds: float, num_encoded: int, tokens: int) -> None:
        seconds = self._clock() - started
        self.stats = StepStats(
            seconds,
            num_sequences=len(self.in_step),
            model_seconds=model_seconds,
            encode_tokens=tokens,
            num_encode_sequences=num_encoded,
            throttle_correction=self.throttle_correction.of(seconds),
        )
        self._delay.observe(self.stats)
        self.in_step = []

    @staticmethod
    def _timings(request: QueuedT, ended: float) -> Timings:
        assert request.started_at is not None, "it was in a step"
        queued = max(request.started_at - request.message.arrived_at, 0.0)
        return Timings(queue_seconds=queued, encode_seconds=ended - request.started_at)

    def _end(self, requests: Iterable[QueuedT], error: RequestError) -> list[Event]:
        ended = [request.message.request_id for request in requests]
        return [RequestFailed(request_id, error) for request_id in ended if self.queue.remove(request_id)]


def step_failed() -> StepFailed:
    return StepFailed("The step that computed this request failed; the server's log says why. It may be sent again.")
