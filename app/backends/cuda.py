"""Backend of an NVIDIA GPU.

Attention over pages runs on the package's Triton kernels. Attention over contiguous tokens runs on PyTorch's flash
attention. Decode steps are captured as CUDA graphs. Not verified on hardware (docs/hardware.md). The process sees
one GPU, which the plan chose. All work is submitted to PyTorch's current stream.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from app.backends.base import Captured, Mark
from app.errors import PlanImpossible
from app.hardware.plan import ServingPlan
from app.kernels import flash
from app.kernels.gpu.available import usable
from app.kernels.kv_rows import KVRows
from app.kernels.paged import PackedTexts, PagedStep
from app.kernels.paged_torch import packed_texts_torch, paged_attention_torch
from app.kernels.turn import Heads, turned
from app.models.context import AttentionSpec

_OLDEST = (8, 0)  # compute capability of Ampere, the first with bfloat16 products, flash attention and four-bit products
# Libraries, graphs and Triton kernels allocate memory outside of torch's allocator. They report out of memory as plain errors.
_NO_ROOM = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "Triton Error [CUDA]: out of memory")


@dataclass(frozen=True, slots=True)
class Passed:
    """Mark in a CUDA stream."""

    event: torch.cuda.Event

    def wait(self) -> None:
        """Wait for the CUDA event."""
        self.event.synchronize()


class CudaBackend:
    """Backend of one process with one GPU and one queue."""

    draws = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.device = torch.device("cuda", 0)  # the process sees only this one
        self.dtype = dtype

    def configure(self, plan: ServingPlan) -> None:
        """Select the GPU and set the numerical options of PyTorch.

        FP32 products do not use TF32. Sums of FP16 products are accumulated in FP32, where they cannot overflow.

        Raises:
            PlanImpossible: torch cannot use the GPU, or its compute capability is too low.
        """
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            torch.cuda.set_device(self.device)
            capability, name = torch.cuda.get_device_capability(self.device), torch.cuda.get_device_name(self.device)
        except (RuntimeError, AssertionError) as error:  # torch raises AssertionError if it is no CUDA build
            raise PlanImpossible(f"device is cuda, but torch {torch.__version__} cannot use the GPU: {error}") from error
        if capability < _OLDEST:
            least, found = (".".join(map(str, one)) for one in (_OLDEST, capability))
            raise PlanImpossible(f"{name} has compute capability {found}, but at least {least} is required. Set device to cpu.")
        torch.set_num_threads(plan.threads.value)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self._recording = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def free_bytes(self) -> int:
        """Return the bytes that are free in the driver plus those that torch has reserved but not allocated."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def synchronize(self) -> None:
        """Wait until the GPU has finished all submitted work."""
        torch.cuda.synchronize(self.device)

    def attention(self, query: Tensor, kv: KVRows, step: PagedStep, spec: AttentionSpec) -> Tensor:
        """Compute causal attention of `query` [tokens, heads, head_dim] over the pages of one layer.

        Prompts that start in this step use PyTorch's flash attention if it supports them. Everything else uses the
        Triton kernels, so a decode gives the same result with any other sequences in the batch.
        """
        if not usable(query):
            return paged_attention_torch(query, kv, step, spec)
        from app.kernels.gpu.attention import attend_decodes
        from app.kernels.gpu.prompts import attend_prompts, fresh_rows

        prompts = len(step.slots) > step.num_decodes
        by_flash = prompts and step.fresh and flash.suits(query.dtype, query.shape[2], spec) and kv.keys.dtype == query.dtype
        if by_flash:
            key, value = fresh_rows(kv, step, len(query))
            result = flash.attend(query, key, value, (step.starts[step.num_decodes :], step.most_queries), spec)
        else:
            result = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if step.num_decodes:
            attend_decodes(query, kv, step, spec, result)
        if prompts and not by_flash:
            attend_prompts(query, kv, step, spec, result)
        return result

    def attend_texts(self, heads: Heads, texts: PackedTexts, spec: AttentionSpec) -> Tensor:
        """Compute attention within each text, with PyTorch's flash attention if it supports the texts.

        Flash attention supports neither FP32 nor soft caps nor relative position biases.
        """
        if flash.suits(heads.product.dtype, heads.head_dim, spec):
            return flash.attend(*turned(heads), (texts.starts, texts.most_tokens), spec).flatten(1)
        if not usable(heads.product):
            return packed_texts_torch(heads, texts, spec)
        from app.kernels.gpu.prompts import attend_packed

        return attend_packed(*turned(heads), texts, spec).flatten(1)

    def capture(self, work: Callable[[], None]) -> Captured:
        """Run `work` once on the recording stream, then record it.

        The first run is needed because libraries create per-stream objects at their first product, and these
        cannot be part of a graph. All graphs allocate temporary memory from one pool, since only one graph runs at
        a time. Other threads may use CUDA during the recording. PyTorch does not leave the recording stream if a
        recording fails to end; the outer `with` always does.
        """
        here = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(here):
            self._recording.wait_stream(here)
            with torch.cuda.stream(self._recording):
                work()
            here.wait_stream(self._recording)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._recording, capture_error_mode="thread_local"):
                work()
        return graph

    def staging(self, words: int) -> Tensor:
        """Return a pinned int64 [words] host tensor."""
        return torch.zeros(words, dtype=torch.int64, pin_memory=True)

    def mark(self) -> Mark:
        """Return a mark that was recorded on the current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return Passed(event)

    def survives(self, error: Exception) -> bool:
        """Return true for an out-of-memory error, after its memory was released and returned to the driver."""
        if not isinstance(error, torch.OutOfMemoryError) and not any(words in str(error) for words in _NO_ROOM):
            return False
        traceback.clear_frames(error.__traceback__)
        torch.cuda.empty_cache()
        return True
