"""What every request passes, whatever is asked: it is counted once, gets a place, is read in a thread beside and sent on its way.

Event loop only.
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
    """How far one request is. `accepted`: it was valid, and is the worker's now."""

    arrived_at: float
    accepted: bool = False
    outcome: Outcome = "failed"


class Desk:
    """The worker, its post and the places before it."""

    def __init__(self, worker: WorkerPort, metrics: Metrics, clock: Callable[[], float]) -> None:
        self.worker, self.metrics, self.clock = worker, metrics, clock
        self.post = Post(worker, clock)
        self.admission = Admission(lambda: worker.snapshot, clock)
        self._seconds = 0.0
        self._pool: ThreadPoolExecutor | None = None

    def open(self, limits: Limits) -> None:
        """From any thread, once, before the first request."""
        self.admission.max_running = limits.max_running_seqs
        self.admission.max_waiting = limits.max_waiting_requests
        self.admission.max_held_bytes = limits.max_held_bytes
        self._seconds = limits.request_timeout_seconds
        self._pool = ThreadPoolExecutor(limits.tokenizer_threads, thread_name_prefix="armature-text")

    def close(self) -> None:
        """Whatever is open fails."""
        self.post.stop()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def deadline(self, course: Course) -> float:
        return course.arrived_at + self._seconds

    @contextmanager
    def counted(self, api: Api) -> Iterator[Course]:
        """However the request ends in here, the metrics are told once."""
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
        """In the text pool: a long text holds up nobody else's answer."""
        assert self._pool is not None, "a model that is served has brought its pool"
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def read(self, function: Callable[..., T], *arguments: Any) -> T:
        """The same for a request's own text, within its time."""
        try:
            async with asyncio.timeout(self._seconds):
                return await self.run(function, *arguments)
        except TimeoutError as error:
            raise RequestTimeout("Reading the prompt took longer than the request timeout.") from error


def _outcome(error: RequestError, accepted: bool) -> Outcome:
    """How the metrics call a request that an error ended; the worker too may find that one can never be served."""
    if isinstance(error, RequestTimeout):
        return "timeout"
    return "failed" if accepted and not isinstance(error, InvalidRequest) else "refused"
