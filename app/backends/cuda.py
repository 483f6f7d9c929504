"""Backend of an NVIDIA GPU: Triton kernels over pages, PyTorch's flash attention over contiguous tokens, CUDA graphs.

Verified on an H200 (docs/hardware.md). All work is submitted to PyTorch's current stream.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from app.backends.base import CapturedGraph, DeviceEvent
from app.errors import PlanImpossible
from app.hardware.plan.plan import ServingPlan
from armature_kernels.attention import texts as text_attention
from armature_kernels.attention.attention import KvRows, QkvHeads, token_bytes, view_kv_rows
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.paged import (
    PAGE_TOKENS,
    PackedTexts,
    PagedStep,
    attend_heads_torch,
    attend_texts_padded_torch,
    paged_attention_torch,
)
from armature_kernels.elementwise.rope import apply_rope_and_write_kv, apply_rope_to_qkv, apply_rope_to_qkv_torch
from armature_kernels.triton.support import agrees_with_reference, triton_usable, unavailable_reason

_MIN_CAPABILITY = (
    8,
    0,
)  # compute capability of Ampere, the first with bfloat16 products, flash attention and four-bit products
_FLASH_3_CAPABILITY = 9  # Hopper's, for which FlashAttention 3 is made
_SHARED_POOL = (0, 0)  # torch's name of the memory that is no captured step's
# Libraries, graphs and Triton kernels allocate memory outside of torch's allocator. They report out of memory as plain
# errors.
_OUT_OF_MEMORY_TEXTS = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "Triton Error [CUDA]: out of memory")


@dataclass(frozen=True, slots=True)
class CudaEvent:
    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()


class CudaBackend:
    """Backend of one process with one GPU and one queue."""

    can_sample = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.device = torch.device("cuda", 0)  # the process sees only this one
        self.dtype = dtype

    def configure(self, plan: ServingPlan) -> None:
        """Select the GPU and set the numerical options of PyTorch. Raises `PlanImpossible` if torch cannot use it.

        FP32 products do not use TF32. Sums of FP16 and BF16 products are accumulated in FP32, where they neither overflow
        nor lose digits.
        """
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            torch.cuda.set_device(self.device)
            capability, name = torch.cuda.get_device_capability(self.device), torch.cuda.get_device_name(self.device)
        except (RuntimeError, AssertionError) as error:  # torch raises AssertionError if it is no CUDA build
            raise PlanImpossible(
                f"device is cuda, but torch {torch.__version__} cannot use the GPU: {error}"
            ) from error
        if capability < _MIN_CAPABILITY:
            least, found = (".".join(map(str, one)) for one in (_MIN_CAPABILITY, capability))
            raise PlanImpossible(
                f"{name} has compute capability {found}, but at least {least} is required. Set device to cpu."
            )
        torch.set_num_threads(plan.cpu.threads)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        if capability[0] == _FLASH_3_CAPABILITY:
            text_attention.use_flash_3_if_faster(self.device, self.synchronize)
        self._recording = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def free_bytes(self) -> int:
        """Return the bytes that are free in the driver plus those that torch has reserved but not allocated.

        What is unused in the pool of the captured steps serves them alone, so it is not free.
        """
        free, _ = torch.cuda.mem_get_info(self.device)
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        shared = [one for one in segments if one["device"] == 0 and tuple(one["segment_pool_id"]) == _SHARED_POOL]
        return int(free + sum(one["total_size"] - one["allocated_size"] for one in shared))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def attention(
        self, heads: QkvHeads, kv: KvRows, written: Tensor, step: PagedStep, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values, and compute causal attention over the pages of one layer.

        Prompts that start in this step use PyTorch's flash attention if it supports them, everything else the Triton
        kernels, so a decode gives the same result beside any other sequences. The kernel of decodes has RoPE and plain
        norms in it. ALiBi and sinks have no kernel yet: torch computes them.
        """
        if not triton_usable(heads.product) or spec.slopes is not None or spec.sinks is not None:
            return attend_heads_torch(heads, kv, written, step, spec)
        attend = attend_by_kernels if _agrees(heads, kv, spec) else attend_by_reference
        return attend(heads, kv, written, step, spec)

    def encoder_attention(self, heads: QkvHeads, texts: PackedTexts, spec: AttentionSpec) -> Tensor:
        """Compute attention within each text. Flash attention has no FP32, soft caps and relative biases."""
        if text_attention.torch_flash_supports(heads.product.dtype, heads.head_dim, spec):
            return text_attention.torch_flash_attention(
                *apply_rope_to_qkv(heads), (texts.starts, texts.most_tokens), spec
            ).flatten(1)
        if not triton_usable(heads.product) or spec.slopes is not None or spec.sinks is not None:
            return attend_texts_padded_torch(heads, texts, spec)
        from armature_kernels.triton.prompts import attend_packed

        return attend_packed(*apply_rope_to_qkv(heads), texts, spec).flatten(1)

    def captures_prompts(self, needs_torch: bool) -> bool:
        return not needs_torch and unavailable_reason() is None

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        """Run `work` once on the recording stream, then record it.

        The first run is needed because libraries create per-stream objects at their first product. All graphs allocate
        temporary memory from one pool, since only one runs at a time. Other threads may use CUDA during the recording.
        PyTorch does not leave the recording stream if a recording fails to end; the outer `with` always does.
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

    def staging_buffer(self, length: int) -> Tensor:
        return torch.zeros(length, dtype=torch.int64, pin_memory=True)

    def record_event(self) -> DeviceEvent:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return CudaEvent(event)

    def recover_from_oom(self, error: Exception) -> bool:
        """Return true for an out-of-memory error, after its memory was released and returned to the driver."""
        if not isinstance(error, torch.OutOfMemoryError) and not any(
            text in str(error) for text in _OUT_OF_MEMORY_TEXTS
        ):
            return False
        traceback.clear_frames(error.__traceback__)
        torch.cuda.empty_cache()
        return True


def attend_by_kernels(
    heads: QkvHeads, kv: KvRows, written: Tensor, step: PagedStep, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Compute `CudaBackend.attention` by Triton's kernels and torch's flash attention."""
    from armature_kernels.triton import rope
    from armature_kernels.triton.attention import attend_decodes
    from armature_kernels.triton.prompts import attend_prompts, gather_fresh_kv

    prompts = len(step.slots) > step.num_decodes
    if not heads.has_plain_norm:
        query = apply_rope_and_write_kv(heads, kv, written)
        heads = QkvHeads(query.flatten(1), heads.num_heads, 0, heads.head_dim)
    elif prompts:
        query = rope.apply_rope_and_write_kv(heads, kv, written, step.num_decodes)
    else:
        query = heads.split()[0]
    by_flash = (
        prompts
        and step.fresh
        and text_attention.torch_flash_supports(query.dtype, query.shape[2], spec)
        and kv.keys.dtype == query.dtype
    )
    if by_flash:
        key, value = gather_fresh_kv(kv, step, len(query))
        result = text_attention.torch_flash_attention(
            query, key, value, (step.starts[step.num_decodes :], step.max_queries), spec
        )
    else:
        result = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if step.num_decodes:
        attend_decodes(heads, kv, written, step, spec, result)
    if prompts and not by_flash:
        attend_prompts(query, kv, step, spec, result)
    return query, result


