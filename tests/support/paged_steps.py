"""Steps over pages for tests: contexts in scattered pages. Rows outside any context are NaN, so that reading one shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from armature_kernels.attention.attention import KvRows, QkvHeads, token_bytes, view_kv_rows
from armature_kernels.attention.paged import PAGE_TOKENS, PagedStep


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32


NOWHERE = torch.empty(0, dtype=torch.int64)  # where queries alone write keys


def alone(query: Tensor) -> QkvHeads:
    """Return these queries as a product without keys and values, which are in the cache."""
    return QkvHeads(query.flatten(1), query.shape[1], 0, query.shape[2])


def made_step(
    shape: Shape, spans: Sequence[tuple[int, int]], num_decodes: int, device: torch.device
) -> tuple[Tensor, KvRows, PagedStep]:
    """`spans`: of each sequence its queries in this step and its whole context. The query is a part of a wider product."""
    generator = torch.Generator().manual_seed(sum(17 * queries + length for queries, length in spans))
    most_pages = max(1, *(-(-length // PAGE_TOKENS) for _, length in spans))
    slots = len(spans) + 1
    pages = torch.randperm(slots * most_pages, generator=generator) + 1  # page 0 is nobody's
    tables = pages.view(slots, most_pages).int()
    owners = torch.randperm(slots, generator=generator)[: len(spans)]
    rows = (slots * most_pages + 1) * PAGE_TOKENS
    memory = torch.zeros((rows, token_bytes(shape.kv_heads, shape.head_dim, shape.dtype)), dtype=torch.uint8)
    kv = view_kv_rows(memory, shape.kv_heads, shape.head_dim, shape.dtype)
    kv.keys.fill_(torch.nan)
    kv.values.fill_(torch.nan)
    for owner, (_, length) in zip(owners, spans, strict=True):
        at = torch.arange(length)
        own = tables[owner].long()[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS
        for part in (kv.keys, kv.values):
            part[own] = torch.randn((length, shape.kv_heads, shape.head_dim), generator=generator).to(shape.dtype)
    starts = torch.tensor([0, *(queries for queries, _ in spans)]).cumsum(0).int()
    lengths = torch.tensor([length for _, length in spans]).int()
    wide = torch.randn((int(starts[-1]), (shape.heads + 2 * shape.kv_heads) * shape.head_dim), generator=generator).to(
        shape.dtype
    )
    query = wide.to(device)[:, : shape.heads * shape.head_dim].unflatten(1, (shape.heads, shape.head_dim))
    there = memory.to(device)
    prompts = spans[num_decodes:]
    step = PagedStep(
        tables.to(device), owners.int().to(device), starts.to(device), lengths.to(device), num_decodes,
        max((queries for queries, _ in spans), default=1), max(length for _, length in spans),
        fresh=bool(prompts) and all(queries == length for queries, length in prompts),
    )  # fmt: skip
    return query, view_kv_rows(there, shape.kv_heads, shape.head_dim, shape.dtype), step
