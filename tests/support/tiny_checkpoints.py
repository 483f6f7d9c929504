"""Tiny random checkpoints of every supported architecture, with a byte-level tokenizer: `write_checkpoint(directory, "LlamaForCausalLM")`.

Every weight matters (norms and biases are random too), so that a part left out changes the logits. Deterministic by seed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from app.models.decoders.config import ModelConfig
from app.models.decoders.shapes import tensors_of

BOS, EOS, USER, ASSISTANT = "<s>", "</s>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (BOS, EOS, USER, ASSISTANT)  # ids 0 to 3
MERGES = ("t h", "h e", "th e", "Ġ the", "i n", "Ġ a", "o n", "e r", "Ġ w", "a n")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GEMMA = {
    "query_pre_attn_scalar": 12,
    "sliding_window": 6,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
BY_ARCHITECTURE: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama", "hidden_act": "silu"},
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": 6},
    "Qwen2ForCausalLM": {"model_type": "qwen2", "use_sliding_window": False},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "head_dim": 16},
    "Phi3ForCausalLM": {"model_type": "phi3", "pad_token_id": 1},
    "SmolLM3ForCausalLM": {"model_type": "smollm3", "num_hidden_layers": 4, "pad_token_id": 1},
    "Gemma2ForCausalLM": {
        "model_type": "gemma2",
        **GEMMA,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "Gemma3ForCausalLM": {"model_type": "gemma3_text", **GEMMA, "num_hidden_layers": 3, "sliding_window_pattern": 3},
}
ARCHITECTURES = tuple(BY_ARCHITECTURE)
# Layers that compute or cache other things than those above.
OTHERS: dict[str, dict[str, Any]] = {
    "GptOssForCausalLM": {"model_type": "gpt_oss", "num_local_experts": 3, "num_experts_per_tok": 2},
    "BloomForCausalLM": {"model_type": "bloom"},
    "Gemma3nForCausalLM": {
        "model_type": "gemma3n_text",
        "num_hidden_layers": 4,
        "intermediate_size": [48, 56, 40, 48],
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "sliding_window": 6,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.8, 0.0, 0.0, 0.5],
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 300,
        "altup_num_inputs": 3,
        "laurel_rank": 8,
        "tie_word_embeddings": True,
    },
    "Gemma4UnifiedForCausalLM": {
        "model_type": "gemma4_unified_text",
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "tie_word_embeddings": True,
    },
    "DeepseekV3ForCausalLM": {
        "model_type": "deepseek_v3",
        "head_dim": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
}
_DELTA_RULE = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
# Layers with a recurrent state.
RECURRENT: dict[str, dict[str, Any]] = {
    "Lfm2ForCausalLM": {
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
    },
    "Qwen3_5ForCausalLM": {"model_type": "qwen3_5_text", **_DELTA_RULE},
    "Qwen3NextForCausalLM": {
        "model_type": "qwen3_next",
        **_DELTA_RULE,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
    "NemotronHForCausalLM": {
        "model_type": "nemotron_h",
        "num_hidden_layers": 5,
        "hybrid_override_pattern": "M-M*M",
        "mamba_num_heads": 6,
        "mamba_head_dim": 10,
        "n_groups": 2,
        "ssm_state_size": 13,
        "conv_kernel": 4,
    },
    "FalconH1ForCausalLM": {
        "model_type": "falcon_h1",
        "mamba_n_heads": 6,
        "mamba_d_head": 10,
        "mamba_d_ssm": 60,
        "mamba_n_groups": 2,
        "mamba_d_state": 13,
        "mamba_d_conv": 4,
        "key_multiplier": 0.7,
        "ssm_multipliers": [0.7, 1.1, 1.2, 0.9, 1.3],
        "mlp_multipliers": [0.8, 0.6],
    },
    "Mamba2ForCausalLM": {
        "model_type": "mamba2",
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 2,
        "state_size": 13,
        "conv_kernel": 3,
    },
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
MIXTURES: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
    "Qwen2MoeForCausalLM": {"model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 40},
    "Qwen3MoeForCausalLM": {"model_type": "qwen3_moe", **EXPERTS, "norm_topk_prob": True, "head_dim": 16},
    "OlmoeForCausalLM": {
        "model_type": "olmoe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
    },
    "GraniteMoeForCausalLM": {
        "model_type": "granitemoe",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.2,
        "logits_scaling": 3.0,
    },
    "Glm4MoeForCausalLM": {
        "model_type": "glm4_moe",
        **EXPERTS,
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "use_qk_norm": True,
        "routed_scaling_factor": 1.5,
    },
}


def config_values(architecture: str = "LlamaForCausalLM", **overrides: Any) -> dict[str, Any]:
    """A tiny config.json of this architecture; an override of None writes null."""
    return {
        **TINY,
        "architectures": [architecture],
        "torch_dtype": "float32",
        **{**BY_ARCHITECTURE, **OTHERS, **RECURRENT, **MIXTURES}[architecture],
        **overrides,
    }


def random_tensors(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Weights that keep activations near 1, whatever the depth."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensors_of(config).items():
        tensor = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensor = tensor * 0.2 + 1.0 - config.norm.offset
        elif len(shape) == 2 and "embed_tokens" not in name:
            tensor = tensor / shape[1] ** 0.5
        elif "embed_tokens" in name:
            tensor = tensor / config.embedding_scale
        else:
            tensor = tensor * 0.3
        tensors[name] = tensor.to(dtype)
    return tensors


def write_checkpoint(
    directory: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    **overrides: Any,
) -> Path:
    """A whole checkpoint directory: config, weights in one file or several, tokenizer with a chat template, generation config."""
    directory.mkdir(parents=True, exist_ok=True)
    values = config_values(architecture, **{"torch_dtype": str(dtype).removeprefix("torch."), **overrides})
    config = ModelConfig.from_hf(values)
    _write_json(directory / "config.json", values)
    write_weights(directory, random_tensors(config, seed, dtype), shards)
    write_tokenizer(directory)
    _write_json(directory / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    return directory


def write_weights(directory: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    files = [f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" for shard in range(shards)]
    weight_map = {name: files[index * shards // len(names)] for index, name in enumerate(names)}
    for file in files:
        held = {name: tensors[name] for name in names if weight_map[name] == file}
        save_file(held, directory / file, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def write_tokenizer(directory: Path) -> None:
    """Byte-level BPE of 4 special tokens, the 256 bytes and a few merges, so that every text has ids and comes back unchanged."""
    symbols = [
        *SPECIAL_TOKENS,
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *(merge.replace(" ", "") for merge in MERGES),
    ]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=merges))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", pair=None, special_tokens=[(BOS, 0)])
    tokenizer.save(str(directory / "tokenizer.json"))
    words = {
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": CHAT_TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(directory / "tokenizer_config.json", words)


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=1))
