"""The decoders: embedding, RoPE angles, last norm and output layer around the layers of Llama or Gemma.

`LlamaLayer` serves Llama and the models that differ from it only by config flags: Mistral, Qwen 2 and 3, Phi-3 and
SmolLM 1 to 3. `GemmaLayer` serves Gemma 2 and 3 (text), with a norm after each branch as well as before it.
`DecoderBody` is a decoder that is served for its hidden states, such as Qwen3-Embedding or the bidirectional EuroBERT.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from app.kernels.attention.attention import QkvHeads, RopeAngles
from app.kernels.attention.context import Attend, AttentionSpec, EncodeContext, StepContext
from app.kernels.elementwise.activations import TopLogits, TopLogitsRequest
from app.kernels.elementwise.embedding import RowFactor, add_embedding_rows, embedding_rows
from app.kernels.elementwise.norms import add_rms_norm, gate, gather, rms_norm
from app.kernels.elementwise.rope import rope_angles
from app.kernels.linear.activations import Activations
from app.kernels.linear.linear import EmbeddingForm, Linear
from app.models.decoders.config import ModelConfig, RopeConfig, RopeKind
from app.models.encoders.config import EncoderConfig


class Embedding(nn.Module):
    """Ids [tokens] to FP32 [tokens, size], times `scale`.

    Ids count from row `first` of the stored table (RoBERTa's positions).

    The table keeps its stored dtype and memory, where only used rows are read. If it is tied to an output layer
    that can return its rows, there is no second table.
    """

    def __init__(self, source: str, rows: int, size: int, scale: float = 1.0, first: int = 0) -> None:
        super().__init__()
        self.source, self.scale, self.first = source, scale, first
        self.weight = nn.Parameter(torch.empty(rows, size), requires_grad=False)
        self.form: EmbeddingForm | None = None
        self.factor: RowFactor = self.scale  # multiplied with the rows

    def set_weight(self, tensor: Tensor) -> None:
        """Set the table to the stored tensor, without its first rows."""
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
        return embedding_rows(self.weight, token_ids, self.factor)

    def add_to(self, hidden: Tensor, ids: Tensor) -> None:
        """Add the rows of ids [tokens] to hidden [tokens, size] FP32."""
        add_embedding_rows(hidden, self.weight, ids, self.factor)


class RMSNorm(nn.Module):
    """x / rms(x) times a weight, in FP32.

    The result is in `dtype`, or in the input format of the product that it `feeds`. Gemma stores the weight minus 1.
    """

    def __init__(
        self, source: str, size: int, config: ModelConfig, dtype: torch.dtype, feeds: Linear | None = None
    ) -> None:
        super().__init__()
        self.source, self.eps, self.dtype, self.feeds = source, config.norm_eps, dtype, feeds
        self.offset = 1.0 if config.gemma else 0.0
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def set_weight(self, tensor: Tensor) -> None:
        """Set the weight [size], converted to FP32."""
        self.weight = nn.Parameter(tensor.to(torch.float32, copy=True) + self.offset, requires_grad=False)

    def divide_weight(self, factors: Tensor) -> None:
        """Divide the weight by the smooth scales of the product that it feeds (kernels/linear/quantization.py)."""
        self.weight.div_(factors)

    def forward(self, x: Tensor) -> Activations:
        """Return the norm of x [tokens, size].

        Without `feeds`, x may have more dimensions and the result is a tensor.
        """
        group = None if self.feeds is None else self.feeds.activation_group(x.shape[0])
        return rms_norm(x, self.weight, self.eps, self.dtype, group)

    def add_to(self, hidden: Tensor, x: Tensor) -> None:
        """Add the norm of x [tokens, size] to hidden [tokens, size] FP32."""
        add_rms_norm(hidden, x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention: one product for queries, keys and values, then `attend`, which also applies RoPE.

    The layer calls the product `out`, since it knows for which tokens the result is needed and where it is added.
    """

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        at = f"model.layers.{layer}.self_attn"
        self.layer, self.head_dim, self.eps = layer, config.head_dim, config.norm_eps
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        names = ("qkv_proj",) if config.fused_weights else ("q_proj", "k_proj", "v_proj")
        sources = tuple(f"{at}.{name}" for name in names)
        rows = () if config.fused_weights else (queries, keys, keys)
        self.qkv = Linear(sources, config.hidden_size, queries + 2 * keys, config.qkv_bias, rows)
        self.out = Linear((f"{at}.o_proj",), queries, config.hidden_size, config.output_bias)
        self.query_norm = RMSNorm(f"{at}.q_norm", config.head_dim, config, torch.float32) if config.qk_norm else None
        self.key_norm = RMSNorm(f"{at}.k_norm", config.head_dim, config, torch.float32) if config.qk_norm else None
        self.spec = AttentionSpec(config.attention_scale, config.windows[layer], config.attention_softcap)

    def forward(self, x: Activations, angles: RopeAngles | None, attend: Attend) -> Tensor:
        """Map x [tokens, hidden] to the attention output [tokens, heads * head_dim]."""
        queries, keys = self.query_norm, self.key_norm
        norms = (None if queries is None else queries.weight, None if keys is None else keys.weight)
        heads = QkvHeads(self.qkv(x), self.num_heads, self.num_kv_heads, self.head_dim, *norms, self.eps, angles)
        return attend(self.layer, heads, self.spec)


class GatedMLP(nn.Module):
    """down(act(gate x) * up x), with gate and up in one product."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        at = f"model.layers.{layer}.mlp"
        sources = (f"{at}.gate_up_proj",) if config.fused_weights else (f"{at}.gate_proj", f"{at}.up_proj")
        self.gate_up = Linear(sources, config.hidden_size, 2 * config.intermediate_size, config.mlp_bias)
        self.down = Linear((f"{at}.down_proj",), config.intermediate_size, config.hidden_size, config.mlp_bias)
        self.activation = config.activation

    def forward(self, x: Activations) -> Tensor:
        """Map x [tokens, hidden] to [tokens, hidden]."""
        result: Tensor = self.down(self._gated(x))
        return result

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """Add the MLP of x to hidden [tokens, hidden]."""
        self.down.add_to(hidden, self._gated(x))

    def _gated(self, x: Activations) -> Activations:
        gate_up = self.gate_up(x)
        return gate(gate_up, self.activation, self.down.activation_group(gate_up.shape[0]))


def output_layer(config: ModelConfig) -> Linear:
    """Return the layer from hidden rows to logits; with tied embeddings its weight is the embedding's."""
    source = "model.embed_tokens" if config.tie_embeddings else "lm_head"
    return Linear((source,), config.hidden_size, config.vocab_size)


class RotaryEmbedding:
    """The angles of one `RopeConfig`.

    With longrope, a server whose contexts may exceed the original length always uses the long factors.

    (transformers uses the short factors while a sequence is short. Keys cached before the border then have wrong
    angles after it.)
    """

    def __init__(self, rope: RopeConfig, max_model_len: int, device: torch.device) -> None:
        frequencies, self.scale = _KINDS[rope.kind](rope, max_model_len)
        self.frequencies = frequencies.to(device)

    def __call__(self, positions: Tensor) -> RopeAngles:
        """Map positions [tokens] to cos and signed sin [tokens, 1, dim]."""
        return rope_angles(positions, self.frequencies, self.scale)


class LayerRopeAngles:
    """The angles of all layers. Layers with the same `RopeConfig` share them; a layer without one gets None."""

    def __init__(self, ropes: Sequence[RopeConfig | None], max_model_len: int, device: torch.device) -> None:
        distinct = list(dict.fromkeys(rope for rope in ropes if rope is not None))
        self.rotaries = [RotaryEmbedding(rope, max_model_len, device) for rope in distinct]
        self.indices = [None if rope is None else distinct.index(rope) for rope in ropes]

    def __call__(self, positions: Tensor) -> list[Tensor]:
        """Map positions [tokens] to the cos and signed sin of each distinct rotary embedding, one after the other."""
        return [tensor for rotary in self.rotaries for tensor in rotary(positions)]

    def by_layer(self, computed: Sequence[Tensor]) -> list[RopeAngles | None]:
        """Return one entry per layer, from the result of the call."""
        return [None if index is None else (computed[2 * index], computed[2 * index + 1]) for index in self.indices]


# ---- frequencies [dim / 2] and the factor on cos and sin, for each kind --------------------------------------------


def _plain(rope: RopeConfig) -> Tensor:
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32, device="cpu") / rope.dim
    return 1.0 / rope.theta**exponents


