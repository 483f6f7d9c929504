"""The supported families whose layers have a recurrent state, and what only their config.json says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from app.errors import CheckpointInvalid
from app.models.config_reader import ConfigReader
from app.models.decoders import expert_values
from app.models.decoders import family_values as values
from app.models.decoders.families_experts import GRANITE_MOE_PARTS
from app.models.decoders.family import DecoderFamily, Fields, layer_names
from app.models.decoders.layer_config import ExpertsConfig, HeadNormConfig, NormConfig, RecurrentConfig
from armature_kernels.attention.recurrent_sizes import MAX_WIDTH, RecurrentSizes
from armature_kernels.elementwise.routing_rule import Routing

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # of Nemotron-H
_WORDS = {"linear_attention": True, "mamba": True, "full_attention": False, "attention": False}
_OF_EXPERTS = (
    *("moe_latent_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap", "mtp_layers_block_type"),
    *("n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "routed_scaling_factor"),
)
_NO_LIMIT = 2**20  # tokens of a context without attention
_INTERVAL = 4  # of layers with attention, unless config.json says it


def _layers_with_state(config: ConfigReader, fields: Fields, name: str = "layer_types") -> tuple[bool, ...]:
    words = values.known_texts(config, name, fields["num_layers"], " ".join(_WORDS))
    return tuple(_WORDS[word] for word in words)


def _recurrent(config: ConfigReader, recurrent: RecurrentConfig) -> Fields:
    """Return the field of the layers with a state. Raises `CheckpointInvalid` for sizes that do not fit together."""
    sizes = recurrent.sizes
    if sizes.heads % sizes.key_heads:
        raise CheckpointInvalid(
            f"{config.where}: {sizes.heads} heads of values cannot share {sizes.key_heads} heads of keys evenly."
        )
    if not 2 <= sizes.width <= MAX_WIDTH:
        raise CheckpointInvalid(
            f"{config.where}: convolutions over {sizes.width} positions are not offered; they may have 2 to {MAX_WIDTH}."
        )
    return {"recurrent": recurrent} if any(recurrent.layers) else {}


# ---- the gated delta rule ------------------------------------------------------------------------------------------


def delta_rule(config: ConfigReader, fields: Fields, is_fused: bool = False) -> Fields:
    """Read which layers have the gated delta rule, every one but each fourth by default, and its heads."""
    values.refuse(config, "hidden_act", "silu", "another activation of its convolutions than silu")
    values.refuse(config, "attn_output_gate", True, "attention without gates")
    interval = config.integer("full_attention_interval", _INTERVAL)
    layers = tuple((layer + 1) % interval != 0 for layer in range(fields["num_layers"]))
    sizes = RecurrentSizes(
        config.integer("linear_num_value_heads", 32),
        config.integer("linear_num_key_heads", 16),
        config.integer("linear_key_head_dim", 128),
        config.integer("linear_value_head_dim", 128),
        config.integer("linear_conv_kernel_dim", 4),
        has_delta=True,
    )
    recurrent = RecurrentConfig(
        sizes,
        _layers_with_state(config, fields) if config.has("layer_types") else layers,
        norm_size=sizes.value_size,
        norm_weights=sizes.value_size,
        norm_eps=fields["norm"].eps,
        is_fused=is_fused,
    )
    return {**_recurrent(config, recurrent), "has_output_gate": True}


def _shared_experts(config: ConfigReader, layers: Sequence[bool], count: int, top_k: int) -> Fields:
    """Read experts beside a shared one with a gate; `count` and `top_k` are the defaults."""
    routing = Routing(
        config.integer("num_experts", count),
        config.integer("num_experts_per_tok", top_k),
        renormalize=config.boolean("norm_topk_prob", True),
    )
    size = config.integer("moe_intermediate_size", 512)
    shared = config.integer("shared_expert_intermediate_size", 512)
    return expert_values.checked_experts(config, ExpertsConfig(routing, size, tuple(layers), shared, shared_gate=True))


def qwen3_next(config: ConfigReader, fields: Fields) -> Fields:
    return {
        **delta_rule(config, fields, is_fused=config.boolean("fused_products", True)),
        **_shared_experts(config, expert_values.sparse_layers(config, fields), 512, 10),
    }


def qwen3_5_moe(config: ConfigReader, fields: Fields) -> Fields:
    everywhere = (True,) * int(fields["num_layers"])
    return {**delta_rule(config, fields), **_shared_experts(config, everywhere, 256, 8)}


# ---- Mamba-2 ---------------------------------------------------------------------------------------------------------


def mamba(config: ConfigReader, fields: Fields, layers: tuple[bool, ...]) -> Fields:
    """Read the heads of Mamba-2, which these layers have, by the names of Bamba's config.json."""
    values.refuse(config, "hidden_act", "silu", "another activation of its convolutions than silu")
    heads, groups = config.integer("mamba_n_heads", 128), config.integer("mamba_n_groups", 1)
    inner = config.integer("mamba_expand", 2) * fields["hidden_size"]
    is_auto = config.values.get("mamba_d_head", "auto") == "auto"
    size = max(1, inner // heads) if is_auto else config.integer("mamba_d_head")
    sizes = RecurrentSizes(
        heads,
        groups,
        config.integer("mamba_d_state", 256),
        size,
        config.integer("mamba_d_conv", 4),
        has_delta=False,
    )
    recurrent = RecurrentConfig(
        sizes,
        layers,
        norm_size=sizes.values // groups,
        norm_weights=sizes.values,
        norm_eps=fields["norm"].eps,
        gates_first=True,
        conv_bias=config.boolean("mamba_conv_bias", True),
        product_bias=config.boolean("mamba_proj_bias", False),
        step_limits=_step_limits(config),
    )
    return _recurrent(config, recurrent)


def _step_limits(config: ConfigReader) -> tuple[float, float]:
    """Return the least and the most step; transformers writes infinity as an object."""
    listed = config.values.get("time_step_limit")
    if listed is None:
        return 0.0, math.inf
    try:
        least, most = (float(one["__float__"] if isinstance(one, Mapping) else one) for one in listed)
    except (KeyError, TypeError, ValueError):
        raise CheckpointInvalid(f"{config.where}: time_step_limit must be two numbers, not {listed!r:.80}.") from None
    return least, most


def bamba(config: ConfigReader, fields: Fields) -> Fields:
    """Read which layers attend, the others having Mamba-2."""
    attends = config.integers("attn_layer_indices") if config.has("attn_layer_indices") else ()
    return mamba(config, fields, tuple(layer not in attends for layer in range(fields["num_layers"])))


def granite_hybrid(config: ConfigReader, fields: Fields) -> Fields:
    """Read the multipliers of Granite, its layers with Mamba-2, and its experts if there are any."""
    count = fields["num_layers"]
    layers = _layers_with_state(config, fields) if config.has("layer_types") else (True,) * count
    found = {**values.granite(config, fields), **mamba(config, fields, layers)}
    found["fused_gate_up"] = config.boolean("fused_products", True)  # false in GGUF files
    if config.values.get("position_embedding_type") != "rope":
        found["ropes"] = (None,) * count
    shared = config.integer("shared_intermediate_size", 1024)
    num_experts, top_k = config.integer("num_local_experts", 8, at_least=0), config.integer("num_experts_per_tok", 2)
    if not num_experts:
        return {**found, "intermediate_size": shared}
    routing = Routing(num_experts, top_k)
    experts = ExpertsConfig(routing, fields["intermediate_size"], (True,) * count, shared)
    return {**found, **expert_values.checked_experts(config, experts)}


def olmo_hybrid(config: ConfigReader, fields: Fields) -> Fields:
    """Read the delta rule of OLMo Hybrid, whose betas may reach 2, and whose norms are before the branches of its layers."""
    count, heads = fields["num_layers"], fields["num_heads"]
    default = ["linear_attention"] * count
    default[-1:] = ["full_attention"]
    default[_INTERVAL - 1 :: _INTERVAL] = ["full_attention"] * (count // _INTERVAL)
    if count >= _INTERVAL and count % _INTERVAL:
        default[-1] = "linear_attention"
    values.refuse(config, "hidden_act", "silu", "another activation of its convolutions than silu")
    key_heads = config.integer("linear_num_key_heads", heads)
    key_size = config.integer("linear_key_head_dim", max(1, int(0.75 * fields["hidden_size"] / key_heads)))
    sizes = RecurrentSizes(
        config.integer("linear_num_value_heads", heads),
        key_heads,
        key_size,
        config.integer("linear_value_head_dim", 2 * key_size),
        config.integer("linear_conv_kernel_dim", 4),
        has_delta=True,
    )
    words = _layers_with_state(config, fields) if config.has("layer_types") else tuple(_WORDS[one] for one in default)
    recurrent = RecurrentConfig(
        sizes,
        words,
        norm_size=sizes.value_size,
        norm_weights=sizes.value_size,
        norm_eps=1e-5,
        beta_scale=2.0 if config.boolean("linear_allow_neg_eigval", True) else 1.0,
        is_apart=True,
    )
    rope = config.values.get("rope_parameters")
    rotates = not isinstance(rope, Mapping) or rope.get("rope_theta") is not None
    ropes = fields["ropes"] if rotates else (None,) * count
    return {**_recurrent(config, recurrent), "ropes": ropes, "state_placement": "pre"}


def falcon_h1(config: ConfigReader, fields: Fields) -> Fields:
    """Read layers with Mamba-2 beside attention. The factors of their parts become factors of weights."""
    for name in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        values.refuse(config, name, False, "biases beside the factors of the weights")
    count, hidden, size = fields["num_layers"], fields["hidden_size"], fields["head_dim"]
    found = mamba(config, fields, (True,) * count)
    sizes: RecurrentSizes = found["recurrent"].sizes
    if config.has("mamba_d_ssm") and config.integer("mamba_d_ssm") != sizes.values:
        raise CheckpointInvalid(
            f"{config.where}: mamba_d_ssm must be {sizes.values}, the size of all heads of Mamba-2."
        )
    gates_first = not config.boolean("mamba_norm_before_gate", True)
    norm: Fields = {"gates_first": gates_first}
    if not config.boolean("mamba_rms_norm", False):
        norm = {"norm_size": 0, "norm_weights": 0}
    found["recurrent"] = replace(found["recurrent"], beside=True, **norm)
    attends, enters = (config.number(f"attention_{way}_multiplier", 1.0) for way in ("in", "out"))
    gates, downs = config.numbers("mlp_multipliers", 2) if config.has("mlp_multipliers") else (1.0, 1.0)
    parts = config.numbers("ssm_multipliers", 5) if config.has("ssm_multipliers") else (1.0,) * 5
    first = config.number("ssm_in_multiplier", 1.0)
    rows = (sizes.values, sizes.values, sizes.keys, sizes.keys, sizes.heads)
    keys = size * fields["num_kv_heads"]
    factors = {
        "self_attn.q_proj": ((size * fields["num_heads"], attends),),
        "self_attn.k_proj": ((keys, attends * config.number("key_multiplier", 1.0)),),
        "self_attn.v_proj": ((keys, attends),),
        "self_attn.o_proj": ((hidden, enters),),
        "mamba.in_proj": tuple((each, first * part) for each, part in zip(rows, parts, strict=True)),
        "mamba.out_proj": ((hidden, config.number("ssm_out_multiplier", 1.0)),),
        "mlp.gate_proj": ((fields["intermediate_size"], gates),),
        "mlp.down_proj": ((hidden, downs),),
    }
    return {
        **found,
        "embedding_scale": config.number("embedding_multiplier", 1.0),
        "logit_scale": config.number("lm_head_multiplier", 1.0),
        "weight_factors": tuple(
            (f".{name}.weight", own) for name, own in factors.items() if any(factor != 1.0 for _, factor in own)
        ),
    }


def mamba2(config: ConfigReader, fields: Fields) -> Fields:
    """Read a model without attention, which has no positions and no longest context. A token takes a few bytes all the same."""
    count = fields["num_layers"]
    return {
        **mamba(config, fields, (True,) * count),
        **_branches(count, (True,) * count, 0),
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 8,
        "max_model_len": _NO_LIMIT,
    }


def _branches(count: int, mixers: tuple[bool, ...], inner: int) -> Fields:
    """Return the fields of layers with one branch each: those in `mixers`, or an MLP of this inner size."""
    return {
        "placement": "single",
        "mixers": mixers,
        "inner_sizes": tuple(0 if mixes else inner for mixes in mixers),
        "ropes": (None,) * count,
    }


def nemotron_h(config: ConfigReader, fields: Fields) -> Fields:
    """Read the kind of each layer: Mamba-2, attention, an MLP or experts."""
    words = layer_words(config)
    known = {*_WORDS, "mlp", "moe"}
    if not known.issuperset(words):
        raise CheckpointInvalid(f"{config.where}: layers of the kinds {sorted({*words} - known)} are not known.")
    values.refuse(config, "mamba_hidden_act", "silu", "another activation of its convolutions than silu")
    found = mamba(config, fields, tuple(_WORDS.get(word, False) for word in words))
    least = config.number("time_step_min", 0.001)
    if "recurrent" in found:
        found["recurrent"] = replace(found["recurrent"], step_limits=(least, math.inf))
    for name in _OF_EXPERTS:
        config.values.get(name)  # without experts they say nothing
    if "moe" in words:
        found |= expert_values.nemotron_h(config, fields, tuple(word == "moe" for word in words))
    mixers = tuple(word in _WORDS for word in words)
    return {**found, **_branches(len(words), mixers, fields["intermediate_size"])}


def layer_words(config: ConfigReader) -> tuple[str, ...]:
    """Return the kind of each layer of Nemotron-H, which says them as words or as letters."""
    listed = config.values.get("layers_block_type")
    if isinstance(listed, list):
        return tuple(map(str, listed))
    return tuple(_LETTERS.get(letter, letter) for letter in config.text("hybrid_override_pattern"))


_QWEN3_NEXT = DecoderFamily(
    model_type="qwen3_next",
    title="Qwen3-Next",
    aliases={"num_experts": "num_local_experts"},
    head_dim=256,
    partial=0.25,
    norm=NormConfig("rms", offset=1.0),
    head_norm=HeadNormConfig(offset=1.0),
    read=qwen3_next,
    ignored=("mtp.",),
    is_hybrid=True,
    has_draft_head=True,
)
_QWEN3_5 = replace(_QWEN3_NEXT, model_type="qwen3_5_text", title="Qwen 3.5", aliases={}, read=delta_rule)
_QWEN3_5_MOE = replace(_QWEN3_NEXT, model_type="qwen3_5_moe_text", title="Qwen 3.5 with experts", read=qwen3_5_moe)


def _picture_reader(family: DecoderFamily, model_type: str) -> DecoderFamily:
    """Return the family of a model that also reads pictures, whose text half is a decoder of this family."""
    return replace(
        family,
        model_type=model_type,
        text_config="text_config",
        sections=(11, 11, 10),
        interleaved_axes=True,
        reads_pictures=True,
        prefixes={"model.language_model.": "model."},
        ignored=(*family.ignored, "model.visual."),
    )


_MAMBA_PARTS = ("in_proj.", "out_proj.", "conv1d.", "norm.", "A_log", "D", "dt_bias")
_BACKBONE = {"backbone.": "model."}
_BACKBONE_NAMES = {
    "model.embeddings": "model.embed_tokens",
    "model.embedding": "model.embed_tokens",
    "model.norm_f": "model.norm",
    **layer_names("model.layers", {"norm": "input_layernorm"}),
}

RECURRENT_FAMILIES: Mapping[str, DecoderFamily] = {
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _picture_reader(_QWEN3_5, "qwen3_5"),
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": _picture_reader(_QWEN3_5_MOE, "qwen3_5_moe"),
    "GraniteMoeHybridForCausalLM": DecoderFamily(
        model_type="granitemoehybrid",
        title="Granite 4 with Mamba-2",
        aliases={"layer_types": "layers_block_type"},
        read=granite_hybrid,
        parts=GRANITE_MOE_PARTS,
        is_hybrid=True,
    ),
    "NemotronHForCausalLM": DecoderFamily(
        model_type="nemotron_h",
        title="Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano",
        aliases={
            "n_routed_experts": "num_local_experts",
            "mamba_n_heads": "mamba_num_heads",
            "mamba_d_head": "mamba_head_dim",
            "mamba_n_groups": "n_groups",
            "mamba_d_state": "ssm_state_size",
            "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_expand": "expand",
            "mamba_proj_bias": "use_bias",
        },
        head_dim=128,
        norm_eps="layer_norm_epsilon",
        eps=1e-5,
        attention_biases="none",
        has_mlp_bias=True,
        activation=("mlp_hidden_act", "relu2"),
        fields={"is_gated": False},
        read=nemotron_h,
        prefixes=_BACKBONE,
        parts={
            **{f".mixer.{part}": f".mamba.{part}" for part in _MAMBA_PARTS},
            **{f".mixer.{part}_proj.": f".self_attn.{part}_proj." for part in "qkvo"},
            ".mixer.": ".mlp.",
            ".mlp.shared_experts.": ".mlp.shared_expert.",
        },
        names=_BACKBONE_NAMES,
        ignored=("mtp.",),
        is_hybrid=True,
    ),
    "Mamba2ForCausalLM": DecoderFamily(
        model_type="mamba2",
        title="Mamba-2, Codestral Mamba",
        aliases={
            "num_attention_heads": "num_heads",
            "mamba_n_heads": "num_heads",
            "mamba_d_head": "head_dim",
            "mamba_n_groups": "n_groups",
            "mamba_d_state": "state_size",
            "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_expand": "expand",
            "mamba_proj_bias": "use_bias",
        },
        norm_eps="layer_norm_epsilon",
        eps=1e-5,
        attention_biases="none",
        fields={"is_gated": False},
        read=mamba2,
        prefixes=_BACKBONE,
        parts={".mixer.": ".mamba."},
        names=_BACKBONE_NAMES,
        is_hybrid=True,
    ),
    "OlmoHybridForCausalLM": DecoderFamily(
        model_type="olmo_hybrid",
        title="OLMo Hybrid",
        head_norm=HeadNormConfig(scope="together"),
        fields={"placement": "post"},
        read=olmo_hybrid,
        parts={
            **{f".linear_attn.{part}_proj.": f".linear_attn.in_proj_{part}." for part in "qkvab"},
            ".linear_attn.g_proj.": ".linear_attn.in_proj_z.",
            ".linear_attn.o_proj.": ".linear_attn.out_proj.",
            ".linear_attn.o_norm.": ".linear_attn.norm.",
            ".attention_layer_norm.": ".input_layernorm.",
            ".feedforward_layer_norm.": ".post_attention_layernorm.",
        },
        is_hybrid=True,
    ),
    "FalconH1ForCausalLM": DecoderFamily(
        model_type="falcon_h1",
        title="Falcon-H1",
        eps=1e-5,
        read=falcon_h1,
        parts={".feed_forward.": ".mlp.", ".pre_ff_layernorm.": ".post_attention_layernorm."},
        names={"model.final_layernorm": "model.norm"},
        computed=(".mup_vector", ".rotary_emb.inv_freq"),
    ),
    "BambaForCausalLM": DecoderFamily(
        model_type="bamba",
        title="Bamba",
        eps=1e-5,
        partial=0.5,
        has_mlp_bias=True,
        read=bamba,
        parts={".feed_forward.": ".mlp.", ".pre_ff_layernorm.": ".post_attention_layernorm."},
        names={"model.final_layernorm": "model.norm"},
        is_hybrid=True,
    ),
}
