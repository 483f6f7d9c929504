"""The contract of a device: no more than is asked of it here. Everything above asks it; nothing above names a device.

A processor (`Backend`) and a device with memory of its own (`DeviceBackend`) have the first five in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from app.hardware.plan import ServingPlan
from app.kernels.attention import Row, Run, Step
from app.kernels.kv_rows import KVRows
from app.kernels.paged import PackedTexts, PagedStep
from app.kernels.turn import Heads
from app.models.context import AttentionSpec


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous run of one sequence's cached tokens: keys and values [tokens, kv_heads, head_dim], the first at absolute `position`."""

    key: Tensor
    value: Tensor
    position: int


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One sequence of a ragged batch: its queries are rows `[first, first + num_tokens)`, at absolute positions from `start`.

    Its context is one or two segments that together cover positions `[0, start + num_tokens)`, this step's own tokens included.
    """

    first: int
    num_tokens: int
    start: int
    segments: tuple[Segment, ...]


def with_segments(row: Row, kv: KVRows) -> AttentionRow:
    """A sequence and its context in one layer."""
    return AttentionRow(row.first, row.num_tokens, row.start, segments_of(row.runs, kv))


def segments_of(runs: Iterable[Run], kv: KVRows) -> tuple[Segment, ...]:
    """Keys and values of one layer: views, or of int8 what the codes mean."""
    return tuple(Segment(*kv.read(run.first, run.num_tokens), run.position) for run in runs)


class Device(Protocol):
    """What every kind of device has."""

    device: torch.device
    dtype: torch.dtype

    def configure(self, plan: ServingPlan) -> None:
        """Makes the device ready as planned (pools and pins, or which of several); once, on the worker thread, before the first tensor."""
        ...

    def free_bytes(self) -> int:
        """Memory that may still be taken on the device."""
        ...

    def synchronize(self) -> None:
        """Returns when the device has done what was asked."""
        ...


class Backend(Device, Protocol):
    """A processor: keys and values lie in slots, which the operating system pages."""

    def attention(self, query: Tensor, kv: KVRows, step: Step, spec: AttentionSpec) -> Tensor:
        """Causal attention of query [tokens, heads, head_dim] over the rows of one layer that the step says; result like query."""
        ...


class Captured(Protocol):
    """Work that was recorded on the device once. Its tensors stay where they were: who replays it writes inputs and reads results there."""

    def replay(self) -> None:
        """Asks the device to do it again; returns at once."""
        ...


class Mark(Protocol):
    """A place in the device's queue."""

    def wait(self) -> None:
        """Returns when the device has done all that was asked of it before this place, whatever was asked since."""
        ...


class DeviceBackend(Device, Protocol):
    """A device with memory and a queue of its own: keys and values lie in pages of ours, and a call returns before its work is done.

    `draws`: whether it has the float64 that drawing a token wants; else only the likeliest are picked there.
    """

    draws: bool

    def attention(self, query: Tensor, kv: KVRows, step: PagedStep, spec: AttentionSpec) -> Tensor:
        """Causal attention of query [tokens, heads, head_dim] over the pages of one layer that the step says; result like query.

        Rows of sequences without context come out as zeros. Nothing waits for the device.
        """
        ...

    def attend_texts(self, heads: Heads, texts: PackedTexts, spec: AttentionSpec) -> Tensor:
        """What each token makes of its own text, [tokens, num_heads * head_dim] of the product's dtype, which may be overwritten."""
        ...

    def capture(self, work: Callable[[], None]) -> Captured | None:
        """Records `work`, which was run before and allocates what it keeps outside; None where this kind of device records nothing."""
        ...

    def staging(self, words: int) -> Tensor:
        """int64 [words] on the host, from where copies to the device (and back) need not wait for each other."""
        ...

    def mark(self) -> Mark:
        """A mark behind all that was asked for until now."""
        ...

    def survives(self, error: Exception) -> bool:
        """Whether that was a want of memory; then what can be given back has been."""
        ...
