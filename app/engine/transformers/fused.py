"""Faster parts for the library's models on processors, in place of parts that cost more calls than arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from armature_kernels.elementwise.norms import rms_norm

# Layers of one parent that usually have one input. If they have not, each computes the product of all.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_NORM_ROWS = 4
_OPTIONS = ("position_bias", "softcap", "cache", "sinks", "s_aux")  # of attention, which only the library computes


def fuse(model: PreTrainedModel) -> None:
    """Replace norms, and attention of one query to keys and values of fewer heads."""
    ALL_ATTENTION_FUNCTIONS.register("sdpa", attend_grouped)
    for parent, name, norm in list(_norms(model)):
        fused = FusedNorm.of(norm)
        if fused is not None:
            setattr(parent, name, fused)


def attend_grouped(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Return attention as the library does, which takes several times as long for one query without a mask.

    There, query heads that share a key are rows of one product instead of a product each.
    """
    beams, sources = getattr(module, "sharing", (1, 0))
    if beams > 1 and attention_mask is None and len(query) == beams * sources:
        return _attend_once(query, key, value, beams, options.get("scaling")), None
    groups = getattr(module, "num_key_value_groups", 1)
    is_one = query.shape[2] == 1 and groups > 1 and query.device.type == "cpu"
    if not is_one or attention_mask is not None or any(options.get(name) is not None for name in _OPTIONS):
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return found
    rows, heads, _, size = query.shape
    packed = query.reshape(rows, heads // groups, groups, size)
    out = functional.scaled_dot_product_attention(packed, key, value, scale=options.get("scaling"))
    return out.reshape(rows, 1, heads, value.shape[-1]), None


def share_sources(model: nn.Module, num_sources: int, num_beams: int) -> None:
    """Let the decoder's attention to its sources read each once for all its beams, which the library copies it for."""
    ALL_ATTENTION_FUNCTIONS.register("sdpa", attend_grouped)
    for name, module in model.named_modules():
        if name.endswith(".encoder_attn"):
            module.sharing = num_beams, num_sources


def _attend_once(query: Tensor, key: Tensor, value: Tensor, beams: int, scale: float | None) -> Tensor:
    """Return attention [rows, queries, heads, size] of rows whose keys and values are those of the first of its beams."""
    rows, heads, length, size = query.shape
    together = query.view(rows // beams, beams, heads, length, size).transpose(1, 2).flatten(2, 3)
    out = functional.scaled_dot_product_attention(together, key[::beams], value[::beams], scale=scale)
    parted = out.view(rows // beams, heads, beams, length, value.shape[-1])
    return parted.permute(0, 2, 3, 1, 4).reshape(rows, length, heads, -1)


# ---- norms -----------------------------------------------------------------------------------------------------------


class FusedNorm(nn.Module):
    """An RMSNorm [..., size] in one operation. `weight` is the library's, which its code may ask for its dtype."""

    def __init__(self, weight: nn.Parameter, factor: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self._factor, self.eps = weight, factor, eps

    @classmethod
    def of(cls, norm: nn.Module) -> FusedNorm | None:
        """Return the norm if its values are those of an RMSNorm by the weight, or by one more than it."""
        weight, eps = norm.weight, getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(eps, float):
            return None
        x = torch.randn(_NORM_ROWS, weight.numel(), generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        with torch.inference_mode():
            expected = norm(x)
            for factor in (weight.float(), weight.float() + 1):
                fused = cls(weight, factor.detach().clone(), eps)
                if torch.allclose(fused(x), expected, rtol=4 * torch.finfo(x.dtype).eps, atol=1e-6):
                    return fused
        return None

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        out = rms_norm(rows, self._factor, self.eps, rows.dtype)
        assert isinstance(out, Tensor), "no quantized rows were asked for"
        return out.view(hidden_states.shape)


def _norms(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            kind = type(child)
            takes = kind.forward.__code__.co_argcount if hasattr(kind.forward, "__code__") else 0
            if kind.__name__.endswith(("RMSNorm", "T5LayerNorm")) and takes == 2 and hasattr(child, "weight"):
                yield parent, name, child


# ---- products of one input -------------------------------------------------------------------------------------------


class JoinedPart(nn.Module):
    """Stands for one of several linear layers that have one input."""

    def __init__(self, product: JoinedProduct, number: int, layer: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self._part, self._number = product.part, number
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = torch.empty(0, dtype=dtype), layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self._part(x, self._number)


class JoinedProduct:
    """The product of one input with the weights of several layers, each of which takes its columns once.

    It is computed again for an input that was written to since. Tensors of the inference mode do not count writes, so
    that their products are not shared: models run by `no_grad`.
    """

    def __init__(self, multiply: Callable[[Tensor], Tensor], sizes: Sequence[int]) -> None:
        self._multiply, self._sizes = multiply, list(sizes)
        self._input: Tensor | None = None
        self._version = 0
        self._parts: list[Tensor | None] = [None] * len(self._sizes)

    def part(self, x: Tensor, number: int) -> Tensor:
        """Return the columns of one layer, [..., size]. The product is kept until all layers have taken theirs."""
        version = -1 if x.is_inference() else x._version
        taken = self._parts[number] if x is self._input and version == self._version >= 0 else None
        if taken is None:
            self._input, self._version = x, version
            self._parts = list(torch.split(self._multiply(x), self._sizes, -1))
            taken = self._parts[number]
        assert taken is not None, "it was computed above"
        self._parts[number] = None
        if not any(part is not None for part in self._parts):
            self._input = None
        return taken.contiguous()


def siblings(names: Sequence[str]) -> list[list[str]]:
    """Return groups of layers, by their full names, that usually have one input."""
    known = set(names)
    groups = []
    for name in names:
        parent, _, own = name.rpartition(".")
        for members in _SIBLINGS:
            group = [f"{parent}.{member}" for member in members]
            is_cross = parent.endswith("encoder_attn") or "cross" in parent
            if own == members[0] and not is_cross and known.issuperset(group):
                groups.append(group)
    return groups
