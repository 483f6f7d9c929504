"""Attention of whole texts, packed end to end: no cache. Keys and values are read where the product of queries, keys and values wrote them.

The twin attends text by text in torch, and serves where our kernel does not suit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from app.kernels.kv_rows import KVRows
from app.kernels.memory import Words, empty
from app.kernels.operations import Code, TextsAttention, has, run
from app.kernels.turn import Heads, turn, turned_torch
from app.models.context import AttentionSpec

_MOST_HEAD, _MOST_GROUP = 256, 64  # csrc/texts.h
_MOST_TOKENS = 2**40  # more than any text has


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
    if not suits(heads):
        return attend_texts_torch(heads, texts.starts, spec)
    _turn_in_place(heads, texts)
    product, size = heads.product, heads.head_dim
    tokens, queries, keys = len(product), heads.num_heads * size, heads.num_kv_heads * size
    out = empty((tokens, queries), product.dtype)
    columns = (product.data_ptr() + at * product.itemsize for at in (0, queries, queries + keys))
    bias, most, (before, after) = spec.distance_bias, 0, _seen(_MOST_TOKENS, spec)
    if bias is not None:
        assert bias.is_contiguous() and bias.dtype == torch.float32 and bias.shape[0] == heads.num_heads, "a row of each head"
        most = bias.shape[1] // 2
    addresses = (*columns, out.data_ptr(), texts.address, None if bias is None else bias.data_ptr())
    sizes = (product.stride(0), queries, heads.num_heads, heads.num_kv_heads, size, before, after, most)
    wide = product.dtype == torch.float32
    run(TextsAttention(*addresses, *sizes, wide, spec.scale, spec.softcap or 0.0), Code.TEXTS)
    return out


def suits(heads: Heads) -> bool:
    """Whether our kernel takes this product: it is of bf16 or fp32, and its heads are of a size that kernels know."""
    product = heads.product
    plain = product.dtype in (torch.bfloat16, torch.float32) and product.stride(1) == 1 and product.device.type == "cpu"
    group = heads.num_heads // heads.num_kv_heads
    return plain and heads.head_dim % 2 == 0 and heads.head_dim <= _MOST_HEAD and group <= _MOST_GROUP and has(Code.TEXTS)


def _turn_in_place(heads: Heads, texts: Texts) -> None:
    """Norms and angles of heads, where they have them: as into a cache whose rows are the product's own."""
    if heads.angles is None and heads.query_norm is None and heads.key_norm is None:
        return
    queries, keys = (number * heads.head_dim for number in (heads.num_heads, heads.num_kv_heads))
    product, tokens = heads.product, len(heads.product)
    if product.dtype != torch.bfloat16:
        query, key, _ = turned_torch(heads)
        product[:, :queries], product[:, queries : queries + keys] = query.flatten(1), key.flatten(1)
        return
    key, value = (product[:, at : at + keys].view(tokens, heads.num_kv_heads, heads.head_dim) for at in (queries, queries + keys))
    turn(heads, KVRows(key, value, product.stride(0) * product.itemsize), texts.rows[:tokens])


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
