"""Reads a decoder's config.json into one frozen `ModelConfig`: every difference between families is a value.

Absent values get the family's default, as in transformers; values that are not understood are rejected by name.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from app.errors import CheckpointInvalid, NotNative
from app.models.config_reader import MAX_LAYERS, ConfigReader
from app.models.decoders.families import DECODER_FAMILIES, DEFAULT_TEXTS, refusal
from app.models.decoders.family import DecoderFamily, Fields
from app.models.decoders.family_values import known_texts, refuse
from app.models.decoders.layer_config import (
    Activation,
    AltUpConfig,
    ConvolutionConfig,
    ExpertsConfig,
    HeadNormConfig,
    HeadSizes,
    LatentConfig,
    NormConfig,
    Placement,
    QkvLayout,
    RecurrentConfig,
    RowFactors,
)
from app.models.decoders.rope import RopeConfig, parse_rope, rope_axes
from armature_kernels.attention.recurrent_sizes import tail_elements

# Names that publishers gave to classes of transformers.
OTHER_NAMES: Mapping[str, str] = {"MPTForCausalLM": "MptForCausalLM", "PhiMoEForCausalLM": "PhimoeForCausalLM"}
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
# ---- layers with a sliding window, and layers with RoPE ------------------------------------------------------------

_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder.

    `windows` and `ropes` have one entry per layer; None means full attention, or no rotary embedding.
    `attention_scale` multiplies scores, `embedding_scale` the embeddings, `logit_scale` the logits. `norm` are the norms of
    hidden states, `head_norm` those of queries and keys. `shares_norm`: the two branches of a parallel layer have the same
    norm. `is_gated`: act(gate x) * up x instead of act(up x). `fused_qkv` and `fused_gate_up`: the checkpoint holds them as
    one tensor each. `num_positions`: learned positions, from row `first_position` of their table; 0: none.
    `sinusoids`: that table is computed.
    `interleaved_rope`: the checkpoint orders the rows of queries and keys for a rotation of neighbours. `experts`: the mixture
    of experts that some layers have; `intermediate_size` is that of the other layers. `latent`:
    attention is latent, and `head_dim` is the size of a head of queries and keys. `convolution`: some layers have a short
    convolution in place of attention. `has_sinks`: each head has a learned logit in the denominator of its softmax.
    `alibi_slopes`: one for each head; empty: no ALiBi. `embedding_norm`: embeddings pass a norm before the first layer.
    `inner_sizes`: the inner size of the MLP of each layer; empty: `intermediate_size`. `gate_deviations`: for each layer,
    how many standard deviations above the mean gates begin to count; None: all count. `altup`: a token has several hidden
    states. The last `shared_kv_layers` layers have no keys and values: each reads those of the last layer before them with
    the same window. `full_heads`: layers with full attention have other heads of keys and values. `layer_factors`: the
    result of a layer is multiplied by a stored number. `recurrent`: some layers have a recurrent state in place of
    attention. `has_output_gate`: the result of attention is multiplied by the sigmoid of gates, which the product of
    queries computes too, or if `gates_apart` a product of their own, of which files with `one_gate_a_head` have a row for
    each head. `mixers`: the layers with attention or a state, in a
    model whose layers have one branch; the inner size of the others is in `inner_sizes`. `weight_factors`: the factors by
    which rows of stored weights are multiplied, by the end of our name. `state_placement`: the placement of layers with a
    state; None: that of all others. `blocks`: the layers in which the tokens of a picture see each other.
    `is_draft_head`: a `DraftHead`, which has the embedding and output layer of the model that it drafts for. With
    `served_size`, the size of that model's hidden states, it is an `AssistantHead`, which has the embedding alone and no
    keys and values: its layers read those of `read_layers` in the model's cache.
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
    norm: NormConfig
    activation: Activation
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig | None, ...]
    attention_scale: float
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    logits_bias: bool = False
    head_norm: HeadNormConfig | None = None
    placement: Placement = "pre"
    shares_norm: bool = False
    is_gated: bool = True
    fused_qkv: bool = False
    fused_gate_up: bool = False
    qkv_layout: QkvLayout = "stacked"
    interleaved_rope: bool = False
    num_positions: int = 0
    first_position: int = 0
    sinusoids: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    convolution: ConvolutionConfig | None = None
    has_sinks: bool = False
    alibi_slopes: tuple[float, ...] = ()
    embedding_norm: bool = False
    inner_sizes: tuple[int, ...] = ()
    gate_deviations: tuple[float | None, ...] = ()
    altup: AltUpConfig | None = None
    shared_kv_layers: int = 0
    full_heads: HeadSizes | None = None
    layer_factors: bool = False
    recurrent: RecurrentConfig | None = None
    has_output_gate: bool = False
    gates_apart: bool = False
    one_gate_a_head: bool = False
    mixers: tuple[bool, ...] = ()
    weight_factors: tuple[tuple[str, RowFactors], ...] = ()
    state_placement: Placement | None = None
    blocks: Literal["none", "sliding", "all"] = "none"
    is_draft_head: bool = False
    served_size: int = 0
    read_layers: tuple[int, ...] = ()

    @property
    def kind(self) -> Literal["decoder"]:
        return "decoder"

    @property
    def norm_eps(self) -> float:
        return self.norm.eps

    @property
    def cache_heads(self) -> int:
        """The heads of keys, and of values, in a row of the cache."""
        return self.num_kv_heads if self.full_heads is None else max(self.num_kv_heads, self.full_heads.num_kv_heads)

    @property
    def cache_head_dim(self) -> int:
        """The elements of these heads; a layer may have fewer heads that are larger."""
        if self.full_heads is None:
            return self.head_dim
        elements = self.full_heads.num_kv_heads * self.full_heads.head_dim
        return max(self.head_dim, -(-elements // self.cache_heads))

    @property
    def head_kinds(self) -> tuple[HeadSizes, ...]:
        plain = HeadSizes(self.num_kv_heads, self.head_dim)
        return (plain,) if self.full_heads is None else (plain, self.full_heads)

    def heads(self, layer: int) -> HeadSizes:
        return self.head_kinds[-1] if self.windows[layer] is None else self.head_kinds[0]

    @property
    def cache_layers(self) -> int:
        """The number of layers that write keys and values; at least 1, since capacity is counted in tokens."""
        return max(1, sum(map(self.writes_cache, range(self.num_layers))))

    def writes_cache(self, layer: int) -> bool:
        convolves = self.has_convolution(layer)
        attends = self.has_mixer(layer) and not convolves and (not self.has_state(layer) or self.attends_beside)
        return attends and not self.served_size and layer < self.num_layers - self.shared_kv_layers

    def cache_layer(self, layer: int) -> int:
        """Return which of the layers that write keys and values has those that a layer reads."""
        if self.served_size:
            return self.read_layers[layer]
        own = [one for one in range(self.num_layers) if self.writes_cache(one)]
        source = layer if layer in own else max(one for one in own if self.windows[one] == self.windows[layer])
        return own.index(source)

    def placement_of(self, layer: int) -> Placement:
        return self.state_placement if self.state_placement and self.has_state(layer) else self.placement

    def sees_blocks(self, layer: int) -> bool:
        return self.blocks == "all" or (self.blocks == "sliding" and self.windows[layer] is not None)

    def has_mixer(self, layer: int) -> bool:
        return not self.mixers or self.mixers[layer]

    def has_state(self, layer: int) -> bool:
        return self.recurrent is not None and self.recurrent.layers[layer]

    @property
    def attends_beside(self) -> bool:
        """Whether layers with a state have attention too."""
        return self.recurrent is not None and self.recurrent.beside

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """The FP32 elements of a sequence's state in each layer that has one."""
        if self.convolution is not None:
            return (tail_elements(self.convolution.width, self.hidden_size),) * sum(self.convolution.layers)
        if self.recurrent is None:
            return ()
        return (self.recurrent.sizes.state_elements,) * sum(self.recurrent.layers)

    def inner_size(self, layer: int) -> int:
        return self.inner_sizes[layer] if self.inner_sizes else self.intermediate_size

    def has_convolution(self, layer: int) -> bool:
        return self.convolution is not None and self.convolution.layers[layer]

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    def draft_head(self) -> ModelConfig:
        """Return the config of this model's draft head: one layer, like the first that attends."""
        attends = 0 if self.recurrent is None else self.recurrent.layers.index(False)
        experts = self.experts and replace(self.experts, layers=(self.experts.layers[attends],))
        windows, ropes = (self.windows[attends],), (self.ropes[attends],)
        one = replace(self, num_layers=1, windows=windows, ropes=ropes, recurrent=None, experts=experts)
        return replace(one, tie_embeddings=True, is_draft_head=True)

    def reading(self, served: ModelConfig) -> ModelConfig:
        """Return the config of this head for a model, whose last layer with the same kind of attention each layer reads.

        Raises:
            CheckpointInvalid: If the head was made for another model.
        """
        last = {served.windows[layer] is None: layer for layer in range(served.num_layers)}
        sources = [last.get(window is None) for window in self.windows]
        alike = [
            source is not None
            and replace(self.heads(layer), keys_are_values=served.heads(source).keys_are_values) == served.heads(source)
            for layer, source in enumerate(sources)
        ]
        ours, theirs = (self.served_size, self.vocab_size), (served.hidden_size, served.vocab_size)
        if ours != theirs or not all(alike):
            raise CheckpointInvalid(
                f"{self.architecture} drafts for a model with hidden states of {ours[0]}, {ours[1]:,} tokens and its heads of keys and"
                f" values, and {served.architecture} has {theirs[0]} and {theirs[1]:,}: give the head of this model."
            )
        return replace(self, read_layers=tuple(served.cache_layer(one) for one in sources if one is not None))

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face config.json. Raises `CheckpointInvalid` for missing, wrong or unknown values."""
        architecture = decoder_architecture(values)
        family = DECODER_FAMILIES[architecture]
        config = _usual_names(values, family)
        fields = _shape(config, family) | {"architecture": architecture}
        fields |= _attention(config, family, fields)
        fields |= {
            "vocab_size": config.integer("vocab_size"),
            "norm": replace(family.norm, eps=config.number(family.norm_eps, family.eps)),
            "activation": _activation(config, family),
            "tie_embeddings": config.boolean("tie_word_embeddings", family.tie_embeddings),
            "mlp_bias": family.has_mlp_bias and config.boolean("mlp_bias", False),
            **family.fields,
        }
        if family.head_norm is not None:
            fields["head_norm"] = replace(family.head_norm, eps=fields["norm"].eps)
        if family.read is not None:
            fields |= family.read(config, fields)
        if "max_model_len" not in fields:
            fields["max_model_len"] = _max_model_len(config, fields["ropes"])
        return _unscaled_branches(fields)


def _unscaled_branches(fields: Fields) -> ModelConfig:
    """Return the config without the factor m of the branches' results, h + m · f(norm h).

    The model computes g = h / m instead: g + f(norm g). The norm of g is that of h if its epsilon is divided by m².
    """
    m = fields.pop("residual_multiplier", 1.0)
    config = ModelConfig(**fields)
    if m == 1.0:
        return config
    norm = replace(config.norm, eps=config.norm.eps / m**2)
    return replace(config, norm=norm, embedding_scale=config.embedding_scale / m)


def decoder_architecture(values: Mapping[str, Any]) -> str:
    """Return the first supported name in `architectures`, or the family of `model_type` if there is none.

    A class whose text model can be one of several has a row for each of them: the name, a slash, the type of the text model.
    """
    names = values.get("architectures") or [
        name for name, family in DECODER_FAMILIES.items() if family.model_type == values.get("model_type")
    ]
    listed = [str(name) for name in names] if isinstance(names, list) else []
    inner = values.get("text_config")
    kind = inner.get("model_type") if isinstance(inner, Mapping) else None
    asked = [OTHER_NAMES.get(name, name).partition("/")[0] for name in listed]
    rows = [row for name in asked for row in (f"{name}/{kind or DEFAULT_TEXTS.get(name)}", name)]
    known = [row for row in rows if row in DECODER_FAMILIES]
    if not known:
        raise NotNative(f"config.json: {refusal(listed, str(values.get('model_type')))}")
    if values.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise CheckpointInvalid(
            "config.json: use_bidirectional_attention makes this decoder an encoder. It is served for embeddings with the architecture"
            " of its plain Model, or with a modules.json."
        )
    return known[0]


def _usual_names(values: Mapping[str, Any], family: DecoderFamily) -> ConfigReader:
    config = ConfigReader(values)
    if family.text_config is not None and config.has(family.text_config):
        inner = config.section(family.text_config)
        # The embeddings are tied if either place says so: transformers writes it to one of them.
        shared = {name: values[name] for name in ("tie_word_embeddings", "backbone_hidden_size") if name in values}
        config = ConfigReader(ChainMap(*_maps(inner.values), shared, dict(family.defaults)), inner.where)
    named = {usual: config.values[own] for usual, own in family.aliases.items() if config.has(own)}
    return ConfigReader(ChainMap(*_maps(config.values), named), config.where) if named else config


def _maps(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    maps = values.maps if isinstance(values, ChainMap) else [values]
    return [one if isinstance(one, dict) else dict(one) for one in maps]


def _shape(config: ConfigReader, family: DecoderFamily) -> Fields:
    num_heads, hidden_size = config.integer("num_attention_heads"), config.integer("hidden_size")
    kinds = config.values.get("layers_block_type") if family.is_hybrid else None
    layers = {"default": len(kinds)} if isinstance(kinds, list) else {}
    inner = None if config.has("intermediate_size") or family.fields.get("is_gated", True) else 4 * hidden_size
    if isinstance(config.values.get("intermediate_size"), list):
        inner = max(config.integers("intermediate_size"))
    return {
        "num_layers": config.integer("num_hidden_layers", **layers, at_most=MAX_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": _kv_heads(config, num_heads),
        "head_dim": config.integer("head_dim", family.head_dim or max(1, hidden_size // num_heads)),
        "hidden_size": hidden_size,
        "intermediate_size": inner or config.integer("intermediate_size"),
    }


def _attention(config: ConfigReader, family: DecoderFamily, fields: Fields) -> Fields:
    head_dim, types = fields["head_dim"], _layer_types(config, family, fields["num_layers"])
    by_config = family.attention_biases in ("config", "config_qkv") and config.boolean("attention_bias", False)
    return {
        "windows": _windows(config, family, types),
        "ropes": _ropes(config, family, head_dim, types),
        "interleaved_rope": family.interleaved,
        "attention_scale": head_dim**-0.5,
        "qkv_bias": by_config or family.attention_biases == "qkv",
        "output_bias": by_config and family.attention_biases == "config",
    }


def _kv_heads(config: ConfigReader, num_heads: int) -> int:
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointInvalid(
            f"{config.where}: {num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly."
        )
    return num_kv_heads


def _activation(config: ConfigReader, family: DecoderFamily) -> Activation:
    name = config.text(*family.activation)
    if name not in ACTIVATIONS:
        raise CheckpointInvalid(
            f"{config.where}: activation {name!r} is not known; known are {', '.join(ACTIVATIONS)}."
        )
    return ACTIVATIONS[name]


def _layer_types(config: ConfigReader, family: DecoderFamily, num_layers: int) -> tuple[str, ...]:
    """Return `full_attention` or `sliding_attention` for each layer, from config.json or the family's rule."""
    plain = ("llama", "mistral", "phi3", "lfm2", "lfm2_moe", "lfm2_vl", "lfm3", "llama4_text", "llama4")
    reads = family.model_type not in plain and not family.is_hybrid
    if config.has("layer_types") and reads:
        return known_texts(config, "layer_types", num_layers, " ".join(_LAYER_TYPES))
    slides = family.slides
    types = tuple(_LAYER_TYPES[slides is not None and slides(config, layer)] for layer in range(num_layers))
    listed = config.values.get("layer_types")
    if family.model_type in ("mistral", "phi3") and listed not in (None, list(types)) and config.has("sliding_window"):
        raise CheckpointInvalid(
            f"{config.where}: layer_types gives some layers another attention, and in {family.title} all have the same."
        )
    return types


