"""An NVIDIA GPU: attention by our kernels over pages and by torch's flash over what lies end to end, decode steps as graphs.

Not verified on hardware (docs/hardware.md). The process sees one GPU, which the plan chose; everything is asked on torch's current stream.
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

_OLDEST = (8, 0)  # compute capability: bfloat16 products, flash attention and four-bit products all begin with Ampere
# Libraries, graphs and Triton's kernels take memory beside torch's allocator, and say so as they say any error.
_NO_ROOM = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "Triton Error [CUDA]: out of memory")


@dataclass(frozen=True, slots=True)
class Passed:
    """A mark, as CUDA has it."""

    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()


class CudaBackend:
    """One process, one GPU, one queue."""

    draws = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.device = torch.device("cuda", 0)  # the only one that the process sees
        self.dtype = dtype

    def configure(self, plan: ServingPlan) -> None:
        """FP32 means FP32: products of it do not go through TF32. Sums of FP16 are kept in FP32, where they cannot overflow."""
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            torch.cuda.set_device(self.device)
            capability, name = torch.cuda.get_device_capability(self.device), torch.cuda.get_device_name(self.device)
        except (RuntimeError, AssertionError) as error:  # torch asserts that it is a CUDA build
            raise PlanImpossible(f"device is cuda, but torch {torch.__version__} cannot use the GPU: {error}") from error
        if capability < _OLDEST:
            least, found = (".".join(map(str, one)) for one in (_OLDEST, capability))
            raise PlanImpossible(
                f"{name} has compute capability {found}, and {least} is the least that is served. Set device to cpu."
            )
        torch.set_num_threads(plan.threads.value)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self._recording = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def free_bytes(self) -> int:
        """What the driver has left, and what torch has taken from it and holds for nobody."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def attention(self, query: Tensor, kv: KVRows, step: PagedStep, spec: AttentionSpec) -> Tensor:
        """Prompts that begin here, where torch's kernel takes them, by that; all else by ours, the same for a decode in any company."""
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
        """By torch's kernel where it takes them: not in FP32, nor with soft caps or biases by distance."""
        if flash.suits(heads.product.dtype, heads.head_dim, spec):
            return flash.attend(*turned(heads), (texts.starts, texts.most_tokens), spec).flatten(1)
        if not usable(heads.product):
            return packed_texts_torch(heads, texts, spec)
        from app.kernels.gpu.prompts import attend_packed

        return attend_packed(*turned(heads), texts, spec).flatten(1)

    def capture(self, work: Callable[[], None]) -> Captured:
        """Run once more first, on the stream that records: what libraries make for a stream at its first product is not part of a graph.

        All graphs take what they need in between from one pool, since one runs after the other. Other threads may go on meanwhile.
        Torch does not leave the recording stream where it could not end a recording: whatever happens, the outer bracket does.
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
        return torch.zeros(words, dtype=torch.int64, pin_memory=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return Passed(event)

    def survives(self, error: Exception) -> bool:
        """What the failed step held is let go, and given back to the driver."""
        if not isinstance(error, torch.OutOfMemoryError) and not any(words in str(error) for words in _NO_ROOM):
            return False
        traceback.clear_frames(error.__traceback__)
        torch.cuda.empty_cache()
        return True
