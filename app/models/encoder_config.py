"""The configuration of an encoder: one frozen `EncoderConfig` in which every difference between families is a value.

`encoder_reading` creates it. Torch is not needed. An encoder maps texts to vectors or to labels; a decoder served
for its hidden states is also one (`decoder`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from app.models.config import Activation, ModelConfig
from app.models.rope import Rope

EncoderActivation = Activation | Literal["relu"]
PoolingMode = Literal["cls", "mean", "max", "mean_sqrt_len", "weighted_mean", "last"]
# activation after the product of a dense module
Between = Literal["tanh", "identity", "relu", "gelu", "gelu_tanh", "silu"]
Scores = Literal["softmax", "sigmoid", "identity"]


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A sentence-transformers dense module after pooling: act(W x + b). `folder` holds its weights."""

    folder: str
    in_features: int
    out_features: int
    bias: bool = True
    activation: Between = "tanh"


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A classification head: pooling, act(dense), its norm, then `out`, which gives one logit per label.

    `pooling` "late" takes the mean of the logits of all tokens instead. `bias` belongs to `out`; the norm's bias
    follows the encoder's `norm_bias`.
    """

    pooling: Literal["cls", "mean", "last", "late"] = "cls"
    dense: bool = True
    dense_bias: bool = True
    activation: Between = "tanh"
    norm: bool = False
    bias: bool = True


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """Pooling of a text's hidden states to one vector.

    The results of all `modes` are concatenated, then go through `dense`, and get unit length if `normalizes`.
    `prompts` are prefixes of a text, by name. `skips_prompt` means that their tokens are not pooled.
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
    - `num_positions` learned positions begin at `first_position` (RoBERTa: after its padding index); 0: none are
      learned.
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
    ropes: tuple[Rope | None, ...]
    pre_norm: bool = False
    gated: bool = False
    num_positions: int = 0
    first_position: int = 0
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
    scores: Scores = "softmax"
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    decoder: ModelConfig | None = None

    @property
    def kind(self) -> Literal["encoder"]:
        """The kind of checkpoint, as engines are selected by."""
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
