"""Threads that compute alone: order, bounded submission, errors, and torch's number of threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from armature_kernels.compute_threads import ComputeThreads


@pytest.fixture(params=[1, 3])
def count(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_results_come_in_the_order_of_the_jobs(count: int) -> None:
    first_is_slow = threading.Event()

    def job(number: int) -> int:
        if number == 0 and count > 1:
            assert first_is_slow.wait(60)
        if number == 1:
            first_is_slow.set()
        return number

    with ComputeThreads() as threads:
        assert list(threads.run([lambda n=n: job(n) for n in range(20)])) == list(range(20))
        assert list(threads.run([])) == []


def test_a_job_computes_alone_and_in_inference_mode(count: int) -> None:
    with ComputeThreads() as threads:
        assert set(threads.run([torch.get_num_threads] * 9)) == {1}
        assert all(threads.run([torch.is_inference_mode_enabled] * 9))
    assert torch.get_num_threads() == count
    found: list[int] = []
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert found == [count]


def test_a_failure_drops_the_jobs_that_have_not_begun(count: int) -> None:
    begun: list[int] = []

    def job(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise ValueError("first")

    with ComputeThreads() as threads:
        with pytest.raises(ValueError, match="first"):
            threads.run_all([lambda n=n: job(n) for n in range(100)])
        assert len(begun) <= 2 * count
        threads.run_all([lambda: begun.append(-1)])
    assert begun[-1] == -1
