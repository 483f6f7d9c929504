"""The steps that every request passes, whatever its kind.

A request is counted in the metrics once, admitted, tokenized in a thread pool and sent to the worker. Used on
the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    Callable,
    Iterator,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import (
    Any,
    TypeVar,
)

from app.errors import (
    InvalidRequest,
    RequestError,
    RequestTimeout,
)
from app.metrics.instruments import (
    Api,
    Metrics,
    Outcome,
)
from app.service.admission import Admission
from app.service.engine_client import (
    EngineClient,
    WorkerInterface,
)
from app.service.served_model import ServingLimits

T = TypeVar("T")


@dataclass(slots=True)
class RequestRecord:
    """Progress of one request. `accepted` is true once it was found valid and the worker has it."""

    arrived_at: float
    accepted: bool = False
    outcome: Outcome = "failed"


class RequestPipeline:
    """The worker with its client, the admission control and the tokenizer's thread pool."""

    def __init__(self, worker: WorkerInterface, metrics: Metrics, clock: Callable[[], float]) -> None:
        self.worker, self.metrics, self.clock = worker, metrics, clock
        self.client = EngineClient(worker, clock)
        self.admission = Admission(lambda: worker.snapshot, clock)
        self._timeout_seconds = 0.0
        self._pool: ThreadPoolExecutor | None = None

    def open(self, limits: ServingLimits) -> None:
        """Apply the limits and start the thread pool. Call it once, before the first request, from any thread."""
        self.admission.open(limits.max_running_seqs, limits.max_waiting_requests, limits.max_held_bytes)
        self._timeout_seconds = limits.request_timeout_seconds
        self._pool = ThreadPoolExecutor(limits.tokenizer_threads, thread_name_prefix="armature-text")

    def close(self) -> None:
        """Fail all open requests and shut down the thread pool."""
        self.client.stop()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def deadline(self, record: RequestRecord) -> float:
        """Return the time on `clock` at which the request times out."""
        return record.arrived_at + self._timeout_seconds

    @contextmanager
    def track(self, api: Api) -> Iterator[RequestRecord]:
        """Report the request's outcome to the metrics exactly once, however the block ends."""
        record = RequestRecord(self.clock())
        try:
            yield record
        except (GeneratorExit, asyncio.CancelledError):
            record.outcome = "aborted"
            raise
        except RequestError as error:
            record.outcome = _failure_outcome(error, record.accepted)
            raise
        finally:
            if record.outcome == "refused":
                self.metrics.refused(api)
            else:
                self.metrics.request_ended(api, record.outcome, self.clock() - record.arrived_at)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run `function` in the thread pool, so that a long text does not block other requests."""
        assert self._pool is not None, "open() starts the pool before the first request"
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def read(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run `function` in the thread pool within the request timeout.

        Raises:
            RequestTimeout: it took longer.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self.run(function, *arguments)
        except TimeoutError as error:
            raise RequestTimeout("Reading the prompt took longer than the request timeout.") from error


def _failure_outcome(error: RequestError, accepted: bool) -> Outcome:
    """Return the metrics' outcome for a request that failed with `error`.

    A request that the worker has accepted can still be refused: the worker may find that it can never be served.
    """
    if isinstance(error, RequestTimeout):
        return "timeout"
    return "failed" if accepted and not isinstance(error, InvalidRequest) else "refused"
