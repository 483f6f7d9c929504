"""The layer of Gemma 2 and 3 (text), with a norm after each branch as well as before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from app.kernels.rowwise import Angles, gather
from app.models.config import ModelConfig
from app.models.context import Attend
from app.models.layers import Attention, GatedMLP, RMSNorm


class GemmaLayer(nn.Module):
    """h + norm(attention(norm h)), then h + norm(mlp(norm h))."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        at, size = f"model.layers.{layer}", config.hidden_size
        self.attention = Attention(config, layer, dtype)
        self.attention_norm = RMSNorm(f"{at}.input_layernorm", size, config, dtype, self.attention.qkv)
        self.mixed_norm = RMSNorm(f"{at}.post_attention_layernorm", size, config, torch.float32)
        self.mlp = GatedMLP(config, layer)
        self.mlp_norm = RMSNorm(f"{at}.pre_feedforward_layernorm", size, config, dtype, self.mlp.gate_up)
        self.gated_norm = RMSNorm(f"{at}.post_feedforward_layernorm", size, config, torch.float32)

    def forward(self, hidden: Tensor, angles: Angles | None, attend: Attend, rows: Tensor | None) -> Tensor:
        """Run the layer on hidden [tokens, hidden], which is overwritten.

        `rows` are the only tokens needed after this layer (None: all).
        """
        mixed = self.attention(self.attention_norm(hidden), angles, attend)
        if rows is not None:
            hidden, mixed = gather(hidden, rows), gather(mixed, rows)
        self.mixed_norm.add_to(hidden, self.attention.out(mixed))
        self.gated_norm.add_to(hidden, self.mlp(self.mlp_norm(hidden)))
        return hidden
