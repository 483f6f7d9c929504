"""The layer of Llama and of models that differ only by config flags.

These are Mistral, Qwen 2 and 3, Phi-3 and SmolLM 1 to 3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from app.kernels.rowwise import Angles, gather
from app.models.config import ModelConfig
from app.models.context import Attend
from app.models.layers import Attention, GatedMLP, RMSNorm


class LlamaLayer(nn.Module):
    """h + attention(norm h), then h + mlp(norm h)."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        at = f"model.layers.{layer}"
        self.attention = Attention(config, layer, dtype)
        self.attention_norm = RMSNorm(f"{at}.input_layernorm", config.hidden_size, config, dtype, self.attention.qkv)
        self.mlp = GatedMLP(config, layer)
        self.mlp_norm = RMSNorm(f"{at}.post_attention_layernorm", config.hidden_size, config, dtype, self.mlp.gate_up)

    def forward(self, hidden: Tensor, angles: Angles | None, attend: Attend, rows: Tensor | None) -> Tensor:
        """Run the layer on hidden [tokens, hidden], which is overwritten.

        `rows` are the only tokens needed after this layer (None: all).
        """
        mixed = self.attention(self.attention_norm(hidden), angles, attend)
        if rows is not None:
            hidden, mixed = gather(hidden, rows), gather(mixed, rows)
        self.attention.out.add_to(hidden, mixed)
        self.mlp.add_to(hidden, self.mlp_norm(hidden))
        return hidden
