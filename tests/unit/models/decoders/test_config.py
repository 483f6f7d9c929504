"""config.json to `ModelConfig`: what published checkpoints say, both spellings of rope, and every refusal."""

from __future__ import annotations

import math
from typing import Any

import pytest

from app.errors import CheckpointInvalid
from app.models.decoders.config import ModelConfig
from app.models.decoders.families import DECODER_FAMILIES
from app.models.decoders.layer_config import AltUpConfig, ConvolutionConfig
from app.models.decoders.shapes import tensors_of
from armature_kernels.elementwise.latent_sizes import LatentHeads
from tiny_checkpoints import ARCHITECTURES, config_values


def read(architecture: str = "LlamaForCausalLM", **values: Any) -> ModelConfig:
    return ModelConfig.from_hf(config_values(architecture, **values))


def test_tiny_checkpoints_are_of_known_families() -> None:
    assert set(ARCHITECTURES) <= set(DECODER_FAMILIES)


def test_multipliers_are_folded() -> None:
    values = {**config_values(), "architectures": ["GraniteForCausalLM"], "head_dim": None}
    plain = ModelConfig.from_hf(values)
    halved = ModelConfig.from_hf({**values, "residual_multiplier": 0.5, "embedding_multiplier": 3.0})
    assert halved.embedding_scale == 6.0 and halved.norm.eps == 4 * plain.norm.eps
    assert ModelConfig.from_hf({**values, "logits_scaling": 8.0}).logit_scale == 1 / 8


@pytest.mark.parametrize(
    ("architecture", "values", "sentence"),
    [
        ("FalconForCausalLM", {"alibi": True}, "ALiBi in Falcon, whose biases are rounded to BF16, is not offered"),
        ("GptOssForCausalLM", {"swiglu_limit": 5.0}, "another limit of the experts' gates than 7 is not offered"),
        ("GptOssForCausalLM", {"swiglu_alpha": 2.0}, "another factor in the experts' gates than 1.702 is not offered"),
        ("BloomForCausalLM", {"apply_residual_connection_post_layernorm": True}, "is not offered"),
        ("PhimoeForCausalLM", {"num_experts_per_tok": 3}, "another number of experts of each token than two"),
        ("Llama4ForCausalLM", {"num_experts_per_tok": 2}, "2 experts of each token; supported: 1"),
        ("Ernie4_5_MoeForCausalLM", {"use_bias": True}, "a bias in products around experts that have none"),
        ("MptForCausalLM", {"no_bias": False}, "products and norms with biases is not offered"),
        ("MptForCausalLM", {"attn_config": {"alibi": False}}, "learned positions of MPT is not offered"),
        ("MptForCausalLM", {"attn_config": {"clip_qkv": 6}}, "clip_qkv is 6"),
        ("MptForCausalLM", {"attn_config": {"qk_ln": True}}, "a norm of queries and keys is not offered"),
        ("OlmoForCausalLM", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("StableLmForCausalLM", {"qk_layernorm": True}, "a separate norm for each head is not offered"),
        ("OPTForCausalLM", {"word_embed_proj_dim": 16}, "word_embed_proj_dim is 16"),
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "a scale of attention for each layer"),
    ],
)
def test_what_a_family_cannot_do_is_refused_by_name(architecture: str, values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointInvalid) as caught:
        ModelConfig.from_hf({**config_values(), "architectures": [architecture], **values})
    assert sentence in caught.value.message


def test_phi_3_5_moe_is_read_as_it_is_published() -> None:
    factors = [1.0] * 64
    values = {
        "architectures": ["PhiMoEForCausalLM"],
        "model_type": "phimoe",
        "attention_bias": True,
        "lm_head_bias": True,
        "num_experts_per_tok": 2,
        "num_local_experts": 16,
        "hidden_size": 4096,
        "intermediate_size": 6400,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32064,
        "router_jitter_noise": 0.01,
        "sliding_window": 131072,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": factors,
            "short_factor": factors,
            "long_mscale": 1.24,
            "short_mscale": 1.24,
            "original_max_position_embeddings": 4096,
        },
        "rope_theta": 10000.0,
    }
    config = ModelConfig.from_hf(values)
    assert config.architecture == "PhimoeForCausalLM" and config.experts is not None
    assert (config.experts.routing.scoring, config.experts.routing.jitter) == ("sparsemixer", 0.01)
    assert (config.norm.kind, config.qkv_bias, config.output_bias, config.logits_bias) == ("layer", True, True, True)
    assert (config.max_model_len, config.ropes[0] and config.ropes[0].long_mscale) == (131072, 1.24)


