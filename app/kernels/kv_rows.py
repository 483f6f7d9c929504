"""Keys and values of one layer as rows, one a token: how they lie in bytes, what writes them, and how they read back (csrc/ops.h, "Keys and
values"). Which row is whose is the cache's business."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from app.kernels.operations import KVAddresses

_ALIGNED = 64  # bytes that a row of int8 is padded to a multiple of


@dataclass(frozen=True, slots=True)
class KVRows:
    """keys, values [rows, kv_heads, head_dim]: views of rows of `token_bytes`; int8 codes have scales [rows, kv_heads] fp32 beside them."""

    keys: Tensor
    values: Tensor
    token_bytes: int
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def write(self, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores key, value [tokens, kv_heads, head_dim] (any strides) at `rows` [tokens] int64, whatever the batch."""
        for target, scales, given in ((self.keys, self.key_scales, key), (self.values, self.value_scales, value)):
            if scales is None:
                target.index_copy_(0, rows, given.to(target.dtype))
            else:
                codes, own = quantised_heads(given)
                target.index_copy_(0, rows, codes)
                scales.index_copy_(0, rows, own)

    def read(self, first: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of rows `[first, first + num_tokens)`: views, or of int8 what the codes mean, in bfloat16."""
        key, value = self.keys.narrow(0, first, num_tokens), self.values.narrow(0, first, num_tokens)
        if self.key_scales is None or self.value_scales is None:
            return key, value
        scales = self.key_scales.narrow(0, first, num_tokens), self.value_scales.narrow(0, first, num_tokens)
        return (key * scales[0][..., None]).to(torch.bfloat16), (value * scales[1][..., None]).to(torch.bfloat16)

    def addresses(self) -> KVAddresses:
        scales = [None if scale is None else scale.data_ptr() for scale in (self.key_scales, self.value_scales)]
        return KVAddresses(self.keys.data_ptr(), self.values.data_ptr(), *scales, self.token_bytes)


def token_bytes(kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that one token takes in one layer."""
    elements = 2 * kv_heads * head_dim
    if dtype != torch.int8:
        return elements * dtype.itemsize
    return -(-(elements + 2 * kv_heads * 4) // _ALIGNED) * _ALIGNED


def kv_rows(memory: Tensor, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVRows:
    """memory uint8 [rows, token_bytes] of one layer."""
    rows, size = memory.shape
    elements = kv_heads * head_dim * dtype.itemsize
    key, value = (memory[:, at * elements : (at + 1) * elements].view(dtype).view(rows, kv_heads, head_dim) for at in (0, 1))
    if dtype != torch.int8:
        return KVRows(key, value, size)
    scales = memory[:, 2 * elements : 2 * elements + 8 * kv_heads].view(torch.float32)
    return KVRows(key, value, size, scales[:, :kv_heads], scales[:, kv_heads:])


def quantised_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [tokens, heads, head_dim] to codes int8 and scales fp32 [tokens, heads]; NaN as the scale of a head that is not finite."""
    x = x.float()
    largest = x.abs().amax(-1)
    finite = x.isfinite().all(-1)
    used = finite & (largest > 1e-35)
    hundred = torch.full_like(largest, 127.0)  # torch divides a number by a tensor through the reciprocal, which rounds twice
    inverse = torch.where(used, torch.div(hundred, largest), 0.0)
    codes = torch.where(used[..., None], x * inverse[..., None], 0.0).round().to(torch.int8)
    return codes, torch.where(used, torch.div(largest, hundred), torch.where(finite, 0.0, torch.nan))
