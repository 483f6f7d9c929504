"""The decoders: embedding, RoPE angles, last norm and output layer around their layers (`layers/`).

`DecoderBody` is a decoder that is served for its hidden states, such as Qwen3-Embedding.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from app.models.decoders.config import ModelConfig
from app.models.decoders.layer_config import AltUpConfig, NormConfig
from app.models.decoders.layers.altup import AltUpEntry, AltUpExit, AltUpLayer
from app.models.decoders.layers.layer import Attention, DecoderLayer
from app.models.decoders.layers.vectors import Norm
from app.models.decoders.rotary import LayerRopeAngles
from app.models.encoders.config import EncoderConfig
from armature_kernels.attention.attention import RopeAngles
from armature_kernels.attention.context import EncodeContext, StepContext
from armature_kernels.elementwise.activations import TopLogits, TopLogitsRequest
from armature_kernels.elementwise.embedding import RowFactor, add_embedding_rows, embedding_rows
from armature_kernels.linear.activations import Activations
from armature_kernels.linear.linear import EmbeddingForm, Linear


class Embedding(nn.Module):
    """Ids [tokens] to FP32 [tokens, size], times `scale`.

    Ids count from row `first` of the stored table (RoBERTa's positions). `absent_first`: an id without a row has row 0.
    The table keeps its stored dtype and memory, unless it is tied to an output layer that can return its rows.
    """

    def __init__(
        self, source: str, rows: int, size: int, scale: float = 1.0, first: int = 0, absent_first: bool = False
    ) -> None:
        super().__init__()
        self.source, self.scale, self.first, self.absent_first = source, scale, first, absent_first
        self.weight = nn.Parameter(torch.empty(rows, size), requires_grad=False)
        self.form: EmbeddingForm | None = None
        self.factor: RowFactor = self.scale  # multiplied with the rows

    def set_weight(self, tensor: Tensor) -> None:
        self.weight = nn.Parameter(tensor[self.first :], requires_grad=False)

    def tie(self, form: EmbeddingForm, even: Tensor | None = None) -> None:
        """Read rows from the output layer's packed weight from now on, whose columns are multiplied by `even`."""
        self.form = form
        if even is not None:
            self.factor = self.scale / even

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the scaled rows of token_ids [tokens], FP32 [tokens, size]."""
        if self.form is not None:
            return self.form.rows(token_ids, self.factor)
        return embedding_rows(self.weight, token_ids, self.factor, self.absent_first)

    def add_to(self, hidden: Tensor, ids: Tensor) -> None:
        """Add the rows of ids [tokens] to hidden [tokens, size] FP32."""
        add_embedding_rows(hidden, self.weight, ids, self.factor)


def output_layer(config: ModelConfig) -> Linear:
    """Return the layer from hidden rows to logits; with tied embeddings its weight is the embedding's."""
    source = "model.embed_tokens" if config.tie_embeddings else "lm_head"
    return Linear((source,), config.hidden_size, config.vocab_size, config.logits_bias)


def decoder_layer(config: ModelConfig, layer: int, dtype: torch.dtype) -> DecoderLayer | AltUpLayer:
    return (
        DecoderLayer(config, layer, dtype) if config.altup is None else AltUpLayer(config, config.altup, layer, dtype)
    )


def position_embedding(config: ModelConfig) -> Embedding | None:
    if not config.num_positions:
        return None
    rows, first = config.num_positions, config.first_position
    return Embedding("model.embed_positions", rows, config.hidden_size, config.embedding_scale, first)


def layer_input_table(config: ModelConfig, altup: AltUpConfig) -> Embedding:
    """Return the table of what each layer reads of a token of its own."""
    rows, size, scale = altup.input_vocab_size, config.num_layers * altup.input_size, math.sqrt(altup.input_size / 2)
    return Embedding("model.embed_tokens_per_layer", rows, size, scale, absent_first=True)


def last_norm(config: ModelConfig) -> NormConfig:
    """Return the norm before the output layer, of the sum of all streams if there are several."""
    if config.altup is None:
        return config.norm
    return replace(config.norm, eps=config.norm.eps * config.altup.num_streams**2)


class Decoder(nn.Module):
    """Token ids to logits. With several streams, rows between `embedded` and `merged` are as in `layers/altup.py`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, max_model_len: int, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding("model.embed_tokens", config.vocab_size, config.hidden_size, config.embedding_scale)
        self.position_embedding = position_embedding(config)
        self.embedding_norm = (
            Norm("model.embed_norm", config.hidden_size, config.norm) if config.embedding_norm else None
        )
        self.entry: AltUpEntry | None = None
        self.exit: AltUpExit | None = None
        if config.altup is not None:
            self.entry = AltUpEntry(config, config.altup, layer_input_table(config, config.altup), dtype)
            self.exit = AltUpExit(config, config.altup, dtype)
        self.layers = nn.ModuleList(decoder_layer(config, index, dtype) for index in range(config.num_layers))
        self.output = output_layer(config)
        norm = last_norm(config)
        self.norm = Norm("model.norm", config.hidden_size, norm, dtype, self.output, gain=config.logit_scale)
        self.angles = LayerRopeAngles(config.ropes, max_model_len, device)

    def forward(self, context: StepContext) -> Tensor | TopLogits:
        return self.outputs(self.body(context), context.top_logits)

    def body(self, context: StepContext) -> Activations:
        """Compute the input of the output layer, for the tokens in `logit_rows`; others stop at the last KV."""
        result: Activations = self.norm(self.hidden(context))
        return result

    def hidden(self, context: StepContext) -> Tensor:
        """Compute hidden states FP32 [rows, size] before the last norm, for the tokens in `logit_rows`."""
        hidden, angles = self.embedded(context.token_ids, context.positions), self.layer_angles(context.positions)
        wanted: list[Tensor | None] = [None] * len(self.layers)
        wanted[-1] = context.logit_rows
        for layer, own, only in zip(self.layers, angles, wanted, strict=True):
            hidden = layer(hidden, own, context.attend, only)
        return self.merged(hidden)

    def merged(self, hidden: Tensor) -> Tensor:
        """Return what the last norm reads, from the result of the last layer."""
        if self.exit is None:
            return hidden
        total: Tensor = self.exit(hidden)
        return total

    def embedded(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the input of the first layer, FP32, for tokens at these positions."""
        hidden: Tensor = self.embedding(token_ids)
        if self.position_embedding is not None:
            self.position_embedding.add_to(hidden, positions)
        if self.embedding_norm is not None:
            self.embedding_norm.overwrite(hidden)
        if self.entry is not None:
            hidden = self.entry(token_ids, hidden)
        return hidden

    def layer_angles(self, positions: Tensor) -> list[RopeAngles | None]:
        return self.angles.by_layer(self.angles(positions))

    def logits(self, hidden: Tensor, wanted: TopLogitsRequest | None = None) -> Tensor | TopLogits:
        """Return the logits [rows, vocab] of hidden states before the last norm, or the top ones of each row."""
        return self.outputs(self.norm(hidden), wanted)

    def outputs(self, rows: Activations, wanted: TopLogitsRequest | None) -> Tensor | TopLogits:
        """Return the logits, bounded by cap · tanh(logits / cap) if the config has a cap."""
        cap = self.config.logit_softcap
        best = None if wanted is None else self.output.top_logits(rows, wanted, cap)
        if best is not None:
            return best
        logits: Tensor = self.output(rows)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class DecoderBody(nn.Module):
    """Token ids to hidden states."""

    def __init__(self, config: EncoderConfig, dtype: torch.dtype, max_model_len: int, device: torch.device) -> None:
        super().__init__()
        decoder = config.decoder
        assert decoder is not None, "a config of a decoder"
        self.embedding = Embedding(
            "model.embed_tokens", decoder.vocab_size, decoder.hidden_size, decoder.embedding_scale
        )
        self.layers = nn.ModuleList(DecoderLayer(decoder, index, dtype) for index in range(decoder.num_layers))
        for part in self.layers.modules():
            if isinstance(part, Attention):
                part.spec = replace(part.spec, bidirectional=config.bidirectional)
        self.norm = Norm("model.norm", decoder.hidden_size, decoder.norm)
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
