"""Values that describe the parts of a decoder's layer. Torch is not needed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from armature_kernels.attention.recurrent_sizes import RecurrentSizes
from armature_kernels.elementwise.latent_sizes import LatentHeads
from armature_kernels.elementwise.routing_rule import Routing

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu", "swiglu_oai"]

# Where the norms of a layer are:
# - pre: h + attention(norm h), then h + mlp(norm h)
# - post: h + norm(attention h), then h + norm(mlp h)
# - sandwich: h + norm(attention(norm h)), then h + norm(mlp(norm h))
# - parallel: h + attention(norm h) + mlp(norm h)
# - single: h + attention(norm h), or h + mlp(norm h): a layer has one of both
Placement = Literal["pre", "post", "sandwich", "parallel", "single"]

# How the rows of a fused product of queries, keys and values are stored:
# - stacked: all queries, all keys, all values
# - grouped: for each key/value head its queries, its key and its value
# - quarters: for each quarter of the heads its queries, its values and its keys
QkvLayout = Literal["stacked", "grouped", "quarters"]

# The factors of successive rows of a weight: how many rows, and their factor.
RowFactors = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class NormConfig:
    """RMSNorm or LayerNorm of hidden states. `offset` is added to the stored weights; without `has_weight` they are 1."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    offset: float = 0.0
    has_weight: bool = True
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class HeadNormConfig:
    """The norm of queries and the norm of keys.

    `scope`: statistics and weights are one head's, which all heads share; each head's; or all heads' together.
    `after_rope`: rotary embeddings are applied first. `values`: values have an RMSNorm without weights. Without `has_weight`
    the weights are 1. `with_rope`: layers without rotary embeddings have no such norm.
    """

    kind: Literal["rms", "layer"] = "rms"
    scope: Literal["shared", "each", "together"] = "shared"
    eps: float = 1e-6
    offset: float = 0.0
    after_rope: bool = False
    values: bool = False
    has_weight: bool = True
    has_bias: bool = False  # of the scope shared
    with_rope: bool = False

    def num_weights(self, heads: int, head_dim: int) -> int:
        return head_dim if self.scope == "shared" else heads * head_dim


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """The heads of keys and values in a layer. `keys_are_values`: one product gives both, before their norms."""

    num_kv_heads: int
    head_dim: int
    keys_are_values: bool = False


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention: keys and values come from a row of `rank` elements that all heads share.

    Queries come from a row of `query_rank` elements; None: from the hidden state. Both rows have an RMSNorm.
    """

    heads: LatentHeads
    rank: int
    query_rank: int | None
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class ConvolutionConfig:
    """Short convolutions of `width` positions in place of the attention of some layers, those of `layers`."""

    width: int
    layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """Layers with a recurrent state in place of attention, those of `layers`: the gated delta rule, or Mamba-2.

    `is_fused`: the products of the delta rule are two tensors, in which the rows of a key head follow each other. The
    result has an RMSNorm of each `norm_size` elements with `norm_weights` weights, before or, if `gates_first`, after it is
    multiplied by silu(gates); with a `norm_size` of 0 it has none. `step_limits`: the least and the most step. `beside`:
    these layers have attention too, and both results are added. `beta_scale`: what the sigmoid of the delta rule's betas is
    multiplied by. `is_apart`: its products and convolution are a tensor for queries, keys and values each.
    """

    sizes: RecurrentSizes
    layers: tuple[bool, ...]
    norm_size: int
    norm_weights: int
    norm_eps: float
    gates_first: bool = False
    is_fused: bool = False
    conv_bias: bool = False
    product_bias: bool = False
    step_limits: tuple[float, float] = (0.0, math.inf)
    beside: bool = False
    beta_scale: float = 1.0
    is_apart: bool = False

    @property
    def name(self) -> str:
        """The part of a layer, in our names."""
        return "linear_attn" if self.sizes.has_delta else "mamba"


@dataclass(frozen=True, slots=True)
class AltUpConfig:
    """Several hidden states for each token, its streams (AltUp), with what the layers around them have.

    A layer computes with the first stream, and adds a branch of rank `laurel_rank` beside attention (LAuReL). Each
    layer also reads `input_size` elements of its own for each token, from a table of `input_vocab_size` rows. A model
    with one stream has these inputs alone.
    """

    num_streams: int
    laurel_rank: int
    input_size: int
    input_vocab_size: int


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP of some layers: MLPs like it with an inner size of `size`.

    Every token also passes a shared expert of `shared_size`, unless that is 0; with `shared_gate` its result is
    multiplied by the sigmoid of a further output of the router, else by `shared_scale`. With `selection_bias` a stored bias is added to the
    scores for the selection only. `router_bias`: the router's product has a bias. `apart`: the shared expert, an MLP as
    that of other layers, the experts and the router have norms of their own, and each expert's weights have a factor.
    `scales_inputs`: the weight of the one expert of a token is multiplied with its input.
    """

    routing: Routing
    size: int
    layers: tuple[bool, ...]
    shared_size: int = 0
    shared_gate: bool = False
    shared_scale: float = 1.0
    selection_bias: bool = False
    router_bias: bool = False
    apart: bool = False
    scales_inputs: bool = False