def test_experts_of_ernie_are_in_a_range_of_layers() -> None:
    values = {**config_values(), "architectures": ["Ernie4_5_MoeForCausalLM"], "num_hidden_layers": 6}
    for given, expected in (
        ({}, [False, True, True, True, True, True]),
        (
            {"moe_layer_start_index": 0, "moe_layer_end_index": 4, "moe_layer_interval": 2},
            [False, True] * 2 + [False] * 2,
        ),
        ({"moe_layer_end_index": None, "moe_layer_start_index": 4}, [False] * 4 + [True] * 2),
    ):
        config = ModelConfig.from_hf({**values, **given})
        assert config.experts is not None and list(config.experts.layers) == expected


def test_ministral_3_ends_where_queries_would_be_scaled() -> None:
    rope = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1}
    values = {**config_values(), "architectures": ["Ministral3ForCausalLM"], "rope_parameters": rope}
    assert ModelConfig.from_hf(values).max_model_len == 64


def test_lfm2_names_its_layers_by_their_numbers_and_adjusts_its_mlp() -> None:
    """As config.json of LFM2-1.2B has it."""
    values = {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "hidden_size": 2048,
        "block_ff_dim": 12288,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "full_attn_idxs": [2],
        "vocab_size": 65536,
        "max_position_embeddings": 128000,
        "tie_embedding": True,
    }
    config = ModelConfig.from_hf(values)
    assert config.convolution == ConvolutionConfig(3, (True, True, False, True))
    assert (config.intermediate_size, config.tie_embeddings) == (8192, True)
    assert (config.cache_layers, config.state_sizes) == (1, (2 * 2048,) * 3)


def test_gemma_3n_has_the_values_of_transformers_if_its_config_omits_them() -> None:
    """As config.json of Gemma 3n E4B has it, without what is the default."""
    values = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "text_config": {
            "hidden_size": 2048,
            "intermediate_size": [16384] * 35,
            "num_hidden_layers": 35,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "vocab_size": 262400,
            "max_position_embeddings": 32768,
        },
    }
    config = ModelConfig.from_hf(values)
    assert config.altup == AltUpConfig(4, 64, 256, 262144)
    assert (config.cache_layers, config.cache_layer(19), config.cache_layer(20), config.cache_layer(34)) == (
        20,
        19,
        18,
        19,
    )
    assert config.windows[:5] == (512, 512, 512, 512, None)
    assert [rope and rope.theta for rope in config.ropes[3:5]] == [10_000.0, 1_000_000.0]
    assert (config.intermediate_size, config.inner_sizes) == (16384, ())
    assert config.gate_deviations == (pytest.approx(1.6448536), *config.gate_deviations[1:10], *(None,) * 25)
    assert (config.attention_scale, config.logit_softcap, config.tie_embeddings) == (1.0, 30.0, True)


def test_deepseek_v3_scales_scores_by_its_yarn() -> None:
    """As config.json of DeepSeek-V3 has it; the factor of cos and sin is 1."""
    values = {
        "architectures": ["DeepseekV3ForCausalLM"],
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 128),
        **dict.fromkeys(("n_shared_experts", "moe_layer_freq", "num_nextn_predict_layers"), 1),
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "vocab_size": 129280,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "max_position_embeddings": 163840,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 4096,
        },
    }
    config = ModelConfig.from_hf(values)
    assert config.attention_scale == pytest.approx(192**-0.5 * 1.36889**2, rel=1e-5)
    assert (config.head_dim, config.max_model_len, config.experts and sum(config.experts.layers)) == (192, 163840, 58)
    rope = config.ropes[0]
    assert rope is not None and (rope.dim, rope.kind, rope.factor) == (64, "yarn", 40.0)
    assert config.experts is not None and (config.experts.routing.num_groups, config.experts.routing.scale) == (8, 2.5)


