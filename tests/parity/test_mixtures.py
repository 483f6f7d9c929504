"""Mixtures of experts against transformers, logit for logit in FP32, on tiny random checkpoints that it writes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loaded_models import load
from reference_attention import PlainAttend, context_of
from reference_models import reference_logits, write_random_model
from tiny_checkpoints import TINY, write_tokenizer

TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
QWEN = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
GLM = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1}

DEEPSEEK = {
    **GLM,
    "head_dim": None,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "routed_scaling_factor": 1.5,
}

# name: model type, what config.json says
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6}),
    "qwen3": ("qwen3_moe", {**QWEN, "norm_topk_prob": True, "head_dim": 16}),
    "qwen3-sums-below-1": ("qwen3_moe", {**QWEN, "num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "qwen3-steps": ("qwen3_moe", {**QWEN, "num_hidden_layers": 4, "decoder_sparse_step": 2}),
    "qwen2-shared": ("qwen2_moe", {**QWEN, "shared_expert_intermediate_size": 40}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "head_dim": None}),
    "olmoe-one-expert": (
        "olmoe",
        {"num_experts": 1, "num_experts_per_tok": 1, "norm_topk_prob": True, "head_dim": None},
    ),
    "granite": (
        "granitemoe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": None,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 3.0,
        },
    ),
    "glm4": ("glm4_moe", {**GLM, "use_qk_norm": True, "routed_scaling_factor": 1.5}),
    "glm4-groups": ("glm4_moe", {**GLM, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "norm_topk_prob": False}),
    "deepseek3": ("deepseek_v3", {**DEEPSEEK, "n_group": 4, "topk_group": 2}),
    "deepseek3-one-group": ("deepseek_v3", {**DEEPSEEK, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "lfm2": (
        "lfm2_moe",
        {
            **QWEN,
            "head_dim": None,
            "num_hidden_layers": 3,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv"],
        },
    ),
    "deepseek2-groups": (
        "deepseek_v2",
        {**DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "norm_topk_prob": False},
    ),
}


@pytest.fixture(params=CASES)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint."""
    model_type, values = CASES[request.param]
    write_random_model(tmp_path, {**TINY, "model_type": model_type, "pad_token_id": 1, **values})
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.mark.cases(test=2)
@torch.inference_mode()
def test_logits_equal_transformers(directory: Path) -> None:
    prompt = torch.randint(4, 320, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = reference_logits(directory, prompt)
    model = load(directory)
    torch.testing.assert_close(model(context_of(prompt, PlainAttend())), expected, **TOLERANCE)
    attend = PlainAttend()
    some = model(context_of(prompt[:12], attend, logit_rows=[2, 11]))
    torch.testing.assert_close(some, expected[[2, 11]], **TOLERANCE)
    for position in range(12, len(prompt)):
        row = model(context_of(prompt[position : position + 1], attend, start=position))
        torch.testing.assert_close(row[0], expected[position], **TOLERANCE)
