"""The decoders: embedding, RoPE angles, last norm and output layer around their layers (`layers.py`).

`DecoderBody` is a decoder that is served for its hidden states, such as Qwen3-Embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor, nn

from app.models.decoders.altup_layers import AltUpEntry, AltUpExit, AltUpLayer
from app.models.decoders.config import ModelConfig
from app.models.decoders.layer_config import AltUpConfig, NormConfig
from app.models.decoders.layers import Attention, BranchLayer, DecoderLayer, Norm
from app.models.decoders.rope import RopeConfig, RopeKind
from app.models.encoders.config import EncoderConfig
from armature_kernels.attention.attention import RopeAngles
from armature_kernels.attention.context import EncodeContext, StepContext, TokenVectors
from armature_kernels.elementwise.activations import TopLogits, TopLogitsRequest
from armature_kernels.elementwise.embedding import RowFactor, add_embedding_rows, embedding_rows
from armature_kernels.elementwise.rope import rope_angles, rope_angles_of_axes
from armature_kernels.linear.activations import Activations
from armature_kernels.linear.linear import EmbeddingForm, Linear


class RotaryEmbedding:
    """The angles of one `RopeConfig`.

    With longrope, a server whose contexts may exceed the original length always uses the long factors. (transformers
    uses the short ones while a sequence is short; keys cached before the border then have wrong angles.)
    """

    def __init__(self, rope: RopeConfig, max_model_len: int, device: torch.device) -> None:
        frequencies, self.scale = _KINDS[rope.kind](rope, max_model_len)
        self.frequencies = (-frequencies if rope.backwards else frequencies).to(device)
        self.axes = torch.tensor(rope.axes, device=device) if rope.axes else None  # of each frequency

    def __call__(self, positions: Tensor, axes: Tensor | None = None) -> RopeAngles:
        """Map positions [tokens], or those in three `axes` [3, tokens], to cos and signed sin [tokens, 1, dim]."""
        if axes is None or self.axes is None:
            return rope_angles(positions, self.frequencies, self.scale)
        return rope_angles_of_axes(axes[self.axes].T, self.frequencies, self.scale)


class LayerRopeAngles:
    """The angles of all layers. Layers with the same `RopeConfig` share them; a layer without one gets None."""

    def __init__(self, ropes: Sequence[RopeConfig | None], max_model_len: int, device: torch.device) -> None:
        distinct = list(dict.fromkeys(rope for rope in ropes if rope is not None))
        self.rotaries = [RotaryEmbedding(rope, max_model_len, device) for rope in distinct]
        self.indices = [None if rope is None else distinct.index(rope) for rope in ropes]

    def __call__(self, positions: Tensor, axes: Tensor | None = None) -> list[Tensor]:
        """Map positions [tokens] to the cos and signed sin of each distinct rotary embedding, one after the other."""
        return [tensor for rotary in self.rotaries for tensor in rotary(positions, axes)]

    def by_layer(self, computed: Sequence[Tensor]) -> list[RopeAngles | None]:
        return [None if index is None else (computed[2 * index], computed[2 * index + 1]) for index in self.indices]


# ---- frequencies [dim / 2] and the factor on cos and sin, for each kind --------------------------------------------


def _plain(rope: RopeConfig) -> Tensor:
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32, device="cpu") / rope.dim
    return 1.0 / rope.theta**exponents


def _proportional(rope: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    """Rotate the first pairs of a whole head only; the others have the frequency 0."""
    plain = _plain(rope) / rope.factor
    plain[rope.num_rotated :] = 0.0
    return plain, 1.0


def _llama3(rope: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    """Divide the frequencies of waves long against the original context by `factor`, and blend at the border."""
    plain, length = _plain(rope), rope.original_max_position_embeddings
    waves = length * plain / (2 * math.pi)  # number of waves that fit
    blend = ((waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return plain * blend + plain / rope.factor * (1 - blend), 1.0


def _yarn(rope: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    """Blend as in llama3, over the index, from `beta_fast` to `beta_slow` rotations in the original context."""

    def index_of(rotations: float) -> float:
        return (
            rope.dim
            * math.log(rope.original_max_position_embeddings / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low if high != low else 0.001
    interpolated = ((torch.arange(rope.dim // 2, dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)
    plain = _plain(rope)
    return plain / rope.factor * interpolated + plain * (1 - interpolated), _yarn_scale(rope)


def _yarn_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1.0 else 0.1 * weight * math.log(rope.factor) + 1.0

    return mscale(rope.mscale) / mscale(rope.mscale_all_dim) if rope.mscale and rope.mscale_all_dim else mscale(1.0)


def _longrope(rope: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    """Divide each frequency by a separate factor, from one set for short contexts and one for long contexts."""
    original = rope.original_max_position_embeddings
    is_long = max_model_len > original
    factors = torch.tensor(rope.long_factor if is_long else rope.short_factor, device="cpu")
    scale = rope.long_mscale if is_long else rope.short_mscale
    scale = rope.attention_factor if scale is None else scale
    if scale is None:
        scale = 1.0 if rope.factor <= 1.0 else math.sqrt(1 + math.log(rope.factor) / math.log(original))
    return _plain(rope) / factors, scale


_KINDS: Mapping[RopeKind, Callable[[RopeConfig, int], tuple[Tensor, float]]] = {
    "default": lambda rope, max_model_len: (_plain(rope), 1.0),
    "linear": lambda rope, max_model_len: (_plain(rope) / rope.factor, 1.0),
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}


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
        if self.form is not None:
            return self.form.rows(token_ids, self.factor)
        return embedding_rows(self.weight, token_ids, self.factor, self.absent_first)

    def add_to(self, hidden: Tensor, ids: Tensor) -> None:
        """Add the rows of ids [tokens] to hidden [tokens, size] FP32."""
        add_embedding_rows(hidden, self.weight, ids, self.factor)


class SinusoidalPositions(Embedding):
    """Sines, then cosines, of positions from `first` on times frequencies from 1 to 1/10,000, which no file holds."""

    def __init__(self, rows: int, size: int, first: int) -> None:
        super().__init__("", rows, size, first=first)

    def fill(self, device: torch.device | None) -> None:
        rows, half = self.weight.shape[0], self.weight.shape[1] // 2
        frequencies = torch.exp(torch.arange(half, device="cpu") * (-math.log(10_000) / (half - 1)))
        angles = torch.arange(self.first, self.first + rows, device="cpu")[:, None] * frequencies
        self.weight = nn.Parameter(torch.cat((angles.sin(), angles.cos()), 1).to(device or "cpu"), requires_grad=False)


def output_layer(config: ModelConfig) -> Linear:
    """Return the layer from hidden rows to logits; with tied embeddings its weight is the embedding's."""
    source = "model.embed_tokens" if config.tie_embeddings else "lm_head"
    return Linear((source,), config.hidden_size, config.vocab_size, config.logits_bias)


