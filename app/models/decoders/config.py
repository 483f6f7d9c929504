"""Reads a decoder's config.json into one frozen `ModelConfig`: every difference between families is a value.

Rotary position embeddings are read in both formats of transformers. Absent values get the family's default, as in
transformers; values that are not understood are rejected by name. Torch is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from app.errors import CheckpointInvalid
from app.models.config_reader import MAX_LAYERS, ConfigReader

Activation = Literal["silu", "gelu", "gelu_tanh"]

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    """The defaults of an architecture's config.json, and the weights and norms that only this family has."""

    model_type: str
    default_window: int | None = None
    tie_embeddings: bool = False
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    theta: float = 10_000.0
    local_theta: float | None = None  # theta of sliding layers, if it differs
    attention_biases: Literal["config", "qkv", "none"] = "config"
    has_mlp_bias: bool = False
    qk_norm: bool = False
    fused_weights: bool = False
    gemma: bool = False
    norm_eps: float = 1e-6


# The defaults are those of transformers' configuration classes, which omit default values from a saved config.json.
DECODER_FAMILIES: Mapping[str, DecoderFamily] = {
    "LlamaForCausalLM": DecoderFamily("llama", has_mlp_bias=True),
    "MistralForCausalLM": DecoderFamily("mistral", default_window=4096, attention_biases="none"),
    "Qwen2ForCausalLM": DecoderFamily("qwen2", default_window=4096, attention_biases="qkv"),
    "Qwen3ForCausalLM": DecoderFamily("qwen3", default_window=4096, head_dim=128, qk_norm=True),
    "Phi3ForCausalLM": DecoderFamily("phi3", attention_biases="none", fused_weights=True, norm_eps=1e-5),
    "SmolLM3ForCausalLM": DecoderFamily("smollm3", tie_embeddings=True, theta=2_000_000.0, has_mlp_bias=True),
    "Gemma2ForCausalLM": DecoderFamily("gemma2", default_window=4096, tie_embeddings=True, head_dim=256, gemma=True),
    "Gemma3ForCausalLM": DecoderFamily(
        "gemma3_text",
        default_window=4096,
        tie_embeddings=True,
        head_dim=256,
        theta=1_000_000.0,
        local_theta=10_000.0,
        qk_norm=True,
        gemma=True,
    ),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder.

    `windows` and `ropes` have one entry per layer; None means full attention, or no rotary embedding.
    `attention_scale` multiplies scores, `embedding_scale` the embeddings. `gemma` means norms with weight 1 + w,
    and one more norm after each branch.
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
    activation: Activation
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig | None, ...]
    attention_scale: float
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fused_weights: bool = False  # the checkpoint holds qkv_proj and gate_up_proj as one tensor each
    gemma: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0

    @property
    def kind(self) -> Literal["decoder"]:
        """The kind of checkpoint, as engines are selected by."""
        return "decoder"

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face config.json.

        Raises `CheckpointInvalid` for values that are missing, wrong or unknown.
        """
        config, architecture = ConfigReader(values), decoder_architecture(values)
        family = DECODER_FAMILIES[architecture]
        num_layers = config.integer("num_hidden_layers", at_most=MAX_LAYERS)
        num_heads = config.integer("num_attention_heads")
        hidden_size = config.integer("hidden_size")
        head_dim = config.integer("head_dim", family.head_dim or max(1, hidden_size // num_heads))
        types = _layer_types(config, family, num_layers)
        bias = family.attention_biases == "config" and config.boolean("attention_bias", False)
        ropes = _ropes(config, family, head_dim, types)
        return cls(
            architecture=architecture,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_kv_heads(config, num_heads),
            head_dim=head_dim,
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            vocab_size=config.integer("vocab_size"),
            max_model_len=_max_model_len(config, ropes),
            norm_eps=config.number("rms_norm_eps", family.norm_eps),
            activation=_activation(config, family),
            windows=_windows(config, family, types),
            ropes=ropes,
            attention_scale=(config.number("query_pre_attn_scalar", 256) if family.gemma else head_dim) ** -0.5,
            tie_embeddings=config.boolean("tie_word_embeddings", family.tie_embeddings),
            qkv_bias=bias or family.attention_biases == "qkv",
            output_bias=bias,
            mlp_bias=family.has_mlp_bias and config.boolean("mlp_bias", False),
            qk_norm=family.qk_norm,
            fused_weights=family.fused_weights,
            gemma=family.gemma,
            attention_softcap=_softcap(config, family, "attn_logit_softcapping", 50.0),
            logit_softcap=_softcap(config, family, "final_logit_softcapping", 30.0),
            embedding_scale=hidden_size**0.5 if family.gemma else 1.0,
        )


def decoder_architecture(values: Mapping[str, Any]) -> str:
    """Return the first supported name in `architectures`.

    If config.json names no architecture, its `model_type` selects the family.
    """
    names = values.get("architectures") or [
        name for name, family in DECODER_FAMILIES.items() if family.model_type == values.get("model_type")
    ]
    known = (
        [name for name in names if isinstance(name, str) and name in DECODER_FAMILIES]
        if isinstance(names, list)
        else []
    )
    if not known:
        said = (
            ", ".join(str(name) for name in names)
            if isinstance(names, list) and names
            else str(values.get("model_type"))
        )
        raise CheckpointInvalid(
            f"config.json: architecture {said} is not supported; supported are {', '.join(DECODER_FAMILIES)} and the"
            " encoders of docs/encoders.md."
        )
    if values.get("use_bidirectional_attention"):
        raise CheckpointInvalid(
            "config.json: use_bidirectional_attention makes this decoder an encoder. It is served for embeddings with the architecture"
            " of its plain Model, or with a modules.json."
        )
    return known[0]


def _kv_heads(config: ConfigReader, num_heads: int) -> int:
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointInvalid(
            f"config.json: {num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly."
        )
    return num_kv_heads


def _activation(config: ConfigReader, family: DecoderFamily) -> Activation:
    # Gemma's first config files have hidden_act "gelu" but use the tanh form; transformers reads only
    # hidden_activation.
    name = config.text("hidden_activation", "gelu_pytorch_tanh") if family.gemma else config.text("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise CheckpointInvalid(f"config.json: activation {name!r} is not known; known are {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


def _softcap(config: ConfigReader, family: DecoderFamily, name: str, default: float) -> float | None:
    if not family.gemma or (name in config.values and not config.has(name)):
        return None
    if family.model_type == "gemma3_text" and not config.has(name):
        return None  # Gemma 3 replaced the caps by norms of queries and keys
    return config.number(name, default)


# ---- layers with a sliding window, and layers with RoPE ------------------------------------------------------------

_LAYER_TYPES = ("full_attention", "sliding_attention")


def _layer_types(config: ConfigReader, family: DecoderFamily, num_layers: int) -> tuple[str, ...]:
    """Return `full_attention` or `sliding_attention` for each layer.

    If config.json does not list them, the family's rule decides.
    """
    if config.has("layer_types") and family.model_type not in ("llama", "mistral", "phi3"):
        types = config.texts("layer_types", num_layers)
        unknown = set(types) - set(_LAYER_TYPES)
        if unknown:
            raise CheckpointInvalid(
                f"config.json: layer_types {sorted(unknown)} are not known; known are {', '.join(_LAYER_TYPES)}."
            )
        return types
    slides = _SLIDES.get(family.model_type)
    return tuple(_LAYER_TYPES[slides is not None and slides(config, layer)] for layer in range(num_layers))


def _qwen_slides(config: ConfigReader, layer: int) -> bool:
    return config.boolean("use_sliding_window", False) and layer >= config.integer("max_window_layers", 28, at_least=0)


def _smollm3_slides(config: ConfigReader, layer: int) -> bool:
    return config.boolean("use_sliding_window", False) and config.has("sliding_window") and not _has_rope(config, layer)


_SLIDES: Mapping[str, Callable[[ConfigReader, int], bool]] = {
    "mistral": lambda config, layer: True,
    "phi3": lambda config, layer: True,
    "qwen2": _qwen_slides,
    "qwen3": _qwen_slides,
    "smollm3": _smollm3_slides,
    "gemma2": lambda config, layer: layer % 2 == 0,
    "gemma3_text": lambda config, layer: (layer + 1) % config.integer("sliding_window_pattern", 6) != 0,
}


def _windows(config: ConfigReader, family: DecoderFamily, types: tuple[str, ...]) -> tuple[int | None, ...]:
    # A null means full attention; an absent key means the family's default.
    window = config.optional_integer(
        "sliding_window", None if "sliding_window" in config.values else family.default_window
    )
    if family.model_type in ("qwen2", "qwen3") and not config.boolean("use_sliding_window", False):
        window = None
    return tuple(window if name == "sliding_attention" else None for name in types)


def _has_rope(config: ConfigReader, layer: int) -> bool:
    """Return True if a layer has RoPE. SmolLM3 leaves every fourth layer without positions."""
    listed = config.values.get("no_rope_layers")
    if isinstance(listed, list) and layer < len(listed):
        return bool(listed[layer])
    return (layer + 1) % config.integer("no_rope_layer_interval", 4) != 0


def _ropes(
    config: ConfigReader, family: DecoderFamily, head_dim: int, types: tuple[str, ...]
) -> tuple[RopeConfig | None, ...]:
    if family.local_theta is None:
        rope = parse_rope(config, head_dim, family.theta)
        return tuple(
            rope if family.model_type != "smollm3" or _has_rope(config, layer) else None for layer in range(len(types))
        )
    full = parse_rope(config, head_dim, family.theta, "full_attention")
    nested = config.section("rope_parameters").section("sliding_attention")
    if nested.text("rope_type", "default") != "default":
        raise CheckpointInvalid(f"{nested.where}: sliding layers must have rope_type 'default', without scaling.")
    theta = nested.number("rope_theta", config.number("rope_local_base_freq", family.local_theta))
    sliding = RopeConfig(theta, head_dim)
    return tuple(sliding if name == "sliding_attention" else full for name in types)


def _max_model_len(config: ConfigReader, ropes: tuple[RopeConfig | None, ...]) -> int:
    """Return the longest context.

    This is max_position_embeddings, or the original length times YaRN's factor if that is larger.
    """
    extended = [rope.factor * rope.original_max_position_embeddings for rope in ropes if rope and rope.kind == "yarn"]
    return max([config.integer("max_position_embeddings"), *(int(length) for length in extended)])


RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]

# Phi-3's first releases called longrope "su". "dynamic" differs only beyond max_position_embeddings, which is never
# served.
ROPE_KINDS: Mapping[str, RopeKind] = {
    "default": "default",
    "dynamic": "default",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embeddings of one layer: they rotate the first `dim` elements of a head, with base `theta`.

    `factor` scales the context beyond `original_max_position_embeddings`. Each other field belongs to one kind,
    and is None or empty for the others.
    """

    theta: float
    dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    attention_factor: float | None = None  # yarn, longrope
    short_factor: tuple[float, ...] = ()  # longrope
    long_factor: tuple[float, ...] = ()


