"""Layout of attention's inputs: keys and values of one layer as rows, one per token, and the heads of a QKV product.

`csrc/ops.h`, "Keys and values", describes the rows. The KV cache decides which row belongs to which sequence.
`QkvHeads` holds a QKV product with its head layout and the norms and RoPE angles that its heads need.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from app.kernels.native.operations import KvAddresses

_ROW_ALIGNMENT = 64  # an int8 row is padded to a multiple of this many bytes


@dataclass(frozen=True, slots=True)
class KvRows:
    """Keys and values [rows, kv_heads, head_dim] of one layer, as views of rows of `token_bytes` bytes.

    int8 codes have scales fp32 [rows, kv_heads] in the same row.
    """

    keys: Tensor
    values: Tensor
    token_bytes: int
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def write(self, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value [tokens, kv_heads, head_dim], of any strides, at `rows` [tokens] int64.

        A token's stored values do not depend on the rest of the batch.
        """
        for target, scales, given in ((self.keys, self.key_scales, key), (self.values, self.value_scales, value)):
            if scales is None:
                target.index_copy_(0, rows, given.to(target.dtype))
            else:
                codes, own = quantise_heads(given)
                target.index_copy_(0, rows, codes)
                scales.index_copy_(0, rows, own)

    def read(self, first: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of rows `[first, first + num_tokens)`: views, or dequantised int8 in bfloat16."""
        key, value = self.keys.narrow(0, first, num_tokens), self.values.narrow(0, first, num_tokens)
        if self.key_scales is None or self.value_scales is None:
            return key, value
        scales = self.key_scales.narrow(0, first, num_tokens), self.value_scales.narrow(0, first, num_tokens)
        return (key * scales[0][..., None]).to(torch.bfloat16), (value * scales[1][..., None]).to(torch.bfloat16)

    def addresses(self) -> KvAddresses:
        """Return the addresses as the C structure `view_kv_rows`."""
        scales = [None if scale is None else scale.data_ptr() for scale in (self.key_scales, self.value_scales)]
        return KvAddresses(self.keys.data_ptr(), self.values.data_ptr(), *scales, self.token_bytes)


def token_bytes(kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one token in one layer."""
    elements = 2 * kv_heads * head_dim
    if dtype != torch.int8:
        return elements * dtype.itemsize
    return -(-(elements + 2 * kv_heads * 4) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


def view_kv_rows(memory: Tensor, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KvRows:
    """View memory uint8 [rows, token_bytes] of one layer as keys and values."""
    rows, size = memory.shape
    elements = kv_heads * head_dim * dtype.itemsize
    key, value = (
        memory[:, at * elements : (at + 1) * elements].view(dtype).view(rows, kv_heads, head_dim) for at in (0, 1)
    )
    if dtype != torch.int8:
        return KvRows(key, value, size)
    scales = memory[:, 2 * elements : 2 * elements + 8 * kv_heads].view(torch.float32)
    return KvRows(key, value, size, scales[:, :kv_heads], scales[:, kv_heads:])


def quantise_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x [tokens, heads, head_dim] to codes int8 and scales fp32 [tokens, heads].

    The scale of a head that is not finite is NaN.
    """
    x = x.float()
    largest = x.abs().amax(-1)
    finite = x.isfinite().all(-1)
    used = finite & (largest > 1e-35)
    # A tensor, because torch divides a Python number by a tensor through the reciprocal, which rounds twice.
    hundred = torch.full_like(largest, 127.0)
    inverse = torch.where(used, torch.div(hundred, largest), 0.0)
    codes = torch.where(used[..., None], x * inverse[..., None], 0.0).round().to(torch.int8)
    return codes, torch.where(used, torch.div(largest, hundred), torch.where(finite, 0.0, torch.nan))


RopeAngles = tuple[Tensor, Tensor]  # cos and signed sin, each [tokens, 1, dim], fp32


@dataclass(frozen=True, slots=True)
class QkvHeads:
    """A layer's QKV product, [tokens, (num_heads + 2 * num_kv_heads) * head_dim], and the transforms its heads need.

    Queries and keys have an RMSNorm each (weights [head_dim] fp32) and RoPE angles, if the model has them.
    """

    product: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    eps: float = 0.0
    angles: RopeAngles | None = None

    @property
    def is_final(self) -> bool:
        """True if heads need no norm and no RoPE before attention."""
        return self.query_norm is None and self.key_norm is None and self.angles is None

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of the product: queries, keys and values, [tokens, heads, head_dim] each."""
        product = self.product.view(len(self.product), self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        query, key, value = product.tensor_split((self.num_heads, self.num_heads + self.num_kv_heads), 1)
        return query, key, value
