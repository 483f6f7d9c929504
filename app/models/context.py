"""What a model's forward pass is given: one flat batch of tokens and a way to attend. A model never sees a slot, a cache or a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from app.kernels.best import Wanted
from app.kernels.turn import Heads


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention: `scale` multiplies the scores, then `softcap` bounds them: cap · tanh(score / cap).

    With a `window`, the token at position p sees positions p - window + 1 to p: itself and the window - 1 before it.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class Attend(Protocol):
    """Gives one layer's heads their norms and positions, writes keys and values to the cache and returns what each token attends to."""

    def __call__(self, layer: int, heads: Heads, spec: AttentionSpec) -> Tensor:
        """The product in `heads` may be overwritten; the result is [tokens, num_heads * head_dim] of its dtype."""
        ...


@dataclass(frozen=True, slots=True)
class StepContext:
    """token_ids, positions [tokens] int64; logit_rows [rows] int64: the tokens whose logits are wanted (None: all).

    `best`: that many of the best are enough; a model whose output layer can only write all logits gives those.
    `shape`: how many tokens and rows of logits, where nothing but values will differ in the next step that has as many: tensors, and what
    `attend` reads, will lie where they lie now.
    """

    token_ids: Tensor
    positions: Tensor
    logit_rows: Tensor | None
    attend: Attend
    best: Wanted | None = None
    shape: tuple[int, int] | None = None
