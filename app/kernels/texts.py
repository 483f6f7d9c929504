"""Attention of whole texts, packed end to end: no cache. Keys and values are read where the product of queries, keys and values wrote them.

The twin attends text by text in torch, and serves where our kernel does not suit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from app.kernels.memory import Words
from app.kernels.turn import Heads, turned_torch
from app.models.context import AttentionSpec


class Texts:
    """Where the texts of a batch begin, the same for every layer: in words whose address stays while they have room, so that recorded
    operations, run again, find the new batch there."""

    def __init__(self, max_tokens: int, max_texts: int = 1024) -> None:
        """Room for so many texts; more get room at another address. `max_tokens`: of all texts of a batch together."""
        self.starts: tuple[int, ...] = (0,)
        self.rows = torch.arange(max_tokens)  # a layer's keys and values turn where they lie: token i's are row i
        self._words = Words(2 + max_texts)

    @property
    def address(self) -> int:
        return self._words.address

    @property
    def stays(self) -> bool:
        """Whether this batch lies where the last one lay."""
        return self._words.stays

    def fill(self, starts: Sequence[int]) -> None:
        """Describes the next batch: text i is tokens [starts[i], starts[i + 1]), starts[0] == 0."""
        self.starts = tuple(starts)
        self._words.fill([len(starts) - 1, *starts])


def attend_texts(heads: Heads, texts: Texts, spec: AttentionSpec) -> Tensor:
    """What each token makes of its own text, [tokens, num_heads * head_dim] of the product's dtype. The product may be overwritten."""
    return attend_texts_torch(heads, texts.starts, spec)


def attend_texts_torch(heads: Heads, starts: Sequence[int], spec: AttentionSpec) -> Tensor:
    """The twin. Without a soft cap scores are torch's business, in the product's dtype; with one they are written out in FP32."""
    query, key, value = turned_torch(heads)
    out = query.new_empty(query.shape)
    for first, last in pairwise(starts):
        queries, keys, values = (x[first:last].transpose(0, 1) for x in (query, key, value))
        out[first:last] = _attended(queries, keys, values, spec).transpose(0, 1)
    return out.flatten(1)


def _attended(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """query [heads, tokens, head_dim], key and value [kv_heads, tokens, head_dim]: one text."""
    group, mask = len(query) // len(key), _mask(query.shape[1], spec)
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    if spec.softcap is None:
        bias = None if mask is None else mask.to(query.dtype)
        return F.scaled_dot_product_attention(query[None], key[None], value[None], bias, scale=spec.scale)[0]
    scores = spec.softcap * torch.tanh(query.float() @ key.float().transpose(1, 2) * spec.scale / spec.softcap)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return (weights @ value.float()).to(query.dtype)


def _mask(tokens: int, spec: AttentionSpec) -> Tensor | None:
    """What is added to scores, [tokens, tokens] or [heads, tokens, tokens] fp32; None: nothing is."""
    if spec.bidirectional and spec.distance_bias is None and (spec.window is None or tokens <= spec.window // 2 + 1):
        return None
    at = torch.arange(tokens)
    ahead = at - at[:, None]  # of keys, seen from queries
    low, high = _seen(tokens, spec)
    hidden = torch.zeros(tokens, tokens).masked_fill_((ahead < -low) | (ahead > high), -torch.inf)
    if spec.distance_bias is None:
        return hidden
    most = spec.distance_bias.shape[1] // 2
    return hidden + spec.distance_bias[:, ahead.clamp(-most, most) + most]


def _seen(tokens: int, spec: AttentionSpec) -> tuple[int, int]:
    """How many positions before and after its own a token sees."""
    if spec.bidirectional:
        reach = tokens if spec.window is None else spec.window // 2
        return reach, reach
    return tokens if spec.window is None else spec.window - 1, 0
