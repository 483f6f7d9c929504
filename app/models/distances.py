"""Relative positions of MPNet: a bias for each head and each bucket of distances, shared by all layers."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from app.kernels.turn import Heads
from app.models.context import Attend, AttentionSpec

MOST = 128  # positions; larger distances share a bucket


class DistanceBias(nn.Module):
    """The bias that is added to the score of a query and a key, by their distance. `weight` is [buckets, heads]."""

    def __init__(self, source: str, buckets: int, heads: int) -> None:
        super().__init__()
        self.source, self.has_bias = source, False
        self.weight = nn.Parameter(torch.empty(buckets, heads), requires_grad=False)
        self.by_distance = torch.empty(0)  # fp32 [heads, 2 * MOST + 1], as an `AttentionSpec` has it

    def adopt(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Set the weight [buckets, heads] and expand it by distance."""
        self.weight = nn.Parameter(weight.to(torch.float32, copy=True), requires_grad=False)
        self.by_distance = self.weight[buckets_of(len(weight)).to(weight.device)].T.contiguous()

    def forward(self, attend: Attend) -> Attend:
        """Return `attend` with the bias added."""

        def attends(layer: int, heads: Heads, spec: AttentionSpec) -> Tensor:
            return attend(layer, heads, replace(spec, distance_bias=self.by_distance))

        return attends


def buckets_of(buckets: int) -> Tensor:
    """Return the bucket of each distance (key position minus query position) from -MOST to MOST.

    Half of the buckets are for keys after the query. In each half, half of the buckets are for one distance each;
    the others grow with the logarithm, up to MOST.
    """
    half = buckets // 2
    exact = half // 2
    distances = torch.arange(-MOST, MOST + 1, device="cpu")
    apart = distances.abs()
    grown = exact + ((apart.float() / exact).log() / math.log(MOST / exact) * (half - exact)).to(torch.int64)
    return torch.where(apart < exact, apart, grown.clamp(max=half - 1)) + half * (distances > 0)
