"""An Apple GPU, by what torch has for Metal: attention by torch's own product over gathered pages, no recorded steps.

Not verified on hardware (docs/hardware.md). What torch lacks there is refused by name: else a step would end, or the processor compute it
without a word.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from app.backends.base import Captured, Mark
from app.errors import PlanImpossible
from app.hardware.plan import ServingPlan
from app.kernels.kv_rows import KVRows
from app.kernels.paged import PackedTexts, PagedStep
from app.kernels.paged_torch import Attended, Part, attended, packed_texts_torch, paged_attention_torch
from app.kernels.turn import Heads
from app.models.context import AttentionSpec

_FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"


class MpsBackend:
    """One process, one GPU, one queue of commands; memory is the machine's own."""

    draws = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.device = torch.device("mps")
        self.dtype = dtype

    def configure(self, plan: ServingPlan) -> None:
        """What Metal may hold is bounded as the plan reckoned: beyond its own limit macOS would swap."""
        if os.environ.get(_FALLBACK, "0") not in ("", "0"):
            raise PlanImpossible(
                f"{_FALLBACK} is set: what torch's MPS lacks would be computed by the processor without a word. "
                "Unset it, or set device to cpu."
            )
        if not torch.backends.mps.is_available():
            built = (
                "was built without MPS"
                if not torch.backends.mps.is_built()
                else "finds no usable Metal device (macOS 14 or newer?)"
            )
            raise PlanImpossible(f"device is mps, but torch {torch.__version__} {built}: set device to cpu.")
        torch.set_num_threads(plan.threads.value)
        torch.mps.set_per_process_memory_fraction(1.0)

    def free_bytes(self) -> int:
        """Of what macOS lets a GPU hold, less what torch's driver has taken."""
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def attention(self, query: Tensor, kv: KVRows, step: PagedStep, spec: AttentionSpec) -> Tensor:
        """Causal attention of query [tokens, heads, head_dim] over the pages of one layer that the step says; result like query."""
        return paged_attention_torch(query, kv, step, spec, road(spec))

    def attend_texts(self, heads: Heads, texts: PackedTexts, spec: AttentionSpec) -> Tensor:
        return packed_texts_torch(heads, texts, spec, road(spec))

    def capture(self, work: Callable[[], None]) -> Captured | None:
        """Metal's graphs are torch's own business: nothing is recorded."""
        return None

    def staging(self, words: int) -> Tensor:
        """Memory is one: there is nothing to pin."""
        return torch.zeros(words, dtype=torch.int64)

    def mark(self) -> Mark:
        return MpsMark()

    def survives(self, error: Exception) -> bool:
        """torch says it in words: a want of memory has no type of its own there."""
        if "MPS backend out of memory" not in str(error):
            return False
        torch.mps.empty_cache()
        return True


class MpsMark:
    """An event behind all that was asked for until now."""

    def __init__(self) -> None:
        self._event = torch.mps.Event()
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


def road(spec: AttentionSpec) -> Attended:
    """Scores that are bent before the softmax, or moved by a distance, are written out."""
    return attended if spec.softcap is not None or spec.distance_bias is not None else attended_by_product


def attended_by_product(query: Tensor, key: Tensor, value: Tensor, part: Part, spec: AttentionSpec) -> Tensor:
    """As `paged_torch.attended`, by torch's scaled dot product. Query heads of one kv head are more queries of it."""
    n, queries, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    grouped = (
        query.reshape(n, queries, kv_heads, group, head_dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(n, kv_heads, group * queries, head_dim)
    )
    # What lies beyond a context may be anything. Who sees nothing is given the first key: without a context zeros, else nobody's row.
    keys, values = (x.masked_fill(~part.context[..., None, None], 0.0).transpose(1, 2) for x in (key, value))
    sees = part.seen.any(-1, keepdim=True)
    first = torch.arange(part.seen.shape[-1], device=query.device) == 0
    mask = (part.seen | (~sees & first)).repeat(1, group, 1).unsqueeze(1)
    found = F.scaled_dot_product_attention(grouped.to(key.dtype), keys, values, mask, scale=spec.scale)
    return found.reshape(n, kv_heads, group, queries, head_dim).permute(0, 3, 1, 2, 4).reshape(query.shape)