def test_latent_attention_has_heads_of_its_own_sizes() -> None:
    config = ModelConfig.from_hf(config_values("DeepseekV3ForCausalLM", num_key_value_heads=1))
    assert (config.num_kv_heads, config.cache_heads, config.cache_head_dim) == (4, 4, 16)
    assert config.latent is not None and config.latent.heads == LatentHeads(4, 12, 4, 10, True)


@pytest.mark.parametrize(
    ("architecture", "values", "need"),
    [
        ("DeepseekV3ForCausalLM", {"v_head_dim": 17}, "values larger than keys"),
        ("DeepseekV3ForCausalLM", {"q_lora_rank": None, "attention_bias": True}, "attention_bias without q_lora_rank"),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "another score of experts"),
        ("DeepseekV3ForCausalLM", {"topk_method": "greedy"}, "noaux_tc"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not known"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("DeepseekV2ForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("Gemma3nForCausalLM", {"altup_active_idx": 1}, "altup_active_idx is 1"),
        ("Gemma3nForCausalLM", {"altup_correct_scale": False}, "altup_correct_scale is False"),
        ("Gemma3nForCausalLM", {"altup_num_inputs": 9}, "altup_num_inputs must be an integer of 2 to 8"),
        ("Gemma3nForCausalLM", {"activation_sparsity_pattern": [1.0] * 4}, "shares below 1"),
        ("Gemma3nForCausalLM", {"activation_sparsity_pattern": [0.5]}, "a list of 4 numbers"),
        ("Gemma3nForCausalLM", {"intermediate_size": [48]}, "one size for each of the 4 layers"),
        ("Gemma3nForCausalLM", {"intermediate_size": []}, "a list of integers"),
        ("Gemma3nForCausalLM", {"num_kv_shared_layers": 4}, "num_kv_shared_layers must be an integer of 0 to 3"),
        ("Gemma3nForCausalLM", {"num_kv_shared_layers": 3}, "no layer before them has the kind of attention"),
        ("Lfm2ForCausalLM", {"conv_bias": True}, "a bias of short convolutions"),
        ("Lfm2ForCausalLM", {"layer_types": ["conv"] * 4}, "a layer with full_attention"),
        ("Lfm2ForCausalLM", {"conv_L_cache": 9}, "convolutions over 9 positions"),
        ("Lfm2ForCausalLM", {"layer_types": ["conv", "sliding_attention"] * 2}, "known are conv, full_attention"),
        ("Lfm2ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(architecture: str, values: dict[str, Any], need: str) -> None:
    known = "DeepseekV3ForCausalLM" if architecture.startswith("Deepseek") else architecture
    with pytest.raises(CheckpointInvalid, match=need):
        ModelConfig.from_hf(config_values(known, **values) | {"architectures": [architecture]})


@pytest.mark.parametrize(
    ("architecture", "need"),
    [
        ("MambaForCausalLM", "state-space layers"),
        ("DbrxForCausalLM", "a mixture of experts of its own kind"),
        ("MllamaForConditionalGeneration", "pictures"),
    ],
)
def test_a_known_architecture_is_refused_with_what_it_needs(architecture: str, need: str) -> None:
    with pytest.raises(CheckpointInvalid) as caught:
        ModelConfig.from_hf({"architectures": [architecture]})
    assert need in caught.value.message and "docs/families.md" in caught.value.message


GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "vocab_size": 201088,
}


def test_gpt_oss_as_published() -> None:
    config = ModelConfig.from_hf(GPT_OSS_20B)
    assert config.windows == (128, None) * 12 and config.max_model_len == 131072
    assert config.has_sinks and config.mlp_bias and config.qkv_bias and config.output_bias
    assert sum(math.prod(shape) for shape in tensors_of(config).values()) == 20_914_757_184
    # Both files of transformers' default mean the same.
    plain = ModelConfig.from_hf({name: value for name, value in GPT_OSS_20B.items() if not name.startswith("rope")})
    assert plain == config


def test_slopes_of_alibi() -> None:
    bloom = {"architectures": ["BloomForCausalLM"], "vocab_size": 320, "hidden_size": 96, "n_layer": 1}
    mpt = {"architectures": ["MPTForCausalLM"], "vocab_size": 320, "d_model": 96, "n_layers": 1}
    eight = tuple(2.0**-power for power in range(1, 9))
    assert ModelConfig.from_hf({**bloom, "n_head": 8}).alibi_slopes == eight
    assert ModelConfig.from_hf({**mpt, "n_heads": 8}).alibi_slopes == eight
    assert ModelConfig.from_hf({**bloom, "n_head": 6}).alibi_slopes == (*(0.25**n for n in range(1, 5)), 0.5, 0.125)
    assert ModelConfig.from_hf({**mpt, "n_heads": 6}).alibi_slopes == (*(0.25**n for n in range(1, 5)), 0.5, 0.125)


@pytest.mark.parametrize("value", [10**400, float("inf"), float("nan"), True, "1"])
def test_numbers_that_no_float_holds_are_refused(value: Any) -> None:
    with pytest.raises(CheckpointInvalid, match="rope_theta must be a number greater than 0"):
        read(rope_theta=value)


def test_model_type_alone_names_the_architecture() -> None:
    assert read("Gemma3ForCausalLM", architectures=None).architecture == "Gemma3ForCausalLM"


def test_llama_3_2_as_published() -> None:
    scaling = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
    config = read(
        rope_scaling={**scaling, "original_max_position_embeddings": 8192},
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    )
    rope = config.ropes[0]
    assert rope is not None
    assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == ("llama3", 32.0, 8192)
    assert config.max_model_len == 131072 and config.tie_embeddings


def test_both_spellings_of_rope_mean_the_same() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = read(rope_theta=5.0, rope_scaling=scaling)
    new = read(rope_theta=None, rope_parameters={**scaling, "rope_theta": 5.0})
    assert old == new and old.ropes[0] is not None and old.ropes[0].theta == 5.0


def test_yarn_stretches_the_context() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert read("Qwen2ForCausalLM", rope_scaling=scaling, max_position_embeddings=32768).max_model_len == 131072


def test_linear_scaling_stretches_the_context_if_the_config_says_how_far() -> None:
    """As Vicuna-7B-v1.5-16k has it. Gemma 3 gives the stretched length as max_position_embeddings."""
    values: dict[str, Any] = {"rope_scaling": {"type": "linear", "factor": 4.0}, "max_position_embeddings": 4096}
    assert read(**values).max_model_len == 4096
    assert read(**values, max_sequence_length=16384).max_model_len == 16384
    assert read(**values, max_sequence_length=32768).max_model_len == 16384


@pytest.mark.parametrize("name", ["su", "longrope", "yarn"])
def test_phi3_has_had_three_names_for_longrope(name: str) -> None:
    scaling = {"type": name, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = read("Phi3ForCausalLM", rope_scaling=scaling, original_max_position_embeddings=64).ropes[0]
    assert rope is not None and rope.kind == "longrope" and rope.factor == 4.0 and rope.long_factor == (2.0,) * 4


def test_windows_by_layer() -> None:
    assert read("MistralForCausalLM", sliding_window=None).windows == (None, None)
    assert read("MistralForCausalLM", sliding_window=9).windows == (9, 9)
    assert read("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=9, max_window_layers=1).windows == (None, 9)
    assert read("Qwen2ForCausalLM", sliding_window=9).windows == (None, None)
    assert read("Gemma2ForCausalLM", num_hidden_layers=3).windows == (6, None, 6)
    assert read("Gemma3ForCausalLM", num_hidden_layers=4).windows == (6, 6, None, 6)
    types = ["full_attention", "sliding_attention"]
    assert read("Gemma2ForCausalLM", layer_types=types).windows == (None, 6)


def test_gemma3_has_two_thetas_and_smollm3_layers_without() -> None:
    gemma = read("Gemma3ForCausalLM", rope_theta=1e6, rope_local_base_freq=1e4)
    assert [rope and rope.theta for rope in gemma.ropes] == [1e4, 1e4, 1e6]
    nested = {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 3.0}}
    gemma = read("Gemma3ForCausalLM", rope_theta=None, rope_parameters=nested)
    assert [rope and rope.theta for rope in gemma.ropes] == [3.0, 3.0, 7.0]
    assert [rope is not None for rope in read("SmolLM3ForCausalLM").ropes] == [True, True, True, False]
    assert [rope is not None for rope in read("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 1]).ropes] == [
        False,
        True,
        True,
        True,
    ]


TYPES = ("full_attention", "sliding_attention")
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"architectures": ["DoubtfulForCausalLM"]},
        "DoubtfulForCausalLM is not supported; supported are Llama",
    ),
    "no architecture": ({"architectures": None, "model_type": "t5"}, "t5 is not supported"),
    "architectures not a list": ({"architectures": "LlamaForCausalLM"}, "is not supported"),
    "rope type": (
        {"rope_scaling": {"rope_type": "spiral", "factor": 2}},
        "rope_type 'spiral' is not known; known are default",
    ),
    "rope key": ({"rope_scaling": {"type": "linear", "factor": 2.0, "ntk": 1}}, "rope_scaling: ntk is not known"),
    "rope scale": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0, "mscale_all_dim": 1.0}},
        "mscale_all_dim with rope_type 'dynamic' is not offered",
    ),
    "partial sliding layers": (
        {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {TYPES[1]: {"partial_rotary_factor": 0.5}}},
        "rotating a part of the heads of sliding layers",
    ),
    "rope factor": ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor is missing"),
    "rope section": ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
    "two ropes": (
        {"rope_parameters": {name: {"rope_theta": len(name)} for name in TYPES}},
        "differs between kinds of layers",
    ),
    "scaled sliding layers": (
        {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {TYPES[1]: {"rope_type": "linear", "factor": 2.0}}},
        "sliding layers must have rope_type 'default', without scaling",
    ),
    "longrope factors": (
        {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}},
        "short_factor must be a list of 4",
    ),
    "odd rotary": ({"head_dim": 7}, "rotate pairs, and 7 of 7"),
    "activation": ({"hidden_act": "relu6"}, "activation 'relu6' is not known; known are silu"),
    "missing": ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
    "zero": ({"hidden_size": 0}, "hidden_size must be an integer of 1 to 1,099,511,627,776, not 0"),
    "more layers than memory": ({"num_hidden_layers": 2**40}, "num_hidden_layers must be an integer of 1 to 4,096"),
    "boolean as number": ({"vocab_size": True}, "vocab_size must be an integer"),
    "text as number": ({"num_attention_heads": "4"}, "num_attention_heads must be an integer of 1 to"),
    "text as boolean": ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
    "infinite": ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be a number greater than 0"),
    "kv heads": ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
    "layer type": (
        {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention", "chunked_attention"]},
        "chunked_attention",
    ),
    "layer types": ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"]}, "a list of 2 strings"),
    "layer types of one kind": (
        {"architectures": ["MistralForCausalLM"], "sliding_window": 9, "layer_types": list(TYPES)},
        "layer_types gives some layers another attention",
    ),
    "activation of Gemma": (
        {"architectures": ["GemmaForCausalLM"], "hidden_act": "silu"},
        "hidden_act is 'silu', and Gemma has gelu_pytorch_tanh",
    ),
    "encoder in disguise": ({"use_bidirectional_attention": True}, "makes this decoder an encoder"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_say_what_and_what_would_be_right(name: str) -> None:
    values, sentence = REFUSALS[name]
    with pytest.raises(CheckpointInvalid) as caught:
        read(**values)
    assert sentence in caught.value.message