def parse_rope(config: ConfigReader, head_dim: int, default_theta: float, layer_type: str | None = None) -> RopeConfig:
    """Read the rotary embeddings of one kind of layer.

    `layer_type` selects among nested `rope_parameters`, as in Gemma 3.
    """
    section = _section(config, layer_type)
    theta = section.number("rope_theta", config.number("rope_theta", default_theta))
    partial = section.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    dim = int(head_dim * partial)
    if dim % 2 or not 0 < dim <= head_dim:
        raise CheckpointInvalid(
            f"{section.where}: rotary embeddings rotate pairs, and {dim} of {head_dim} elements cannot be paired."
        )
    name = section.text("rope_type", section.text("type", "default"))
    kind = ROPE_KINDS.get(name)
    if kind is None:
        raise CheckpointInvalid(
            f"{section.where}: rope_type {name!r} is not known; known are {', '.join(sorted(ROPE_KINDS))}."
        )
    if kind == "yarn" and section.has("short_factor"):
        kind = "longrope"  # Phi-3's second releases called it yarn
    return RopeConfig(theta, dim) if kind == "default" else _scaled(config, section, RopeConfig(theta, dim, kind))


def _section(config: ConfigReader, layer_type: str | None) -> ConfigReader:
    new, old = config.section("rope_parameters"), config.section("rope_scaling")
    if new.has("full_attention") or new.has("sliding_attention"):
        full, sliding = new.section("full_attention"), new.section("sliding_attention")
        if layer_type is None and full.values and sliding.values and full.values != sliding.values:
            raise CheckpointInvalid(
                f"{new.where} differs between kinds of layers, which is supported for Gemma 3 only."
            )
        return new.section(layer_type or "full_attention")
    return old if old.values and not new.values else new


def _scaled(config: ConfigReader, section: ConfigReader, plain: RopeConfig) -> RopeConfig:
    longest = config.integer("max_position_embeddings")
    original = config.optional_integer("original_max_position_embeddings")
    original = original or section.integer("original_max_position_embeddings", longest)
    half = plain.dim // 2
    is_longrope, is_llama3 = plain.kind == "longrope", plain.kind == "llama3"
    factor = (
        section.number("factor", longest / original) if plain.kind in ("longrope", "yarn") else section.number("factor")
    )
    return RopeConfig(
        theta=plain.theta,
        dim=plain.dim,
        kind=plain.kind,
        factor=factor,
        original_max_position_embeddings=original,
        low_freq_factor=section.number("low_freq_factor") if is_llama3 else 1.0,
        high_freq_factor=section.number("high_freq_factor") if is_llama3 else 4.0,
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        mscale=section.optional_number("mscale"),
        mscale_all_dim=section.optional_number("mscale_all_dim"),
        truncate=section.boolean("truncate", True),
        attention_factor=section.optional_number("attention_factor"),
        short_factor=section.numbers("short_factor", half) if is_longrope else (),
        long_factor=section.numbers("long_factor", half) if is_longrope else (),
    )
