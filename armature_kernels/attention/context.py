"""The inputs of a model's forward pass: one flat batch of tokens and a function that attends.

A model does not know slots, caches or devices.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from armature_kernels.attention.attention import QkvHeads
from armature_kernels.attention.recurrence import Recurrence, RecurrentInputs
from armature_kernels.elementwise.activations import TopLogitsRequest


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention parameters of one layer.

    `scale` multiplies the scores, then `softcap` bounds them: cap · tanh(score / cap).
    With a `window`, the token at position p sees positions p - window + 1 to p: itself and the window - 1 before it.
    If attention is `bidirectional`, a token sees its whole text, or with a window positions p - window // 2
    to p + window // 2.
    `distance_bias` [heads, 2 * n + 1] FP32 is added to the scores: column n + key position - query
    position. The outermost columns serve larger distances.
    `slopes` [heads] FP32 times key position - query position is added to the scores (ALiBi, arXiv 2108.12409).
    `sinks` [heads] FP32 are the scores of a further position that every query sees and whose value is zero.
    `sees_blocks`: tokens of a block of the step, such as a picture, see each other in both directions, in the window.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    _: KW_ONLY
    bidirectional: bool = False
    distance_bias: Tensor | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    sees_blocks: bool = False

    @property
    def has_plain_scores(self) -> bool:
        """True if weights are the softmax of scaled scores alone, as torch's attention computes them."""
        return self.softcap is None and self.distance_bias is None and self.slopes is None and self.sinks is None

    def visible_window(self, unbounded: int) -> tuple[int, int]:
        """Return the numbers of positions before and after its own that a token sees; `unbounded` without a limit."""
        if self.bidirectional:
            both = unbounded if self.window is None else self.window // 2
            return both, both
        return unbounded if self.window is None else self.window - 1, 0


class Attend(Protocol):
    """A function that computes the attention of one layer.

    It applies norms and RoPE to the heads, writes keys and values to the cache, and returns the attention output.
    """

    def __call__(self, layer: int, heads: QkvHeads, spec: AttentionSpec) -> Tensor:
        """Return [tokens, num_heads * head_dim] in the dtype of the product in `heads`, which may be overwritten."""
        ...


@runtime_checkable
class AttendWithStates(Attend, Protocol):
    """An `Attend` that also keeps a recurrent state for each sequence and layer."""

    def recur(self, layer: int, inputs: RecurrentInputs, recurrence: Recurrence) -> Tensor:
        """Return the result fp32 [tokens, heads * value_size] of a layer, counted among those with a state."""
        ...

    def convolve(self, layer: int, x: Tensor, filters: Tensor) -> Tensor:
        """Return the result fp32 [tokens, channels] of a short convolution, counted among the layers with a state."""
        ...


@dataclass(frozen=True, slots=True)
class TokenVectors:
    """What pictures are in a step, at its tokens `rows`.

    `values` FP32 [rows, size] take the place of embeddings; further elements are added to the results of the first
    layers. `axes` int64 [3, tokens] are the positions of all tokens in three axes, if they differ.
    """

    rows: Tensor
    values: Tensor
    axes: Tensor | None = None

    def to(self, device: torch.device) -> TokenVectors:
        axes = None if self.axes is None else self.axes.to(device)
        return TokenVectors(self.rows.to(device), self.values.to(device), axes)


@dataclass(frozen=True, slots=True)
class StepContext:
    """The inputs of one decoder step.

    `token_ids`, `positions` [tokens] int64. `logit_rows` [rows] int64: the tokens whose logits are needed (None: all).
    `top_logits`: only this many top logits are needed; a model whose output layer can only write all logits returns
    all. `shape`: tokens and rows of logits. It is set if the next step with the same numbers differs only in
    values: the tensors, and the buffers that `attend` reads, stay at the same addresses. `vectors`: some tokens are no
    words, but vectors.
    """

    token_ids: Tensor
    positions: Tensor
    logit_rows: Tensor | None
    attend: Attend
    top_logits: TopLogitsRequest | None = None
    shape: tuple[int, int] | None = None
    vectors: TokenVectors | None = None


@dataclass(frozen=True, slots=True)
class EncodeContext:
    """Texts packed end to end in one flat batch: token_ids, positions and type_ids (None: all 0), [tokens] int64.

    Positions start at 0 in each text. `starts` [texts + 1] int64: text i is tokens [starts[i], starts[i + 1]).
    """

    token_ids: Tensor
    positions: Tensor
    type_ids: Tensor | None
    starts: Tensor
    attend: Attend
