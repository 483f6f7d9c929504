"""The heads of encoders: LayerNorm, pooling of texts to one vector each, and small products.

They are in FP32: lower precision would change the last digits of every score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.models.encoders.config import DenseConfig, EncoderConfig, HeadConfig, PoolingMode
from armature_kernels.elementwise.activations import ACTIVATIONS
from armature_kernels.elementwise.norms import layer_norm, layer_norm_in_place
from armature_kernels.elementwise.pooling import MEAN, SUM, pool_rows, pool_rows_torch
from armature_kernels.linear.activations import Activations
from armature_kernels.linear.linear import Linear

_MAX = 2  # a mode of torch.embedding_bag
DENSE_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {**ACTIVATIONS, "identity": lambda x: x}


class LayerNorm(nn.Module):
    """(x - mean) / deviation times a weight, plus an optional bias, in `dtype` or the input format it `feeds`.

    `in_place`: the residual stream is replaced by its norm, for layers that normalise after the sum.
    """

    def __init__(
        self, source: str, config: EncoderConfig, dtype: torch.dtype, feeds: Linear | None = None, in_place: bool = True
    ) -> None:
        super().__init__()
        self.source, self.has_bias, self.eps = source, config.norm_bias, config.norm_eps
        self.dtype, self.feeds, self.in_place = dtype, feeds, in_place
        self.weight = nn.Parameter(torch.empty(config.hidden_size), requires_grad=False)
        self.bias: nn.Parameter | None = None

    def set_weight(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = nn.Parameter(weight.to(torch.float32, copy=True), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.to(torch.float32, copy=True), requires_grad=False)

    def forward(self, hidden: Tensor) -> Activations:
        """Return the norm of hidden [tokens, size] FP32: `hidden` itself if it is in place and feeds no product."""
        norm = (self.weight, self.bias, self.eps)
        if self.in_place and self.feeds is None:
            layer_norm_in_place(hidden, norm)
            return hidden
        group = None if self.feeds is None else self.feeds.activation_group(hidden.shape[0])
        return layer_norm(hidden, norm, self.dtype, group, self.in_place)


def pool(hidden: Tensor, starts: Tensor, modes: Sequence[PoolingMode], skipped: Tensor | None = None) -> Tensor:
    """Pool hidden FP32 [tokens, size] to [texts, size * modes], the modes concatenated.

    The first `skipped` [texts] tokens of a text are left out (None: none). Modes that take a single token ignore it.
    """
    vectors = []
    for mode in modes:
        token = single_token(starts, mode)
        vectors.append(_POOLERS[mode](hidden, starts, skipped) if token is None else hidden[token])
    return vectors[0] if len(vectors) == 1 else torch.cat(vectors, 1)


def single_token(starts: Tensor, mode: str) -> Tensor | None:
    """Return the token of each text that becomes its vector, [texts] int64, or None if the mode uses several."""
    return {"cls": starts[:-1], "last": starts[1:] - 1}.get(mode)


def _weighted_mean(hidden: Tensor, starts: Tensor, skipped: Tensor | None) -> Tensor:
    """Return the mean with weights 1, 2, … by a text's token; skipped tokens count for the weights."""
    # A known output size avoids waiting for the device.
    firsts = torch.repeat_interleave(starts[:-1], starts.diff(), output_size=len(hidden))
    weights = torch.arange(1.0, len(hidden) + 1.0, device=hidden.device) - firsts
    sums = pool_rows_torch(hidden, starts, SUM, skipped, weights)
    return sums / pool_rows_torch(weights[:, None], starts, SUM, skipped)


def _sum_by_root(hidden: Tensor, starts: Tensor, skipped: Tensor | None) -> Tensor:
    """Return the sum divided by the square root of the number of tokens that count."""
    lengths = starts.diff() if skipped is None else starts.diff() - skipped
    return pool_rows(hidden, starts, SUM, skipped) / lengths[:, None].sqrt()


_POOLERS: Mapping[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "mean": lambda hidden, starts, skipped: pool_rows(hidden, starts, MEAN, skipped),
    "max": lambda hidden, starts, skipped: pool_rows_torch(hidden, starts, _MAX, skipped),
    "mean_sqrt_len": _sum_by_root,
    "weighted_mean": _weighted_mean,
}


class DenseLayer(nn.Module):
    """act(W x + b), FP32 [rows, in] to [rows, out]."""

    def __init__(self, source: str, shape: tuple[int, int], has_bias: bool, activation: str = "identity") -> None:
        super().__init__()
        self.source, self.has_bias, self.activation = source, has_bias, DENSE_ACTIVATIONS[activation]
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.bias: nn.Parameter | None = None

    def set_weight(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = nn.Parameter(weight.to(torch.float32, copy=True), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.to(torch.float32, copy=True), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(F.linear(x, self.weight, self.bias))


class VectorHead(nn.Module):
    """Hidden states to one vector per text, not normalised: pooling, then the checkpoint's dense layers."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.modes = config.pooling.modes
        self.dense = nn.Sequential(*(_dense(f"dense.{index}", one) for index, one in enumerate(config.pooling.dense)))

    def needed_rows(self, starts: Tensor) -> Tensor | None:
        return single_token(starts, self.modes[0]) if len(self.modes) == 1 else None

    def forward(self, hidden: Tensor, starts: Tensor, skipped: Tensor | None) -> Tensor:
        """Map hidden [tokens, size] to [texts, embedding size]."""
        vectors: Tensor = self.dense(pool(hidden, starts, self.modes, skipped))
        return vectors

    def from_rows(self, hidden: Tensor) -> Tensor:
        """Map the hidden states of the tokens in `hidden` [texts, size] to [texts, embedding size]."""
        vectors: Tensor = self.dense(hidden)
        return vectors


def _dense(source: str, config: DenseConfig) -> DenseLayer:
    return DenseLayer(source, (config.out_features, config.in_features), config.bias, config.activation)


class LabelHead(nn.Module):
    """Hidden states to one logit per label: pooling, an optional dense layer and norm, then `out`."""

    def __init__(self, config: EncoderConfig, head: HeadConfig) -> None:
        super().__init__()
        size = config.hidden_size
        parts: list[nn.Module] = []
        if head.dense:
            parts.append(DenseLayer("head.dense", (size, size), head.dense_bias, head.activation))
        if head.norm:
            parts.append(LayerNorm("head.norm", config, torch.float32, in_place=False))
        parts.append(DenseLayer("head.out", (len(config.labels), size), head.bias))
        self.pooling, self.parts = head.pooling, nn.Sequential(*parts)

    def needed_rows(self, starts: Tensor) -> Tensor | None:
        return single_token(starts, self.pooling)

    def forward(self, hidden: Tensor, starts: Tensor) -> Tensor:
        """Map hidden [tokens, size] to [texts, labels]; "late" pooling is the mean of all tokens' logits."""
        if self.pooling == "late":
            return pool(self.from_rows(hidden), starts, ("mean",))
        return self.from_rows(pool(hidden, starts, (self.pooling,)))

    def from_rows(self, hidden: Tensor) -> Tensor:
        """Map pooled hidden states [texts, size] to [texts, labels]."""
        logits: Tensor = self.parts(hidden)
        return logits
