"""The decoders: embedding, RoPE angles, last norm and output layer around the layers of Llama or Gemma.

`LlamaLayer` serves Llama and the models that differ from it only by config flags: Mistral, Qwen 2 and 3, Phi-3 and
SmolLM 1 to 3. `GemmaLayer` serves Gemma 2 and 3 (text), with a norm after each branch as well as before it.
`DecoderBody` is a decoder that is served for its hidden states, such as Qwen3-Embedding or the bidirectional EuroBERT.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import (
    Tensor,
    nn,
)

from app.kernels.attention.context import (
    Attend,
    EncodeContext,
    StepContext,
)
from app.kernels.attention.layout import RopeAngles
from app.kernels.elementwise.activations import (
    TopLogits,
    TopLogitsRequest,
)
from app.kernels.elementwise.norms import gather
from app.kernels.linear.activations import Activations
from app.models.decoders.config import ModelConfig
from app.models.decoders.layers import (
    Attention,
    Embedding,
    GatedMLP,
    LayerRopeAngles,
    RMSNorm,
    output_layer,
)
from app.models.encoders.config import EncoderConfig


class Decoder(nn.Module):
    """Token ids to logits. `layer(config, index, dtype)` makes one layer, which maps hidden rows to hidden rows."""

    def __init__(
        self, layer: type[nn.Module], config: ModelConfig, dtype: torch.dtype, max_model_len: int, device: torch.device
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding("model.embed_tokens", config.vocab_size, config.hidden_size, config.embedding_scale)
        self.layers = nn.ModuleList(layer(config, index, dtype) for index in range(config.num_layers))
        self.output = output_layer(config)
        self.norm = RMSNorm("model.norm", config.hidden_size, config, dtype, self.output)
        self.angles = LayerRopeAngles(config.ropes, max_model_len, device)

    def forward(self, context: StepContext) -> Tensor | TopLogits:
        """Return logits [rows, vocab] of the tokens in `logit_rows`, or the top ones of each row."""
        return self.outputs(self.body(context), context.top_logits)

    def body(self, context: StepContext) -> Activations:
        """Compute the input of the output layer, for the tokens in `logit_rows`.

        For the other tokens, the last layer computes only keys and values.
        """
        hidden, angles = self.embedding(context.token_ids), self.angles.by_layer(self.angles(context.positions))
        wanted: list[Tensor | None] = [None] * len(self.layers)
        wanted[-1] = context.logit_rows
        for layer, own, only in zip(self.layers, angles, wanted, strict=True):
            hidden = layer(hidden, own, context.attend, only)
        result: Activations = self.norm(hidden)
        return result

    def outputs(self, rows: Activations, wanted: TopLogitsRequest | None) -> Tensor | TopLogits:
        """Return the logits, bounded by cap · tanh(logits / cap) if the config has a cap."""
        cap = self.config.logit_softcap
        best = None if wanted is None else self.output.top_logits(rows, wanted, cap)
        if best is not None:
            return best
        logits: Tensor = self.output(rows)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class LlamaLayer(nn.Module):
    """h + attention(norm h), then h + mlp(norm h)."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        at = f"model.layers.{layer}"
        self.attention = Attention(config, layer, dtype)
        self.attention_norm = RMSNorm(f"{at}.input_layernorm", config.hidden_size, config, dtype, self.attention.qkv)
        self.mlp = GatedMLP(config, layer)
        self.mlp_norm = RMSNorm(f"{at}.post_attention_layernorm", config.hidden_size, config, dtype, self.mlp.gate_up)

    def forward(self, hidden: Tensor, angles: RopeAngles | None, attend: Attend, rows: Tensor | None) -> Tensor:
        """Run the layer on hidden [tokens, hidden], which is overwritten.

        `rows` are the only tokens needed after this layer (None: all).
        """
        mixed = self.attention(self.attention_norm(hidden), angles, attend)
        if rows is not None:
            hidden, mixed = gather(hidden, rows), gather(mixed, rows)
        self.attention.out.add_to(hidden, mixed)
        self.mlp.add_to(hidden, self.mlp_norm(hidden))
        return hidden


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

    def forward(self, hidden: Tensor, angles: RopeAngles | None, attend: Attend, rows: Tensor | None) -> Tensor:
        """Run the layer on hidden [tokens, hidden], which is overwritten.

        `rows` are the only tokens needed after this layer (None: all).
        """
        mixed = self.attention(self.attention_norm(hidden), angles, attend)
        if rows is not None:
            hidden, mixed = gather(hidden, rows), gather(mixed, rows)
        self.mixed_norm.add_to(hidden, self.attention.out(mixed))
        self.gated_norm.add_to(hidden, self.mlp(self.mlp_norm(hidden)))
        return hidden


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
        self.embedding = Embedding(
            "model.embed_tokens", decoder.vocab_size, decoder.hidden_size, decoder.embedding_scale
        )
        self.layers = nn.ModuleList(layer(decoder, index, dtype) for index in range(decoder.num_layers))
        for part in self.layers.modules():
            if isinstance(part, Attention):
                part.spec = replace(part.spec, bidirectional=config.bidirectional)
        self.norm = RMSNorm("model.norm", decoder.hidden_size, decoder, torch.float32)
        self.angles = LayerRopeAngles(decoder.ropes, max_model_len, device)

    def forward(self, context: EncodeContext, rows: Tensor | None = None) -> Tensor:
        """Return hidden states FP32 [tokens, size] before the last norm, or only those of the tokens in `rows`."""
        hidden: Tensor = self.embedding(context.token_ids)
        angles = self.angles.by_layer(self.angles(context.positions))
        wanted: list[Tensor | None] = [None] * len(self.layers)
        wanted[-1] = rows
        for layer, own, only in zip(self.layers, angles, wanted, strict=True):
            hidden = layer(hidden, own, context.attend, only)
        return hidden

    def finished(self, hidden: Tensor) -> Tensor:
        """Apply the last norm in FP32. It is not a native operation, so it is not part of a recording."""
        result: Tensor = self.norm(hidden)
        return result
