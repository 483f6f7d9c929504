"""Reads the values of config.json that single families of decoders have. Each function is `DecoderFamily.read` of one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from app.errors import CheckpointInvalid
from app.models.config_reader import ConfigReader
from app.models.decoders.family import Fields
from app.models.decoders.layer_config import (
    AltUpConfig,
    ConvolutionConfig,
    ExpertsConfig,
    HeadNormConfig,
    LatentConfig,
    NormConfig,
)
from app.models.decoders.rope import RopeConfig
from armature_kernels.elementwise.latent_sizes import LatentHeads
from armature_kernels.elementwise.routing_rule import MAX_EXPERTS, Routing
from armature_kernels.native.arguments import SWIGLU_ALPHA, SWIGLU_LIMIT

_MAX_STREAMS = 8  # csrc/ops.h
_SPARSE_LAYERS, _SPARSITY = 10, 0.95  # transformers' default, in models of more layers


def refuse(config: ConfigReader, name: str, unless: object, reason: str) -> None:
    """Check that a value is absent or `unless`. Raises `CheckpointInvalid`: `reason` is not offered."""
    value = config.values.get(name)
    if value is not None and value != unless:
        raise CheckpointInvalid(f"{config.where}: {name} is {value!r}, and {reason} is not offered.")


def known_texts(config: ConfigReader, name: str, length: int, known: str) -> tuple[str, ...]:
    """Return a list of so many words. Raises `CheckpointInvalid` if one is not in `known`, separated by spaces."""
    found = config.texts(name, length)
    unknown = sorted(set(found).difference(known.split()))
    if unknown:
        listed = ", ".join(known.split())
        raise CheckpointInvalid(f"{config.where}: {name} {unknown} are not known; known are {listed}.")
    return found


def _shared_kv_heads(config: ConfigReader, fields: Fields, kv_heads: int) -> Fields:
    if fields["num_heads"] % kv_heads:
        raise CheckpointInvalid(
            f"{config.where}: {fields['num_heads']} attention heads cannot share {kv_heads} key/value heads evenly."
        )
    return {"num_kv_heads": kv_heads}


def _learned_positions(config: ConfigReader, fields: Fields, first: int = 0) -> Fields:
    return {
        "ropes": (None,) * fields["num_layers"],
        "num_positions": config.integer("max_position_embeddings"),
        "first_position": first,
    }


def _without_rope(ropes: Sequence[RopeConfig | None], kept: Sequence[bool]) -> tuple[RopeConfig | None, ...]:
    return tuple(rope if keeps else None for rope, keeps in zip(ropes, kept, strict=True))


# ---- families like Llama --------------------------------------------------------------------------------------------


def qwen_slides(config: ConfigReader, layer: int) -> bool:
    return config.boolean("use_sliding_window", False) and layer >= config.integer("max_window_layers", 28, at_least=0)


def smollm3_slides(config: ConfigReader, layer: int) -> bool:
    """Return True for the layers of SmolLM3 with a window, if there are any."""
    return config.boolean("use_sliding_window", False) and config.has("sliding_window") and not _has_rope(config, layer)


def smollm3(config: ConfigReader, fields: Fields) -> Fields:
    kept = [_has_rope(config, layer) for layer in range(fields["num_layers"])]
    return {"ropes": _without_rope(fields["ropes"], kept)}


def _has_rope(config: ConfigReader, layer: int) -> bool:
    """Return True if a layer has RoPE. SmolLM3 leaves every fourth layer without positions."""
    listed = config.values.get("no_rope_layers")
    if isinstance(listed, list) and layer < len(listed):
        return bool(listed[layer])
    return (layer + 1) % config.integer("no_rope_layer_interval", 4) != 0


def granite(config: ConfigReader, fields: Fields) -> Fields:
    return {
        "attention_scale": config.number("attention_multiplier", 1.0),
        "embedding_scale": config.number("embedding_multiplier", 1.0),
        "residual_multiplier": config.number("residual_multiplier", 1.0),
        "logit_scale": 1.0 / config.number("logits_scaling", 1.0),
    }


def gemma(config: ConfigReader, fields: Fields) -> Fields:
    """Scale embeddings by the square root of their size.

    The first files of Gemma 1 say `gelu` and were trained with its approximation, which `hidden_activation` corrects.
    """
    act = config.text("hidden_act", "gelu")
    if not config.has("hidden_activation") and act not in ("gelu", "gelu_pytorch_tanh"):
        raise CheckpointInvalid(f"{config.where}: hidden_act is {act!r}, and Gemma has gelu_pytorch_tanh.")
    return {"embedding_scale": fields["hidden_size"] ** 0.5}


def gemma2(config: ConfigReader, fields: Fields) -> Fields:
    return {
        **gemma3(config, fields),
        "attention_softcap": _cap(config, "attn_logit_softcapping", 50.0),
        "logit_softcap": _cap(config, "final_logit_softcapping", 30.0),
    }


def gemma3(config: ConfigReader, fields: Fields) -> Fields:
    """Read the scale of attention, and caps, which Gemma 3 replaced by norms of queries and keys."""
    return {
        **gemma(config, fields),
        "attention_scale": config.number("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": config.optional_number("attn_logit_softcapping"),
        "logit_softcap": config.optional_number("final_logit_softcapping"),
    }


def _cap(config: ConfigReader, name: str, default: float) -> float | None:
    return None if _is_null(config, name) else config.number(name, default)


def hyperclovax(config: ConfigReader, fields: Fields) -> Fields:
    """Read the multipliers; the norms after the branches can be left out."""
    refuse(config, "use_post_norm", True, "leaving out the norms after the branches")
    scale = config.number("logits_scaling", 1.0)
    default = fields["attention_scale"]
    return {
        **granite(config, fields),
        "attention_scale": config.number("attention_multiplier", default),
        "logit_scale": scale,
    }


def ministral3(config: ConfigReader, fields: Fields) -> Fields:
    """Limit the context to the original one, where queries are not scaled by their position."""
    section = config.section("rope_parameters")
    if not section.has("llama_4_scaling_beta"):
        return {}
    most = section.integer("original_max_position_embeddings")
    return {"max_model_len": min(most, config.integer("max_position_embeddings"))}


def jais2(config: ConfigReader, fields: Fields) -> Fields:
    """Read the biases, which Jais 2 has by default."""
    bias = config.boolean("attention_bias", True)
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": config.boolean("mlp_bias", True)}


def olmo(config: ConfigReader, fields: Fields) -> Fields:
    refuse(config, "clip_qkv", None, "clipping queries, keys and values")
    return {}


def seed_oss(config: ConfigReader, fields: Fields) -> Fields:
    """Read the biases, which differ between products of attention."""
    return {
        "qkv_bias": config.boolean("attention_bias", True),
        "output_bias": config.boolean("attention_out_bias", False),
    }


def glm(config: ConfigReader, fields: Fields) -> Fields:
    """Read the biases of queries, keys and values, which GLM has by default."""
    return {"qkv_bias": config.boolean("attention_bias", True)}


def lfm2(config: ConfigReader, fields: Fields) -> Fields:
    """Read which layers have a short convolution, and the size of the MLP, which is adjusted unless it says otherwise."""
    size = config.integer("block_ff_dim", fields["intermediate_size"])
    if config.boolean("block_auto_adjust_ff_dim", True):
        multiple = config.integer("block_multiple_of", 256)
        size = int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        size = -(-size // multiple) * multiple
    return {**convolutions(config, fields), "intermediate_size": size}


def convolutions(config: ConfigReader, fields: Fields) -> Fields:
    """Read which layers of LFM2 have a short convolution, and whether embeddings are tied."""
    refuse(config, "conv_bias", False, "a bias of short convolutions")
    layers, hidden, block = fields["num_layers"], fields["hidden_size"], 2 * fields["head_dim"]
    attends = config.values.get("full_attn_idxs")
    if config.has("layer_types"):
        convolves = tuple(name == "conv" for name in known_texts(config, "layer_types", layers, "conv full_attention"))
    else:
        convolves = tuple(isinstance(attends, list) and layer not in attends for layer in range(layers))
    if all(convolves):
        raise CheckpointInvalid(f"{config.where}: layer_types must have a layer with full_attention.")
    if hidden % block:
        raise CheckpointInvalid(
            f"{config.where}: short convolutions of {hidden} channels do not fit heads of {block // 2}."
        )
    convolution = ConvolutionConfig(config.integer("conv_L_cache", 3), convolves) if any(convolves) else None
    return {
        "convolution": convolution,
        "tie_embeddings": config.boolean("tie_embedding", fields["tie_embeddings"]),
    }


def ernie(config: ConfigReader, fields: Fields) -> Fields:
    bias = config.boolean("use_bias", False)
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bias}


def hunyuan(config: ConfigReader, fields: Fields) -> Fields:
    for name in ("rope_parameters", "rope_scaling"):
        section = config.section(name)
        if section.text("rope_type", section.text("type", "default")) == "dynamic" and section.values.get("alpha"):
            alpha, dim = section.number("alpha"), fields["head_dim"]
            raised = [rope and replace(rope, theta=rope.theta * alpha ** (dim / (dim - 2))) for rope in fields["ropes"]]
            return {"ropes": tuple(raised)}
    return {}


def exaone4(config: ConfigReader, fields: Fields) -> Fields:
    """Leave layers of full attention without rotary embeddings, if others have a window."""
    if not config.has("sliding_window") and "sliding_window" in config.values:
        return {}
    return {"ropes": _without_rope(fields["ropes"], [window is not None for window in fields["windows"]])}


def exaone4_slides(config: ConfigReader, layer: int) -> bool:
    """Return True unless it is the last layer of a pattern, or of the model."""
    pattern = config.values.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        return pattern[layer % len(pattern)] == "L"
    return (layer + 1) % config.integer("sliding_window_pattern", 4) != 0


# ---- multi-head latent attention -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LatentDefaults:
    plain: int = 128
    value: int | None = 128
    rank: int = 512
    query_rank: int = 1536


LATENT = LatentDefaults()


def latent(config: ConfigReader, fields: Fields, defaults: LatentDefaults, interleaved: bool = True) -> Fields:
    """Read latent attention; `head_dim` so far is the rotated part. With YaRN, `mscale_all_dim` scales scores too."""
    value = defaults.value or fields["hidden_size"] // fields["num_heads"]
    heads = LatentHeads(
        fields["num_heads"],
        config.integer("qk_nope_head_dim", defaults.plain),
        fields["head_dim"],
        config.integer("v_head_dim", value),
        config.boolean("rope_interleave", interleaved),
    )
    if heads.value > heads.size:
        raise CheckpointInvalid(
            f"{config.where}: v_head_dim is {heads.value}, and values larger than keys, of {heads.size}, are not offered."
        )
    default = None if "q_lora_rank" in config.values else defaults.query_rank  # null: queries have no short row
    rank = config.optional_integer("q_lora_rank", default)
    if rank is None and fields["qkv_bias"]:
        raise CheckpointInvalid(f"{config.where}: attention_bias without q_lora_rank is not offered.")
    rope, scale = fields["ropes"][0], heads.size**-0.5
    if rope.mscale_all_dim and rope.factor > 1.0:
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
    return {
        "latent": LatentConfig(heads, config.integer("kv_lora_rank", defaults.rank), rank),
        "num_kv_heads": heads.heads,
        "head_dim": heads.size,
        "attention_scale": scale,
    }


def youtu(config: ConfigReader, fields: Fields) -> Fields:
    return latent(config, fields, LATENT)


def minicpm3(config: ConfigReader, fields: Fields) -> Fields:
    """Read latent attention, and the multipliers of embeddings, branches and logits."""
    layers, hidden = fields["num_layers"], fields["hidden_size"]
    depth = math.sqrt(layers) if _is_null(config, "scale_depth") else config.number("scale_depth", 1.4)
    base = hidden if _is_null(config, "dim_model_base") else config.number("dim_model_base", 256.0)
    sizes = LatentDefaults(plain=64, value=None, rank=256, query_rank=768)
    return {
        **latent(config, fields, sizes, interleaved=False),
        "embedding_scale": config.number("scale_emb", 12.0),
        "residual_multiplier": depth / math.sqrt(layers),
        "logit_scale": base / hidden,
    }


def _is_null(config: ConfigReader, name: str) -> bool:
    return name in config.values and not config.has(name)


# ---- families with LayerNorm ----------------------------------------------------------------------------------------


def cohere(config: ConfigReader, fields: Fields) -> Fields:
    """Read the scale of the logits, and the norms of queries and keys if there are any."""
    norms = HeadNormConfig("layer", "each", fields["norm"].eps) if config.boolean("use_qk_norm", False) else None
    return {"logit_scale": config.number("logit_scale", 0.0625), "head_norm": norms}


def cohere2(config: ConfigReader, fields: Fields) -> Fields:
    """Read the scale of the logits; only layers with a window have rotary embeddings."""
    kept = [window is not None for window in fields["windows"]]
    return {
        "logit_scale": config.number("logit_scale", 0.0625),
        "ropes": _without_rope(fields["ropes"], kept),
    }


def phi(config: ConfigReader, fields: Fields) -> Fields:
    refuse(config, "qk_layernorm", False, "LayerNorm of queries and keys with biases")
    return {}


def stablelm(config: ConfigReader, fields: Fields) -> Fields:
    refuse(config, "qk_layernorm", False, "a separate norm for each head")
    parallel = config.boolean("use_parallel_residual", False)
    return {
        "qkv_bias": config.boolean("use_qkv_bias", False),
        "output_bias": False,
        "placement": "parallel" if parallel else "pre",
        "shares_norm": parallel,
    }


def starcoder2(config: ConfigReader, fields: Fields) -> Fields:
    bias = config.boolean("use_bias", True)
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bias}


def falcon(config: ConfigReader, fields: Fields) -> Fields:
    """Read which of the three layouts of Falcon it is."""
    refuse(config, "alibi", False, "ALiBi in Falcon, whose biases are rounded to BF16,")
    heads, bias = fields["num_heads"], config.boolean("bias", False)
    is_new, multi_query = config.boolean("new_decoder_architecture", False), config.boolean("multi_query", True)
    kv_heads = config.integer("num_kv_heads", heads) if is_new else 1 if multi_query else heads
    parallel = is_new or config.boolean("parallel_attn", True)
    norms = config.integer("num_ln_in_parallel_attn", 2 if is_new else 1)
    return {
        **_shared_kv_heads(config, fields, kv_heads),
        "intermediate_size": config.integer("ffn_hidden_size", 4 * fields["hidden_size"]),
        "placement": "parallel" if parallel else "pre",
        "shares_norm": parallel and norms == 1,
        "qkv_layout": "stacked" if multi_query and not is_new else "grouped",
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
        "max_model_len": config.integer("max_position_embeddings", 2048),
    }


def gpt_neox(config: ConfigReader, fields: Fields) -> Fields:
    bias = config.boolean("attention_bias", True)
    return {
        "placement": "parallel" if config.boolean("use_parallel_residual", True) else "pre",
        "qkv_bias": bias,
        "output_bias": bias,
    }


def gptj(config: ConfigReader, fields: Fields) -> Fields:
    dim = config.integer("rotary_dim", 64)
    if dim % 2 or dim > fields["head_dim"]:
        raise CheckpointInvalid(f"{config.where}: rotary_dim {dim} cannot be paired in heads of {fields['head_dim']}.")
    return {"ropes": (RopeConfig(10_000.0, dim),) * fields["num_layers"]}


def gpt2(config: ConfigReader, fields: Fields) -> Fields:
    refuse(config, "scale_attn_by_inverse_layer_idx", False, "a scale of attention for each layer")
    refuse(config, "add_cross_attention", False, "attention to an encoder")
    scale = fields["attention_scale"] if config.boolean("scale_attn_weights", True) else 1.0
    return {**_learned_positions(config, fields), "attention_scale": scale}


def gpt_neo(config: ConfigReader, fields: Fields) -> Fields:
    """Read the learned positions and the windows; scores are not scaled."""
    kinds = config.values.get("attention_layers")
    if not isinstance(kinds, list):
        types = config.values.get("attention_types") or [[["global", "local"], fields["num_layers"] // 2]]
        kinds = [kind for pattern, times in types for _ in range(times) for kind in pattern]
    if len(kinds) != fields["num_layers"] or not set(kinds) <= {"global", "local"}:
        raise CheckpointInvalid(f"{config.where}: attention_types must give `global` or `local` for each layer.")
    window = config.integer("window_size", 256)
    return {
        **_learned_positions(config, fields),
        "attention_scale": 1.0,
        "windows": tuple(window if kind == "local" else None for kind in kinds),
    }


def opt(config: ConfigReader, fields: Fields) -> Fields:
    """Read the learned positions, whose table begins with two rows for padding, and the biases."""
    refuse(config, "word_embed_proj_dim", fields["hidden_size"], "a projection of the embeddings")
    refuse(config, "do_layer_norm_before", True, "a norm after each branch")
    refuse(config, "_remove_final_layer_norm", False, "an output without a norm")
    bias, affine = config.boolean("enable_bias", True), config.boolean("layer_norm_elementwise_affine", True)
    return {
        **_learned_positions(config, fields, first=2),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
        "norm": NormConfig("layer", 1e-5, has_weight=affine, has_bias=affine),
    }


# ---- families with ALiBi (arXiv 2108.12409) -------------------------------------------------------------------------


def _bloom_slopes(heads: int) -> tuple[float, ...]:
    """Return powers of 2^(-8 / n) for the n heads of the largest power of 2, then odd powers of its root."""
    power: int = 2 ** (heads.bit_length() - 1)
    first, second = 2.0 ** (-8.0 / power), 2.0 ** (-4.0 / power)
    others = (second ** (2 * index + 1) for index in range(heads - power))
    return (*(first ** (index + 1) for index in range(power)), *others)


def _mpt_slopes(heads: int) -> tuple[float, ...]:
    """Return powers of 2^(-8 / n) for the next power of 2, n: if that is not `heads`, every second one comes first."""
    power: int = 2 ** (heads - 1).bit_length()
    slopes = [2.0 ** (-8.0 * (index + 1) / power) for index in range(power)]
    return tuple(slopes if power == heads else (slopes[1::2] + slopes[::2])[:heads])


def _by_distance(fields: Fields, slopes: tuple[float, ...]) -> Fields:
    return {"ropes": (None,) * fields["num_layers"], "alibi_slopes": slopes}


def bloom(config: ConfigReader, fields: Fields) -> Fields:
    """Read the context; BLOOM has no setting for its activation."""
    refuse(config, "apply_residual_connection_post_layernorm", False, "adding branches to what a norm returns")
    return {
        **_by_distance(fields, _bloom_slopes(fields["num_heads"])),
        "max_model_len": config.integer("seq_length", 2048),
    }


def mpt(config: ConfigReader, fields: Fields) -> Fields:
    """Read the context and the scale of scores; the section attn_config has further values."""
    own = config.section("attn_config")
    refuse(config, "no_bias", True, "products and norms with biases")
    refuse(config, "logit_scale", None, "a scale of the logits")
    refuse(own, "alibi", True, "learned positions of MPT")
    refuse(own, "alibi_bias_max", 8, "another largest slope than 8")
    refuse(own, "attn_type", "multihead_attention", "another attention of MPT")
    refuse(own, "clip_qkv", None, "clipping queries, keys and values")
    refuse(own, "qk_ln", False, "a norm of queries and keys")
    refuse(own, "prefix_lm", False, "a prefix that sees all of itself")
    return {
        **_by_distance(fields, _mpt_slopes(fields["num_heads"])),
        "attention_scale": own.number("softmax_scale", fields["attention_scale"]),
        "intermediate_size": config.integer("expansion_ratio", 4) * fields["hidden_size"],
        "max_model_len": config.integer("max_seq_len", 2048),
    }


def gemma3n(config: ConfigReader, fields: Fields) -> Fields:
    """Read the streams, the sparse gates, the inner sizes, and which layers share keys and values."""
    refuse(config, "altup_active_idx", 0, "computing with another hidden state than the first")
    refuse(config, "altup_correct_scale", True, "leaving out the factors of the corrected hidden state")
    config.integer("sliding_window", 512)
    layers = fields["num_layers"]
    altup = AltUpConfig(
        num_streams=config.integer("altup_num_inputs", 4, at_least=2, at_most=_MAX_STREAMS),
        laurel_rank=config.integer("laurel_rank", 64),
        input_size=config.integer("hidden_size_per_layer_input", 256),
        input_vocab_size=config.integer("vocab_size_per_layer_input", 262_144),
    )
    cap = 30.0 if "final_logit_softcapping" not in config.values else config.optional_number("final_logit_softcapping")
    return {
        **gemma(config, fields),
        "attention_scale": 1.0,
        "logit_softcap": cap,
        "altup": altup,
        "gate_deviations": tuple(_deviations(config, sparsity) for sparsity in _sparsities(config, layers)),
        "inner_sizes": _inner_sizes(config, layers),
        "shared_kv_layers": _shared_kv_layers(config, fields["windows"]),
    }


def _inner_sizes(config: ConfigReader, layers: int) -> tuple[int, ...]:
    if not isinstance(config.values["intermediate_size"], list):
        return ()
    sizes = config.integers("intermediate_size")
    if len(sizes) != layers:
        raise CheckpointInvalid(
            f"{config.where}: intermediate_size must have one size for each of the {layers} layers."
        )
    return sizes if len(set(sizes)) > 1 else ()


def _sparsities(config: ConfigReader, layers: int) -> tuple[float, ...]:
    if config.has("activation_sparsity_pattern"):
        return config.numbers("activation_sparsity_pattern", layers)
    sparse = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
    return (_SPARSITY,) * sparse + (0.0,) * (layers - sparse)


def _deviations(config: ConfigReader, sparsity: float) -> float | None:
    """Return above how many standard deviations of a normal distribution the other gates are."""
    if sparsity >= 1:
        raise CheckpointInvalid(
            f"{config.where}: activation_sparsity_pattern must have shares below 1, not {sparsity}."
        )
    return NormalDist().inv_cdf(sparsity) if sparsity > 0 else None


def _shared_kv_layers(config: ConfigReader, windows: tuple[int | None, ...]) -> int:
    shared = config.integer("num_kv_shared_layers", 15, at_least=0, at_most=len(windows) - 1)
    own = len(windows) - shared
    if not set(windows[own:]).issubset(windows[:own]):
        raise CheckpointInvalid(
            f"{config.where}: the last {shared} layers share keys and values (num_kv_shared_layers), but no layer before"
            " them has the kind of attention that some of them have (layer_types)."
        )
    return shared


def checked_experts(config: ConfigReader, experts: ExpertsConfig) -> Fields:
    """Return the field of the experts. Raises `CheckpointInvalid` for numbers that are contradictory or too large."""
    routing = experts.routing
    if routing.num_experts > MAX_EXPERTS:
        raise CheckpointInvalid(f"{config.where}: {routing.num_experts} experts are more than {MAX_EXPERTS}.")
    groups, kept = routing.num_groups, routing.top_groups
    if routing.num_experts % groups or kept > groups:
        raise CheckpointInvalid(
            f"{config.where}: {kept} of {groups} groups cannot be selected from {routing.num_experts} experts."
        )
    if groups > 1 and routing.group_rating == "two best" and routing.num_experts // groups < 2:
        raise CheckpointInvalid(f"{config.where}: groups of experts must have two at least.")
    if routing.top_k > routing.num_experts // groups * kept:
        raise CheckpointInvalid(
            f"{config.where}: {routing.top_k} experts of each token cannot be selected from"
            f" {routing.num_experts // groups * kept}."
        )
    return {"experts": experts}


def _everywhere(fields: Fields) -> tuple[bool, ...]:
    return (True,) * int(fields["num_layers"])


def sparse_layers(config: ConfigReader, fields: Fields) -> tuple[bool, ...]:
    step, dense = config.integer("decoder_sparse_step", 1), config.values.get("mlp_only_layers") or []
    if not isinstance(dense, Sequence):
        raise CheckpointInvalid(f"{config.where}: mlp_only_layers must be a list of layers.")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(fields["num_layers"]))


def _routing(config: ConfigReader, number: str, count: int, top_k: int) -> Routing:
    return Routing(
        config.integer(number, count),
        config.integer("num_experts_per_tok", top_k),
        renormalize=config.boolean("norm_topk_prob", False),
    )


def mixtral(config: ConfigReader, fields: Fields) -> Fields:
    routing = Routing(config.integer("num_local_experts", 8), config.integer("num_experts_per_tok", 2))
    return checked_experts(config, ExpertsConfig(routing, fields["intermediate_size"], _everywhere(fields)))


def phimoe(config: ConfigReader, fields: Fields) -> Fields:
    """Read the experts of Phi-3.5-MoE, of which its router always selects two, and the bias of the logits."""
    refuse(config, "num_experts_per_tok", 2, "another number of experts of each token than two")
    jitter = config.number("router_jitter_noise", 0.01)
    routing = Routing(config.integer("num_local_experts", 16), 2, "sparsemixer", renormalize=False, jitter=jitter)
    experts = ExpertsConfig(routing, fields["intermediate_size"], _everywhere(fields))
    return {**checked_experts(config, experts), "logits_bias": config.boolean("lm_head_bias", False)}


def granite_moe(config: ConfigReader, fields: Fields) -> Fields:
    """Read the experts of Granite: a softmax over the logits of the selected ones gives their weights."""
    return {**granite(config, fields), **mixtral(config, fields)}


def olmoe(config: ConfigReader, fields: Fields) -> Fields:
    refuse(config, "clip_qkv", None, "clipping queries, keys and values")
    routing = _routing(config, "num_experts", 64, 8)
    return checked_experts(config, ExpertsConfig(routing, fields["intermediate_size"], _everywhere(fields)))


def qwen2_moe(config: ConfigReader, fields: Fields) -> Fields:
    """Read the experts of Qwen 1.5 and 2, with a gated shared expert, and the biases of attention."""
    experts = ExpertsConfig(
        _routing(config, "num_experts", 60, 4),
        config.integer("moe_intermediate_size", 1408),
        sparse_layers(config, fields),
        shared_size=config.integer("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    return {**checked_experts(config, experts), "qkv_bias": config.boolean("qkv_bias", True)}


def qwen3_moe(config: ConfigReader, fields: Fields) -> Fields:
    size = config.integer("moe_intermediate_size", 768)
    routing = _routing(config, "num_experts", 128, 8)
    return checked_experts(config, ExpertsConfig(routing, size, sparse_layers(config, fields)))


def gpt_oss(config: ConfigReader, fields: Fields) -> Fields:
    """Read the experts of gpt-oss, whose gates are clamped, and the biases of attention.

    transformers writes YaRN even if config.json has no rotary embeddings.
    """
    refuse(config, "swiglu_alpha", SWIGLU_ALPHA, "another factor in the experts' gates than 1.702")
    refuse(config, "swiglu_limit", SWIGLU_LIMIT, "another limit of the experts' gates than 7")
    routing = Routing(config.integer("num_local_experts", 128), config.integer("num_experts_per_tok", 4))
    experts = ExpertsConfig(routing, fields["intermediate_size"], _everywhere(fields), router_bias=True)
    bias = config.boolean("attention_bias", True)
    found = {**checked_experts(config, experts), "qkv_bias": bias, "output_bias": bias}
    if config.has("rope_parameters") or config.has("rope_scaling"):
        return found
    rope = RopeConfig(150_000.0, fields["head_dim"], "yarn", 32.0, 4096, truncate=False)
    return {**found, "ropes": (rope,) * fields["num_layers"]}


def _sigmoid_routing(
    config: ConfigReader, count: int, top_k: int, scale: float, groups: tuple[int, int] = (1, 1)
) -> Routing:
    return Routing(
        config.integer("n_routed_experts", count),
        config.integer("num_experts_per_tok", top_k),
        "sigmoid",
        config.boolean("norm_topk_prob", True),
        config.number("routed_scaling_factor", scale),
        1e-20,
        config.integer("n_group", groups[0]),
        config.integer("topk_group", groups[1]),
        "two best",
    )


def _experts_after(config: ConfigReader, fields: Fields, dense: int) -> tuple[bool, ...]:
    first = config.integer("first_k_dense_replace", dense, at_least=0)
    return tuple(layer >= first for layer in range(fields["num_layers"]))


def ernie_moe(config: ConfigReader, fields: Fields) -> Fields:
    """Read the experts of Ernie 4.5, which are in every so many layers of a range of them."""
    refuse(config, "use_bias", False, "a bias in products around experts that have none")
    size = config.integer("moe_intermediate_size", 1536)
    routing = Routing(
        config.integer("moe_num_experts", 64),
        config.integer("moe_k", 6),
        epsilon=config.number("moe_norm_min", 1e-12),
    )
    count, step = fields["num_layers"], config.integer("moe_layer_interval", 1)
    first, last = config.integer("moe_layer_start_index", 1, at_least=0), config.values.get("moe_layer_end_index", -1)
    last = count - 1 if last in (-1, None) else config.integer("moe_layer_end_index", at_least=0)
    experts = ExpertsConfig(
        routing,
        size,
        tuple((layer + 1) % step == 0 and first <= layer <= last for layer in range(count)),
        shared_size=size * config.integer("moe_num_shared_experts", 2, at_least=0),
        selection_bias=True,
    )
    return checked_experts(config, experts)


def glm4_moe(config: ConfigReader, fields: Fields) -> Fields:
    """Read the experts of GLM 4.5, which begin after some dense layers, and the norms of queries and keys."""
    size = config.integer("moe_intermediate_size", 1408)
    experts = ExpertsConfig(
        _sigmoid_routing(config, 128, 8, 1.0),
        size,
        _experts_after(config, fields, 1),
        shared_size=size * config.integer("n_shared_experts", 1, at_least=0),
        selection_bias=True,
    )
    norms = {} if config.boolean("use_qk_norm", False) else {"head_norm": None}
    return {**checked_experts(config, experts), **norms}


def lfm2_moe(config: ConfigReader, fields: Fields) -> Fields:
    """Read the short convolutions of LFM2, and the experts, which begin after some dense layers."""
    routing = Routing(
        config.integer("num_experts", 32),
        config.integer("num_experts_per_tok", 4),
        "sigmoid",
        config.boolean("norm_topk_prob", True),
        config.number("routed_scaling_factor", 1.0),
        1e-6,
    )
    dense = config.integer("num_dense_layers", 2, at_least=0)
    experts = ExpertsConfig(
        routing,
        config.integer("moe_intermediate_size", 1792),
        tuple(layer >= dense for layer in range(fields["num_layers"])),
        selection_bias=config.boolean("use_expert_bias", True),
    )
    return {**checked_experts(config, experts), **convolutions(config, fields)}


def deepseek_v2(config: ConfigReader, fields: Fields) -> Fields:
    """Read latent attention and the experts of DeepSeek-V2, whose weights are not divided by their sum."""
    refuse(
        config,
        "norm_topk_prob",
        False,
        "dividing the weights of experts by their sum, which implementations do differently,",
    )
    refuse(config, "scoring_func", "softmax", "another score of experts than softmax")
    refuse(config, "moe_layer_freq", 1, "a dense layer between layers with experts")
    size, method = config.integer("moe_intermediate_size", 1407), config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointInvalid(
            f"{config.where}: topk_method {method!r} is not known; known are greedy and group_limited_greedy."
        )
    has_groups = method == "group_limited_greedy"
    routing = Routing(
        config.integer("n_routed_experts", 64),
        config.integer("num_experts_per_tok"),
        renormalize=False,
        scale=config.number("routed_scaling_factor", 1.0),
        num_groups=config.integer("n_group") if has_groups else 1,
        top_groups=config.integer("topk_group") if has_groups else 1,
    )
    shared = size * config.integer("n_shared_experts", 2, at_least=0)
    experts = ExpertsConfig(routing, size, _experts_after(config, fields, 0), shared)
    return {**checked_experts(config, experts), **latent(config, fields, LATENT)}


def deepseek_v3(config: ConfigReader, fields: Fields) -> Fields:
    refuse(config, "scoring_func", "sigmoid", "another score of experts than sigmoid")
    refuse(config, "topk_method", "noaux_tc", "another selection of experts than noaux_tc")
    refuse(config, "moe_layer_freq", 1, "a dense layer between layers with experts")
    size = config.integer("moe_intermediate_size", 2048)
    experts = ExpertsConfig(
        _sigmoid_routing(config, 256, 8, 2.5, groups=(8, 4)),
        size,
        _experts_after(config, fields, 3),
        shared_size=size * config.integer("n_shared_experts", 1, at_least=0),
        selection_bias=True,
    )
    return {**checked_experts(config, experts), **latent(config, fields, LATENT)}


def glm4_moe_lite(config: ConfigReader, fields: Fields) -> Fields:
    """Read latent attention and the experts of GLM 4.7 Flash."""
    size, layers = config.integer("moe_intermediate_size", 1536), fields["num_layers"]
    sparse = tuple(layer > 0 for layer in range(layers))
    if config.has("mlp_layer_types"):
        sparse = tuple(name == "sparse" for name in known_texts(config, "mlp_layer_types", layers, "dense sparse"))
    elif config.has("first_k_dense_replace"):
        sparse = _experts_after(config, fields, 1)
    experts = ExpertsConfig(
        _sigmoid_routing(config, 64, 4, 1.8),
        size,
        sparse,
        shared_size=size * config.integer("n_shared_experts", 1, at_least=0),
        selection_bias=True,
    )
    sizes = LatentDefaults(plain=192, value=256, query_rank=768)
    return {**checked_experts(config, experts), **latent(config, fields, sizes)}
