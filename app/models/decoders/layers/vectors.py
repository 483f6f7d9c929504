"""What a layer of a decoder holds beside its products: norms, and stored vectors and factors, in FP32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.models.decoders.layer_config import HeadNormConfig, NormConfig
from armature_kernels.elementwise.activations import xielu
from armature_kernels.elementwise.norms import add_rms_norm, layer_norm, layer_norm_in_place, rms_norm
from armature_kernels.linear.activations import Activations, RowGroups
from armature_kernels.linear.linear import Linear


class Norm(nn.Module):
    """An RMSNorm or a LayerNorm in FP32, times `gain`, in `dtype` or the input format of the product it `feeds`."""

    def __init__(
        self,
        source: str,
        size: int,
        norm: NormConfig,
        dtype: torch.dtype = torch.float32,
        feeds: Linear | None = None,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.source, self.norm, self.dtype, self.feeds, self.gain = source, norm, dtype, feeds, gain
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if norm.has_bias else None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its stored tensors, in the order in which `set_weight` takes them."""
        return ("weight",) * self.norm.has_weight + ("bias",) * self.norm.has_bias

    def set_weight(self, *tensors: Tensor) -> None:
        wide = {kind: tensor.to(torch.float32, copy=True) for kind, tensor in zip(self.kinds, tensors, strict=True)}
        self.weight = nn.Parameter((wide["weight"] + self.norm.offset) * self.gain, requires_grad=False)
        if self.bias is not None:
            self.bias = nn.Parameter(wide["bias"] * self.gain, requires_grad=False)

    def fill(self, weight: float, device: torch.device | None) -> None:
        self.weight = nn.Parameter(
            torch.full(self.weight.shape, weight * self.gain, device=device), requires_grad=False
        )
        if self.bias is not None:
            self.bias = nn.Parameter(torch.zeros(self.bias.shape, device=device), requires_grad=False)

    def divide_weight(self, factors: Tensor) -> None:
        """Divide the weight by the smooth scales of the product that it feeds (armature_kernels/linear/smoothing.py)."""
        self.weight.div_(factors)
        if self.bias is not None:
            self.bias.div_(factors)

    def forward(self, x: Tensor) -> Activations:
        """Return the norm of x [tokens, size]; without `feeds`, x may have more dimensions."""
        group = None if self.feeds is None else self.feeds.activation_group(x.shape[0])
        if self.norm.kind == "layer":
            return layer_norm(x, (self.weight, self.bias, self.norm.eps), self.dtype, group)
        return rms_norm(x, self.weight, self.norm.eps, self.dtype, group)

    def overwrite(self, hidden: Tensor) -> None:
        """Overwrite hidden [tokens, size] FP32 by its norm. Only a LayerNorm can do that."""
        assert self.norm.kind == "layer", "no family has an RMSNorm after its embeddings"
        layer_norm_in_place(hidden, (self.weight, self.bias, self.norm.eps))

    def add_to(self, hidden: Tensor, x: Tensor) -> None:
        """Add the norm of x [tokens, size] to hidden [tokens, size] FP32. Only an RMSNorm can do that."""
        assert self.norm.kind == "rms", "no family has a LayerNorm after a branch"
        add_rms_norm(hidden, x, self.weight, self.norm.eps)


class HeadNorm(nn.Module):
    """The weights of the norm of queries or keys, FP32; `QkvHeads` says how they are applied."""

    def __init__(self, source: str, norm: HeadNormConfig, heads: int, head_dim: int) -> None:
        super().__init__()
        self.source, self.norm, self.kinds = source, norm, ("weight",)
        self.weight = nn.Parameter(torch.empty(norm.num_weights(heads, head_dim)), requires_grad=False)

    def set_weight(self, tensor: Tensor) -> None:
        self.weight = nn.Parameter(tensor.to(torch.float32, copy=True) + self.norm.offset, requires_grad=False)

    def fill(self, weight: float, device: torch.device | None) -> None:
        self.weight = nn.Parameter(torch.full(self.weight.shape, weight, device=device), requires_grad=False)


class StoredVector(nn.Module):
    """A stored vector of a layer, or a small matrix, in FP32. Without a `kind` it is not stored and its elements are 1."""

    kinds: tuple[str, ...]

    def __init__(self, source: str, kind: str, *shape: int) -> None:
        super().__init__()
        self.source, self.kinds = source, (kind,) if kind else ()
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)

    def fill(self, weight: float, device: torch.device | None) -> None:
        self.weight = nn.Parameter(torch.full(self.weight.shape, weight, device=device), requires_grad=False)

    def set_weight(self, tensor: Tensor) -> None:
        self.weight = nn.Parameter(tensor.to(torch.float32, copy=True), requires_grad=False)


class AlibiSlopes(StoredVector):
    """The slopes of ALiBi, FP32 [heads], which no checkpoint stores."""

    def __init__(self, slopes: Sequence[float]) -> None:
        super().__init__("", "", len(slopes))
        self.slopes = tuple(slopes)

    def fill(self, weight: float, device: torch.device | None) -> None:
        self.weight = nn.Parameter(torch.tensor(self.slopes, device=device or "cpu"), requires_grad=False)


class Filters(nn.Module):
    """The filters of a short convolution, FP32 [width, channels]."""

    kinds = ("weight",)

    def __init__(self, source: str, width: int, channels: int) -> None:
        super().__init__()
        self.source = source
        self.weight = nn.Parameter(torch.empty(width, channels), requires_grad=False)

    def set_weight(self, tensor: Tensor) -> None:
        """Set the filters from the stored ones [channels, 1, width]."""
        self.weight = nn.Parameter(tensor.float().squeeze(1).T.contiguous(), requires_grad=False)

    def fill(self, weight: float, device: torch.device | None) -> None:
        self.weight = nn.Parameter(torch.full(self.weight.shape, weight, device=device), requires_grad=False)


class Xielu(nn.Module):
    """The activation xIELU with the two trained factors of a layer."""

    kinds = ("alpha_p", "alpha_n")

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.positive, self.negative = 0.8, 0.8

    def set_weight(self, positive: Tensor, negative: Tensor) -> None:
        """Set the factors from the stored logarithms [1]."""
        self.positive = float(F.softplus(positive.float()))
        self.negative = 0.5 + float(F.softplus(negative.float()))

    def fill(self, weight: float, device: torch.device | None) -> None:
        self.positive = self.negative = weight

    def forward(self, x: Tensor, group: RowGroups | None) -> Activations:
        """Return xIELU(x) [tokens, size], quantized if `group` is given."""
        return xielu(x, self.positive, self.negative, group)
