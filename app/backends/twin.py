"""A device that is none: memory in pages and work asked for ahead, as on a GPU, computed by a processor at once.

What a device's engine does is tried on it where there is no device. Attention is the twins' of paged_torch.py.
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
    """Work that is simply done again: what it reads and writes stays where it was, as a graph's does."""

    work: Callable[[], None]

    def replay(self) -> None:
        self.work()


class Done:
    """A mark in no queue: what was asked before it is done."""

    def wait(self) -> None:
        """There is nothing to wait for."""


class TwinBackend:
    """A `DeviceBackend` on the processor."""

    draws = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.device = torch.device("cpu")
        self.dtype = dtype

    def configure(self, plan: ServingPlan) -> None:
        torch.set_num_threads(plan.threads.value)

    def free_bytes(self) -> int:
        return probe().usable_bytes

    def synchronize(self) -> None:
        """All was done when it was asked for."""

    def attention(self, query: Tensor, kv: KVRows, step: PagedStep, spec: AttentionSpec) -> Tensor:
        return paged_attention_torch(query, kv, step, spec)

    def attend_texts(self, heads: Heads, texts: PackedTexts, spec: AttentionSpec) -> Tensor:
        return packed_texts_torch(heads, texts, spec)

    def capture(self, work: Callable[[], None]) -> Again:
        return Again(work)

    def staging(self, words: int) -> Tensor:
        return torch.zeros(words, dtype=torch.int64)

    def mark(self) -> Done:
        return Done()

    def survives(self, error: Exception) -> bool:
        """A processor that wants memory is ended by its kernel; tests plant an error of torch's own."""
        return isinstance(error, torch.OutOfMemoryError)
