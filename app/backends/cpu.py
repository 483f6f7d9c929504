"""Backend of x86 and Arm processors: compute threads, pinning, attention.

Attention runs on the native kernels if they support the tensors (armature_kernels/attention/attention.py), else on
PyTorch's (armature_kernels/attention/flash.py).
"""

from __future__ import annotations

import logging
import os

import torch
from torch import Tensor

from app.hardware.plan.plan import ServingPlan
from app.hardware.probe.probe import probe
from armature_kernels.attention import attention as native_attention
from armature_kernels.attention.attention import AttentionStep, KvRows
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.flash import attention_row, torch_attention
from armature_kernels.attention.ragged import attend

log = logging.getLogger(__name__)


class CpuBackend:
    """Backend of one process with one pool of compute threads, owned by the thread that calls `configure`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.device = torch.device("cpu")
        self.dtype = dtype

    def configure(self, plan: ServingPlan) -> None:
        """Pin the calling thread, then set the sizes of the thread pools.

        libgomp creates its pool at the first parallel region, and new threads inherit the affinity of their creator.
        """
        _pin(plan.cpu.cpu_ids)
        torch.set_num_threads(plan.cpu.threads)
        if torch.get_num_interop_threads() != plan.cpu.interop_threads:  # torch allows only one call
            torch.set_num_interop_threads(plan.cpu.interop_threads)

    def free_bytes(self) -> int:
        """Return the bytes that this process could allocate without swapping, by probing the machine."""
        return probe().usable_bytes

    def attention(self, query: Tensor, kv: KvRows, step: AttentionStep, spec: AttentionSpec) -> Tensor:
        if not native_attention.supports_attention(query, kv):
            return torch_attention(query, [attention_row(row, kv) for row in step.rows], spec)
        return attend(query, kv, step, spec)

    def synchronize(self) -> None: ...


def _pin(cpu_ids: tuple[int, ...]) -> None:
    """Bind the calling thread to these CPUs; empty: none. Without the mask the server works too, perhaps slower."""
    if not cpu_ids:
        return
    try:
        os.sched_setaffinity(0, cpu_ids)  # 0 is the calling thread
    except (AttributeError, OSError, ValueError, OverflowError) as error:
        log.warning("the compute threads cannot be bound to CPUs %s: %s", list(cpu_ids), error)
