"""Thread pool that reads prompts: chat templates and tokenization, beside the event loop.

A request that waits for a thread, or is being read, counts as waiting, in the metrics and in the predicted wait. Its
work counts until the thread has ended it, even if the client has left. A thread asks between two chunks of a text
whether the result is still needed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

from app.text.cancellation import CANCELLED

T = TypeVar("T")
_GAIN = 0.1  # weight of a new text in the running mean
_MIN_TIMED_BYTES = 1_000  # of a shorter text, starting the thread takes most of the time


class TextPool:
    """Threads for prompts, with the number of requests and bytes that wait for them or are in work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._num_threads = 1
        self._flags: dict[threading.Event, int] = {}  # flag to cancel it, and bytes, of each chunk of work
        self._seconds_per_byte = 0.0

    def open(self, num_threads: int) -> None:
        """Start the pool."""
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="armature-text")

    def close(self) -> None:
        """Cancel all work. Threads end after their current chunk."""
        with self._lock:
            for flag in self._flags:
                flag.set()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def num_requests(self) -> int:
        """Number of requests that wait for a thread or are being read."""
        return len(self._flags)

    def wait_seconds(self) -> float:
        """Return the time after which the texts now known are read, at the speed of the last ones."""
        with self._lock:
            return sum(self._flags.values()) * self._seconds_per_byte / self._num_threads

    async def run(self, num_bytes: int, function: Callable[..., T], *arguments: Any) -> T:
        """Run `function` in a thread and return its result.

        If the caller is cancelled, `stop_if_cancelled` ends the work at its next step.
        """
        assert self._pool is not None, "open() starts the pool before the first request"
        flag, context = threading.Event(), copy_context()
        context.run(CANCELLED.set, flag)
        with self._lock:
            self._flags[flag] = num_bytes
        try:
            work = self._pool.submit(context.run, self._timed, num_bytes, function, *arguments)
        except RuntimeError:  # the pool is closed, or no thread can be started
            self._end(flag)
            raise
        work.add_done_callback(lambda _: self._end(flag))
        try:
            return await asyncio.wrap_future(work)
        finally:
            flag.set()
            del work  # it holds its error, and the error this frame: the cycle would keep the texts for long

    def _timed(self, num_bytes: int, function: Callable[..., T], *arguments: Any) -> T:
        began = time.monotonic()
        result = function(*arguments)
        if num_bytes >= _MIN_TIMED_BYTES:
            rate = (time.monotonic() - began) / num_bytes
            with self._lock:
                self._seconds_per_byte += (_GAIN if self._seconds_per_byte else 1.0) * (rate - self._seconds_per_byte)
        return result

    def _end(self, flag: threading.Event) -> None:
        with self._lock:
            self._flags.pop(flag, None)
