"""The body of a decoder that is served for its hidden states, such as Qwen3-Embedding.

Bidirectional models such as EuroBERT use it too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from app.models.config import ModelConfig
from app.models.context import EncodeContext
from app.models.encoder_config import EncoderConfig
from app.models.layers import Attention, Embedding, RMSNorm
from app.models.rotary import LayerAngles


class DecoderBody(nn.Module):
    """Token ids to hidden states. `layer(config, index, dtype)` makes one layer, as in a `Decoder`."""

    def __init__(
        self,
        layer: Callable[[ModelConfig, int, torch.dtype], nn.Module],
        config: EncoderConfig,
        dtype: torch.dtype,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        decoder = config.decoder
        assert decoder is not None, "a config of a decoder"
        self.embedding = Embedding("model.embed_tokens", decoder.vocab_size, decoder.hidden_size, decoder.embedding_scale)
        self.layers = nn.ModuleList(layer(decoder, index, dtype) for index in range(decoder.num_layers))
        for part in self.layers.modules():
            if isinstance(part, Attention):
                part.spec = replace(part.spec, bidirectional=config.bidirectional)
        self.norm = RMSNorm("model.norm", decoder.hidden_size, decoder, torch.float32)
        self.angles = LayerAngles(decoder.ropes, max_model_len, device)

    def forward(self, context: EncodeContext, rows: Tensor | None = None) -> Tensor:
        """Return hidden states FP32 [tokens, size] before the last norm, or only those of the tokens in `rows`."""
        hidden: Tensor = self.embedding(context.token_ids)
        angles = self.angles.of_layers(self.angles(context.positions))
        wanted: list[Tensor | None] = [None] * len(self.layers)
        wanted[-1] = rows
        for layer, own, only in zip(self.layers, angles, wanted, strict=True):
            hidden = layer(hidden, own, context.attend, only)
        return hidden

    def finished(self, hidden: Tensor) -> Tensor:
        """Apply the last norm in FP32. It is not a native operation, so it is not part of a recording."""
        result: Tensor = self.norm(hidden)
        return result
