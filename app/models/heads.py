"""The heads of encoders: small products in FP32, for any precision of the body.

They process one row per text, and their results are the answer: lower precision would change the last digits of
every score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.kernels.activate import ACTIVATIONS
from app.models.encoder_config import DenseConfig, EncoderConfig, HeadConfig
from app.models.layer_norm import LayerNorm
from app.models.pooling import one_token, pooled

BETWEEN: Mapping[str, Callable[[Tensor], Tensor]] = {**ACTIVATIONS, "identity": lambda x: x}


class Dense(nn.Module):
    """act(W x + b), FP32 [rows, in] to [rows, out]."""

    def __init__(self, source: str, shape: tuple[int, int], has_bias: bool, activation: str = "identity") -> None:
        """Create the layer; `shape` is that of the weight, [out, in]."""
        super().__init__()
        self.source, self.has_bias, self.activation = source, has_bias, BETWEEN[activation]
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.bias: nn.Parameter | None = None

    def adopt(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Set the weight [out, in] and the bias, converted to FP32."""
        self.weight = nn.Parameter(weight.to(torch.float32, copy=True), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.to(torch.float32, copy=True), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return act(W x + b), FP32 [rows, out]."""
        return self.activation(F.linear(x, self.weight, self.bias))


class VectorHead(nn.Module):
    """Hidden states to one vector per text: pooling, then the checkpoint's dense layers.

    The vectors are not normalised.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.modes = config.pooling.modes
        self.dense = nn.Sequential(*(_dense(f"dense.{index}", one) for index, one in enumerate(config.pooling.dense)))

    def rows(self, starts: Tensor) -> Tensor | None:
        """Return the tokens that this head reads, or None for all."""
        return one_token(starts, self.modes[0]) if len(self.modes) == 1 else None

    def forward(self, hidden: Tensor, starts: Tensor, skipped: Tensor | None) -> Tensor:
        """Map hidden [tokens, size] to [texts, embedding size]."""
        vectors: Tensor = self.dense(pooled(hidden, starts, self.modes, skipped))
        return vectors

    def of_rows(self, hidden: Tensor) -> Tensor:
        """Map the hidden states of the tokens in `rows` [texts, size] to [texts, embedding size]."""
        vectors: Tensor = self.dense(hidden)
        return vectors


def _dense(source: str, config: DenseConfig) -> Dense:
    return Dense(source, (config.out_features, config.in_features), config.bias, config.activation)


class LabelHead(nn.Module):
    """Hidden states to one logit per label: pooling, an optional dense layer and norm, then `out`."""

    def __init__(self, config: EncoderConfig, head: HeadConfig) -> None:
        super().__init__()
        size = config.hidden_size
        parts: list[nn.Module] = []
        if head.dense:
            parts.append(Dense("head.dense", (size, size), head.dense_bias, head.activation))
        if head.norm:
            parts.append(LayerNorm("head.norm", config, torch.float32, in_place=False))
        parts.append(Dense("head.out", (len(config.labels), size), head.bias))
        self.pooling, self.parts = head.pooling, nn.Sequential(*parts)

    def rows(self, starts: Tensor) -> Tensor | None:
        """Return the tokens that this head reads, or None for all."""
        return one_token(starts, self.pooling)

    def forward(self, hidden: Tensor, starts: Tensor) -> Tensor:
        """Map hidden [tokens, size] to [texts, labels].

        With pooling "late" this is the mean of the logits of all tokens.
        """
        if self.pooling == "late":
            return pooled(self.of_rows(hidden), starts, ("mean",))
        return self.of_rows(pooled(hidden, starts, (self.pooling,)))

    def of_rows(self, hidden: Tensor) -> Tensor:
        """Map pooled hidden states [texts, size] to [texts, labels]."""
        logits: Tensor = self.parts(hidden)
        return logits
