"""Attention over pages on a device: descriptions of a step's sequences as tensors, and attention in plain torch.

The engine fills the descriptions. Keys and values of a layer are flat rows with `PAGE_TOKENS` rows per page. Position
p of a slot is row `tables[slot, p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS`. Page 0 belongs to no sequence:
rows that only pad a bucket are written there.

The torch functions are the reference implementation of the kernels, and the fallback where there are none. They never
wait for the device, and scores, weights and sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from armature_kernels.attention.attention import KvRows, QkvHeads
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.weights import attention_weights
from armature_kernels.elementwise.rope import apply_rope_and_write_kv, apply_rope_to_qkv_torch

# Tokens that a kernel reads at a time; at most 63 tokens of a sequence's memory are unused. Torch's flash
# kernel does not support pages (pytorch/pytorch#175924: only with a separate package), so nothing else requires
# a page size.
PAGE_TOKENS = 64
# The most tokens of a context that one part of a decode's attention reads. Where no context of a step is longer, the
# number of parts follows from its sequences and heads alone.
PART_TOKENS = 8192
MAX_SEQUENCE_DECODES = 16  # of one step: a token and its drafts, each of which sees the ones before it


@dataclass(frozen=True, slots=True)
class PagedStep:
    """The sequences of one step, decodes first; the same for every layer. Tensors are int32 on the device.

    `tables` is [slots, max_pages]. `slots` [sequences] selects each sequence's table. `lengths` [sequences] is
    the number of context tokens including this step's (0: the row only pads a bucket). `starts` is [sequences +
    1]: the queries of sequence i are rows [starts[i], starts[i + 1]) of the batch.

    The first `num_decodes` sequences have one query each. Of those, up to `MAX_SEQUENCE_DECODES` in a row may have one
    slot, and each is then one token longer than the one before it. `max_queries` and `max_context` are upper bounds over
    all sequences, known to the host. `fresh` is True if every sequence that is not a decode begins at position 0,
    so it sees only keys and values of this step.
    """

    tables: Tensor
    slots: Tensor
    starts: Tensor
    lengths: Tensor
    num_decodes: int
    max_queries: int
    max_context: int
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """Texts packed end to end: text i is tokens [starts[i], starts[i + 1]), at most `most_tokens`.

    `starts` is int32 [texts + 1] on the device. Empty texts are allowed, because they pad a bucket.
    """

    starts: Tensor
    most_tokens: int


_MAX_SCORES = 2**24  # most scores in memory at once: 64 MiB

QueryRange = tuple[slice, int, int]  # a slice of the sequences, and the range of each one's queries: first, last


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Some queries of some sequences, padded to a rectangle.

    `rows` [n, q] are row numbers of the batch; padding has the number after the last row. `visible` [n, q, k] is True
    for the keys that a query sees. `ahead` [n, q, k] is a key's position minus the query's. `context` [n, k] is
    True for keys that exist.
    """

    rows: Tensor
    visible: Tensor
    ahead: Tensor
    context: Tensor


def attend_block(query: Tensor, key: Tensor, value: Tensor, part: QueryBlock, spec: AttentionSpec) -> Tensor:
    """Compute attention of one rectangle: query [n, q, heads, head_dim], key and value [n, k, kv_heads, head_dim].

    The result has the query's shape in fp32. Queries that see no key get zeros.
    """
    n, queries, heads, head_dim = query.shape
    grouped = query.float().reshape(n, queries, key.shape[2], -1, head_dim)
    scores = torch.einsum("nqhgd,nkhd->nhgqk", grouped, key.float()) * spec.scale
    weights = attention_weights(scores.flatten(1, 2), part.ahead, part.visible, spec).view(scores.shape)
    # Memory after a context may contain anything, and zero times NaN is NaN.
    values = value.float().masked_fill(~part.context[..., None, None], 0.0)
    return torch.einsum("nhgqk,nkhd->nqhgd", weights, values).reshape(n, queries, heads, head_dim)


AttendBlock = Callable[[Tensor, Tensor, Tensor, QueryBlock, AttentionSpec], Tensor]


def attend_heads_torch(
    heads: QkvHeads,
    kv: KvRows,
    written: Tensor,
    step: PagedStep,
    spec: AttentionSpec,
    attend: AttendBlock = attend_block,
) -> tuple[Tensor, Tensor]:
    """Compute `DeviceBackend.attention`, first the queries, keys and values, then attention."""
    query = apply_rope_and_write_kv(heads, kv, written)
    return query, paged_attention_torch(query, kv, step, spec, attend)


