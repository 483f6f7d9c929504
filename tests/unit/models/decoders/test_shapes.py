"""The torch-free list of tensors and the modules' own `sources` must name the same tensors, each once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from app.models.decoders.config import ModelConfig
from app.models.decoders.decoder import Embedding, build_decoder_model
from app.models.decoders.layers import AlibiSlopes, Filters, HeadNorm, Norm, StoredVector
from app.models.decoders.shapes import norm_elements, tensors_of
from armature_kernels.linear.linear import Linear
from tiny_checkpoints import ARCHITECTURES, OTHERS, RECURRENT, config_values


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("architecture", (*ARCHITECTURES, *OTHERS, *RECURRENT))
def test_modules_want_exactly_the_tensors_listed(architecture: str, biases: bool) -> None:
    biases = biases and architecture != "FalconH1ForCausalLM"  # which has none
    values = config_values(architecture, tie_word_embeddings=False, attention_bias=biases, mlp_bias=biases)
    config = ModelConfig.from_hf(values)
    model = build_decoder_model(config, torch.float32, config.max_model_len, torch.device("cpu"))
    wanted: Counter[str] = Counter()
    shapes = tensors_of(config)
    for module in model.modules():
        if isinstance(module, Embedding):
            wanted[f"{module.source}.weight"] += 1
        elif isinstance(module, Norm | HeadNorm | Filters | StoredVector):
            wanted.update(f"{module.source}.{kind}" for kind in module.kinds)
        elif isinstance(module, Linear):
            kinds = ("weight", "bias") if module.has_bias else ("weight",)
            wanted.update(f"{source}.{kind}" for source in module.sources for kind in kinds)
            assert sum(shapes[f"{source}.weight"][0] for source in module.sources) == module.out_features
    if config.shares_norm:  # a parallel layer computes it for each of its two products
        assert {wanted[f"model.layers.0.input_layernorm.{kind}"] for kind in ("weight",)} == {2}
        wanted = Counter(dict.fromkeys(wanted, 1))
    if config.altup is not None:  # the branch beside attention reads the norm twice, and the router reads two rows
        for layer in range(config.num_layers):
            for name, count in (("input_layernorm", 3), ("altup.router_norm", 2)):
                assert wanted[f"model.layers.{layer}.{name}.weight"] == count
        wanted = Counter(dict.fromkeys(wanted, 1))
    if config.full_heads is not None and config.full_heads.keys_are_values:  # one product gives both
        assert max(wanted.values()) == 2
        wanted = Counter(dict.fromkeys(wanted, 1))
    assert wanted == Counter(list(shapes))


@pytest.mark.parametrize("architecture", (*ARCHITECTURES, *OTHERS, *RECURRENT))
def test_elements_in_fp32_are_counted_as_the_modules_hold_them(architecture: str) -> None:
    config = ModelConfig.from_hf(config_values(architecture))
    model = build_decoder_model(config, torch.float32, config.max_model_len, torch.device("cpu"))
    held = [module for module in model.modules() if isinstance(module, Norm | HeadNorm | Filters | StoredVector)]
    stored = (module for module in held if module.kinds or not isinstance(module, AlibiSlopes))
    assert sum(parameter.numel() for module in stored for parameter in module.parameters()) == norm_elements(config)


def test_the_model_is_built_without_memory() -> None:
    config = ModelConfig.from_hf(config_values())
    model = build_decoder_model(config, torch.float32, config.max_model_len, torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