def decoder_layer(config: ModelConfig, layer: int, dtype: torch.dtype) -> DecoderLayer | AltUpLayer | BranchLayer:
    if config.placement == "single":
        return BranchLayer(config, layer, dtype)
    if config.altup is None or config.altup.num_streams == 1:
        return DecoderLayer(config, layer, dtype)
    return AltUpLayer(config, config.altup, layer, dtype)


def position_embedding(config: ModelConfig) -> Embedding | None:
    if not config.num_positions:
        return None
    rows, first = config.num_positions, config.first_position
    if config.sinusoids:
        return SinusoidalPositions(rows, config.hidden_size, first)
    return Embedding("model.embed_positions", rows, config.hidden_size, first=first)


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
    """Token ids to logits. With several streams, rows between `embedded` and `merged` are as in `AltUpLayer`."""

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
        result: Activations = self.norm(self.hidden(context), is_read_once=True)
        return result

    def hidden(self, context: StepContext) -> Tensor:
        """Compute hidden states FP32 [rows, size] before the last norm, for the tokens in `logit_rows`."""
        vectors = context.vectors
        added: Sequence[Tensor] = ()
        if vectors is not None:
            values = vectors.values
            inputs, *added = values.chunk(values.shape[1] // self.config.hidden_size, 1)
            vectors = replace(vectors, values=inputs)
            assert len(added) < len(self.layers), "the last layer may compute some rows only"
        hidden = self.embedded(context.token_ids, context.positions, vectors)
        angles = self.layer_angles(context.positions, None if vectors is None else vectors.axes)
        wanted: list[Tensor | None] = [None] * len(self.layers)
        wanted[-1] = context.logit_rows
        for layer, own, only, more in zip_longest(self.layers, angles, wanted, added):
            hidden = layer(hidden, own, context.attend, only)
            if more is not None and vectors is not None:
                hidden[vectors.rows] += more
        return self.merged(hidden)

    def merged(self, hidden: Tensor) -> Tensor:
        """Return what the last norm reads, from the result of the last layer."""
        if self.exit is None:
            return hidden
        total: Tensor = self.exit(hidden)
        return total

    def embedded(self, token_ids: Tensor, positions: Tensor, vectors: TokenVectors | None = None) -> Tensor:
        """Return the input of the first layer, FP32, for tokens at these positions."""
        hidden: Tensor = self.embedding(token_ids)
        if vectors is not None:
            hidden[vectors.rows] = vectors.values
        if self.position_embedding is not None:
            self.position_embedding.add_to(hidden, positions)
        if self.embedding_norm is not None:
            self.embedding_norm.overwrite(hidden)
        if self.entry is not None:
            hidden = self.entry(token_ids, hidden)
        return hidden

    def layer_angles(self, positions: Tensor, axes: Tensor | None = None) -> list[RopeAngles | None]:
        return self.angles.by_layer(self.angles(positions, axes))

    def logits(self, hidden: Tensor, wanted: TopLogitsRequest | None = None) -> Tensor | TopLogits:
        """Return the logits [rows, vocab] of hidden states before the last norm, or the top ones of each row."""
        return self.outputs(self.norm(hidden, is_read_once=True), wanted)

    def outputs(self, rows: Activations, wanted: TopLogitsRequest | None) -> Tensor | TopLogits:
        """Return the logits, bounded by cap · tanh(logits / cap) if the config has a cap."""
        cap = self.config.logit_softcap
        best = None if wanted is None else self.output.top_logits(rows, wanted, cap)
        if best is not None:
            return best
        logits: Tensor = self.output(rows)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class DecoderBody(nn.Module):
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


def build_decoder_model(config: ModelConfig, dtype: torch.dtype, max_model_len: int, device: torch.device) -> Decoder:
    """Build a decoder on `meta` in inference mode, without weights; the loader assigns them."""
    with torch.device("meta"):
        return Decoder(config, dtype, max_model_len, device).eval()
