"""What an encoder is: one frozen `EncoderConfig` in which every difference between families is a value. `encoder_reading` reads it.

Torch is not needed. An encoder maps texts to vectors or to labels; a decoder served for its hidden states is one too (`decoder`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from app.models.config import Activation, ModelConfig
from app.models.rope import Rope

EncoderActivation = Activation | Literal["relu"]
PoolingMode = Literal["cls", "mean", "max", "mean_sqrt_len", "weighted_mean", "last"]
Between = Literal["tanh", "identity", "relu", "gelu", "gelu_tanh", "silu"]  # what stands behind the product of a dense module
Scores = Literal["softmax", "sigmoid", "identity"]


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A sentence-transformers module behind pooling: act(W x + b). `folder` holds its weights."""

    folder: str
    in_features: int
    out_features: int
    bias: bool = True
    activation: Between = "tanh"


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """How hidden states become one logit a label: pooled, act(dense), its norm, then `out`.

    `pooling` "late" takes the mean of the logits of all tokens instead. `bias` is `out`'s, `norm_bias` the encoder's.
    """

    pooling: Literal["cls", "mean", "last", "late"] = "cls"
    dense: bool = True
    dense_bias: bool = True
    activation: Between = "tanh"
    norm: bool = False
    bias: bool = True


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """How a text's hidden states become one vector: `modes` side by side, then `dense`, then unit length where `normalizes`.

    `prompts` by name are put before a text; `skips_prompt`: their tokens are not pooled.
    """

    modes: tuple[PoolingMode, ...] = ("mean",)
    dense: tuple[DenseConfig, ...] = ()
    normalizes: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None  # the name of one
    skips_prompt: bool = False


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """An encoder's shape. `windows` and `ropes` have one entry a layer, as in `ModelConfig`; a window is symmetric here.

    `pre_norm`: layers normalise what they read (ModernBERT), else what they have added to (BERT). `gated`: act(gate x) * up x.
    `num_positions` learned positions begin at `first_position` (RoBERTa: behind its padding index); 0: none are learned.
    `labels` of a classification head, in order; `head` says how that is built, `scores` what its logits become.
    `decoder`: layers and attention are a decoder's, which sees what follows a token as well where it is `bidirectional`.
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
    ropes: tuple[Rope | None, ...]
    pre_norm: bool = False
    gated: bool = False
    num_positions: int = 0
    first_position: int = 0
    num_types: int = 0
    distance_buckets: int = 0  # MPNet: relative positions in so many buckets; 0: none
    qkv_bias: bool = True
    output_bias: bool = True
    mlp_bias: bool = True  # of up, and of gate where there is one
    down_bias: bool = True
    norm_bias: bool = True
    lowercases: bool = False  # texts, before the tokenizer sees them
    bidirectional: bool = True
    head: HeadConfig | None = None
    labels: tuple[str, ...] = ()
    scores: Scores = "softmax"
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    decoder: ModelConfig | None = None

    @property
    def kind(self) -> Literal["encoder"]:
        return "encoder"

    @property
    def embedding_size(self) -> int:
        """Of the vectors that come out."""
        if self.pooling.dense:
            return self.pooling.dense[-1].out_features
        return self.hidden_size * len(self.pooling.modes)

    @property
    def outputs(self) -> tuple[str, ...]:
        """What can be asked of it, the usual one first."""
        return ("logits", "last_hidden_state") if self.labels else ("embedding", "last_hidden_state")
