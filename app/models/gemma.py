"""Gemma 2 and 3 (text): scaled embeddings, a norm after each branch as well as before it, capped logits, two kinds of layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from app.kernels.activations import Activations
from app.kernels.best import Best, Wanted
from app.kernels.rowwise import Angles, gather
from app.models.config import ModelConfig
from app.models.context import Attend, StepContext
from app.models.layers import Attention, Embedding, GatedMLP, RMSNorm, output_layer
from app.models.rotary import LayerAngles


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
        """hidden [tokens, hidden], overwritten; `rows`: the only tokens wanted after this layer (None: all)."""
        mixed = self.attention(self.attention_norm(hidden), angles, attend)
        if rows is not None:
            hidden, mixed = gather(hidden, rows), gather(mixed, rows)
        self.mixed_norm.add_to(hidden, self.attention.out(mixed))
        self.gated_norm.add_to(hidden, self.mlp(self.mlp_norm(hidden)))
        return hidden


class Gemma(nn.Module):
    """Token ids to logits."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, max_model_len: int, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding("model.embed_tokens", config)
        self.layers = nn.ModuleList(GemmaLayer(config, layer, dtype) for layer in range(config.num_layers))
        self.output = output_layer(config)
        self.norm = RMSNorm("model.norm", config.hidden_size, config, dtype, self.output)
        self.angles = LayerAngles(config.ropes, max_model_len, device)

    def inputs(self, context: StepContext) -> list[Tensor]:
        """What the layers start from: embedded tokens [tokens, hidden], then cos and sin of each kind of rotary positions."""
        return [self.embedding(context.token_ids), *self.angles(context.positions)]

    def body(self, inputs: list[Tensor], attend: Attend, rows: Tensor | None) -> Activations:
        """All layers and the last norm: what the output layer takes, of the tokens in `rows` (None: all). Overwrites the inputs."""
        hidden, angles = inputs[0], self.angles.of_layers(inputs[1:])
        wanted: list[Tensor | None] = [None] * len(self.layers)
        wanted[-1] = rows
        for layer, own, only in zip(self.layers, angles, wanted, strict=True):
            hidden = layer(hidden, own, attend, only)
        result: Activations = self.norm(hidden)
        return result

    def forward(self, context: StepContext) -> Tensor | Best:
        """Logits [rows, vocab] of the tokens in `logit_rows`, or the best of them."""
        return self.outputs(self.body(self.inputs(context), context.attend, context.logit_rows), context.best)

    def outputs(self, rows: Activations, wanted: Wanted | None) -> Tensor | Best:
        """Bounded by cap · tanh(logits / cap) where the config has a cap."""
        cap = self.config.logit_softcap
        best = None if wanted is None else self.output.best(rows, wanted, cap)
        if best is not None:
            return best
        logits: Tensor = self.output(rows)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
