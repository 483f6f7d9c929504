"""The rule by which a mixture of experts selects them. Torch is not needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scoring = Literal["softmax", "sigmoid", "sparsemixer"]
GroupRating = Literal["best", "two best"]

MAX_EXPERTS = 1024  # MOST_EXPERTS of csrc/ops.h


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are selected from the router's logits.

    `top_k` experts have the best scores. Their weights are the scores, divided by their sum plus `epsilon` if
    `renormalize`, times `scale`. With `num_groups` > 1 they are selected from the `top_groups` groups with the best
    experts: the best one of each, or the sum of its two best (DeepSeek-V3, arXiv 2412.19437).

    With `sparsemixer` (arXiv 2409.12136, at inference) experts with the best logits are selected. The weight of one is
    its softmax over itself and those after it whose logit x is near: (best - x) / max(abs(x), best) <= 2 * `jitter`.
    There is no bias, no group and no sum to divide by.
    """

    num_experts: int
    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    epsilon: float = 0.0
    num_groups: int = 1
    top_groups: int = 1
    group_rating: GroupRating = "best"
    jitter: float = 0.0
