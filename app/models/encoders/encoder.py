"""Encoders: a body that computes the hidden states of texts, and heads that turn them into vectors or logits.

The body is BERT's, and that of encoders that differ from it only by config values. ModernBERT normalises the input of a
branch instead of the residual stream. Every norm produces the input of the next product, so one layer class serves both
kinds.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from app.models.decoders.decoder import DecoderBody, Embedding, LayerRopeAngles
from app.models.encoders.config import EncoderConfig
from app.models.encoders.heads import LabelHead, LayerNorm, VectorHead
from armature_kernels.attention.attention import QkvHeads, RopeAngles
from armature_kernels.attention.context import Attend, AttentionSpec, EncodeContext
from armature_kernels.elementwise.norms import gate, gather
from armature_kernels.linear.activations import Activations
from armature_kernels.linear.linear import Linear

MAX_DISTANCE = 128  # positions; larger distances share a bucket


class Encoder(nn.Module):
    """Token ids to `embedding` or `logits`, and `last_hidden_state`. Parts are methods, so the body can be recorded."""

    def __init__(self, config: EncoderConfig, body: BertBody | DecoderBody) -> None:
        super().__init__()
        self.config, self.body = config, body
        self.vectors = VectorHead(config) if config.head is None else None
        self.labels = None if config.head is None else LabelHead(config, config.head)

    def rows(self, starts: Tensor, names: Collection[str]) -> Tensor | None:
        """Return the tokens [texts] int64 whose hidden states these outputs need, or None for all."""
        if "last_hidden_state" in names:
            return None
        head = self.vectors or self.labels
        assert head is not None, "vectors where there are no labels"
        return head.needed_rows(starts)

    def hidden(self, context: EncodeContext, rows: Tensor | None = None) -> Tensor:
        """Return hidden states FP32 [tokens, size], or those of `rows` only, by native operations if they exist."""
        result: Tensor = self.body(context, rows)
        return result

    def outputs(
        self,
        hidden: Tensor,
        starts: Tensor,
        names: Collection[str],
        rows: Tensor | None = None,
        skipped: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the requested outputs, FP32.

        - `embedding` [texts, size], not normalised.
        - `logits` [texts, labels].
        - `last_hidden_state` of all tokens.

        `rows` must be those that `hidden` was called with. The first `skipped` [texts] tokens of a text are not pooled.
        """
        hidden, results = self.body.finished(hidden), {}
        for name in names:
            if name == "last_hidden_state":
                results[name] = hidden
            elif name == "embedding":
                assert self.vectors is not None, "outputs are those of the config"
                results[name] = (
                    self.vectors.from_rows(hidden) if rows is not None else self.vectors(hidden, starts, skipped)
                )
            else:
                assert self.labels is not None, "outputs are those of the config"
                results[name] = self.labels.from_rows(hidden) if rows is not None else self.labels(hidden, starts)
        return results


class BertBody(nn.Module):
    def __init__(self, config: EncoderConfig, dtype: torch.dtype, max_model_len: int, device: torch.device) -> None:
        super().__init__()
        layers = [BertLayer(config, index, dtype) for index in range(config.num_layers)]
        for index, (layer, following) in enumerate(pairwise(layers)):
            end = f"layers.{index + 1}.attention_norm" if config.pre_norm else f"layers.{index}.mlp_norm"
            layer.end_norm = LayerNorm(end, config, dtype, following.qkv, in_place=not config.pre_norm)
        last = "final_norm" if config.pre_norm else f"layers.{config.num_layers - 1}.mlp_norm"
        layers[-1].end_norm = LayerNorm(last, config, dtype)
        self.embeddings = BertEmbeddings(config, dtype, layers[0].qkv)
        self.layers = nn.ModuleList(layers)
        buckets = config.distance_buckets
        self.distances = DistanceBias("distance_bias", buckets, config.num_heads) if buckets else None
        self.angles = LayerRopeAngles(config.ropes, max_model_len, device)

    def forward(self, context: EncodeContext, rows: Tensor | None = None) -> Tensor:
        """Return the last hidden state, FP32 [tokens, size], or only those of the tokens in `rows`."""
        angles = self.angles.by_layer(self.angles(context.positions))
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


