"""Which layers compute which architecture: one table, one function."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from app.models.config import ModelConfig
from app.models.decoder import Decoder
from app.models.gemma import GemmaLayer
from app.models.llama import LlamaLayer

LAYERS: Mapping[str, type[nn.Module]] = {
    "LlamaForCausalLM": LlamaLayer,
    "MistralForCausalLM": LlamaLayer,
    "Qwen2ForCausalLM": LlamaLayer,
    "Qwen3ForCausalLM": LlamaLayer,
    "Phi3ForCausalLM": LlamaLayer,
    "SmolLM3ForCausalLM": LlamaLayer,
    "Gemma2ForCausalLM": GemmaLayer,
    "Gemma3ForCausalLM": GemmaLayer,
}


def build_model(config: ModelConfig, dtype: torch.dtype, max_model_len: int, device: torch.device) -> Decoder:
    """The model on `meta`, in inference mode, without weights: the loader assigns them."""
    with torch.device("meta"):
        return Decoder(LAYERS[config.architecture], config, dtype, max_model_len, device).eval()