def attend_by_reference(
    heads: QkvHeads, kv: KvRows, written: Tensor, step: PagedStep, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Compute `CudaBackend.attention` in plain torch."""
    query, key, value = apply_rope_to_qkv_torch(heads)
    if heads.num_kv_heads:
        kv.write(written, key, value)
    return query, paged_attention_torch(query, kv, step, spec)


def _agrees(heads: QkvHeads, kv: KvRows, spec: AttentionSpec) -> bool:
    """Return True if the kernels give what torch gives for heads like these; compared when they are first met."""
    angles = None if heads.angles is None else heads.angles[0].shape[-1]
    sizes = (heads.num_heads, heads.num_kv_heads, kv.keys.shape[1], heads.head_dim, angles, heads.query_norm is None)
    rules = (heads.has_plain_norm, heads.value_norm is None, spec.window is None, spec.softcap is None)
    case = (*sizes, *rules, heads.product.dtype, kv.keys.dtype)
    return agrees_with_reference("attention over pages", case, lambda: attention_difference(heads, kv, spec))


# Queries and contexts of sequences of the comparison: decodes with one part and with several, a row that pads a bucket,
# and a prompt that continues.
_COMPARED = ((1, 3), (1, 130), (1, 0), (1, 700), (37, 100))


def attention_difference(heads: QkvHeads, kv: KvRows, spec: AttentionSpec) -> float:
    """Return the largest difference of a made-up step by kernels and by torch, relative to the largest result of its row."""
    where, kv_heads, size = heads.product.device, kv.keys.shape[1], heads.head_dim
    generator = torch.Generator(where).manual_seed(0)
    pages = [-(-length // PAGE_TOKENS) for _, length in _COMPARED]
    tables, first = torch.zeros(len(_COMPARED), max(pages), dtype=torch.int32, device=where), 1
    for table, count in zip(tables, pages, strict=True):
        table[:count] = torch.arange(first, first + count, device=where)
        first += count
    own = [range(length - queries, length) if length else (-1,) for queries, length in _COMPARED]
    places = [(number, at) for number, positions in enumerate(own) for at in positions]
    # A row that pads is written to page 0.
    written = torch.tensor(
        [int(tables[number, at // PAGE_TOKENS]) * PAGE_TOKENS + at % PAGE_TOKENS if at >= 0 else 0 for number, at in places],
        device=where,
    )  # fmt: skip
    starts = torch.tensor([0, *(len(positions) for positions in own)], device=where).cumsum(0).int()
    lengths = torch.tensor([length for _, length in _COMPARED], dtype=torch.int32, device=where)
    slots = torch.arange(len(_COMPARED), dtype=torch.int32, device=where)
    step = PagedStep(tables, slots, starts, lengths, len(_COMPARED) - 1, _COMPARED[-1][0], 700)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=where)

    product = random(len(places), heads.product.shape[1]).to(heads.product.dtype)
    angle = None if heads.angles is None else random(len(places), 1, heads.angles[0].shape[-1])
    asked = replace(heads, angles=None if angle is None else (angle.cos(), angle.sin()))
    past, rows = random(2, first * PAGE_TOKENS, kv_heads, size), torch.arange(first * PAGE_TOKENS, device=where)
    found = []
    for attend in (attend_by_reference, attend_by_kernels):
        memory = torch.zeros(len(rows), token_bytes(kv_heads, size, kv.keys.dtype), dtype=torch.uint8, device=where)
        own_kv = view_kv_rows(memory, kv_heads, size, kv.keys.dtype)
        own_kv.write(rows, past[0], past[1])
        result = attend(replace(asked, product=product.clone()), own_kv, written, step, spec)[1]
        key, value = own_kv.gather(written[written > 0])
        found.append([one.float().flatten(1) for one in (result, key, value)])
    differences = [
        ((one - twin).abs().amax(1) / twin.abs().amax(1).clamp_min(1e-6)).max().item()
        for twin, one in zip(*found, strict=True)
    ]
    return max(math.inf if math.isnan(one) else one for one in differences)
