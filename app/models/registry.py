"""Builds the models of checkpoints, one function per kind of model."""

from __future__ import annotations

import torch

from app.models.decoders.config import ModelConfig
from app.models.decoders.decoder import Decoder, DecoderBody
from app.models.encoders.config import EncoderConfig
from app.models.encoders.encoder import BertBody, Encoder


def build_decoder_model(config: ModelConfig, dtype: torch.dtype, max_model_len: int, device: torch.device) -> Decoder:
    """Build a decoder on `meta` in inference mode, without weights; the loader assigns them."""
    with torch.device("meta"):
        return Decoder(config, dtype, max_model_len, device).eval()


def build_encoder_model(config: EncoderConfig, dtype: torch.dtype, max_model_len: int, device: torch.device) -> Encoder:
    """Build an encoder on `meta`, without weights. A decoder served for its hidden states has that decoder's layers."""
    with torch.device("meta"):
        if config.decoder is None:
            return Encoder(config, BertBody(config, dtype, max_model_len, device)).eval()
        return Encoder(config, DecoderBody(config, dtype, max_model_len, device)).eval()