def paged_attention_torch(
    query: Tensor, kv: KvRows, step: PagedStep, spec: AttentionSpec, attend: AttendBlock = attend_block
) -> Tensor:
    """Compute the attention of a step; query and result are [tokens, heads, head_dim].

    `attend` computes one rectangle of it.
    """
    result = query.new_zeros((len(query) + 1, *query.shape[1:]))  # the last row receives the results of padding
    width = min(step.max_context, step.tables.shape[1] * PAGE_TOKENS)
    at = torch.arange(width, device=query.device)
    decodes = _blocks((0, step.num_decodes), 1, width * query.shape[1])
    prompts = _blocks((step.num_decodes, len(step.slots)), step.max_queries, width * query.shape[1])
    for block in (*decodes, *prompts):
        sequences, first, last = block
        starts, ends, lengths = (
            step.starts[:-1][sequences].long(),
            step.starts[1:][sequences].long(),
            step.lengths[sequences].long(),
        )
        part = _query_block((starts, ends, lengths), (first, last), at, len(query), spec)
        pages = step.tables[step.slots[sequences].long()][:, at // PAGE_TOKENS].long()
        rows = torch.where(part.context, pages * PAGE_TOKENS + at % PAGE_TOKENS, 0)
        block_result = attend(_clamped_rows(query, part.rows), *kv.gather(rows), part, spec)
        result.index_copy_(0, part.rows.flatten(), block_result.flatten(0, 1).to(result.dtype))
    return result[:-1]


def attend_texts_padded_torch(
    heads: QkvHeads, texts: PackedTexts, spec: AttentionSpec, attend: AttendBlock = attend_block
) -> Tensor:
    """Compute attention within texts like `DeviceBackend.attend_texts`.

    The result is [tokens, num_heads * head_dim] of the product's dtype.
    """
    query, key, value = apply_rope_to_qkv_torch(heads)
    result = query.new_zeros((len(query) + 1, *query.shape[1:]))
    at = torch.arange(texts.most_tokens, device=query.device)
    for sequences, first, last in _blocks(
        (0, len(texts.starts) - 1), texts.most_tokens, texts.most_tokens * heads.num_heads
    ):
        starts, ends = texts.starts[:-1][sequences].long(), texts.starts[1:][sequences].long()
        part = _query_block((starts, ends, ends - starts), (first, last), at, len(query), spec)
        rows = torch.where(part.context, starts.unsqueeze(1) + at, len(query))
        block_result = attend(
            _clamped_rows(query, part.rows), _clamped_rows(key, rows), _clamped_rows(value, rows), part, spec
        )
        result.index_copy_(0, part.rows.flatten(), block_result.flatten(0, 1).to(result.dtype))
    return result[:-1].flatten(1)


def _blocks(sequences: tuple[int, int], most_queries: int, scores: int) -> Iterator[QueryRange]:
    """Yield blocks of these sequences' queries whose scores fit the limit; `scores` is the number per query."""
    together = max(1, _MAX_SCORES // max(1, scores))
    several = max(1, together // max(1, most_queries))
    for first in range(*sequences, several):
        for place in range(0, most_queries, together):
            yield slice(first, min(first + several, sequences[1])), place, min(place + together, most_queries)


def _query_block(
    ranges: tuple[Tensor, Tensor, Tensor], places: tuple[int, int], at: Tensor, tokens: int, spec: AttentionSpec
) -> QueryBlock:
    """Build the rectangle for one block.

    `ranges` contains the starts and ends of each sequence's queries in the batch of `tokens` rows, and its context
    length. `places` is the range of each sequence's queries. `at` contains all positions of the context.
    """
    starts, ends, lengths = (one.unsqueeze(1) for one in ranges)  # [n, 1]
    place = torch.arange(*places, device=at.device)
    present = place < ends - starts  # [n, q]
    positions = lengths - (ends - starts) + place
    context = at < lengths  # [n, k]
    ahead = at - positions.unsqueeze(2)
    before, after = spec.visible_window(len(at))
    seen = (ahead >= -before) & (ahead <= after) & present.unsqueeze(2) & context.unsqueeze(1)
    return QueryBlock(torch.where(present, starts + place, tokens), seen, ahead, context)


def _clamped_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return rows of x; an arbitrary row for numbers past the end."""
    return x[rows.clamp(max=len(x) - 1)]
