"""The body of BERT and of the encoders that differ from it only by config values: token ids to hidden states.

These are RoBERTa, XLM-RoBERTa, DistilBERT and MPNet, and with rotary positions Nomic's, Jina's and GTE's encoders.
ModernBERT normalises the input of a branch instead of the residual stream. Every norm produces the input of the
next product, so one layer class serves both kinds.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from app.kernels.activations import Activations
from app.kernels.linear import Linear
from app.kernels.rowwise import Angles, gate, gather
from app.kernels.turn import Heads
from app.models.context import Attend, AttentionSpec, EncodeContext
from app.models.distances import DistanceBias
from app.models.encoder_config import EncoderConfig
from app.models.layer_norm import LayerNorm
from app.models.layers import Embedding
from app.models.rotary import LayerAngles


class BertLayer(nn.Module):
    """h + attention, a norm, h + mlp, a norm.

    The caller sets the last norm (`end`), since it knows which product that feeds.
    """

    end: LayerNorm

    def __init__(self, config: EncoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        at, size, inner = f"layers.{layer}", config.hidden_size, config.intermediate_size
        self.config, self.layer = config, layer
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        sources = tuple(f"{at}.{name}" for name in ("query", "key", "value"))
        self.qkv = Linear(sources, size, queries + 2 * keys, config.qkv_bias)
        self.out = Linear((f"{at}.out",), queries, size, config.output_bias)
        ups = (f"{at}.gate", f"{at}.up") if config.gated else (f"{at}.up",)
        self.up = Linear(ups, size, len(ups) * inner, config.mlp_bias)
        self.down = Linear((f"{at}.down",), inner, size, config.down_bias)
        between = f"{at}.mlp_norm" if config.pre_norm else f"{at}.attention_norm"
        self.middle = LayerNorm(between, config, dtype, self.up, in_place=not config.pre_norm)
        self.spec = AttentionSpec(config.head_dim**-0.5, config.windows[layer], bidirectional=True)

    def forward(
        self, hidden: Tensor, x: Activations, angles: Angles | None, attend: Attend, rows: Tensor | None
    ) -> tuple[Tensor, Activations]:
        """Run the layer and return both inputs of the next layer.

        `hidden` [tokens, size] FP32 is overwritten; `x` is the normalised input of the products. `rows` are the
        only tokens needed after this layer (None: all).
        """
        config = self.config
        heads = Heads(self.qkv(x), config.num_heads, config.num_kv_heads, config.head_dim, angles=angles)
        mixed = attend(self.layer, heads, self.spec)
        if rows is not None:
            hidden, mixed = gather(hidden, rows), gather(mixed, rows)
        self.out.add_to(hidden, mixed)
        self.down.add_to(hidden, self._between(self.middle(hidden)))
        return hidden, self.end(hidden)

    def _between(self, x: Activations) -> Activations:
        """Return the input of `down`."""
        if not self.config.gated:
            return self.up.activated(x, self.config.activation, self.down)
        gate_up = self.up(x)
        return gate(gate_up, self.config.activation, self.down.takes(gate_up.shape[0]))


class BertEmbeddings(nn.Module):
    """Word embeddings, plus learned positions and types if the model has them, added and normalised."""

    def __init__(self, config: EncoderConfig, dtype: torch.dtype, feeds: Linear) -> None:
        super().__init__()
        size, first = config.hidden_size, config.first_position
        self.words = Embedding("embeddings.word", config.vocab_size, size)
        self.positions = (
            Embedding("embeddings.position", config.num_positions, size, first=first) if config.num_positions else None
        )
        self.types = Embedding("embeddings.type", config.num_types, size) if config.num_types else None
        self.norm = LayerNorm("embeddings.norm", config, dtype, feeds)

    def forward(self, context: EncodeContext) -> tuple[Tensor, Activations]:
        """Return hidden [tokens, size] FP32, and the input of the first product."""
        hidden = self.words(context.token_ids)
        if self.positions is not None:
            self.positions.add_to(hidden, context.positions)
        if self.types is not None:
            self.types.add_to(hidden, _types_of(context))
        return hidden, self.norm(hidden)


def _types_of(context: EncodeContext) -> Tensor:
    return torch.zeros_like(context.token_ids) if context.type_ids is None else context.type_ids


class BertBody(nn.Module):
    """Token ids to hidden states."""

    def __init__(self, config: EncoderConfig, dtype: torch.dtype, max_model_len: int, device: torch.device) -> None:
        super().__init__()
        layers = [BertLayer(config, index, dtype) for index in range(config.num_layers)]
        for index, (layer, following) in enumerate(pairwise(layers)):
            end = f"layers.{index + 1}.attention_norm" if config.pre_norm else f"layers.{index}.mlp_norm"
            layer.end = LayerNorm(end, config, dtype, following.qkv, in_place=not config.pre_norm)
        last = "final_norm" if config.pre_norm else f"layers.{config.num_layers - 1}.mlp_norm"
        layers[-1].end = LayerNorm(last, config, dtype)
        self.embeddings = BertEmbeddings(config, dtype, layers[0].qkv)
        self.layers = nn.ModuleList(layers)
        buckets = config.distance_buckets
        self.distances = DistanceBias("distance_bias", buckets, config.num_heads) if buckets else None
        self.angles = LayerAngles(config.ropes, max_model_len, device)

    def forward(self, context: EncodeContext, rows: Tensor | None = None) -> Tensor:
        """Return the last hidden state, FP32 [tokens, size], or only those of the tokens in `rows`."""
        angles = self.angles.of_layers(self.angles(context.positions))
        attend: Attend = context.attend if self.distances is None else self.distances(context.attend)
        hidden: Tensor
        hidden, x = self.embeddings(context)
        wanted: list[Tensor | None] = [None] * len(self.layers)
        wanted[-1] = rows
        for layer, own, only in zip(self.layers, angles, wanted, strict=True):
            hidden, x = layer(hidden, x, own, attend, only)
        return hidden

    def finished(self, hidden: Tensor) -> Tensor:
        """Return the hidden states unchanged: the norm of the last layer was applied in place."""
        return hidden
