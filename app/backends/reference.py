"""Attention as the formula says it, one head of one sequence at a time in float32: what every quicker way must be equal to."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from app.backends.base import AttentionRow
from app.models.context import AttentionSpec


def reference_attention(query: Tensor, rows: Rows[AttentionRow], spec: AttentionSpec) -> Tensor:
    """Like `Backend.attention`, but the result is float32."""
    result = torch.empty(query.shape, dtype=torch.float32)
    for row in rows:
        key = torch.cat([segment.key for segment in row.segments]).float()  # [context, kv_heads, head_dim]
        value = torch.cat([segment.value for segment in row.segments]).float()
        group = query.shape[1] // key.shape[1]
        mask = visible(torch.arange(row.start, row.start + row.num_tokens), torch.arange(len(key)), spec.window)
        for head in range(query.shape[1]):
            queries = query[row.first : row.first + row.num_tokens, head].float()
            scores = capped(queries @ key[:, head // group].T * spec.scale, spec.softcap)
            weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
            result[row.first : row.first + row.num_tokens, head] = weights @ value[:, head // group]
    return result


def visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """[queries, keys] bool from absolute positions: a token sees itself and what is before it, `window` tokens in all."""
    distance = queries.unsqueeze(1) - keys
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores bounded to (-softcap, softcap), smoothly."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap
