"""Attention within packed texts, without a KV cache.

Keys and values are read directly from the QKV product. `attend_texts_torch` is the reference implementation, which
processes text by text. It serves where the native kernel does not apply.
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
    """The starts of the texts of a batch, the same for every layer.

    The int64 buffer keeps its address as long as its capacity suffices, so recorded operations that run again read
    the new batch there.
    """

    def __init__(self, max_tokens: int, max_texts: int = 1024) -> None:
        """Allocate a buffer for `max_texts`; a batch with more texts gets a buffer at another address.

        `max_tokens` is the limit for all texts of a batch together.
        """
        self.starts: tuple[int, ...] = (0,)
        # RoPE is applied in place: token i's keys and values are row i of the product.
        self.rows = torch.arange(max_tokens)
        self._words = Words(2 + max_texts)

    @property
    def address(self) -> int:
        """Address of the C structure that describes the batch."""
        return self._words.address

    @property
    def stays(self) -> bool:
        """True if this batch is stored in the fixed buffer."""
        return self._words.stays

    def fill(self, starts: Sequence[int]) -> None:
        """Describe the next batch: text i is tokens [starts[i], starts[i + 1]), starts[0] == 0."""
        self.starts = tuple(starts)
        self._words.fill([len(starts) - 1, *starts])


def attend_texts(heads: Heads, texts: Texts, spec: AttentionSpec) -> Tensor:
    """Compute attention within each text, [tokens, num_heads * head_dim] of the product's dtype.

    The product may be overwritten.
    """
    if not suits(heads):
        return attend_texts_torch(heads, texts.starts, spec)
    _turn_in_place(heads, texts)
    product, size = heads.product, heads.head_dim
    tokens, queries, keys = len(product), heads.num_heads * size, heads.num_kv_heads * size
    out = empty((tokens, queries), product.dtype)
    columns = (product.data_ptr() + at * product.itemsize for at in (0, queries, queries + keys))
    bias, most, (before, after) = spec.distance_bias, 0, _seen(_MOST_TOKENS, spec)
    if bias is not None:
        assert bias.is_contiguous() and bias.dtype == torch.float32 and bias.shape[0] == heads.num_heads, (
            "the bias must be fp32 with one row per head"
        )
        most = bias.shape[1] // 2
    addresses = (*columns, out.data_ptr(), texts.address, None if bias is None else bias.data_ptr())
    sizes = (product.stride(0), queries, heads.num_heads, heads.num_kv_heads, size, before, after, most)
    wide = product.dtype == torch.float32
    run(TextsAttention(*addresses, *sizes, wide, spec.scale, spec.softcap or 0.0), Code.TEXTS)
    return out


def suits(heads: Heads) -> bool:
    """Return True if the native kernel supports this product: bf16 or fp32, with supported head sizes."""
    product = heads.product
    plain = product.dtype in (torch.bfloat16, torch.float32) and product.stride(1) == 1 and product.device.type == "cpu"
    group = heads.num_heads // heads.num_kv_heads
    return plain and heads.head_dim % 2 == 0 and heads.head_dim <= _MOST_HEAD and group <= _MOST_GROUP and has(Code.TEXTS)


def _turn_in_place(heads: Heads, texts: Texts) -> None:
    """Apply norms and RoPE to the heads in place, by treating the product's rows as the KV cache."""
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
    """Compute attention within each text by torch (reference implementation).

    Without a soft cap, torch's attention computes scores in the product's dtype. With one, scores are in FP32.
    """
    query, key, value = turned_torch(heads)
    out = query.new_empty(query.shape)
    for first, last in pairwise(starts):
        queries, keys, values = (x[first:last].transpose(0, 1) for x in (query, key, value))
        out[first:last] = _attended(queries, keys, values, spec).transpose(0, 1)
    return out.flatten(1)


def _attended(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """Compute attention of one text: query [heads, tokens, head_dim], key and value [kv_heads, tokens, head_dim]."""
    group, mask = len(query) // len(key), _mask(query.shape[1], spec)
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    if spec.softcap is None:
        bias = None if mask is None else mask.to(query.dtype)
        return F.scaled_dot_product_attention(query[None], key[None], value[None], bias, scale=spec.scale)[0]
    scores = spec.softcap * torch.tanh(query.float() @ key.float().transpose(1, 2) * spec.scale / spec.softcap)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return (weights @ value.float()).to(query.dtype)


def _mask(tokens: int, spec: AttentionSpec) -> Tensor | None:
    """Return the addend of the scores, [tokens, tokens] or [heads, tokens, tokens] fp32, or None."""
    if spec.bidirectional and spec.distance_bias is None and (spec.window is None or tokens <= spec.window // 2 + 1):
        return None
    at = torch.arange(tokens)
    ahead = at - at[:, None]  # key position minus query position
    low, high = _seen(tokens, spec)
    hidden = torch.zeros(tokens, tokens).masked_fill_((ahead < -low) | (ahead > high), -torch.inf)
    if spec.distance_bias is None:
        return hidden
    most = spec.distance_bias.shape[1] // 2
    return hidden + spec.distance_bias[:, ahead.clamp(-most, most) + most]


def _seen(tokens: int, spec: AttentionSpec) -> tuple[int, int]:
    """Return the numbers of positions before and after its own that a token sees."""
    if spec.bidirectional:
        reach = tokens if spec.window is None else spec.window // 2
        return reach, reach
    return tokens if spec.window is None else spec.window - 1, 0
