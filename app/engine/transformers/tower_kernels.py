"""The library's vision towers in BF16, with products, attention and activations of this package's kernels."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.activations import GELUTanh
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from app.engine.transformers.loading import packed_layer
from armature_kernels.attention.attention import QkvHeads
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.texts import TextStarts, attend_texts, supports_texts
from armature_kernels.elementwise.activations import activate
from armature_kernels.linear.linear import FORMS, QUANTIZED_FORMS, FormFactory

_LOG = logging.getLogger(__name__)
_ATTENTION = "armature"  # its name in the library
_LARGE_WEIGHT = 2**18  # values, from which a packed product gains more than its call costs
_TRIED_ROWS, _TRIES = 512, 3
_FORMS: Mapping[str, FormFactory] = {**FORMS, **QUANTIZED_FORMS}


def use_kernels(model: Any, is_quantized: bool) -> None:
    """Let a tower compute with kernels. `is_quantized`: weights of large products may have eight bits."""
    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(_ATTENTION)
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, GELUTanh):
                setattr(module, name, _GeluTanh())
    _pack_products(model, is_quantized)


class _GeluTanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found = activate(x.reshape(-1, x.shape[-1]), "gelu_tanh")
        assert isinstance(found, Tensor), "no group is given"
        return found.view(x.shape)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> tuple[Tensor, None]:
    """Attend as the library's function "sdpa", by the kernel if all tokens see each other. Heads are [batch, heads, tokens, size]."""
    batch, heads, tokens, size = query.shape
    is_causal = named.get("is_causal")
    sees_all = attention_mask is None and not (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if sees_all and query.shape == key.shape == value.shape:
        rows = [each.transpose(1, 2).reshape(batch * tokens, heads * size) for each in (query, key, value)]
        product = QkvHeads(torch.cat(rows, 1), heads, heads, size)
        if supports_texts(product):
            texts = TextStarts(0, batch)
            texts.fill(range(0, batch * tokens + 1, tokens))
            scale = named.get("scaling") or size**-0.5
            found = attend_texts(product, texts, AttentionSpec(scale, bidirectional=True))
            return found.view(batch, tokens, heads, size), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **named)[0], None


def _pack_products(model: nn.Module, is_quantized: bool) -> None:
    """Hold the weights of large linear layers in the form that multiplies many rows fastest here.

    Where the processor multiplies integers of eight bits, they take half the time of BF16.
    """
    layers = [(name, one) for name, one in model.named_modules() if type(one) is nn.Linear]
    layers = [(name, one) for name, one in layers if one.weight.numel() >= _LARGE_WEIGHT]
    if not layers:
        return
    _, largest = max(layers, key=lambda named: named[1].weight.numel())
    weight = largest.weight.detach()
    names = ("panels", "int8/128") if is_quantized else ("panels",)
    forms = {name: _FORMS[name] for name in names}
    forms = {name: one for name, one in forms.items() if one.supports(weight.shape[0], weight.shape[1], weight.dtype)}
    rows = torch.ones(_TRIED_ROWS, largest.in_features, dtype=weight.dtype)
    with torch.inference_mode():
        seconds = {name: _seconds(form.pack(weight, None).multiply, rows) for name, form in forms.items()}
        plain = _seconds(lambda x: nn.functional.linear(x, weight), rows)
        fastest = min(seconds, key=seconds.__getitem__, default="")
        if not fastest or seconds[fastest] > plain:
            return
        for name, layer in layers:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, packed_layer(name, layer, forms[fastest]))
    _LOG.info("%d products of the part that reads pictures have the form %s", len(layers), fastest)


def _seconds(multiply: Callable[[Tensor], object], rows: Tensor) -> float:
    """Return the shortest time of a product."""
    found = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        multiply(rows)
        found.append(time.perf_counter() - began)
    return min(found)
