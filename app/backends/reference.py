"""Reference attention: the formula itself, in float32, one head of one sequence at a time.

Every faster implementation is tested against it.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from app.backends.base import AttentionRow
from app.models.context import AttentionSpec


def reference_attention(query: Tensor, rows: Rows[AttentionRow], spec: AttentionSpec) -> Tensor:
    """Compute the attention of `HostBackend.attention` with a float32 result [tokens, heads, head_dim]."""
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
    """Return a bool mask [queries, keys] from absolute positions.

    A token sees itself and the tokens before it; with `window`, at most `window` tokens in all.
    """
    distance = queries.unsqueeze(1) - keys
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Return the scores smoothly bounded to (-softcap, softcap); unchanged if `softcap` is None."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap
