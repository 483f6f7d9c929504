"""The contract of a device: eight members at the most. Everything above asks it; nothing above names a device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from app.hardware.plan import ServingPlan
from app.kernels.attention import Row, Run, Step
from app.kernels.kv_rows import KVRows
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


class Backend(Protocol):
    """Our code for a kind of device."""

    device: torch.device
    dtype: torch.dtype

    def configure(self, plan: ServingPlan) -> None:
        """Sizes the thread pools and pins; once, on the worker thread, before the first tensor."""
        ...

    def free_bytes(self) -> int:
        """Memory that may still be taken on the device."""
        ...

    def attention(self, query: Tensor, kv: KVRows, step: Step, spec: AttentionSpec) -> Tensor:
        """Causal attention of query [tokens, heads, head_dim] over the rows of one layer that the step says; result like query."""
        ...

    def synchronize(self) -> None:
        """Returns when the device has done what was asked."""
        ...
