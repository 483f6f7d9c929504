"""Threads that each compute one job at a time, alone.

Torch divides one operation among its threads. Packing has many independent jobs instead: each runs on one thread, so no
thread waits for another after every operation, and a job's result does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from typing import Self, TypeVar

import torch

T = TypeVar("T")
_WAITING = 2  # jobs per thread that are submitted ahead, so that their results are not held in memory


class ComputeThreads:
    """As many threads as torch has on the calling thread, which alone may call `run`. Use it as a context manager.

    With one thread, jobs run on the calling thread.
    """

    def __init__(self) -> None:
        self.count = torch.get_num_threads()
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            torch.set_num_threads(self.count)  # a thread's number is also the one of threads that start later

    def run(self, jobs: Iterable[Callable[[], T]]) -> Iterator[T]:
        """Run the jobs and yield their results in the order of the jobs.

        If a job raises, or the iterator is closed, jobs that have not begun are dropped, and those that run are waited
        for.
        """
        if self.count == 1:
            yield from (_computed(job) for job in jobs)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.count, "armature-pack", initializer=_compute_alone)
        pool, remaining, submitted = self._pool, iter(jobs), list[Future[T]]()
        with ExitStack() as stack:
            stack.callback(_drop, submitted)
            while True:
                submitted += [pool.submit(_computed, job) for job in islice(remaining, self._room(submitted))]
                if not submitted:
                    return
                yield submitted.pop(0).result()

    def run_all(self, jobs: Iterable[Callable[[], object]], alone: bool = False) -> None:
        """Run jobs without results; with `alone`, on the calling thread, which a device is used by."""
        for _ in map(_computed, jobs) if alone else self.run(jobs):
            pass

    def _room(self, submitted: list[Future[T]]) -> int:
        return self.count * _WAITING - len(submitted)


def _compute_alone() -> None:
    torch.get_num_threads()  # initializes the thread, which would otherwise overwrite the number later
    torch.set_num_threads(1)


def _computed(job: Callable[[], T]) -> T:
    with torch.inference_mode():  # it applies to one thread
        return job()


def _drop(submitted: list[Future[T]]) -> None:
    for future in submitted:
        future.cancel()
    for future in submitted:
        if not future.cancelled():
            future.exception()
