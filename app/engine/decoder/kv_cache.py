"""CPU KV cache: one reserved range of address space for all slots. Only pages that were written take memory."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from app.engine.scheduler.batch import KvCopy, ScheduledSpan, StateCopy
from app.errors import PlanImpossible
from app.hardware.kernel_advice import advise
from app.hardware.plan.memory_budget import KV_PRECISIONS
from app.hardware.plan.plan import ServingPlan
from app.models.decoders.config import ModelConfig
from armature_kernels.attention.attention import KvSegment, token_bytes, view_kv_rows

# MAP_NORESERVE: Python's mmap module has no name for it. The value is the same on x86, Arm and RISC-V (Linux,
# asm-generic/mman-common.h). With it, the reservation does not count against the commit limit. macOS needs no
# flag, because anonymous memory is lazy there anyway.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
# Linux frees the pages at once. macOS uses the advice only under memory pressure, and marks unused content with
# MADV_FREE.
_RELEASE_ADVICE = "MADV_DONTNEED" if sys.platform == "linux" else "MADV_FREE"

KV_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, dtype) for name, (dtype, _) in KV_PRECISIONS.items()}


def kv_dtype(plan: ServingPlan) -> torch.dtype:
    return KV_DTYPES[plan.weights.kv_precision]


@dataclass(frozen=True, slots=True)
class KvShape:
    """Capacity of a KV cache: `num_slots` sequences of up to `max_len` tokens each, and the shape of a token's KV.

    `state_sizes`: the FP32 elements of a sequence's recurrent state, in each layer that has one. `num_checkpoints`: the
    copies of such states that are kept beside those of the slots.
    """

    num_layers: int
    num_slots: int
    max_len: int
    num_kv_heads: int
    head_dim: int
    state_sizes: tuple[int, ...] = ()
    num_checkpoints: int = 0


def kv_shape_of(config: ModelConfig, num_slots: int, max_len: int, num_checkpoints: int = 0) -> KvShape:
    heads, head_dim, sizes = config.cache_heads, config.cache_head_dim, config.state_sizes
    return KvShape(config.cache_layers, num_slots, max_len, heads, head_dim, sizes, num_checkpoints)


class KvCache:
    """Keys and values of all slots in host memory, position p of a slot's sequence at offset p.

    The memory of a layer is `[slots, stride, token_bytes]` (`KvRows` has the row format); `stride` is `max_len` rounded
    up so that no two slots share a page. A slot also holds the recurrent states of its sequence, one after the other: the
    state after the last computed token; checkpoints follow those of the slots. At position 0 a state is zero, whatever the
    slot holds.
    """

    def __init__(self, shape: KvShape, dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self.token_bytes = token_bytes(shape.num_kv_heads, shape.head_dim, dtype)  # bytes of one layer
        self.bytes_per_token = shape.num_layers * self.token_bytes
        # rounded up, so that a page never counts as fewer tokens
        self.tokens_per_page = math.ceil(mmap.PAGESIZE / self.token_bytes)
        # smallest number of tokens that fills pages exactly
        whole_pages = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, self.token_bytes)
        self.stride = math.ceil(shape.max_len / whole_pages) * whole_pages
        self.reserved_bytes = shape.num_slots * self.stride * self.bytes_per_token
        self._memory = _reserve(self.reserved_bytes)
        self._rows = torch.frombuffer(self._memory, dtype=torch.uint8).view(
            shape.num_layers, shape.num_slots * self.stride, self.token_bytes
        )
        self.layers = [view_kv_rows(layer, shape.num_kv_heads, shape.head_dim, dtype) for layer in self._rows]
        self._states = _reserve_floats(shape.num_slots + shape.num_checkpoints, sum(shape.state_sizes))
        self.states: tuple[Tensor, ...] = (
            torch.split(self._states, list(shape.state_sizes), 1) if shape.state_sizes else ()
        )

    def row(self, slot: int, position: int) -> int:
        return slot * self.stride + position

    def written_rows(self, spans: Iterable[ScheduledSpan]) -> list[int]:
        rows: list[int] = []
        for span in spans:
            assert span.start >= span.prefix_tokens, "a step never writes into a prefix that others share"
            first = self.row(span.slot, span.start)
            rows.extend(range(first, first + span.num_tokens))
        return rows

    def write(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Store `key` and `value` [tokens, kv_heads, head_dim] (any strides) at `rows` [tokens] int64."""
        self.layers[layer].write(rows, key, value)

    def kv_segments(self, span: ScheduledSpan) -> tuple[KvSegment, ...]:
        """Return the contiguous runs that hold a span's context `[0, end)`: the shared prefix, then the own tail."""
        prefix = span.prefix_tokens if span.prefix_slot is not None else 0
        tail = KvSegment(self.row(span.slot, prefix), span.end - prefix, prefix)
        if span.prefix_slot is None or prefix == 0:
            return (tail,)
        return (KvSegment(self.row(span.prefix_slot, 0), prefix, 0), tail)

    def move(self, copies: Iterable[KvCopy], released: Iterable[tuple[int, int, int]]) -> None:
        """Do a batch's copies, and then its releases, because a released page may be the source of a copy."""
        for copy in copies:
            self.copy(copy)
        for slot, start, end in released:
            self.release(slot, start, end)

    def read_block(self, rows: Tensor, slot: int, prefix_slot: int | None, prefix_tokens: int, start: int) -> None:
        """Copy the tokens from position `start` on of a slot's context to `rows`, as many as fit.

        `rows` is uint8 [layers * tokens * token_bytes]. Positions below `prefix_tokens` are in `prefix_slot`.
        """
        block = rows.view(self.shape.num_layers, -1, self.token_bytes)
        shared = 0 if prefix_slot is None else min(max(prefix_tokens - start, 0), block.shape[1])
        if prefix_slot is not None and shared:
            block[:, :shared].copy_(self._rows.narrow(1, self.row(prefix_slot, start), shared))
        own = block.shape[1] - shared
        if own:
            block[:, shared:].copy_(self._rows.narrow(1, self.row(slot, start + shared), own))

    def write_block(self, rows: Tensor, slot: int, start: int, first: int, end: int) -> None:
        """Store the tokens of positions `[first, end)` of `rows`, whose first token has position `start`, in a slot."""
        block = rows.view(self.shape.num_layers, -1, self.token_bytes)
        self._rows.narrow(1, self.row(slot, first), end - first).copy_(block[:, first - start : end - start])

    def copy(self, copy: KvCopy) -> None:
        source, target = self.row(copy.source, copy.start), self.row(copy.target, copy.start)
        length = copy.end - copy.start
        self._rows.narrow(1, target, length).copy_(self._rows.narrow(1, source, length))

    def copy_states(self, copies: Iterable[StateCopy]) -> None:
        """Do a batch's copies of recurrent states, one after the other."""
        for source, target, _ in copies:
            self._states[target].copy_(self._states[source])

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's states in all layers."""
        return 4 * sum(self.shape.state_sizes)

    def state(self, row: int) -> Tensor:
        """Return the states of a slot, or a checkpoint, as uint8 [state_bytes], which may be written."""
        return self._states[row].view(torch.uint8)

    def release(self, slot: int, start: int, end: int) -> None:
        """Give back whole pages among positions `[start, end)` of a slot; the last too if `end` is `max_len`."""
        last = self.stride if end >= self.shape.max_len else end
        first_byte = math.ceil(start * self.token_bytes / mmap.PAGESIZE) * mmap.PAGESIZE
        last_byte = last * self.token_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if last_byte <= first_byte:
            return
        layer_bytes = self.shape.num_slots * self.stride * self.token_bytes
        for layer in range(self.shape.num_layers):
            slot_byte = layer * layer_bytes + slot * self.stride * self.token_bytes
            advise(self._memory, _RELEASE_ADVICE, slot_byte + first_byte, last_byte - first_byte)

    def resident_bytes(self) -> int:
        """Return the bytes that take memory now: for tests and reports, as it asks for every page."""
        pages = (ctypes.c_ubyte * (self.reserved_bytes // mmap.PAGESIZE))()
        address = ctypes.c_void_p(self._rows.data_ptr())
        if ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(self.reserved_bytes), pages) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        # the lowest bit means resident; the other bits are reserved
        flags = torch.frombuffer(pages, dtype=torch.uint8)
        return int(flags.bitwise_and_(1).sum()) * mmap.PAGESIZE


def _reserve_floats(rows: int, columns: int) -> Tensor:
    if not columns:
        return torch.empty(rows, 0)
    return torch.frombuffer(_reserve(4 * rows * columns), dtype=torch.float32).view(rows, columns)


def _reserve(num_bytes: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    try:
        memory = mmap.mmap(-1, num_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError, OverflowError) as error:
        raise PlanImpossible(
            f"The system refuses to reserve {num_bytes / 2**30:.1f} GiB of address space for the KV cache ({error}). "
            "Memory is only used once it is written, but strict overcommit (vm.overcommit_memory=2) or an address space limit (ulimit -v) "
            "counts it at once: lift that, or lower max_running_seqs or max_model_len."
        ) from error
    # Huge pages would use 2 MiB per layer for one token. A kernel without huge pages rejects the advice and does
    # not need it.
    advise(memory, "MADV_NOHUGEPAGE")
    return memory