def _default(rope: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    return _plain(rope), 1.0


def _linear(rope: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    return _plain(rope) / rope.factor, 1.0


def _llama3(rope: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    """Divide the frequencies of long waves by `factor`, keep short ones, and blend those between.

    The blend depends on how many waves fit in the original context.
    """
    plain, length = _plain(rope), rope.original_max_position_embeddings
    waves = length * plain / (2 * math.pi)  # number of waves that fit
    blend = ((waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return plain * blend + plain / rope.factor * (1 - blend), 1.0


def _yarn(rope: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    """Blend as in llama3, but over the element index.

    The borders are the pairs that rotate `beta_fast` and `beta_slow` times in the original context.
    """

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
    factors = torch.tensor(rope.long_factor if max_model_len > original else rope.short_factor, device="cpu")
    scale = rope.attention_factor
    if scale is None:
        scale = 1.0 if rope.factor <= 1.0 else math.sqrt(1 + math.log(rope.factor) / math.log(original))
    return _plain(rope) / factors, scale


_KINDS: Mapping[RopeKind, Callable[[RopeConfig, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


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
        result: Activations = self.norm(self.hidden(context))
        return result

    def hidden(self, context: StepContext) -> Tensor:
        """Compute hidden states FP32 [rows, size] before the last norm, for the tokens in `logit_rows`."""
        hidden: Tensor
        hidden, angles = self.embedding(context.token_ids), self.angles.by_layer(self.angles(context.positions))
        wanted: list[Tensor | None] = [None] * len(self.layers)
        wanted[-1] = context.logit_rows
        for layer, own, only in zip(self.layers, angles, wanted, strict=True):
            hidden = layer(hidden, own, context.attend, only)
        return hidden

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
