"""Translates the metadata of a GGUF file into the values of Hugging Face's config.json. Torch is not needed."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from app.errors import CheckpointInvalid
from app.models.config_reader import AskedValues, ConfigReader, unknown_keys
from app.weights.files import join_names
from app.weights.gguf.hybrid import BY_LAYER, READERS, ROPE_DIVISORS, LayerValues, factor, floats, granite
from app.weights.gguf.reader import GgufModel, GgufTensor

# Names in a layer `blk.N` and in `model.layers.N`.
EXPERT_NAMES: Mapping[str, str] = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
# Tensors whose kind is part of our name.
WHOLE_NAMES: Mapping[str, str] = {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp.scale": "mlp.router_norm.weight",
    "ffn_down_exps.scale": "mlp.gate.per_expert_scale",
    "layer_output_scale.weight": "layer_scalar",
}
# Tensors of all experts, and the weights of one expert in them, one below the other.
MERGED_NAMES: Mapping[str, tuple[str, ...]] = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_down_exps": ("down_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
}
_MERGED = re.compile(rf"blk\.(\d+)\.({'|'.join(MERGED_NAMES)})\.(weight|bias)")
_SINGLE = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")
# Whether llama.cpp divides the weights of a token's experts by their sum, by model type. GLM's files say it.
RENORMALIZES: Mapping[str, bool] = {
    "mixtral": True, "granitemoe": True, "qwen2_moe": False, "qwen3_moe": True, "qwen3_vl_moe": True, "olmoe": False,
    "gpt_oss": True, "qwen3_next": True, "qwen3_5_moe_text": True, "granitemoehybrid": True, "gemma4_text": True,
}  # fmt: skip
SOFTMAX, SIGMOID, SOFTMAX_WEIGHT = 1, 2, 3  # `enum llama_expert_gating_func_type`
log = logging.getLogger(__name__)
# What a file is if `general.type` says that it is not a model.
_OTHER_FILES: Mapping[str, str] = {
    "imatrix": "an importance matrix, which quantizers read",
    "adapter": "an adapter (LoRA); merge it into its model",
    "mmproj": "the image part of a model",
    "vocab": "a vocabulary without weights",
}
# Tensors that hold divisors of the rotary frequencies; config.json has them as lists.
ROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
# Gemma's 27B models scale attention by the width of a head in the hidden state instead of that of a key
# (llama-model.cpp, by the number of layers).
_GEMMA_WIDE_LAYERS: Mapping[str, int] = {"gemma2": 46, "gemma3": 62}
# Read where another value asks for them, or about vectors, other modalities and how a model was trained. A token of a text
# has one number as each of its positions in `rope.dimension_sections`.
WITHOUT_EFFECT = frozenset(
    "vocab_size embedding_length_out features_length pooling_type decoder_start_token_id classifier.output_labels"
    " rope.scaling.finetuned rope.dimension_sections rope.scaling.factor rope.scaling.original_context_length"
    " rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.type rope.freq_base_swa attention.sliding_window"
    " attention.sliding_window_pattern posnet.embedding_length posnet.block_count convnext.embedding_length"
    " convnext.block_count expert_shared_feed_forward_length expert_weights_norm expert_gating_func"
    " expert_feed_forward_length expert_used_count expert_count expert_weights_scale {dense}_feat_in {dense}_feat_out".split()
)


def expert_values(model_type: str, read: ConfigReader) -> dict[str, Any]:
    """Return config.json's values about experts. Raises `CheckpointInvalid`, also for another rule of selection."""
    used, inner = read.integer("expert_used_count"), read.integer("feed_forward_length")
    values: dict[str, Any] = {
        "num_local_experts": read.integer("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": read.integer("expert_feed_forward_length", max(1, inner // used)),
        "norm_topk_prob": RENORMALIZES.get(model_type, False),
    }
    scale = factor(read, "expert_weights_scale")
    has_sigmoid = model_type in ("glm4_moe", "nemotron_h")
    rule = {"gpt_oss": SOFTMAX_WEIGHT}.get(model_type, SIGMOID if has_sigmoid else SOFTMAX)
    if read.integer("expert_gating_func", 0, at_least=0) not in (0, rule):
        raise CheckpointInvalid(f"{read.where}.expert_gating_func is not the one of this architecture in llama.cpp.")
    if has_sigmoid:
        values["n_routed_experts"] = values["num_local_experts"]
        return values | {
            "norm_topk_prob": read.boolean("expert_weights_norm", False),
            "routed_scaling_factor": scale,
            "first_k_dense_replace": read.integer("leading_dense_block_count", 0, at_least=0),
            "n_shared_experts": read.integer("expert_shared_count", 0, at_least=0),
            "n_group": read.integer("expert_group_count", 0, at_least=0) or 1,
            "topk_group": read.integer("expert_group_used_count", 0, at_least=0) or 1,
        }
    if scale != 1:
        raise CheckpointInvalid(f"{read.where}.expert_weights_scale is {scale:g}, which is not supported.")
    if model_type == "gpt_oss":
        values["intermediate_size"] = values["moe_intermediate_size"]
    if model_type == "qwen2_moe":
        values["shared_expert_intermediate_size"] = read.integer("expert_shared_feed_forward_length", inner)
    return values


def expert_tensors(name: str, tensor: GgufTensor, experts: int) -> Iterator[tuple[str, GgufTensor]]:
    """Yield the checkpoint's names of a tensor of so many experts with their parts of it; none for others."""
    single, merged = _SINGLE.fullmatch(name), _MERGED.fullmatch(name)
    if single is not None:
        yield f"model.layers.{single[1]}.mlp.experts.{single[3]}.{single[2]}_proj.weight", tensor
    elif merged is not None and len(tensor.shape) == 2 + (merged[3] == "weight") and tensor.shape[0] == experts:
        parts = MERGED_NAMES[merged[2]]
        rows = tensor.shape[1] // len(parts)
        row_bytes = (tensor.end - tensor.start) // (experts * tensor.shape[1])
        for expert in range(experts):
            for place, part in enumerate(parts):
                start = tensor.start + (expert * tensor.shape[1] + place * rows) * row_bytes
                own = replace(tensor, shape=(rows, *tensor.shape[2:]), start=start, end=start + rows * row_bytes)
                yield f"model.layers.{merged[1]}.mlp.experts.{expert}.{part}.{merged[3]}", own
    elif name.endswith(".ffn_gate_inp_shexp.weight") and len(tensor.shape) == 1:
        own = replace(tensor, shape=(1, *tensor.shape))  # the only row of the gate of the shared expert
        yield f"model.layers.{name.split('.')[1]}.{EXPERT_NAMES['ffn_gate_inp_shexp']}.weight", own


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """An architecture of llama.cpp.

    `interleaves_heads`: rows of queries and keys are ordered for a rotary embedding of neighbours. `is_gemma`: norms are
    named for both sides of each branch. `adds_one`: norms are stored with 1 added, except in layers with a state.
    `has_experts`: None if a model may have some. `tiles_values`: heads of values are ordered for a repetition of all keys.
    """

    architecture: str
    model_type: str
    interleaves_heads: bool = False
    is_gemma: bool = False
    adds_one: bool = False
    has_experts: bool | None = False
    tiles_values: bool = False


FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily("LlamaForCausalLM", "llama", interleaves_heads=True),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", "smollm3", interleaves_heads=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3"),
    "phi3": GgufFamily("Phi3ForCausalLM", "phi3"),
    "gemma2": GgufFamily("Gemma2ForCausalLM", "gemma2", is_gemma=True, adds_one=True),
    "gemma3": GgufFamily("Gemma3ForCausalLM", "gemma3_text", is_gemma=True, adds_one=True),
    "qwen2moe": GgufFamily("Qwen2MoeForCausalLM", "qwen2_moe", has_experts=True),
    "qwen2vl": GgufFamily("Qwen2VLForConditionalGeneration", "qwen2_vl"),
    "qwen3vl": GgufFamily("Qwen3VLForConditionalGeneration", "qwen3_vl"),
    "qwen3vlmoe": GgufFamily("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", has_experts=True),
    "mistral3": GgufFamily("MistralForCausalLM", "mistral", interleaves_heads=True),
    "granite": GgufFamily("GraniteForCausalLM", "granite", interleaves_heads=True),
    "lfm2": GgufFamily("Lfm2ForCausalLM", "lfm2"),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", "qwen3_moe", has_experts=True),
    "olmoe": GgufFamily("OlmoeForCausalLM", "olmoe", has_experts=True),
    "granitemoe": GgufFamily("GraniteMoeForCausalLM", "granitemoe", interleaves_heads=True, has_experts=True),
    "glm4moe": GgufFamily("Glm4MoeForCausalLM", "glm4_moe", has_experts=True),
    "gpt-oss": GgufFamily("GptOssForCausalLM", "gpt_oss", has_experts=True),
    "gemma4": GgufFamily("Gemma4ForCausalLM", "gemma4_text", has_experts=None),
    "qwen35": GgufFamily("Qwen3_5ForCausalLM", "qwen3_5_text", adds_one=True, tiles_values=True),
    "qwen35moe": GgufFamily(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", adds_one=True, tiles_values=True, has_experts=True
    ),
    "qwen3next": GgufFamily("Qwen3NextForCausalLM", "qwen3_next", adds_one=True, has_experts=True),
    "granitehybrid": GgufFamily(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", interleaves_heads=True, has_experts=None
    ),
    "nemotron_h": GgufFamily("NemotronHForCausalLM", "nemotron_h"),
    "nemotron_h_moe": GgufFamily("NemotronHForCausalLM", "nemotron_h", has_experts=True),
    "falcon-h1": GgufFamily("FalconH1ForCausalLM", "falcon_h1"),
}
# A file of the architecture `llama` that has experts.
MIXTRAL = GgufFamily("MixtralForCausalLM", "mixtral", interleaves_heads=True, has_experts=True)
# Names below the architecture's that change what llama.cpp computes, with the values that do not. They are refused where no
# reader asks for them; the tensors of a layer that an architecture does not have are refused too.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "use_parallel_residual": (False,),
    "tensor_data_layout": ("reference",),
    "leading_dense_block_count": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_group_scale": (0.0, 1.0),
    "expert_chunk_feed_forward_length": (0,),
    "experts_per_group": (0,),
    "moe_every_n_layers": (0,),
    "moe_latent_size": (0,),
    "interleave_moe_layer_step": (0, 1),
    "n_deepstack_layers": (0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "attn_logit_softcapping": (0.0,),
    "router_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "swin_norm": (False,),
    "full_attention_interval": (0, 1),
    "activation_sparsity_scale": (),
    "swiglu_clamp_exp": (),
    "swiglu_clamp_shexp": (),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.output_scale": (0.0, 1.0),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0.0,),
    "attention.key_length_swa": (),
    "attention.value_length_swa": (),
    "attention.key_length_mla": (),
    "attention.value_length_mla": (),
    "attention.q_lora_rank": (0,),
    "attention.kv_lora_rank": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.relative_buckets_count": (0,),
    "attention.layer_norm_epsilon": (),
    "attention.group_norm_epsilon": (),
    "attention.group_norm_groups": (),
    "attention.indexer.head_count": (),
    "attention.indexer.key_length": (),
    "attention.indexer.top_k": (),
    "rope.dimension_count_swa": (),
    "rope.scaling.alpha": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scale_linear": (0.0, 1.0),
    "shortconv.l_cache": (),
    **{f"ssm.{name}": () for name in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count", "dt_b_c_rms")},
    **{f"attention.{name}_lora_rank": (0,) for name in ("decay", "iclr", "value_residual_mix", "gate")},
    **{f"altup.{name}": () for name in ("active_idx", "num_inputs")},
    "embedding_length_per_layer_input": (0,),
    "kda.head_dim": (),
    "wkv.head_size": (),
    "time_mix_extra_dim": (),
    "time_decay_extra_dim": (),
    "token_shift_count": (),
    "rescale_every_n_layers": (0,),
    "decoder_block_count": (0,),
}  # fmt: skip


def family_of(model: GgufModel) -> GgufFamily:
    """Return the family of a model's architecture. Raises `CheckpointInvalid` for another, or no model."""
    read = ConfigReader(model.metadata, model.file.name)
    kind = _OTHER_FILES.get(read.text("general.type", "model"))
    if kind is None and not model.tensors:
        kind = _OTHER_FILES["vocab"]
    if kind is not None:
        raise CheckpointInvalid(f"{model.file.name} is not a model: it is {kind}. Give the model's own file.")
    name = read.text("general.architecture")
    if name not in FAMILIES:
        raise CheckpointInvalid(
            f"{model.file.name}: architecture {name[:80]!r} is not supported; supported are {', '.join(FAMILIES)}."
        )
    has_experts = read.integer(f"{name}.expert_count", 0, at_least=0) > 0
    family = MIXTRAL if has_experts and name == "llama" else FAMILIES[name]
    if family.has_experts is not None and has_experts != family.has_experts:
        said = "a mixture of experts" if has_experts else "no mixture of experts"
        raise CheckpointInvalid(f"{model.file.name} is {said}, which is not supported for architecture {name!r}.")
    return family


def config_values(model: GgufModel) -> dict[str, Any]:
    """Return the values of config.json that the model families read. Raises `CheckpointInvalid`."""
    family, name = family_of(model), model.metadata["general.architecture"]
    # Without its prefix a key has one name in all architectures.
    own = AskedValues(
        {
            key.removeprefix(f"{name}."): _one_of_all(value)
            for key, value in model.metadata.items()
            if key.startswith(f"{name}.")
        }
    )
    if family.model_type in READERS:
        own.update({key: max(own[key]) for key in BY_LAYER if isinstance(own.get(key), tuple)})
    read = ConfigReader(own, f"{model.file.name}: {name}")
    heads, hidden_size = read.integer("attention.head_count"), read.integer("embedding_length")
    head_dim = read.integer("attention.key_length", max(1, hidden_size // heads))
    if read.integer("attention.value_length", head_dim) != head_dim:
        raise CheckpointInvalid(f"{model.file.name}: keys and values of different lengths are not supported.")
    further = read.integer("nextn_predict_layers", 0, at_least=0)  # layers that predict further tokens, of GLM
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointInvalid(f"{model.file.name} has no matrix token_embd.weight.")
    values: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": read.integer("feed_forward_length", *_inner_of_experts(family, read)),
        "num_hidden_layers": read.integer("block_count") - further,
        "num_nextn_predict_layers": further,
        "num_attention_heads": heads,
        "num_key_value_heads": read.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": read.integer("context_length"),
        "rms_norm_eps": _epsilon(family, read),
        "layer_norm_epsilon": _epsilon(family, read),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "qkv_bias": "blk.0.attn_q.bias" in model.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in model.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in model.tensors,
        "rope_theta": read.number("rope.freq_base", 10_000.0),
        **_with_axes(model, family, read, _rope(model, read, head_dim)),
        **_windows(family, read),
    }
    if family.is_gemma:
        values |= _gemma(name, read, hidden_size // heads, head_dim)
    if read.values.get("expert_count"):
        values |= expert_values(family.model_type, read)
    if family.model_type in ("granite", "granitemoe"):
        values |= granite(read, head_dim)
    if family.model_type in READERS:
        values |= READERS[family.model_type](LayerValues(model, read, values["num_hidden_layers"]))
    if family.model_type == "gpt_oss":  # as it is published: without rounding YaRN's borders, as llama.cpp does
        values["rope_scaling"] = {"rope_type": "default", **values.get("rope_scaling", {}), "truncate": False}
    unknown = unknown_keys(own, f"{model.file.name}: {name}", REFUSED, WITHOUT_EFFECT)
    if unknown:
        log.info(
            "%s: not known here and without effect: %s", model.file.name, join_names([one[:80] for one in unknown])
        )
    return values


def _inner_of_experts(family: GgufFamily, read: ConfigReader) -> tuple[int, ...]:
    """Return the default of the inner size of an MLP, which a family may not have."""
    return (read.integer("expert_feed_forward_length"),) if family.model_type == "qwen3_5_moe_text" else ()


def _epsilon(family: GgufFamily, read: ConfigReader) -> float:
    name = "attention.layer_norm_rms_epsilon"
    if family.model_type == "nemotron_h" and not read.has(name):
        name = "attention.layer_norm_epsilon"
    return read.number(name)


def _windows(family: GgufFamily, read: ConfigReader) -> dict[str, Any]:
    window = read.integer("attention.sliding_window", 0, at_least=0)
    if not window or not (family.is_gemma or family.model_type in ("phi3", "gpt_oss")):
        return {"sliding_window": None, "use_sliding_window": False}
    return {"sliding_window": window}


def _gemma(name: str, read: ConfigReader, hidden_per_head: int, head_dim: int) -> dict[str, Any]:
    is_wide = read.integer("block_count") == _GEMMA_WIDE_LAYERS[name]
    values: dict[str, Any] = {
        "query_pre_attn_scalar": hidden_per_head if is_wide else head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if read.has(cap):
            values[cap] = read.number(cap)
    if read.has("rope.freq_base_swa"):
        values["rope_local_base_freq"] = read.number("rope.freq_base_swa")
    pattern = read.values.get("attention.sliding_window_pattern")
    if isinstance(pattern, tuple):
        values["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    elif pattern is not None:
        values["sliding_window_pattern"] = read.integer("attention.sliding_window_pattern")
    return values


def _with_axes(model: GgufModel, family: GgufFamily, read: ConfigReader, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the rotary embedding with how many frequencies each of three axes has."""
    read.values.get("n_deepstack_layers")  # the picture part decides
    sections = model.metadata.get(f"{model.metadata['general.architecture']}.rope.dimension_sections")
    if not isinstance(sections, tuple) or not family.model_type.startswith("qwen"):
        return values
    scaling = values.get("rope_scaling", {"rope_type": "default"})
    return values | {"rope_scaling": {**scaling, "mrope_section": list(sections[:3])}}


def _rope(model: GgufModel, read: ConfigReader, head_dim: int) -> dict[str, Any]:
    """Return the values of the rotary embedding; single frequencies' divisors are given as longrope's factors."""
    longest, dim = read.integer("context_length"), read.integer("rope.dimension_count", head_dim)
    values: dict[str, Any] = {"partial_rotary_factor": dim / head_dim}
    original = read.integer("rope.scaling.original_context_length", longest)
    short, long = (model.tensors.get(name) for name in ROPE_FACTORS)
    divisors = model.tensors.get(ROPE_DIVISORS)
    if short is not None and long is not None:
        return values | {
            "original_max_position_embeddings": original,
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": floats(short),
                "long_factor": floats(long),
                "attention_factor": read.optional_number("rope.scaling.attn_factor"),
            },
        }
    if divisors is not None and model.metadata["general.architecture"] != "gemma4":
        each = floats(divisors)
        scaling = {"rope_type": "longrope", "short_factor": each, "long_factor": each, "attention_factor": 1.0}
        return values | {"rope_scaling": scaling | {"original_max_position_embeddings": longest}}
    linear = read.values.get("rope.scale_linear") or 1.0  # in files of 2023
    kind = read.text("rope.scaling.type", "linear" if linear != 1 else "none")
    factor = read.number("rope.scaling.factor", linear)
    if kind == "none" or factor == 1:
        return values
    scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if read.has(f"rope.scaling.{theirs}"):
            scaling[ours] = read.number(f"rope.scaling.{theirs}")
    return values | {"rope_scaling": scaling}


def _one_of_all(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) and value and len(set(value)) == 1 else value
