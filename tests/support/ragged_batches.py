"""Ragged batches for attention: queries of several sequences, and one layer's cache in which their contexts lie somewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.backends.cpu import AttentionRow, CpuBackend, attention_row
from armature_kernels.attention.attention import (
    AttentionSequence,
    AttentionStep,
    KvRows,
    KvSegment,
    token_bytes,
    view_kv_rows,
)
from armature_kernels.attention.context import AttentionSpec


@dataclass(frozen=True)
class Share:
    """A row to be: `prefix` tokens in another slot, `past` computed tokens of its own, `new` tokens in this step."""

    prefix: int
    past: int
    new: int


@dataclass(frozen=True)
class Batch:
    """Queries and one layer's keys and values, as a step has them."""

    query: torch.Tensor
    kv: KvRows
    rows: list[AttentionSequence]

    @property
    def segments(self) -> list[AttentionRow]:
        return [attention_row(row, self.kv) for row in self.rows]

    def step(self) -> AttentionStep:
        step = AttentionStep()
        step.fill(self.rows)
        return step


def make_batch(shares: list[Share], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Batch:
    """Every run lies somewhere in the cache, rows of others before and behind it, which hold NaN."""
    generator = torch.Generator().manual_seed(sum(share.prefix * 7 + share.past * 3 + share.new for share in shares))
    rows: list[AttentionSequence] = []
    first = at = 1
    for share in shares:
        context = share.past + share.new
        own = KvSegment(at + share.prefix + 1, context, share.prefix)
        runs = (KvSegment(at, share.prefix, 0), own) if share.prefix else (own,)
        rows.append(AttentionSequence(first - 1, share.new, share.prefix + share.past, runs))
        first, at = first + share.new, at + share.prefix + context + 2
    memory = torch.empty(at, token_bytes(kv_heads, head_dim, dtype), dtype=torch.uint8)
    kv = view_kv_rows(memory, kv_heads, head_dim, dtype)
    kv.write(torch.arange(at), *torch.full((2, at, kv_heads, head_dim), torch.nan).unbind(0))
    for run in (run for row in rows for run in row.runs):
        key, value = torch.randn((2, run.num_tokens, kv_heads, head_dim), generator=generator).unbind(0)
        kv.write(torch.arange(run.first, run.first + run.num_tokens), key, value)
    query = torch.randn((first - 1, heads, head_dim), generator=generator)
    return Batch(query.to(torch.bfloat16 if dtype == torch.int8 else dtype), kv, rows)


def attend(batch: Batch, spec: AttentionSpec, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return CpuBackend(dtype).attention(batch.query, batch.kv, batch.step(), spec)
