"""Simulated device that computes on the processor: paged memory and asynchronous submission, as on a GPU.

The device engine is tested on it on machines without a GPU. Attention uses the PyTorch implementations of
paged_torch.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from app.hardware.plan import ServingPlan
from app.hardware.probe import probe
from app.kernels.kv_rows import KVRows
from app.kernels.paged import PackedTexts, PagedStep
from app.kernels.paged_torch import packed_texts_torch, paged_attention_torch
from app.kernels.turn import Heads
from app.models.context import AttentionSpec


@dataclass(frozen=True, slots=True)
class Again:
    """Recorded work that is run again by calling it; its tensors keep their addresses, like those of a graph."""

    work: Callable[[], None]

    def replay(self) -> None:
        """Call the work again."""
        self.work()


class Done:
    """Mark of a device without a queue: all work before it is finished."""

    def wait(self) -> None:
        """Return at once."""


class TwinBackend:
    """`DeviceBackend` that runs on the processor."""

    draws = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.device = torch.device("cpu")
        self.dtype = dtype

    def configure(self, plan: ServingPlan) -> None:
        """Set the number of compute threads."""
        torch.set_num_threads(plan.threads.value)

    def free_bytes(self) -> int:
        """Return the bytes of host memory that this process can still allocate."""
        return probe().usable_bytes

    def synchronize(self) -> None:
        """Return at once: work is finished when it was submitted."""

    def attention(self, query: Tensor, kv: KVRows, step: PagedStep, spec: AttentionSpec) -> Tensor:
        """Compute causal attention over the pages of one layer, with PyTorch."""
        return paged_attention_torch(query, kv, step, spec)

    def attend_texts(self, heads: Heads, texts: PackedTexts, spec: AttentionSpec) -> Tensor:
        """Compute attention of each token within its own text, with PyTorch."""
        return packed_texts_torch(heads, texts, spec)

    def capture(self, work: Callable[[], None]) -> Again:
        """Return an object that calls `work` again."""
        return Again(work)

    def staging(self, words: int) -> Tensor:
        """Return an int64 [words] tensor."""
        return torch.zeros(words, dtype=torch.int64)

    def mark(self) -> Done:
        """Return a mark that is already passed."""
        return Done()

    def survives(self, error: Exception) -> bool:
        """Return true for torch's out-of-memory error.

        On a real processor the kernel kills a process that runs out of memory; tests raise torch's error instead.
        """
        return isinstance(error, torch.OutOfMemoryError)
