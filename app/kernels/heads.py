"""What a layer's product of queries, keys and values is made of, and what its heads still need; turn.py gives it to them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

Angles = tuple[Tensor, Tensor]  # cos and signed sin, each [tokens, 1, dim], fp32


@dataclass(frozen=True, slots=True)
class Heads:
    """One layer's product of queries, keys and values, [tokens, (num_heads + 2 * num_kv_heads) * head_dim], and what its heads still need:

    an RMSNorm each for queries and keys (weights [head_dim] fp32) and rotary angles, where the model has them.
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
        """Whether heads go to attention as the product made them."""
        return self.query_norm is None and self.key_norm is None and self.angles is None

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the product: queries, keys and values, [tokens, heads, head_dim] each."""
        product = self.product.view(len(self.product), self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        query, key, value = product.tensor_split((self.num_heads, self.num_heads + self.num_kv_heads), 1)
        return query, key, value
