"""Attention of a ragged batch by our own kernels: keys and values in bf16 or int8, one or two segments a sequence, windows and soft caps.

Its twin is `backends/reference.py`; where it does not suit, and for prompts on levels without products of bf16, the backend uses torch's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from app.kernels.kv_rows import KVRows
from app.kernels.memory import Words, aligned, empty
from app.kernels.native import native
from app.kernels.operations import Attention, Code, has, run

_MAX_HEAD_DIM, _MAX_GROUP = 256, 32  # csrc/attention.h
_FEW_ROWS = 32  # is_decode in csrc/attention.h: below, the queries of a head of keys read the context as it lies
_NO_SEGMENT = (0, 0, 0)
_HEAD_WORDS, _ROW_WORDS = 2, 10  # of `attention_step` and `sequence` in csrc/ops.h


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens `[first, first + num_tokens)` of a layer's flat rows; the first is at absolute `position` of its sequence."""

    first: int
    num_tokens: int
    position: int


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a ragged batch: its queries are rows `[first, first + num_tokens)`, at absolute positions from `start`.

    Its context is one or two runs that together cover positions `[0, start + num_tokens)`, this step's own tokens included.
    """

    first: int
    num_tokens: int
    start: int
    runs: tuple[Run, ...]


class Step:
    """What a step attends to, the same for every layer, as `attention_step` in csrc/ops.h lays it: in words whose address stays while they
    have room, so that recorded operations, run again, find the new step there."""

    def __init__(self, num_sequences: int = 64) -> None:
        """Room for so many sequences; more get room at another address."""
        self.rows: Rows[Row] = ()
        self._words = Words(_HEAD_WORDS + num_sequences * _ROW_WORDS)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._asked: Attention | None = None  # by how many heads: known from the first layer that attends

    @property
    def address(self) -> int:
        return self._words.address

    def fill(self, rows: Rows[Row]) -> None:
        """Describes the next step."""
        self.rows = rows
        words = [len(rows), self._scratch.data_ptr()]
        for row in rows:
            words += (row.first, row.num_tokens, row.start, len(row.runs))
            for part in row.runs:
                words += (part.first, part.num_tokens, part.position)
            if len(row.runs) == 1:
                words += _NO_SEGMENT
        self._words.fill(words)
        if self._asked is not None:
            self._reserve(self._asked)

    def stays(self, kv: KVRows) -> bool:
        """Whether the next step may be run as this one was: it will lie at the same address, and nothing but our kernel attends."""
        asked = self._asked
        if asked is None or not self._words.stays:  # the first step makes the scratch
            return False
        return max([row.num_tokens for row in self.rows]) <= most_few(asked.heads, asked.kv_heads) or takes_prompts(kv)

    def attend_with(self, heads: int, kv_heads: int, head_dim: int) -> None:
        """Says how many heads attend: scratch is made for them now, and at every step from now on."""
        asked = self._asked
        if asked is None or (asked.heads, asked.kv_heads, asked.head_dim) != (heads, kv_heads, head_dim):
            self._asked = Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
            self._reserve(self._asked)

    def _reserve(self, asked: Attention) -> None:
        library = native().library
        assert library is not None, "its kernels attend"
        asked.step = self.address
        needed = int(library.armature_attention_scratch(ctypes.byref(asked)))
        if needed > self._scratch.numel():
            self._scratch = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._scratch = aligned(needed)
            self._words.set(1, self._scratch.data_ptr())


def suits(query: Tensor, kv: KVRows) -> bool:
    """Whether the native kernels take this query [tokens, heads, head_dim] over these keys and values, at least for decode."""
    _, heads, head_dim = query.shape
    plain = query.dtype == torch.bfloat16 and query.stride(2) == 1 and query.stride(1) == head_dim
    return plain and kv.keys.dtype in (torch.bfloat16, torch.int8) and fits(heads, kv.keys.shape[1], head_dim)


def fits(heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether they are here, and take heads of this number and size."""
    return heads // kv_heads <= _MAX_GROUP and head_dim % 8 == 0 and head_dim <= _MAX_HEAD_DIM and has(Code.ATTENTION)


def takes(row: Row, query: Tensor, kv: KVRows) -> bool:
    """Whether they take this very sequence."""
    return row.num_tokens <= most_few(query.shape[1], kv.keys.shape[1]) or takes_prompts(kv)


def takes_prompts(kv: KVRows) -> bool:
    """Prompts are products of bf16, of int8 too."""
    return kv.keys.dtype in (torch.bfloat16, torch.int8) and has(Code.LINEAR_BF16)


def most_few(heads: int, kv_heads: int) -> int:
    """So many queries of a sequence go the road of one, and not that of prompts, whose sums have another order."""
    return max(1, (_FEW_ROWS - 1) // (heads // kv_heads))


def few_at_a_time(rows: Rows[Row], few: int, together: int) -> list[tuple[slice, list[Row]]]:
    """The same queries as sequences of at most `few`, in parts of about `together`: which rows of the batch, and how they lie in those.

    Parts bound the scratch. A batch of one query a sequence is one part.
    """
    if all(row.num_tokens == 1 for row in rows):
        return [(slice(0, len(rows)), list(rows))]
    parts: list[tuple[slice, list[Row]]] = []
    for row in rows:
        for at in range(0, row.num_tokens, few):
            first, count = row.first + at, min(few, row.num_tokens - at)
            if not parts or first - parts[-1][0].start >= together:
                parts.append((slice(first, first), []))
            begin = parts[-1][0].start
            parts[-1][1].append(Row(first - begin, count, row.start + at, between(row.runs, 0, row.start + at + count)))
            parts[-1] = (slice(begin, first + count), parts[-1][1])
    return parts


def between(runs: Rows[Run], start: int, end: int) -> tuple[Run, ...]:
    """What of a context lies at positions `[start, end)`."""
    cut = [(run, max(start, run.position), min(end, run.position + run.num_tokens)) for run in runs]
    return tuple(Run(run.first + low - run.position, high - low, low) for run, low, high in cut if low < high)


def attention(query: Tensor, kv: KVRows, step: Step, scale: float, window: int | None, softcap: float | None) -> Tensor:
    """Causal attention of query [tokens, heads, head_dim] to a new contiguous tensor like it; rows of sequences not taken are left open."""
    tokens, heads, head_dim = query.shape
    kv_heads = kv.keys.shape[1]
    step.attend_with(heads, kv_heads, head_dim)
    out = empty((tokens, heads, head_dim), torch.bfloat16)
    sizes = (query.stride(0), heads * head_dim, heads, kv_heads, head_dim, window or 0)
    run(Attention(query.data_ptr(), out.data_ptr(), step.address, kv.addresses(), *sizes, scale, softcap or 0.0), Code.ATTENTION)
    return out
