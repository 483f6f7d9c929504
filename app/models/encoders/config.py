"""The configuration of an encoder: one frozen `EncoderConfig` in which every difference between families is a value.

An encoder maps texts to vectors or to labels; a decoder served for its hidden states is also one (`decoder`). The names
and shapes of its tensors follow from the configuration alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from app.models.decoders.config import ModelConfig
from app.models.decoders.layer_config import Activation
from app.models.decoders.rope import RopeConfig
from app.models.decoders.shapes import Shape, linear_tensors, norm_elements, products_of, tensors_of

EncoderActivation = Activation | Literal["relu"]
PoolingMode = Literal["cls", "mean", "max", "mean_sqrt_len", "weighted_mean", "last"]
# activation after the product of a dense module
DenseActivation = Literal["tanh", "identity", "relu", "gelu", "gelu_tanh", "silu"]
ScoreFunction = Literal["softmax", "sigmoid", "identity"]


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A sentence-transformers dense module after pooling: act(W x + b). `folder` holds its weights."""

    folder: str
    in_features: int
    out_features: int
    bias: bool = True
    activation: DenseActivation = "tanh"


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A classification head: pooling, act(dense), its norm, then `out`, which gives one logit per label.

    `pooling` "late" takes the mean of the logits of all tokens. `bias` belongs to `out`.
    """

    pooling: Literal["cls", "mean", "last", "late"] = "cls"
    dense: bool = True
    dense_bias: bool = True
    activation: DenseActivation = "tanh"
    norm: bool = False
    bias: bool = True


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """Pooling of a text's hidden states to one vector.

    The results of all `modes` are concatenated, go through `dense`, and get unit length if `normalizes`. `prompts` are
    prefixes of a text, by name; `skips_prompt`: their tokens are not pooled.
    """

    modes: tuple[PoolingMode, ...] = ("mean",)
    dense: tuple[DenseConfig, ...] = ()
    normalizes: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None  # the name of a prompt
    skips_prompt: bool = False


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The shape of an encoder.

    `windows` and `ropes` have one entry per layer, as in `ModelConfig`; a window is symmetric here.

    - `pre_norm`: layers normalise their input (ModernBERT), otherwise the sum after each branch (BERT).
    - `gated`: the MLP is act(gate x) * up x.
    - `num_positions` learned positions; 0: none are learned.
    - `padding_id`: learned positions are counted from the one after this id, without padding tokens, which all have the
      position of this id (RoBERTa). None: they are counted from 0.
    - `labels` of a classification head, in order; `head` describes that head, `scores` the function of its logits.
    - `decoder`: layers and attention are those of a decoder; if `bidirectional`, a token also sees the tokens
      after it.
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    norm_eps: float
    activation: EncoderActivation
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig | None, ...]
    pre_norm: bool = False
    gated: bool = False
    num_positions: int = 0
    padding_id: int | None = None
    num_types: int = 0
    distance_buckets: int = 0  # MPNet: number of buckets of relative positions; 0: none
    qkv_bias: bool = True
    output_bias: bool = True
    mlp_bias: bool = True  # bias of up, and of gate if there is one
    down_bias: bool = True
    norm_bias: bool = True
    lowercases: bool = False  # texts are lowercased before tokenization
    bidirectional: bool = True
    head: HeadConfig | None = None
    labels: tuple[str, ...] = ()
    scores: ScoreFunction = "softmax"
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    decoder: ModelConfig | None = None

    @property
    def kind(self) -> Literal["encoder"]:
        return "encoder"

    @property
    def embedding_size(self) -> int:
        """Size of an embedding vector."""
        if self.pooling.dense:
            return self.pooling.dense[-1].out_features
        return self.hidden_size * len(self.pooling.modes)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs, the usual one first."""
        return ("logits", "last_hidden_state") if self.labels else ("embedding", "last_hidden_state")


def positions_of(token_ids: Sequence[int], padding_id: int | None) -> Sequence[int]:
    """Return the position of each token, from the padding token's on if there is a padding id.

    Source: `create_position_ids_from_input_ids` in transformers' models/roberta/modeling_roberta.py.
    """
    if padding_id is None:
        return range(len(token_ids))
    if padding_id not in token_ids:
        return range(1, len(token_ids) + 1)
    counts = accumulate(token_id != padding_id for token_id in token_ids)
    return [0 if token_id == padding_id else count for token_id, count in zip(token_ids, counts, strict=True)]


