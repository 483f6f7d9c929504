"""LayerNorm of an encoder's residual stream, which also prepares the input of the next product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from app.kernels.activations import Activations
from app.kernels.layer_norm import layer_norm, layer_norm_in_place
from app.kernels.linear import Linear
from app.models.encoder_config import EncoderConfig


class LayerNorm(nn.Module):
    """(x - mean) / deviation times a weight, plus an optional bias.

    The result is in `dtype`, or in the input format of the product that it `feeds`. `in_place`: the residual
    stream is replaced by its norm, for layers that normalise after the sum.
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
        """Set the weight [size] and the bias, converted to FP32."""
        self.weight = nn.Parameter(weight.to(torch.float32, copy=True), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.to(torch.float32, copy=True), requires_grad=False)

    def forward(self, hidden: Tensor) -> Activations:
        """Return the norm of hidden [tokens, size] FP32.

        If it is in place and feeds no product, `hidden` itself is returned.
        """
        norm = (self.weight, self.bias, self.eps)
        if self.in_place and self.feeds is None:
            layer_norm_in_place(hidden, norm)
            return hidden
        group = None if self.feeds is None else self.feeds.takes(hidden.shape[0])
        return layer_norm(hidden, norm, self.dtype, group, self.in_place)
