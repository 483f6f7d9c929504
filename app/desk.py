"""The steps that every request passes, whatever its kind.

A request is counted in the metrics once, admitted, tokenized in a thread pool and sent to the worker. Used on
the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from app.admission import Admission
from app.errors import InvalidRequest, RequestError, RequestTimeout
from app.metrics import Api, Metrics, Outcome
from app.post import Post, WorkerPort
from app.served import Limits

T = TypeVar("T")


@dataclass(slots=True)
class Course:
    """Progress of one request. `accepted` is true once it was found valid and the worker has it."""

    arrived_at: float
    accepted: bool = False
    outcome: Outcome = "failed"


class Desk:
    """The worker with its client, the admission control and the tokenizer's thread pool."""

    def __init__(self, worker: WorkerPort, metrics: Metrics, clock: Callable[[], float]) -> None:
        self.worker, self.metrics, self.clock = worker, metrics, clock
        self.post = Post(worker, clock)
        self.admission = Admission(lambda: worker.snapshot, clock)
        self._seconds = 0.0
        self._pool: ThreadPoolExecutor | None = None

    def open(self, limits: Limits) -> None:
        """Apply the limits and start the thread pool. Call it once, before the first request, from any thread."""
        self.admission.max_running = limits.max_running_seqs
        self.admission.max_waiting = limits.max_waiting_requests
        self.admission.max_held_bytes = limits.max_held_bytes
        self._seconds = limits.request_timeout_seconds
        self._pool = ThreadPoolExecutor(limits.tokenizer_threads, thread_name_prefix="armature-text")

    def close(self) -> None:
        """Fail all open requests and shut down the thread pool."""
        self.post.stop()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def deadline(self, course: Course) -> float:
        """Return the time on `clock` at which the request times out."""
        return course.arrived_at + self._seconds

    @contextmanager
    def counted(self, api: Api) -> Iterator[Course]:
        """Report the request's outcome to the metrics exactly once, however the block ends."""
        course = Course(self.clock())
        try:
            yield course
        except (GeneratorExit, asyncio.CancelledError):
            course.outcome = "aborted"
            raise
        except RequestError as error:
            course.outcome = _outcome(error, course.accepted)
            raise
        finally:
            if course.outcome == "refused":
                self.metrics.refused(api)
            else:
                self.metrics.request_ended(api, course.outcome, self.clock() - course.arrived_at)

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
            async with asyncio.timeout(self._seconds):
                return await self.run(function, *arguments)
        except TimeoutError as error:
            raise RequestTimeout("Reading the prompt took longer than the request timeout.") from error


def _outcome(error: RequestError, accepted: bool) -> Outcome:
    """Return the metrics' outcome for a request that failed with `error`.

    A request that the worker has accepted can still be refused: the worker may find that it can never be served.
    """
    if isinstance(error, RequestTimeout):
        return "timeout"
    return "failed" if accepted and not isinstance(error, InvalidRequest) else "refused"
