"""The table from the plan's device to a backend, and what the processor's backend does when it is configured."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch

from app.backends.cpu import CpuBackend
from app.backends.selection import select_backend, select_device_backend, select_host_backend
from app.errors import PlanImpossible
from app.hardware.plan.plan import ServingPlan
from planned_machines import bare_plan


@pytest.fixture
def plan() -> ServingPlan:
    interop_threads = torch.get_num_interop_threads()
    return bare_plan(device="cpu", dtype="bfloat16", threads=1, interop_threads=interop_threads, cpu_ids=())


def in_a_thread(work: Callable[[], object]) -> object:
    """What `work` returns or raises on a thread of its own: its affinity ends with it."""
    answer: list[object] = []

    def run() -> None:
        try:
            answer.append(work())
        except PlanImpossible as error:
            answer.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return answer[0]


def test_the_cpu_is_served_in_the_plans_dtype(plan: ServingPlan) -> None:
    backend = select_backend(plan)
    assert isinstance(backend, CpuBackend)
    assert (backend.device, backend.dtype) == (torch.device("cpu"), torch.bfloat16)
    assert select_backend(plan.changed(dtype="float32")).dtype == torch.float32


@pytest.mark.parametrize(("device", "kind"), [("cuda", "CudaBackend"), ("mps", "MpsBackend")])
def test_a_device_is_served_by_its_own(device: str, kind: str, plan: ServingPlan) -> None:
    backend = select_device_backend(plan.changed(device=device, dtype="float16"))
    assert (type(backend).__name__, backend.device.type, backend.dtype) == (kind, device, torch.float16)


def test_what_is_asked_for_one_kind_is_not_given_of_another(plan: ServingPlan) -> None:
    with pytest.raises(PlanImpossible, match=r"'cpu' here; available: cuda, mps"):
        select_device_backend(plan)
    with pytest.raises(PlanImpossible, match=r"'cuda' here; available: cpu"):
        select_host_backend(plan.changed(device="cuda"))


def test_an_unknown_device_is_refused_and_what_exists_is_named(plan: ServingPlan) -> None:
    with pytest.raises(PlanImpossible, match=r"'tpu'.*available: cpu, cuda, mps"):
        select_backend(plan.changed(device="tpu"))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not pin threads")
def test_configure_sizes_the_pool_and_pins_the_calling_thread_alone(plan: ServingPlan) -> None:
    before, threads, dtype = os.sched_getaffinity(0), torch.get_num_threads(), torch.get_default_dtype()
    cpu = max(before)

    def work() -> tuple[set[int], int]:
        CpuBackend(torch.float32).configure(plan.changed(threads=2, cpu_ids=(cpu,)))
        return os.sched_getaffinity(0), torch.get_num_threads()

    try:
        assert in_a_thread(work) == ({cpu}, 2)
    finally:
        torch.set_num_threads(threads)
    assert os.sched_getaffinity(0) == before
    assert torch.get_default_dtype() == dtype


def test_a_mask_that_the_kernel_refuses_is_only_logged(plan: ServingPlan, caplog: pytest.LogCaptureFixture) -> None:
    threads = torch.get_num_threads()
    assert (
        in_a_thread(lambda: CpuBackend(torch.float32).configure(plan.changed(cpu_ids=(100_000,), threads=threads)))
        is None
    )
    assert "cannot be bound to CPUs [100000]" in caplog.text


def test_free_bytes_is_a_part_of_the_machines_memory() -> None:
    assert 0 < CpuBackend(torch.float32).free_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
