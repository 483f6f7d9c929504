"""Tiny checkpoints of models with a recurrent state and of Gemma 4, and GGUF files of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from app.models.decoders.config import ModelConfig
from app.models.decoders.families import DECODER_FAMILIES
from app.weights.checkpoint import open_checkpoint
from armature_bench.engine import gguf_file
from gguf_files import write_tokenizer
from tiny_checkpoints import random_tensors, write_weights
from tiny_checkpoints import write_tokenizer as write_checkpoint_tokenizer

# llama.cpp has one size of a head's keys and values in a state, and heads of twice the hidden size in Mamba-2.
SIZES: dict[str, Any] = {
    "vocab_size": 270,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
DELTA = {
    **SIZES,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
MAMBA = {
    **SIZES,
    "head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
}
GRANITE = {
    **MAMBA,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.3,
    "logits_scaling": 2.0,
    "shared_intermediate_size": 48,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
}
NEMOTRON = {
    **SIZES,
    "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
}
NEMOTRON_EXPERTS = {
    "layers_block_type": ["mamba", "moe", "attention", "moe"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "routed_scaling_factor": 1.5,
}
FALCON = {
    **MAMBA,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "mlp_multipliers": [0.8, 0.6],
    "ssm_multipliers": [0.7, 1.1, 1.2, 0.9, 1.3],
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
}
GEMMA = {
    **SIZES,
    "sliding_window": 6,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "global_head_dim": 64,
    "final_logit_softcapping": 3.0,
}
LAYER_INPUTS = {
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "vocab_size_per_layer_input": 270,
    "hidden_size_per_layer_input": 12,
}
GEMMA_EXPERTS = {
    "hidden_size_per_layer_input": 0,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 32,
}
LFM2 = {
    **SIZES,
    "head_dim": 16,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "block_auto_adjust_ff_dim": False,
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen35": ("Qwen3_5ForCausalLM", DELTA),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", {**DELTA, **EXPERTS}),
    "qwen3next": ("Qwen3NextForCausalLM", {**DELTA, **EXPERTS}),
    "granitehybrid": ("GraniteMoeHybridForCausalLM", {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitehybrid-dense": ("GraniteMoeHybridForCausalLM", {**GRANITE, "num_local_experts": 0}),
    "nemotron_h": ("NemotronHForCausalLM", NEMOTRON),
    "nemotron_h_moe": ("NemotronHForCausalLM", {**NEMOTRON, **NEMOTRON_EXPERTS}),
    "falcon-h1": ("FalconH1ForCausalLM", FALCON),
    "lfm2": ("Lfm2ForCausalLM", LFM2),
    "gemma4": ("Gemma4ForCausalLM", {**GEMMA, **LAYER_INPUTS}),
    "gemma4-moe": ("Gemma4ForCausalLM", {**GEMMA, **GEMMA_EXPERTS}),
}


def write_hybrid(folder: Path, name: str) -> Path:
    """Write a tiny checkpoint to `folder`/exact and the same model to `folder`/tiny.gguf."""
    architecture, values = HYBRIDS[name]
    family = DECODER_FAMILIES[architecture]
    values = {"architectures": [architecture], "model_type": family.model_type, **values}
    exact = folder / "exact"
    exact.mkdir()
    (exact / "config.json").write_text(json.dumps(values))
    tensors = random_tensors(ModelConfig.from_hf(values))
    for tensor in (tensor for name, tensor in tensors.items() if name.endswith(("per_expert_scale", "layer_scalar"))):
        tensor.abs_()
    if architecture == "Gemma4ForCausalLM":  # its experts are beside the MLP
        tensors = {name.replace(".mlp.experts.", ".experts."): tensor for name, tensor in tensors.items()}
        for name in tensors:  # its scores are not scaled, and random ones as large as theirs would select single tokens
            tensors[name] *= 0.35 if name.endswith((".q_norm.weight", ".k_norm.weight")) else 1.0
    write_weights(exact, tensors)
    write_checkpoint_tokenizer(exact)
    file = folder / "tiny.gguf"
    gguf_file.write_gguf(open_checkpoint(exact), file, lambda writer: write_tokenizer(writer, exact))
    return file
