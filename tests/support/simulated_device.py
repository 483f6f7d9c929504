"""Simulated device that computes on the processor: paged memory and asynchronous submission, as on a GPU.

The device engines are tested on it on machines without a GPU. Attention uses the PyTorch implementations of
`armature_kernels/attention/paged.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from app.hardware.facts import CudaDevice, Facts, TorchBuild
from app.hardware.plan.plan import ServingPlan
from app.hardware.probe.probe import probe
from armature_kernels.attention.attention import KvRows, QkvHeads
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.paged import PackedTexts, PagedStep, attend_heads_torch, attend_texts_padded_torch

GPU = CudaDevice(0, "NVIDIA H200", (9, 0), 141 * 2**30, free_bytes=20 * 2**30)


def with_gpu(root: Path = Path("/")) -> Facts:
    """Return the facts of this machine, with a GPU."""
    return replace(probe(root), cuda=(GPU,), torch=TorchBuild("2.13.0", cuda="13.0"))


@dataclass(frozen=True, slots=True)
class RepeatedWork:
    """Recorded work that is run again by calling it; its tensors keep their addresses, like those of a graph."""

    work: Callable[[], None]

    def replay(self) -> None:
        """Call the work again."""
        self.work()


class CompletedEvent:
    """Mark of a device without a queue: all work before it is finished."""

    def wait(self) -> None:
        """Return at once."""


class SimulatedDeviceBackend:
    """`DeviceBackend` that runs on the processor."""

    can_sample = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.device = torch.device("cpu")
        self.is_configured = False
        self.dtype = dtype

    def configure(self, plan: ServingPlan) -> None:
        """Set the number of compute threads."""
        torch.set_num_threads(plan.cpu.threads)
        self.is_configured = True

    def free_bytes(self) -> int:
        """Return the bytes of host memory that this process can still allocate."""
        return probe().usable_bytes

    def synchronize(self) -> None:
        """Return at once: work is finished when it was submitted."""

    def attention(
        self, heads: QkvHeads, kv: KvRows, written: Tensor, step: PagedStep, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Compute causal attention over the pages of one layer, with PyTorch."""
        return attend_heads_torch(heads, kv, written, step, spec)

    def encoder_attention(self, heads: QkvHeads, texts: PackedTexts, spec: AttentionSpec) -> Tensor:
        """Compute attention of each token within its own text, with PyTorch."""
        return attend_texts_padded_torch(heads, texts, spec)

    def captures_prompts(self, needs_torch: bool) -> bool:
        """Return true: tests are small."""
        return True

    def capture(self, work: Callable[[], None]) -> RepeatedWork:
        """Return an object that calls `work` again."""
        return RepeatedWork(work)

    def staging_buffer(self, length: int) -> Tensor:
        """Return an int64 [length] tensor."""
        return torch.zeros(length, dtype=torch.int64)

    def record_event(self) -> CompletedEvent:
        """Return a mark that is already passed."""
        return CompletedEvent()

    def recover_from_oom(self, error: Exception) -> bool:
        """Return true for torch's out-of-memory error.

        On a real processor the kernel kills a process that runs out of memory; tests raise torch's error instead.
        """
        return isinstance(error, torch.OutOfMemoryError)
