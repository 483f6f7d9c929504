"""Interfaces of the compute backends: one for processors (`HostBackend`), one for devices (`DeviceBackend`).

The code above this layer never names a kind of device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from app.hardware.plan.plan import ServingPlan
from armature_kernels.attention.attention import AttentionStep, KvRows, QkvHeads
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.paged import PackedTexts, PagedStep


class BaseBackend(Protocol):
    """Methods and attributes that every backend has."""

    device: torch.device
    dtype: torch.dtype

    def configure(self, plan: ServingPlan) -> None:
        """Prepare the device as planned, on the worker thread, before the first tensor is created."""

    def free_bytes(self) -> int:
        """Return the number of bytes that can still be allocated on the device."""

    def synchronize(self) -> None: ...


class HostBackend(BaseBackend, Protocol):
    """Backend of a processor: keys and values are stored in slots, which the operating system pages."""

    def attention(self, query: Tensor, kv: KvRows, step: AttentionStep, spec: AttentionSpec) -> Tensor:
        """Compute causal attention over the rows of one layer that `step` describes.

        `query` is [tokens, heads, head_dim]; the result has its shape and dtype.
        """


class CapturedGraph(Protocol):
    """Work that was recorded on the device once; the caller writes and reads its tensors around `replay`."""

    def replay(self) -> None: ...


class DeviceEvent(Protocol):
    """Position in the device's queue, like `torch.cuda.Event`."""

    def wait(self) -> None:
        """Wait until the device has finished all work submitted before this position; later work is not waited for."""


class DeviceBackend(BaseBackend, Protocol):
    """Backend of a device with a memory and a queue that are separate from the processor's.

    Keys and values are stored in pages. A call returns before its work is done. `can_sample`: the device has the
    float64 arithmetic that sampling needs; without it the device only selects the top logits.
    """

    can_sample: bool

    def attention(
        self, heads: QkvHeads, kv: KvRows, written: Tensor, step: PagedStep, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values to rows `written` of one layer, and compute causal attention over the pages of `step`.

        Return queries and results [tokens, num_heads, head_dim] in the dtype of the product, which may be overwritten. The
        results of sequences without context are zeros; the queries of decodes are not defined.
        """

    def encoder_attention(self, heads: QkvHeads, texts: PackedTexts, spec: AttentionSpec) -> Tensor:
        """Compute attention of each token within its own text.

        The result is [tokens, num_heads * head_dim] in the dtype of the QKV product, which may be overwritten.
        """

    def captures_prompts(self, needs_torch: bool) -> bool:
        """Return True if attention skips padding, so that steps with prompts may be padded; `needs_torch`: no kernel has it."""

    def capture(self, work: Callable[[], None]) -> CapturedGraph | None:
        """Record `work`, which has run before; None if this kind of device cannot record."""

    def staging_buffer(self, length: int) -> Tensor:
        """Return an int64 [words] host tensor that can be copied to and from the device asynchronously."""

    def record_event(self) -> DeviceEvent:
        """Return a mark behind all work submitted so far."""

    def recover_from_oom(self, error: Exception) -> bool:
        """Return true if `error` means that the device ran out of memory, after releasing what can be released."""
