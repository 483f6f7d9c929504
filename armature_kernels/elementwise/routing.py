"""The router of a mixture of experts: which experts each row goes to, and how much each of them counts.

`csrc/route.h` computes it on a CPU; `route_torch` is the reference implementation and serves elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from armature_kernels.elementwise.routing_rule import GroupRating, Routing, Scoring
from armature_kernels.native.arguments import OpCode, RouteArguments
from armature_kernels.native.memory import empty
from armature_kernels.native.operations import has_kernel, run_operation

_SCORING: Mapping[Scoring, int] = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}
_RATINGS: Mapping[GroupRating, int] = {"best": 1, "two best": 2}


def route(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return each row's experts, best first: ids int64 [tokens, top_k], and weights fp32 [tokens, top_k].

    The lower id comes first among equals.

    Args:
        logits: The router's logits, fp32 [tokens, at least num_experts].
        routing: The rule.
        bias: Added to the scores for the selection only, fp32 [num_experts].
        factors: Multiplied with the weights of each expert, fp32 [num_experts]; not with sparsemixer.
    """
    if logits.device.type != "cpu" or logits.stride(1) != 1 or not has_kernel(OpCode.ROUTE):
        return route_torch(logits, routing, bias, factors)
    rows, k = logits.shape[0], routing.top_k
    ids, weights = empty((rows, k), torch.int64), empty((rows, k), torch.float32)
    addresses = (logits.data_ptr(), None if bias is None else bias.data_ptr(), ids.data_ptr(), weights.data_ptr())
    groups = (routing.num_groups, routing.top_groups, _RATINGS[routing.group_rating] if routing.num_groups > 1 else 0)
    sizes = (logits.stride(0), rows, routing.num_experts, k, _SCORING[routing.scoring], routing.renormalize, *groups)
    run_operation(
        RouteArguments(
            *addresses,
            *sizes,
            *(routing.scale, routing.epsilon, routing.jitter),
            None if factors is None else factors.data_ptr(),
        ),
        64 * rows * routing.num_experts,
    )
    return ids, weights


def route_torch(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return each row's experts and weights by torch."""
    logits = logits[:, : routing.num_experts].float()
    if routing.scoring == "sparsemixer":
        return _sparsemixer(logits, routing)
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    rated = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        grouped = rated.view(len(rated), routing.num_groups, -1)
        count = 1 if routing.group_rating == "best" else 2
        ratings = grouped.topk(count, dim=-1).values.sum(-1)
        kept = torch.zeros_like(ratings, dtype=torch.bool)
        kept.scatter_(1, _best(ratings, routing.top_groups), value=True)
        rated = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    ids = _best(rated, routing.top_k)
    weights = scores.gather(1, ids)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.epsilon)
    weights = weights * routing.scale
    return ids, weights if factors is None else weights * factors[ids]


def _sparsemixer(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    left, ids, weights = logits.clone(), [], []
    for _ in range(routing.top_k):
        selected = _best(left, 1)
        best = left.gather(1, selected)
        is_far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * routing.jitter
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(-1).gather(1, selected))
        ids.append(selected)
        left.scatter_(1, selected, -torch.inf)
    return torch.cat(ids, 1), torch.cat(weights, 1) * routing.scale


def _best(values: Tensor, count: int) -> Tensor:
    """Return the ids of the largest values of each row, the lower id first among equals."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
