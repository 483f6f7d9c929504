"""Which module computes which architecture: one table, one function."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from app.models.config import ModelConfig
from app.models.gemma import Gemma
from app.models.llama import Llama

Decoder = Llama | Gemma

MODELS: Mapping[str, type[Decoder]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,
    "Qwen2ForCausalLM": Llama,
    "Qwen3ForCausalLM": Llama,
    "Phi3ForCausalLM": Llama,
    "SmolLM3ForCausalLM": Llama,
    "Gemma2ForCausalLM": Gemma,
    "Gemma3ForCausalLM": Gemma,
}


def build_model(config: ModelConfig, dtype: torch.dtype, max_model_len: int, device: torch.device) -> nn.Module:
    """The model on `meta`, in inference mode, without weights: the loader assigns them."""
    with torch.device("meta"):
        return MODELS[config.architecture](config, dtype, max_model_len, device).eval()
