"""Backend of an Apple GPU, built on PyTorch's Metal support. Not verified on hardware (docs/hardware.md).

Attention uses PyTorch's scaled dot product over gathered pages; no steps are recorded. Operations that PyTorch lacks on
Metal are refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from app.backends.base import CapturedGraph, DeviceEvent
from app.errors import PlanImpossible
from app.hardware.plan.plan import ServingPlan
from armature_kernels.attention.attention import KvRows, QkvHeads
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.paged import (
    AttendBlock,
    PackedTexts,
    PagedStep,
    QueryBlock,
    attend_block,
    attend_heads_torch,
    attend_texts_padded_torch,
)

_FALLBACK_VARIABLE = "PYTORCH_ENABLE_MPS_FALLBACK"


class MpsBackend:
    """Backend of one process with one GPU and one command queue; the GPU shares the machine's memory."""

    can_sample = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.device = torch.device("mps")
        self.dtype = dtype

    def configure(self, plan: ServingPlan) -> None:
        """Check that Metal is usable, and limit its memory to the plan's: beyond its own limit macOS would swap.

        Raises `PlanImpossible` if the fallback to the processor is enabled, or torch cannot use Metal.
        """
        if os.environ.get(_FALLBACK_VARIABLE, "0") not in ("", "0"):
            raise PlanImpossible(
                f"{_FALLBACK_VARIABLE} is set: operations that torch's MPS lacks would run on the processor without notice. "
                "Unset it, or set device to cpu."
            )
        if not torch.backends.mps.is_available():
            built = (
                "was built without MPS"
                if not torch.backends.mps.is_built()
                else "finds no usable Metal device (macOS 14 or newer?)"
            )
            raise PlanImpossible(f"device is mps, but torch {torch.__version__} {built}: set device to cpu.")
        torch.set_num_threads(plan.cpu.threads)
        torch.mps.set_per_process_memory_fraction(1.0)

    def free_bytes(self) -> int:
        """Return the bytes that macOS recommends for the GPU, less those that torch's driver has allocated."""
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def attention(
        self, heads: QkvHeads, kv: KvRows, written: Tensor, step: PagedStep, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        return attend_heads_torch(heads, kv, written, step, spec, attention_function(spec))

    def encoder_attention(self, heads: QkvHeads, texts: PackedTexts, spec: AttentionSpec) -> Tensor:
        return attend_texts_padded_torch(heads, texts, spec, attention_function(spec))

    def captures_prompts(self, needs_torch: bool) -> bool:
        return False

    def capture(self, work: Callable[[], None]) -> CapturedGraph | None:
        """Return None: PyTorch has no interface to record work on Metal."""
        return None

    def staging_buffer(self, length: int) -> Tensor:
        """Return an int64 [words] tensor; processor and GPU share one memory, so nothing is pinned."""
        return torch.zeros(length, dtype=torch.int64)

    def record_event(self) -> DeviceEvent:
        return MpsEvent()

    def recover_from_oom(self, error: Exception) -> bool:
        """Return true for an out-of-memory error, which MPS reports by its message, after releasing cached memory."""
        if "MPS backend out of memory" not in str(error):
            return False
        torch.mps.empty_cache()
        return True


class MpsEvent:
    def __init__(self) -> None:
        self._event = torch.mps.Event()
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


def attention_function(spec: AttentionSpec) -> AttendBlock:
    """Return the attention function for this layer; scores that are not plain are materialised."""
    return sdpa_attention if spec.has_plain_scores else attend_block


def sdpa_attention(query: Tensor, key: Tensor, value: Tensor, part: QueryBlock, spec: AttentionSpec) -> Tensor:
    """Compute `attend_block` with PyTorch's scaled dot product: query heads become queries of their kv head."""
    n, queries, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    grouped = (
        query.reshape(n, queries, kv_heads, group, head_dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(n, kv_heads, group * queries, head_dim)
    )
    # Cells beyond a context hold arbitrary values, so they are zeroed. A query that sees no key is given the first
    # key, because a softmax over no key is NaN. Without a context that key is zero; otherwise the row is padding, and
    # its result is ignored.
    keys, values = (x.masked_fill(~part.context[..., None, None], 0.0).transpose(1, 2) for x in (key, value))
    sees = part.visible.any(-1, keepdim=True)
    first = torch.arange(part.visible.shape[-1], device=query.device) == 0
    mask = (part.visible | (~sees & first)).repeat(1, group, 1).unsqueeze(1)
    result = F.scaled_dot_product_attention(grouped.to(key.dtype), keys, values, mask, scale=spec.scale)
    return result.reshape(n, kv_heads, group, queries, head_dim).permute(0, 3, 1, 2, 4).reshape(query.shape)
