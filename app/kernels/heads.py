"""The product of a layer's QKV projection, its head layout, and the norms and RoPE angles its heads need."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

Angles = tuple[Tensor, Tensor]  # cos and signed sin, each [tokens, 1, dim], fp32


@dataclass(frozen=True, slots=True)
class Heads:
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
    angles: Angles | None = None

    @property
    def as_they_are(self) -> bool:
        """True if heads need no norm and no RoPE before attention."""
        return self.query_norm is None and self.key_norm is None and self.angles is None

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of the product: queries, keys and values, [tokens, heads, head_dim] each."""
        product = self.product.view(len(self.product), self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        query, key, value = product.tensor_split((self.num_heads, self.num_heads + self.num_kv_heads), 1)
        return query, key, value
