"""The weights of attention from scores, in plain torch: soft cap, biases by distance, mask, sinks and softmax.

The reference implementation of what every attention kernel does between its two products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from armature_kernels.attention.context import AttentionSpec


def attention_weights(scores: Tensor, ahead: Tensor, seen: Tensor, spec: AttentionSpec) -> Tensor:
    """Return the weights of the keys for each query; those of a query that sees no key are 0.

    Args:
        scores: fp32 [..., heads, queries, keys], scaled.
        ahead: int64 [..., queries, keys], a key's position minus the query's.
        seen: bool [..., queries, keys], the keys that a query sees.
        spec: The parameters of the layer.
    """
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.distance_bias is not None:
        most = spec.distance_bias.shape[1] // 2
        scores = scores + spec.distance_bias[:, ahead.clamp(-most, most) + most].movedim(0, -3)
    if spec.slopes is not None:
        scores = scores + spec.slopes[:, None, None] * ahead.unsqueeze(-3)
    hidden = ~seen.unsqueeze(-3)
    scores = scores.masked_fill(hidden, -torch.inf)
    if spec.sinks is None:
        return scores.softmax(-1).masked_fill(hidden, 0.0)
    sinks = spec.sinks[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
