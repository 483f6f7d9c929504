"""Reads the values of config.json that single families of decoders have. Each function is `DecoderFamily.read` of one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from app.errors import CheckpointInvalid
from app.models.config_reader import ConfigReader
from app.models.decoders.family import Fields
from app.models.decoders.layer_config import AltUpConfig, ConvolutionConfig, HeadNormConfig, LatentConfig, NormConfig
from app.models.decoders.rope import RopeConfig
from armature_kernels.attention.recurrent_sizes import MAX_WIDTH
from armature_kernels.elementwise.latent_sizes import LatentHeads

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


def biases(value: bool) -> Fields:
    return dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), value)


def without_rope(ropes: Sequence[RopeConfig | None], kept: Sequence[bool]) -> tuple[RopeConfig | None, ...]:
    return tuple(rope if keeps else None for rope, keeps in zip(ropes, kept, strict=True))


# ---- families like Llama --------------------------------------------------------------------------------------------


def qwen_slides(config: ConfigReader, layer: int) -> bool:
    return config.boolean("use_sliding_window", False) and layer >= config.integer("max_window_layers", 28, at_least=0)


def smollm3_slides(config: ConfigReader, layer: int) -> bool:
    """Return True for the layers of SmolLM3 with a window, if there are any."""
    return config.boolean("use_sliding_window", False) and config.has("sliding_window") and not _has_rope(config, layer)


def smollm3(config: ConfigReader, fields: Fields) -> Fields:
    kept = [_has_rope(config, layer) for layer in range(fields["num_layers"])]
    return {"ropes": without_rope(fields["ropes"], kept)}


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


def granite_swa(config: ConfigReader, fields: Fields) -> Fields:
    """Read the rotary embeddings of each layer; those of base 0 are none."""
    if not config.has("layer_rope_theta"):
        return granite(config, fields)
    bases = config.numbers("layer_rope_theta", fields["num_layers"])
    ropes = [
        rope and replace(rope, theta=base) if base else None for rope, base in zip(fields["ropes"], bases, strict=True)
    ]
    return {**granite(config, fields), "ropes": tuple(ropes)}


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


def paligemma(config: ConfigReader, fields: Fields) -> Fields:
    """Read Gemma 1 behind pictures, where the tokens of a prompt see each other."""
    config.values.get("use_bidirectional_attention")  # of the prompt
    return {**gemma(config, fields), "blocks": "all"}


def paligemma2(config: ConfigReader, fields: Fields) -> Fields:
    config.values.get("use_bidirectional_attention")
    return {**gemma2(config, fields), "blocks": "all"}


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


def nanochat(config: ConfigReader, fields: Fields) -> Fields:
    """Read the cap of the logits; heads are rotated backwards."""
    return {
        "logit_softcap": _cap(config, "final_logit_softcapping", 15.0),
        "ropes": tuple(rope and replace(rope, backwards=True) for rope in fields["ropes"]),
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


def convolutions(config: ConfigReader, fields: Fields, words: tuple[str, ...] | None = None, width: int = 3) -> Fields:
    """Read which layers of LFM2 have a short convolution, and whether embeddings are tied; `width`: a default."""
    refuse(config, "conv_bias", False, "a bias of short convolutions")
    layers, width = fields["num_layers"], config.integer("conv_L_cache", width)
    attends = config.values.get("full_attn_idxs")
    if words is None and config.has("layer_types"):
        words = known_texts(config, "layer_types", layers, "conv full_attention")
    if words is not None:
        convolves = tuple(name == "conv" for name in words)
    else:
        convolves = tuple(isinstance(attends, list) and layer not in attends for layer in range(layers))
    if all(convolves):
        raise CheckpointInvalid(f"{config.where}: layer_types must have a layer with full_attention.")
    if not 2 <= width <= MAX_WIDTH:
        raise CheckpointInvalid(
            f"{config.where}: convolutions over {width} positions are not offered; they may have 2 to {MAX_WIDTH}."
        )
    return {
        "convolution": ConvolutionConfig(width, convolves) if any(convolves) else None,
        "tie_embeddings": config.boolean("tie_embedding", fields["tie_embeddings"]),
    }


def lfm3(config: ConfigReader, fields: Fields) -> Fields:
    """Read LFM3: convolutions, windows and full attention in turn, each with its rotary embedding, and a gate a head."""
    refuse(config, "use_sandwich_norm", True, "layers without norms after their branches")
    count, size = fields["num_layers"], fields["head_dim"]
    words = tuple(
        "full_attention" if layer % 4 == 2 else "sliding_attention" if layer % 4 == 0 and layer else "conv"
        for layer in range(count)
    )
    if config.has("layer_types"):
        words = known_texts(config, "layer_types", count, "conv full_attention sliding_attention")
    full = fields["ropes"][0]
    if not config.has("rope_parameters"):
        full = RopeConfig(1_000_000.0, size, "proportional", num_rotated=size // 4)
    theta = config.section("rope_parameters").section("sliding_attention").number("rope_theta", 10_000.0)
    slides = [word == "sliding_attention" for word in words]
    window = config.integer("sliding_window", 256)
    gates = config.boolean("use_attention_gate", True)
    return {
        **convolutions(config, fields, words, 7),
        "windows": tuple(window if one else None for one in slides),
        "ropes": tuple(RopeConfig(theta, size) if one else full for one in slides),
        **({"has_output_gate": True, "gates_apart": True, "one_gate_a_head": True} if gates else {}),
    }


def ernie(config: ConfigReader, fields: Fields) -> Fields:
    return biases(config.boolean("use_bias", False))


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
    return {"ropes": without_rope(fields["ropes"], [window is not None for window in fields["windows"]])}


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
        "ropes": without_rope(fields["ropes"], kept),
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
    return biases(config.boolean("use_bias", True))


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
        **biases(bias),
        "max_model_len": config.integer("max_position_embeddings", 2048),
    }


def gpt_neox(config: ConfigReader, fields: Fields) -> Fields:
    bias = config.boolean("attention_bias", True)
    return {
        "placement": "parallel" if config.boolean("use_parallel_residual", True) else "pre",
        "qkv_bias": bias,
        "output_bias": bias,
    }


def persimmon(config: ConfigReader, fields: Fields) -> Fields:
    return {} if config.boolean("qk_layernorm", True) else {"head_norm": None}


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


def gpt_bigcode(config: ConfigReader, fields: Fields) -> Fields:
    multi_query = config.boolean("multi_query", True)
    return {
        **gpt2(config, fields),
        "num_kv_heads": 1 if multi_query else fields["num_heads"],
        "qkv_layout": "stacked" if multi_query else "grouped",
    }


def codegen(config: ConfigReader, fields: Fields) -> Fields:
    if fields["num_heads"] % 4:
        raise CheckpointInvalid(f"{config.where}: {fields['num_heads']} heads cannot be in the four parts of CodeGen.")
    return gptj(config, fields)


def biogpt(config: ConfigReader, fields: Fields) -> Fields:
    """Read the learned positions; norms have the epsilon of torch, whatever layer_norm_eps says."""
    config.number("layer_norm_eps", 1e-12)
    scale = fields["hidden_size"] ** 0.5 if config.boolean("scale_embedding", True) else 1.0
    return {
        **_learned_positions(config, fields, first=2),
        "embedding_scale": scale,
        "norm": NormConfig("layer", 1e-5, has_bias=True),
    }


def xglm(config: ConfigReader, fields: Fields) -> Fields:
    """Read the computed positions, of which the first two are for padding."""
    refuse(config, "add_cross_attention", False, "attention to an encoder")
    if fields["hidden_size"] % 2:
        raise CheckpointInvalid(f"{config.where}: an odd d_model is not offered.")
    return {**biogpt(config, fields), "sinusoids": True}


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
        **biases(bias),
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
        "shared_kv_layers": shared_kv_layers(config, fields["windows"], 15),
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


def shared_kv_layers(config: ConfigReader, windows: tuple[int | None, ...], default: int = 0) -> int:
    shared = config.integer("num_kv_shared_layers", default, at_least=0, at_most=len(windows) - 1)
    own = len(windows) - shared
    if not set(windows[own:]).issubset(windows[:own]):
        raise CheckpointInvalid(
            f"{config.where}: the last {shared} layers share keys and values (num_kv_shared_layers), but no layer before"
            " them has the kind of attention that some of them have (layer_types)."
        )
    return shared
