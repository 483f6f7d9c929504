"""What stands behind an encoder's body: small products in FP32 whatever the body's precision, since they see one row a text and what they
say is the answer: rounding would be seen in the last digits of every score."""

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
    """act(W x + b), fp32 [rows, in] to [rows, out]."""

    def __init__(self, source: str, shape: tuple[int, int], has_bias: bool, activation: str = "identity") -> None:
        """`shape` is the weight's: [out, in]."""
        super().__init__()
        self.source, self.has_bias, self.activation = source, has_bias, BETWEEN[activation]
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.bias: nn.Parameter | None = None

    def adopt(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = nn.Parameter(weight.to(torch.float32, copy=True), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.to(torch.float32, copy=True), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(F.linear(x, self.weight, self.bias))


class VectorHead(nn.Module):
    """Hidden states to one vector a text: pooled, then through the checkpoint's dense layers. Not yet of unit length."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.modes = config.pooling.modes
        self.dense = nn.Sequential(*(_dense(f"dense.{index}", one) for index, one in enumerate(config.pooling.dense)))

    def rows(self, starts: Tensor) -> Tensor | None:
        """The only tokens that it looks at; None: all."""
        return one_token(starts, self.modes[0]) if len(self.modes) == 1 else None

    def forward(self, hidden: Tensor, starts: Tensor, skipped: Tensor | None) -> Tensor:
        """hidden [tokens, size] to [texts, embedding size]."""
        vectors: Tensor = self.dense(pooled(hidden, starts, self.modes, skipped))
        return vectors

    def of_rows(self, hidden: Tensor) -> Tensor:
        """The same, of the rows alone that it looks at, [texts, size]."""
        vectors: Tensor = self.dense(hidden)
        return vectors


def _dense(source: str, config: DenseConfig) -> Dense:
    return Dense(source, (config.out_features, config.in_features), config.bias, config.activation)


class LabelHead(nn.Module):
    """Hidden states to one logit a label: pooled, perhaps through a dense layer and a norm, then `out`."""

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
        """The only tokens that it looks at; None: all."""
        return one_token(starts, self.pooling)

    def forward(self, hidden: Tensor, starts: Tensor) -> Tensor:
        """hidden [tokens, size] to [texts, labels]. "late": the mean of what all tokens of a text say."""
        if self.pooling == "late":
            return pooled(self.of_rows(hidden), starts, ("mean",))
        return self.of_rows(pooled(hidden, starts, (self.pooling,)))

    def of_rows(self, hidden: Tensor) -> Tensor:
        """The same, of the rows alone that it looks at, [texts, size]."""
        logits: Tensor = self.parts(hidden)
        return logits
