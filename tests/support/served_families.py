"""Tiny random checkpoints of every family of language models, written by transformers, and their logits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.models.decoders.families import DECODER_FAMILIES

TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_GPT = {
    "vocab_size": 320,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_NO_HEAD_DIM = {name: value for name, value in TINY.items() if name != "head_dim"}
_ALIKE = {name: value for name, value in _NO_HEAD_DIM.items() if name != "num_key_value_heads"}
_WINDOW = {"sliding_window": 6}
_GEMMA = {**_WINDOW, "query_pre_attn_scalar": 12}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.3,
    "logits_scaling": 2.0,
}
_GRANITE_MOE = {**_NO_HEAD_DIM, **_MULTIPLIERS, "num_local_experts": 4, "num_experts_per_tok": 2}
_LLAMA4 = {
    **TINY,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_local_experts": 6,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 64,
    "floor_scale": 48,
}
_GPT_OSS = {
    **TINY,
    **_WINDOW,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 150_000.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
_BLOOM = {"vocab_size": 320, "hidden_size": 48, "n_layer": 4, "n_head": 6, "bos_token_id": 0, "eos_token_id": 1}
_MPT = {
    "vocab_size": 320,
    "d_model": 48,
    "n_layers": 4,
    "n_heads": 6,
    "max_seq_len": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_FALCON = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "ffn_hidden_size": 80,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

# A row of the cache is wider than attention needs.
_CONVOLUTIONS = {"num_key_value_heads": 1, "layer_types": ["conv", "full_attention", "conv", "conv"]}
_LATENT = {
    **_ALIKE,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
_DEEPSEEK = {
    **_LATENT,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
}
_PHIMOE = {**_NO_HEAD_DIM, "num_local_experts": 6, "num_experts_per_tok": 2}
_ERNIE = {**_NO_HEAD_DIM, "moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 2}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5000.0,
    "beta_fast": 32,
    "beta_slow": 1,
}

_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_MISTRAL4 = {
    **_DEEPSEEK,
    "v_head_dim": 16,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}
_MINISTRAL3 = {**TINY, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}, "tie_word_embeddings": True}


_MROPE = {
    **_NO_HEAD_DIM,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 5000.0},
}
_QWEN_VISION = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "intermediate_size": 16}
_QWEN3_VISION = {**_QWEN_VISION, "hidden_size": 16, "out_hidden_size": 32, "num_position_embeddings": 16}


def _mistral3(kind: str, text: dict[str, Any]) -> dict[str, Any]:
    vision = {**_VISION, "head_dim": 8, "model_type": "pixtral"}
    return {"text_config": {**text, "model_type": kind}, "vision_config": vision, "tie_word_embeddings": False}


_GEMMA3N = {
    **TINY,
    **_WINDOW,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "intermediate_size": [48, 48, 56, 56, 40, 40],
    "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.2, 0.0, 0.9],
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 300,
    "hidden_size_per_layer_input": 12,
    "altup_num_inputs": 3,
    "laurel_rank": 8,
    "rms_norm_eps": 1e-3,
    "final_logit_softcapping": 3.0,
}

# One layer after each kind, heads of values that are not those of keys, and sizes that fill no vector.
_DELTA_RULE = {
    **TINY,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 3,
    "head_dim": 16,
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "full_attention", "linear_attention"],
}
_MAMBA = {
    **_NO_HEAD_DIM,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 13,
    "mamba_d_conv": 3,
}
_FALCON_H1 = {
    **_MAMBA,
    "mamba_d_ssm": 64,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "mlp_multipliers": [0.8, 0.6],
    "ssm_multipliers": [0.7, 1.1, 1.2, 0.9, 1.3],
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.8,
}
_NEMOTRON_H = {
    **TINY,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "ssm_state_size": 13,
}
_NEMOTRON_H.pop("num_hidden_layers")
_MAMBA2 = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 8,
    "n_groups": 2,
    "state_size": 13,
    "conv_kernel": 3,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_GRANITE_HYBRID = {
    **_MAMBA,
    **_MULTIPLIERS,
    "shared_intermediate_size": 40,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
_SHARED = {**EXPERTS, "shared_expert_intermediate_size": 40}
_GEMMA4 = {
    **TINY,
    **_WINDOW,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "global_head_dim": 16,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "vocab_size_per_layer_input": 330,
    "hidden_size_per_layer_input": 12,
    "final_logit_softcapping": 3.0,
}
_GEMMA4_UNIFIED = {
    **TINY,
    **_WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
}
_GEMMA4_MOE = {
    **_GEMMA4_UNIFIED,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}

# class of transformers: what its configuration gets instead of `TINY`, or None if `TINY` suffices
SERVED: Mapping[str, dict[str, Any]] = {
    "LlamaForCausalLM": {**TINY, "attention_bias": True, "mlp_bias": True},
    "MistralForCausalLM": {**TINY, **_WINDOW},
    "Qwen2ForCausalLM": TINY,
    "Qwen3ForCausalLM": TINY,
    "Phi3ForCausalLM": TINY,
    "SmolLM3ForCausalLM": TINY,
    "GemmaForCausalLM": TINY,
    "Gemma2ForCausalLM": {**TINY, **_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "Gemma3ForCausalLM": {**TINY, **_GEMMA},
    "Gemma3ForConditionalGeneration": {
        "text_config": {**TINY, **_GEMMA, "num_hidden_layers": 7},
        "vision_config": _VISION,
        "mm_tokens_per_image": 4,
    },
    "Gemma3nForCausalLM": _GEMMA3N,
    "Gemma3nForConditionalGeneration": {"text_config": _GEMMA3N},
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": {"text_config": _GEMMA4, "vision_config": None, "audio_config": None},
    "Gemma4UnifiedForCausalLM": _GEMMA4_UNIFIED,
    "Gemma4UnifiedForConditionalGeneration": {
        "text_config": _GEMMA4_UNIFIED,
        "vision_config": None,
        "audio_config": None,
    },
    "VaultGemmaForCausalLM": {**TINY, **_GEMMA},
    "GraniteForCausalLM": {**_NO_HEAD_DIM, **_MULTIPLIERS},
    "HyperCLOVAXForCausalLM": {**TINY, **_MULTIPLIERS},
    "OlmoForCausalLM": _NO_HEAD_DIM,
    "Olmo2ForCausalLM": _NO_HEAD_DIM,
    "Olmo3ForCausalLM": {**_NO_HEAD_DIM, **_WINDOW},
    "Exaone4ForCausalLM": {**TINY, **_WINDOW},
    "MinistralForCausalLM": {**TINY, **_WINDOW},
    "Ministral3ForCausalLM": {**TINY, **_WINDOW},
    "Mistral3ForConditionalGeneration": _mistral3("mistral", {**TINY, **_WINDOW}),
    "Mistral3ForConditionalGeneration/ministral3": _mistral3("ministral3", _MINISTRAL3),
    "Mistral3ForConditionalGeneration/mistral4": _mistral3("mistral4", _MISTRAL4),
    "Mistral4ForCausalLM": _MISTRAL4,
    "Qwen2VLForConditionalGeneration": {"text_config": _MROPE, "vision_config": _QWEN_VISION},
    "Qwen2_5_VLForConditionalGeneration": {
        "text_config": _MROPE,
        "vision_config": _QWEN3_VISION,
    },
    "Qwen3VLForConditionalGeneration": {
        "text_config": {**_MROPE, "head_dim": 8},
        "vision_config": {**_QWEN3_VISION, "deepstack_visual_indexes": [0]},
    },
    "SeedOssForCausalLM": {**TINY, "attention_bias": True, "attention_out_bias": False},
    "Ernie4_5ForCausalLM": {**TINY, "use_bias": True},
    "HunYuanDenseV1ForCausalLM": {**TINY, "attention_bias": True},
    "ArceeForCausalLM": {**TINY, "mlp_bias": True},
    "ApertusForCausalLM": TINY,
    "GlmForCausalLM": TINY,
    "Glm4ForCausalLM": TINY,
    "HeliumForCausalLM": TINY,
    "CwmForCausalLM": {**TINY, **_WINDOW},
    "Lfm2MoeForCausalLM": {**_NO_HEAD_DIM, **EXPERTS, **_CONVOLUTIONS, "num_dense_layers": 1},
    "Lfm2ForCausalLM": {**_NO_HEAD_DIM, **_CONVOLUTIONS, "block_multiple_of": 8},
    "Lfm3ForCausalLM": {
        **TINY,
        **_WINDOW,
        "layer_types": ["conv", "full_attention", "sliding_attention", "conv"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
        },
    },
    "PhiForCausalLM": _NO_HEAD_DIM,
    "FalconForCausalLM": {**_FALCON, "bias": True},
    "GPT2LMHeadModel": _GPT,
    "GPTNeoForCausalLM": {
        "vocab_size": 320,
        "hidden_size": 32,
        "num_layers": 4,
        "num_heads": 4,
        "max_position_embeddings": 256,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 6,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "GPTNeoXForCausalLM": {**_ALIKE, "hidden_size": 64},
    "PersimmonForCausalLM": {**_ALIKE, "pad_token_id": None},
    "GPTJForCausalLM": {**_GPT, "rotary_dim": 4},
    "GPTBigCodeForCausalLM": {**_GPT, "n_inner": 80},
    "CodeGenForCausalLM": {**_GPT, "rotary_dim": 4},
    "BioGptForCausalLM": {**_ALIKE, "max_position_embeddings": 256},
    "XGLMForCausalLM": {
        "vocab_size": 320,
        "d_model": 32,
        "ffn_dim": 48,
        "num_layers": 4,
        "attention_heads": 4,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 1,
    },
    "NanoChatForCausalLM": {**_NO_HEAD_DIM, "final_logit_softcapping": 3.0},
    "OPTForCausalLM": {**_ALIKE, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "StableLmForCausalLM": {**_NO_HEAD_DIM, "hidden_size": 64, "use_qkv_bias": True},
    "Starcoder2ForCausalLM": {**_NO_HEAD_DIM, **_WINDOW},
    "CohereForCausalLM": {**_NO_HEAD_DIM, "use_qk_norm": True},
    "Cohere2ForCausalLM": {**TINY, **_WINDOW},
    "NemotronForCausalLM": {**TINY, "attention_bias": True, "mlp_bias": True},
    "Jais2ForCausalLM": TINY,
    "MixtralForCausalLM": {**TINY, "num_local_experts": 5, "num_experts_per_tok": 2},
    "PhimoeForCausalLM": {**_PHIMOE, "attention_bias": True, "lm_head_bias": True},
    "Ernie4_5_MoeForCausalLM": {**_ERNIE, "moe_norm_min": 1e-12},
    "Qwen2MoeForCausalLM": {**_NO_HEAD_DIM, **EXPERTS, "shared_expert_intermediate_size": 40},
    "Qwen3MoeForCausalLM": {**TINY, **EXPERTS},
    "OlmoeForCausalLM": {**_NO_HEAD_DIM, "num_experts": 6, "num_experts_per_tok": 2},
    "GraniteMoeForCausalLM": _GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": {**_GRANITE_MOE, "shared_intermediate_size": 40},
    "GraniteSWAForCausalLM": {**_NO_HEAD_DIM, **_MULTIPLIERS, **_WINDOW, "layer_rope_theta": [5000.0, 0.0, 700.0, 0.0]},
    "GraniteMoeSWAForCausalLM": {**_GRANITE_MOE, **_WINDOW, "shared_intermediate_size": 40},
    "Dots1ForCausalLM": {**TINY, **EXPERTS, "n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "SolarOpenForCausalLM": {**TINY, **EXPERTS, "n_routed_experts": 6, "n_group": 3, "topk_group": 2},
    "MiniMaxM2ForCausalLM": {**TINY, "num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 4},
    "ExaoneMoeForCausalLM": {**TINY, **EXPERTS, **_WINDOW, "first_k_dense_replace": 1},
    "HunYuanMoEV1ForCausalLM": {**TINY, "num_experts": 6, "moe_topk": [3, 3, 3, 3]},
    "HYV3ForCausalLM": {**TINY, **EXPERTS, "num_shared_experts": 2},
    "AfmoeForCausalLM": {
        **TINY,
        **EXPERTS,
        **_WINDOW,
        "num_shared_experts": 2,
        "route_scale": 1.5,
        "mup_enabled": True,
    },
    "FlexOlmoForCausalLM": {**_NO_HEAD_DIM, "num_experts": 6, "num_experts_per_tok": 3},
    "MellumForCausalLM": {
        **TINY,
        **EXPERTS,
        **_WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "Cohere2MoeForCausalLM": {
        **TINY,
        **_WINDOW,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "first_k_dense_replace": 1,
        "prefix_dense_intermediate_size": 56,
    },
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": {"text_config": _LLAMA4},
    "GptOssForCausalLM": _GPT_OSS,
    "BloomForCausalLM": _BLOOM,
    "MptForCausalLM": _MPT,
    "Glm4MoeForCausalLM": {**TINY, **EXPERTS, "n_routed_experts": 6, "use_qk_norm": True},
    "DeepseekV2ForCausalLM": {**_DEEPSEEK, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
    "Glm4MoeLiteForCausalLM": {**_DEEPSEEK, "v_head_dim": 16, "n_shared_experts": 1},
    "YoutuForCausalLM": {**_LATENT, "pad_token_id": None},  # transformers clears the row of a padding token
    "MiniCPM3ForCausalLM": {**_LATENT, "v_head_dim": 8, "dim_model_base": 16},
    "Qwen3NextForCausalLM": {**_DELTA_RULE, **_SHARED, "mlp_only_layers": [1]},
    "Qwen3_5ForCausalLM": _DELTA_RULE,
    "GraniteMoeHybridForCausalLM": {**_GRANITE_HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2},
    "NemotronHForCausalLM": _NEMOTRON_H,
    "Mamba2ForCausalLM": {**_MAMBA2, "use_bias": True},
    "FalconH1ForCausalLM": _FALCON_H1,
    # transformers stores the convolution in three equal parts, so queries, keys and values have equal sizes.
    "OlmoHybridForCausalLM": {**_DELTA_RULE, "head_dim": 8, "linear_num_value_heads": 2, "linear_value_head_dim": 12},
    "BambaForCausalLM": {**_MAMBA, "attn_layer_indices": [1], "mamba_proj_bias": True, "mlp_bias": True},
    "Qwen3_5ForConditionalGeneration": {"text_config": _DELTA_RULE, "vision_config": _QWEN3_VISION},
    "Qwen3_5MoeForCausalLM": {**_DELTA_RULE, **_SHARED},
    "Qwen3_5MoeForConditionalGeneration": {
        "text_config": {**_DELTA_RULE, **_SHARED},
        "vision_config": _QWEN3_VISION,
    },
    "DeepseekV3ForCausalLM": {**_DEEPSEEK, "first_k_dense_replace": 2, "n_group": 2, "topk_group": 1},
}
# Classes whose other halves need packages that the environment does not have: a checkpoint has the text half of the class
# below, under the names of published files.
TEXT_HALVES: Mapping[str, str] = {
    "Gemma3nForConditionalGeneration": "Gemma3nForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
}
# Families that are refused by their names.
# Further forms of these families.
VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "falcon-new": ("FalconForCausalLM", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-one-norm": (
        "FalconForCausalLM",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-sequential": (
        "FalconForCausalLM",
        {**_FALCON, "multi_query": False, "parallel_attn": False, "tie_word_embeddings": False},
    ),
    "neox-sequential": ("GPTNeoXForCausalLM", {**_ALIKE, "hidden_size": 64, "use_parallel_residual": False}),
    "stablelm-parallel": ("StableLmForCausalLM", {**_NO_HEAD_DIM, "hidden_size": 64, "use_parallel_residual": True}),
    "cohere-plain": ("CohereForCausalLM", {**_NO_HEAD_DIM, "attention_bias": True}),
    "exaone4-no-window": (
        "Exaone4ForCausalLM",
        {**TINY, "sliding_window": None, "sliding_window_pattern": 4, "layer_types": ["full_attention"] * 4},
    ),
    "olmo3-yarn": (
        "Olmo3ForCausalLM",
        {
            **_NO_HEAD_DIM,
            **_WINDOW,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "rope_theta": 5000.0,
                    "attention_factor": 1.2,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                },
            },
        },
    ),
    "opt-no-bias": ("OPTForCausalLM", {**_ALIKE, "ffn_dim": 48, "word_embed_proj_dim": 32, "enable_bias": False}),
    "bigcode-all-heads": ("GPTBigCodeForCausalLM", {**_GPT, "multi_query": False}),
    "gptj-whole-heads": ("GPTJForCausalLM", {**_GPT, "rotary_dim": 8, "tie_word_embeddings": False}),
    "gpt-oss-no-biases": ("GptOssForCausalLM", {**_GPT_OSS, "attention_bias": False, "tie_word_embeddings": True}),
    "cohere2-moe-sigmoid": (
        "Cohere2MoeForCausalLM",
        {
            **TINY,
            **_WINDOW,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-3,
        },
    ),
    "nemotron-h-moe": (
        "NemotronHForCausalLM",
        {
            **_NEMOTRON_H,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
        },
    ),
    "gemma4-moe": ("Gemma4ForCausalLM", _GEMMA4_MOE),
    "bloom-four-heads": ("BloomForCausalLM", {**_BLOOM, "n_head": 4}),
    "mpt-four-heads": ("MptForCausalLM", {**_MPT, "n_heads": 4, "attn_config": {"softmax_scale": 0.3}}),
    "granite-tied": ("GraniteForCausalLM", {**_NO_HEAD_DIM, **_MULTIPLIERS, "tie_word_embeddings": True}),
    "deepseek-lite": (
        "DeepseekV2ForCausalLM",
        {**_DEEPSEEK, "q_lora_rank": None, "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek-groups": (
        "DeepseekV2ForCausalLM",
        {**_DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2},
    ),
    "deepseek-yarn": (
        "DeepseekV3ForCausalLM",
        {
            **_DEEPSEEK,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "youtu-queries": ("YoutuForCausalLM", {**_LATENT, "pad_token_id": None, "q_lora_rank": None}),
    "kimi": (
        "DeepseekV3ForCausalLM",
        {
            **_DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.827,
            "v_head_dim": 16,
            "rope_interleave": False,
            "rms_norm_eps": 0.05,
        },
    ),
    "phimoe-longrope": (
        "PhimoeForCausalLM",
        {
            **_PHIMOE,
            **_WINDOW,
            "router_jitter_noise": 0.3,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 5000.0,
                "short_factor": [1.0, 1.5, 2.0, 3.0],
                "long_factor": [1.0, 2.0, 4.0, 8.0],
                "short_mscale": 1.2,
                "long_mscale": 1.3,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "phimoe-all-experts": (
        "PhimoeForCausalLM",
        {**_PHIMOE, "num_local_experts": 2, "attention_bias": True, "lm_head_bias": True},
    ),
    "ernie-layers": (
        "Ernie4_5_MoeForCausalLM",
        {
            **_ERNIE,
            "num_hidden_layers": 6,
            "moe_layer_interval": 2,
            "moe_layer_end_index": 3,
            "moe_num_shared_experts": 0,
            "tie_word_embeddings": False,
        },
    ),
    "falcon-h1-norm": (
        "FalconH1ForCausalLM",
        {**_FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "tie_word_embeddings": True},
    ),
    "granite-hybrid-dense": (
        "GraniteMoeHybridForCausalLM",
        {**_GRANITE_HYBRID, "num_local_experts": 0, "position_embedding_type": "rope", "mamba_conv_bias": False},
    ),
    "glm-biases": ("GlmForCausalLM", {**TINY, "attention_bias": False}),
}


def prompt_of(length: int) -> list[int]:
    """Return a random prompt of token ids."""
    return torch.randint(4, 320, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def write_family(directory: Path, architecture: str, values: Mapping[str, Any], seed: int = 0) -> None:
    """Write a random checkpoint of transformers' class, without a tokenizer.

    Every weight matters: norms and biases are random too.
    """
    import transformers

    if architecture in TEXT_HALVES:
        write_family(directory / TEXT_HALF, TEXT_HALVES[architecture], values["text_config"], seed)
        _write_whole(directory, architecture)
        return
    kind = getattr(transformers, architecture.partition("/")[0])
    torch.manual_seed(seed)
    model = kind(kind.config_class(**values)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "emb" not in name and "wte" not in name and "wpe" not in name:
                parameter.copy_(torch.randn_like(parameter) / min(parameter.shape) ** 0.5)
            elif parameter.dim() == 2 and parameter.shape[0] >= 256:
                parameter.copy_(torch.randn_like(parameter) * 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    model.save_pretrained(directory)


TEXT_HALF = "text"  # folder of a text half, as transformers saves it


def _write_whole(directory: Path, architecture: str) -> None:
    """Write the text half as part of a published checkpoint, which also holds weights that are not used."""
    from safetensors.torch import load_file, save_file

    config = json.loads((directory / TEXT_HALF / "config.json").read_text())
    published = {"architectures": [architecture], "model_type": DECODER_FAMILIES[architecture].model_type}
    (directory / "config.json").write_text(json.dumps({**published, "text_config": config}))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(directory / TEXT_HALF / "model.safetensors").items()
    }
    last = f"model.language_model.layers.{config['num_hidden_layers'] - 1}.self_attn"
    others = (
        "model.vision_tower.timm_model.conv_stem",
        "model.audio_tower.conformer.0.norm",
        "model.embed_audio.embedding",
    )
    shared = (f"{last}.k_proj", f"{last}.v_proj", f"{last}.k_norm") if "num_kv_shared_layers" in config else ()
    for name in (*shared, *others):
        tensors[f"{name}.weight"] = torch.ones(8, 8)
    save_file(tensors, directory / "model.safetensors")


@torch.inference_mode()
def expected_logits(directory: Path, architecture: str, prompt: list[int]) -> Tensor:
    """Return transformers' logits [tokens, vocab] of a prompt, in FP32."""
    import transformers

    if architecture in TEXT_HALVES:
        architecture, directory = TEXT_HALVES[architecture], directory / TEXT_HALF
    kind = getattr(transformers, architecture.partition("/")[0])
    model = kind.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    logits: Tensor = model(torch.tensor([prompt]), use_cache=False).logits[0]
    return logits
