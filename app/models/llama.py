"""The Llama decoder and all that differ from it by a flag of the config: Mistral, Qwen 2 and 3, Phi-3, SmolLM 1 to 3."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from app.kernels.rowwise import Angles, gather
from app.models.config import ModelConfig
from app.models.context import Attend, StepContext
from app.models.layers import Attention, Embedding, GatedMLP, RMSNorm, output_layer
from app.models.rotary import LayerAngles


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
        """hidden [tokens, hidden], overwritten; `rows`: the only tokens wanted after this layer (None: all)."""
        mixed = self.attention(self.attention_norm(hidden), angles, attend)
        if rows is not None:
            hidden, mixed = gather(hidden, rows), mixed.index_select(0, rows)
        self.attention.out.add_to(hidden, mixed)
        self.mlp.add_to(hidden, self.mlp_norm(hidden))
        return hidden


class Llama(nn.Module):
    """Token ids to logits."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, max_model_len: int, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding("model.embed_tokens", config)
        self.layers = nn.ModuleList(LlamaLayer(config, layer, dtype) for layer in range(config.num_layers))
        self.output = output_layer(config)
        self.norm = RMSNorm("model.norm", config.hidden_size, config, dtype, self.output)
        self.angles = LayerAngles(config.ropes, max_model_len, device)

    def forward(self, context: StepContext) -> Tensor:
        """Logits [rows, vocab] of the tokens in `logit_rows`; of the others the last layer needs no more than keys and values."""
        hidden = self.embedding(context.token_ids)  # [tokens, hidden]
        rows: list[Tensor | None] = [None] * len(self.layers)
        rows[-1] = context.logit_rows
        for layer, angles, wanted in zip(self.layers, self.angles(context.positions), rows, strict=True):
            hidden = layer(hidden, angles, context.attend, wanted)
        logits: Tensor = self.output(self.norm(hidden))
        return logits