class BertEmbeddings(nn.Module):
    """Word embeddings, plus learned positions and types if the model has them, added and normalised."""

    def __init__(self, config: EncoderConfig, dtype: torch.dtype, feeds: Linear) -> None:
        super().__init__()
        size, first = config.hidden_size, config.padding_id or 0
        self.tokens = Embedding("embeddings.word", config.vocab_size, size)
        self.positions = (
            Embedding("embeddings.position", config.num_positions, size, first=first) if config.num_positions else None
        )
        self.types = Embedding("embeddings.type", config.num_types, size) if config.num_types else None
        self.norm = LayerNorm("embeddings.norm", config, dtype, feeds)

    def forward(self, context: EncodeContext) -> tuple[Tensor, Activations]:
        """Return hidden [tokens, size] FP32, and the input of the first product."""
        hidden = self.tokens(context.token_ids)
        if self.positions is not None:
            self.positions.add_to(hidden, context.positions)
        if self.types is not None:
            self.types.add_to(hidden, _types_of(context))
        return hidden, self.norm(hidden)


def _types_of(context: EncodeContext) -> Tensor:
    return torch.zeros_like(context.token_ids) if context.type_ids is None else context.type_ids


class BertLayer(nn.Module):
    """h + attention, a norm, h + mlp, a norm. The caller sets the last norm (`end`), which feeds its next product."""

    end_norm: LayerNorm

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
        self.mid_norm = LayerNorm(between, config, dtype, self.up, in_place=not config.pre_norm)
        self.spec = AttentionSpec(config.head_dim**-0.5, config.windows[layer], bidirectional=True)

    def forward(
        self, hidden: Tensor, x: Activations, angles: RopeAngles | None, attend: Attend, rows: Tensor | None
    ) -> tuple[Tensor, Activations]:
        """Run the layer and return both inputs of the next: `hidden` [tokens, size] FP32, overwritten, and its norm.

        `rows` are the only tokens needed after this layer (None: all).
        """
        config = self.config
        heads = QkvHeads(self.qkv(x), config.num_heads, config.num_kv_heads, config.head_dim, angles=angles)
        mixed = attend(self.layer, heads, self.spec)
        if rows is not None:
            hidden, mixed = gather(hidden, rows), gather(mixed, rows)
        self.out.add_to(hidden, mixed)
        self.down.add_to(hidden, self._mlp_input(self.mid_norm(hidden)))
        return hidden, self.end_norm(hidden)

    def _mlp_input(self, x: Activations) -> Activations:
        if not self.config.gated:
            return self.up.multiply_activated(x, self.config.activation, self.down)
        gate_up = self.up(x)
        return gate(gate_up, self.config.activation, self.down.activation_group(gate_up.shape[0]))


class DistanceBias(nn.Module):
    """The bias that is added to the score of a query and a key, by their distance. `weight` is [buckets, heads]."""

    def __init__(self, source: str, buckets: int, heads: int) -> None:
        super().__init__()
        self.source, self.has_bias = source, False
        self.weight = nn.Parameter(torch.empty(buckets, heads), requires_grad=False)
        self.by_distance = torch.empty(0)  # fp32 [heads, 2 * MAX_DISTANCE + 1], as an `AttentionSpec` has it

    def set_weight(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Set the weight [buckets, heads] and expand it by distance."""
        self.weight = nn.Parameter(weight.to(torch.float32, copy=True), requires_grad=False)
        self.by_distance = self.weight[distance_bucket_table(len(weight)).to(weight.device)].T.contiguous()

    def forward(self, attend: Attend) -> Attend:
        """Return `attend` with the bias added."""

        def attends(layer: int, heads: QkvHeads, spec: AttentionSpec) -> Tensor:
            return attend(layer, heads, replace(spec, distance_bias=self.by_distance))

        return attends


def distance_bucket_table(buckets: int) -> Tensor:
    """Return the bucket of each distance (key position minus query position) from -MAX_DISTANCE to MAX_DISTANCE.

    Half of the buckets are for keys after the query. In each half, half of the buckets are for one distance each; the
    others grow with the logarithm.
    """
    half = buckets // 2
    exact = half // 2
    distances = torch.arange(-MAX_DISTANCE, MAX_DISTANCE + 1, device="cpu")
    apart = distances.abs()
    grown = exact + ((apart.float() / exact).log() / math.log(MAX_DISTANCE / exact) * (half - exact)).to(torch.int64)
    return torch.where(apart < exact, apart, grown.clamp(max=half - 1)) + half * (distances > 0)


def build_encoder_model(config: EncoderConfig, dtype: torch.dtype, max_model_len: int, device: torch.device) -> Encoder:
    """Build an encoder on `meta`, without weights. A decoder served for its hidden states has that decoder's layers."""
    with torch.device("meta"):
        if config.decoder is None:
            return Encoder(config, BertBody(config, dtype, max_model_len, device)).eval()
        return Encoder(config, DecoderBody(config, dtype, max_model_len, device)).eval()
