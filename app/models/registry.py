"""Maps architectures to the layers that compute them: one table, one function per kind of model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from app.models.decoders.config import ModelConfig
from app.models.decoders.decoder import Decoder, DecoderBody, GemmaLayer, LlamaLayer
from app.models.encoders.config import EncoderConfig
from app.models.encoders.encoder import BertBody, Encoder

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


def build_decoder_model(config: ModelConfig, dtype: torch.dtype, max_model_len: int, device: torch.device) -> Decoder:
    """Build a decoder on `meta` in inference mode, without weights; the loader assigns them."""
    with torch.device("meta"):
        return Decoder(LAYERS[config.architecture], config, dtype, max_model_len, device).eval()


def build_encoder_model(config: EncoderConfig, dtype: torch.dtype, max_model_len: int, device: torch.device) -> Encoder:
    """Build an encoder on `meta`, without weights.

    A decoder served for its hidden states uses that decoder's layers.
    """
    with torch.device("meta"):
        if config.decoder is None:
            return Encoder(config, BertBody(config, dtype, max_model_len, device)).eval()
        layer = LAYERS[config.decoder.architecture]
        return Encoder(config, DecoderBody(layer, config, dtype, max_model_len, device)).eval()
