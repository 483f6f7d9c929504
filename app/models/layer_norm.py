"""LayerNorm of an encoder's residual stream, and what it leaves for the product that comes next."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from app.kernels.activations import Activations
from app.kernels.layer_norm import layer_norm, layer_norm_in_place
from app.kernels.linear import Linear
from app.models.encoder_config import EncoderConfig


class LayerNorm(nn.Module):
    """(x - mean) / deviation times a weight, plus a bias where there is one; in `dtype`, or as the product that it `feeds` wants it.

    `in_place`: the stream becomes its norm as well, as where a layer normalises what it has added to.
    """

    def __init__(
        self, source: str, config: EncoderConfig, dtype: torch.dtype, feeds: Linear | None = None, in_place: bool = True
    ) -> None:
        super().__init__()
        self.source, self.has_bias, self.eps = source, config.norm_bias, config.norm_eps
        self.dtype, self.feeds, self.in_place = dtype, feeds, in_place
        self.weight = nn.Parameter(torch.empty(config.hidden_size), requires_grad=False)
        self.bias: nn.Parameter | None = None

    def adopt(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = nn.Parameter(weight.to(torch.float32, copy=True), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.to(torch.float32, copy=True), requires_grad=False)

    def forward(self, hidden: Tensor) -> Activations:
        """hidden [tokens, size] fp32 to its norm. In place with nobody to feed it is that alone."""
        norm = (self.weight, self.bias, self.eps)
        if self.in_place and self.feeds is None:
            layer_norm_in_place(hidden, norm)
            return hidden
        group = None if self.feeds is None else self.feeds.takes(hidden.shape[0])
        return layer_norm(hidden, norm, self.dtype, group, self.in_place)
