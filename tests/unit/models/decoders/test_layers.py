"""Inputs that layers give to their products: plain rows, or quantized ones in the form's groups."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
import torch
from torch import Tensor

from app.models.decoders.config import ModelConfig
from app.models.decoders.layer_config import Placement
from app.models.decoders.layers import DecoderLayer, HeadNorm, Norm
from armature_kernels.attention.attention import QkvHeads
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.linear.activations import Activations, QuantizedActivations
from armature_kernels.linear.int_panels import IntPanelFactory
from armature_kernels.linear.linear import Linear, PlainLinear
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from tiny_checkpoints import config_values

needs_integers = pytest.mark.skipif(
    not (has_kernel(OpCode.LINEAR_INT) and has_kernel(OpCode.QUANTIZE)), reason="no kernels of integer products"
)


def layer_of(placement: Placement, packing: IntPanelFactory | type[PlainLinear]) -> DecoderLayer:
    """Random weights, the same at every call, in the form that is asked for."""
    config = replace(ModelConfig.from_hf(config_values()), placement=placement)
    layer = DecoderLayer(config, 0, torch.bfloat16)
    seeds = count()
    for module in layer.modules():
        generator = torch.Generator().manual_seed(next(seeds))
        if isinstance(module, Linear):
            weight = (
                torch.randn(module.out_features, module.in_features, generator=generator) * module.in_features**-0.5
            )
            module.form = packing.pack(weight.bfloat16(), None)
        elif isinstance(module, Norm | HeadNorm):
            module.set_weight(1 + 0.1 * torch.randn(module.weight.shape, generator=generator))
    return layer


def attend(layer: int, heads: QkvHeads, spec: AttentionSpec) -> Tensor:
    return heads.product[:, : heads.num_heads * heads.head_dim]


@needs_integers
@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "parallel"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("wanted", [None, [6, 2]])
def test_a_layer_in_integers_says_what_the_plain_one_says(
    placement: Placement, bits: int, wanted: list[int] | None
) -> None:
    packing = IntPanelFactory(bits, None if bits == 8 else 32)
    rows = None if wanted is None else torch.tensor(wanted)
    results = []
    for form in (PlainLinear, packing):
        layer = layer_of(placement, form)
        hidden = torch.randn(9, layer.attention.qkv.in_features, generator=torch.Generator().manual_seed(99))
        results.append(layer(hidden, None, attend, rows))
    plain, ours = results
    assert ours.shape == plain.shape == (9 if rows is None else 2, plain.shape[1])
    assert (ours - plain).norm() < (0.02 if bits == 8 else 0.25) * plain.norm()


@needs_integers
def test_who_feeds_a_product_writes_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, seen = layer_of("pre", IntPanelFactory(4, 32)), []
    multiply = Linear.forward

    def seeing(self: Linear, x: Activations) -> Tensor:
        seen.append(x)
        return multiply(self, x)

    monkeypatch.setattr(Linear, "forward", seeing)
    monkeypatch.setattr(Linear, "add_to", lambda self, hidden, x: seen.append(x))
    layer(torch.randn(3, layer.attention.qkv.in_features), None, attend, None)
    qkv, out, gate_up, down = seen
    assert all(isinstance(x, QuantizedActivations) and (x.rows, x.group) == (3, 32) for x in (qkv, gate_up, down))
    assert isinstance(out, Tensor)
    seen.clear()
    layer_of("pre", PlainLinear)(torch.randn(3, layer.attention.qkv.in_features), None, attend, None)
    assert len(seen) == 4
    assert all(isinstance(x, Tensor) and x.dtype == torch.bfloat16 for x in seen)
