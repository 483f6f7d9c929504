"""Decisions of the CUDA backend, with a fake torch.cuda; no GPU is needed or touched."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from app.backends.cuda import CudaBackend
from app.backends.selection import select_backend, select_device_backend, select_host_backend
from app.errors import PlanImpossible
from app.hardware.plan.plan import ServingPlan
from planned_machines import bare_plan


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


def _segment(pool: tuple[int, int], reserved: int, allocated: int) -> dict[str, Any]:
    """Return torch's description of memory that it has reserved for a pool."""
    return {"device": 0, "segment_pool_id": pool, "total_size": reserved, "allocated_size": allocated}


class Cuda:
    """torch.cuda as far as the backend asks it; `log` is what was asked, in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.capability = (9, 0)
        self.available = Stream("served", self.log)
        played = {
            "init": lambda: None,
            "set_device": lambda device: self.log.append(f"device {device}"),
            "get_device_capability": lambda device: self.capability,
            "get_device_name": lambda device: "NVIDIA H200",
            "Stream": lambda device: Stream("recording", self.log),
            "graph_pool_handle": lambda: "pool",
            "current_stream": lambda device: self.available,
            "stream": self._on,
            "graph": self._recorded,
            "CUDAGraph": Graph,
            "mem_get_info": lambda device: (1000, 5000),
            "memory_snapshot": lambda: [_segment((0, 0), 300, 200), _segment((0, 7), 900, 100)],
            "empty_cache": lambda: self.log.append("given back"),
        }
        for name, value in played.items():
            patch.setattr(torch.cuda, name, value)

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        self.log.append(f"on {stream.name}")
        before, self.available = self.available, stream
        try:
            yield
        finally:
            self.available = before

    @contextlib.contextmanager
    def _recorded(self, graph: Graph, pool: str, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        """As torch's: where it cannot end a recording, it stays on the recording stream."""
        self.log.append(f"recorded on {stream.name} from {pool}, {capture_error_mode}")
        before, self.available = self.available, stream
        yield
        self.available = before


class Graph:
    def replay(self) -> None:
        """Nothing was recorded."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    products, threads = torch.backends.cuda.matmul, torch.get_num_threads()
    before = products.allow_fp16_reduced_precision_reduction, torch.get_float32_matmul_precision()
    yield Cuda(monkeypatch)
    products.allow_fp16_reduced_precision_reduction = before[0]
    torch.set_float32_matmul_precision(before[1])
    torch.set_num_threads(threads)


@pytest.fixture
def plan() -> Any:
    """The few words of a plan that a backend reads."""
    return bare_plan(device="cuda", dtype="bfloat16", threads=1)


def test_nothing_of_cuda_is_touched_before_it_is_configured(plan: ServingPlan) -> None:
    """On a CPU build of torch, or a host without a driver, any question would raise."""
    backend = select_backend(plan)
    assert isinstance(backend, CudaBackend)
    assert (backend.device, backend.dtype) == (torch.device("cuda", 0), torch.bfloat16)
    assert type(select_device_backend(plan)) is CudaBackend


def test_a_gpu_where_a_processor_is_required_is_refused(plan: ServingPlan) -> None:
    with pytest.raises(PlanImpossible, match=r"'cuda' here; available: cpu"):
        select_host_backend(plan)


def test_products_of_fp32_are_of_fp32_and_halves_do_not_overflow_in_sums(cuda: Cuda, plan: ServingPlan) -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    CudaBackend(torch.float16).configure(plan)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    assert cuda.log == ["device cuda:0"]


def test_an_old_gpu_is_refused_by_its_name(cuda: Cuda, plan: ServingPlan) -> None:
    cuda.capability = (7, 5)
    with pytest.raises(PlanImpossible, match=r"H200 has compute capability 7\.5, but at least 8\.0 is required"):
        CudaBackend(torch.float16).configure(plan)


@pytest.mark.parametrize(
    "error", [AssertionError("Torch not compiled with CUDA enabled"), RuntimeError("Found no NVIDIA driver")]
)
def test_a_torch_that_cannot_use_the_gpu_says_why(
    error: Exception, cuda: Cuda, plan: ServingPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "init", refused)
    with pytest.raises(PlanImpossible, match=str(error)):
        CudaBackend(torch.bfloat16).configure(plan)


def test_what_torch_holds_for_nobody_is_free_too(cuda: Cuda) -> None:
    assert CudaBackend(torch.bfloat16).free_bytes() == 1100


def test_work_is_run_where_it_is_recorded_and_every_graph_takes_from_one_pool(cuda: Cuda, plan: ServingPlan) -> None:
    backend = CudaBackend(torch.bfloat16)
    backend.configure(plan)
    cuda.log.clear()
    for _ in range(2):
        assert isinstance(backend.capture(lambda: cuda.log.append("work")), Graph)
    once = [
        "on served",
        "recording waits for served",
        "on recording",
        "work",
        "served waits for recording",
        "recorded on recording from pool, thread_local",
        "work",
    ]
    assert cuda.log == once * 2


def test_what_cannot_be_recorded_leaves_the_stream_as_it_was(cuda: Cuda, plan: ServingPlan) -> None:
    backend = CudaBackend(torch.bfloat16)
    backend.configure(plan)
    runs = iter([None, RuntimeError("operation not permitted when stream is capturing")])

    def work() -> None:
        error = next(runs)
        if error is not None:
            raise error

    with pytest.raises(RuntimeError, match="not permitted"):
        backend.capture(work)
    assert cuda.available.name == "served"


class Held:
    """Stands for a tensor of a step that failed."""


def test_want_of_memory_is_survived_and_what_the_step_held_is_given_back(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[weakref.ref[Held]] = []

    def step() -> None:
        held = Held()
        kept.append(weakref.ref(held))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def given_back() -> None:
        cuda.log.append("held" if kept[0]() is not None else "let go")

    monkeypatch.setattr(torch.cuda, "empty_cache", given_back)
    try:
        step()
    except torch.OutOfMemoryError as error:
        assert CudaBackend(torch.bfloat16).recover_from_oom(error)
    assert cuda.log == ["let go"]


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'",
        "Triton Error [CUDA]: out of memory",
    ],
)
def test_libraries_and_graphs_may_want_memory_too(words: str, cuda: Cuda) -> None:
    assert CudaBackend(torch.bfloat16).recover_from_oom(RuntimeError(words))
    assert cuda.log == ["given back"]


def test_only_want_of_memory_is_survived(cuda: Cuda) -> None:
    assert not CudaBackend(torch.bfloat16).recover_from_oom(
        RuntimeError("CUDA error: an illegal memory access was encountered")
    )
    assert cuda.log == []