def _windows(config: ConfigReader, family: DecoderFamily, types: tuple[str, ...]) -> tuple[int | None, ...]:
    # A null means full attention; an absent key means the family's default.
    has_switch = family.model_type in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
    if has_switch and not config.boolean("use_sliding_window", False):
        return (None,) * len(types)  # sliding_window may be 0 then
    window = config.optional_integer("sliding_window", None if "sliding_window" in config.values else family.window)
    return tuple(window if name == "sliding_attention" else None for name in types)


def _ropes(
    config: ConfigReader, family: DecoderFamily, head_dim: int, types: tuple[str, ...]
) -> tuple[RopeConfig | None, ...]:
    if not family.sliding_ropes:
        rope = parse_rope(config, head_dim, family.theta, partial=family.partial)
        if family.sections:
            rope = replace(rope, axes=rope_axes(config, rope, family.sections, family.interleaved_axes))
        return (rope,) * len(types)
    full = parse_rope(config, head_dim, family.theta, "full_attention")
    nested = config.section("rope_parameters").section("sliding_attention")
    if nested.text("rope_type", "default") != "default":
        raise CheckpointInvalid(f"{nested.where}: sliding layers must have rope_type 'default', without scaling.")
    refuse(nested, "partial_rotary_factor", 1.0, "rotating a part of the heads of sliding layers")
    theta = nested.number("rope_theta", config.number("rope_local_base_freq", family.local_theta or full.theta))
    sliding = RopeConfig(theta, head_dim)
    return tuple(sliding if name == "sliding_attention" else full for name in types)


def _max_model_len(config: ConfigReader, ropes: tuple[RopeConfig | None, ...]) -> int:
    """Return the longest context: max_position_embeddings, or what YaRN or linear scaling gives if it is larger."""
    longest = config.integer("max_position_embeddings")
    extended = [longest]
    for rope in filter(None, ropes):
        if rope.kind == "yarn":
            extended.append(int(rope.factor * rope.original_max_position_embeddings))
        if rope.kind == "linear":
            extended.append(min(int(rope.factor * longest), config.integer("max_sequence_length", longest)))
    return max(extended)
