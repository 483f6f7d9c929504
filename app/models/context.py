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
    Where attention is `bidirectional` it sees all of its own text, or with a window positions p - window // 2 to p + window // 2.
    `distance_bias` [heads, 2 * most + 1] fp32 is added to the scores: column `most` + key position - query position, the outermost beyond.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    bidirectional: bool = False
    distance_bias: Tensor | None = None


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


@dataclass(frozen=True, slots=True)
class EncodeContext:
    """Texts end to end in one flat batch: token_ids, positions (0 at each text's begin) and type_ids (None: all 0), [tokens] int64.

    `starts` [texts + 1] int64: text i is tokens [starts[i], starts[i + 1]).
    """

    token_ids: Tensor
    positions: Tensor
    type_ids: Tensor | None
    starts: Tensor
    attend: Attend