def encoder_tensors_of(config: EncoderConfig) -> dict[str, Shape]:
    """Return name to shape of every tensor that serving needs; weights are [out, in] as in torch."""
    body = _body(config) if config.decoder is None else tensors_of(config.decoder).items()
    return {**dict(body), **dict(_head(config)), **dict(_dense(config))}


def encoder_products_of(config: EncoderConfig) -> Iterator[tuple[Shape, bool]]:
    """Yield the shape of every product of the layers, as computed (`products_of`), and True if it has a bias."""
    if config.decoder is not None:
        yield from products_of(config.decoder)
        return
    size, inner = config.hidden_size, config.intermediate_size
    for _ in range(config.num_layers):
        yield (3 * size, size), config.qkv_bias
        yield (size, size), config.output_bias
        yield (inner * (2 if config.gated else 1), size), config.mlp_bias
        yield (size, inner), config.down_bias


def encoder_tables_of(config: EncoderConfig) -> Iterator[str]:
    """Yield the tensors that are looked up by rows and keep their stored dtype."""
    if config.decoder is not None:
        yield "model.embed_tokens.weight"
        return
    yield "embeddings.word.weight"
    if config.num_positions:
        yield "embeddings.position.weight"
    if config.num_types:
        yield "embeddings.type.weight"


def encoder_norm_elements(config: EncoderConfig) -> int:
    """Return the number of elements that are always FP32: norms, distance bias, head and dense modules."""
    if config.decoder is not None:
        norms = norm_elements(config.decoder)
    else:
        norms = sum(
            _elements(shape) for name, shape in _body(config) if "norm." in name or name.startswith("distance_bias")
        )
    return norms + sum(_elements(shape) for _, shape in (*_head(config), *_dense(config)))


def _elements(shape: Shape) -> int:
    return shape[0] * (shape[1] if len(shape) == 2 else 1)


def _norm(name: str, config: EncoderConfig) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (config.hidden_size,)
    if config.norm_bias:
        yield f"{name}.bias", (config.hidden_size,)


def _body(config: EncoderConfig) -> Iterator[tuple[str, Shape]]:
    size = config.hidden_size
    yield "embeddings.word.weight", (config.vocab_size, size)
    if config.num_positions:
        yield "embeddings.position.weight", (config.num_positions, size)
    if config.num_types:
        yield "embeddings.type.weight", (config.num_types, size)
    yield from _norm("embeddings.norm", config)
    if config.distance_buckets:
        yield "distance_bias.weight", (config.distance_buckets, config.num_heads)
    for layer in range(config.num_layers):
        yield from _layer(config, layer)
    if config.pre_norm:
        yield from _norm("final_norm", config)


def _layer(config: EncoderConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    at, size, inner = f"layers.{layer}", config.hidden_size, config.intermediate_size
    for name in ("query", "key", "value"):
        yield from linear_tensors(f"{at}.{name}", size, size, config.qkv_bias)
    yield from linear_tensors(f"{at}.out", size, size, config.output_bias)
    for name in ("gate", "up") if config.gated else ("up",):
        yield from linear_tensors(f"{at}.{name}", inner, size, config.mlp_bias)
    yield from linear_tensors(f"{at}.down", size, inner, config.down_bias)
    if layer > 0 or not config.pre_norm:  # the embeddings' norm serves as the first layer's if pre_norm is set
        yield from _norm(f"{at}.attention_norm", config)
    yield from _norm(f"{at}.mlp_norm", config)


def _head(config: EncoderConfig) -> Iterator[tuple[str, Shape]]:
    head, size = config.head, config.hidden_size
    if head is None:
        return
    if head.dense:
        yield from linear_tensors("head.dense", size, size, head.dense_bias)
    if head.norm:
        yield from _norm("head.norm", config)
    yield from linear_tensors("head.out", len(config.labels), size, head.bias)


def _dense(config: EncoderConfig) -> Iterator[tuple[str, Shape]]:
    for place, dense in enumerate(config.pooling.dense):
        yield from linear_tensors(f"dense.{place}", dense.out_features, dense.in_features, dense.bias)
