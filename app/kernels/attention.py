"""Attention of a ragged batch by our own kernels: bf16, one or two segments a sequence, windows and soft caps included.

Its twin is `backends/reference.py`; where it does not suit, the backend uses torch's own kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Rows
from typing import Protocol

import torch
from torch import Tensor

from app.kernels.memory import scratch
from app.kernels.native import native

_MAX_HEAD_DIM, _MAX_GROUP = 256, 32  # csrc/attention_bf16.h


class Run(Protocol):
    """A contiguous run of cached tokens: key, value [tokens, kv_heads, head_dim], the first at absolute `position`."""

    @property
    def key(self) -> Tensor: ...
    @property
    def value(self) -> Tensor: ...
    @property
    def position(self) -> int: ...


class Row(Protocol):
    """One sequence's queries, batch rows `[first, first + num_tokens)` at positions from `start`, and its context."""

    @property
    def first(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def segments(self) -> Rows[Run]: ...


_WORDS = 12  # of one `sequence` in csrc/attention_bf16.h: first, num_tokens, start, num_segments, then two segments of four
_NO_SEGMENT = (0, 0, 0, 0)


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "out", "sequences")),
        *((name, ctypes.c_int64) for name in ("num_sequences", "query_stride", "out_stride", "key_stride")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_dim", "window")),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
        ("scratch", ctypes.c_void_p),
    )


def suits(query: Tensor, rows: Rows[Row]) -> bool:
    """Whether the native kernels take this batch: query [tokens, heads, head_dim] and its segments as the KV cache lays them."""
    if native().bf16 is None or query.dtype != torch.bfloat16 or query.stride(2) != 1 or query.stride(1) != query.shape[2]:
        return False
    key, (_, heads, head_dim) = rows[0].segments[0].key, query.shape
    grouped = heads // key.shape[1] <= _MAX_GROUP
    laid = key.stride(2) == 1 and key.stride(1) == head_dim and key.dtype == torch.bfloat16
    return grouped and laid and head_dim % 16 == 0 and head_dim <= _MAX_HEAD_DIM


def attention(query: Tensor, rows: Rows[Row], scale: float, window: int | None, softcap: float | None) -> Tensor:
    """Causal attention of query [tokens, heads, head_dim] over each row's segments; a new contiguous tensor like query."""
    library = native().bf16
    assert library is not None, "suits() was asked"
    tokens, heads, head_dim = query.shape
    key = rows[0].segments[0].key
    out = torch.empty(tokens, heads, head_dim, dtype=torch.bfloat16)
    described = _described(rows)
    call = _Attention(
        query.data_ptr(), out.data_ptr(), ctypes.addressof(described), len(rows), query.stride(0), heads * head_dim, key.stride(0),
        heads, key.shape[1], head_dim, window or 0, scale, softcap or 0.0,
    )  # fmt: skip
    call.scratch = scratch(library.armature_attention_scratch(ctypes.byref(call)))
    if library.armature_attention_bf16(ctypes.byref(call)):
        raise MemoryError("No memory for the list of attention tasks.")
    return out


def _described(rows: Rows[Row]) -> ctypes.Array[ctypes.c_int64]:
    words: list[int] = []
    for row in rows:
        words += (row.first, row.num_tokens, row.start, len(row.segments))
        for run in row.segments:
            words += (run.key.data_ptr(), run.value.data_ptr(), run.key.shape[0], run.position)
        if len(row.segments) == 1:
            words += _NO_SEGMENT
    return (ctypes.c_int64 * (_WORDS * len(rows)))(*words)
