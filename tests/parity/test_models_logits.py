"""Our decoders against transformers' own, logit for logit in FP32, on tiny random checkpoints of every architecture.

Tolerance 1e-4 absolute on logits of standard deviation about 1: the order of sums differs, nothing else does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loaded_models import load
from reference_attention import PlainAttend, context_of
from reference_models import reference_logits
from tiny_checkpoints import ARCHITECTURES, write_checkpoint

TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]}
LONGROPE = {"original_max_position_embeddings": 64, "rope_scaling": {"type": "longrope", **FACTORS}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
NESTED = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}

# name: architecture, what config.json says, length of the prompt
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    **{architecture: (architecture, {}, 24) for architecture in ARCHITECTURES},
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}, 24),
    "llama-no-gqa": ("LlamaForCausalLM", {"num_key_value_heads": 4}, 24),
    "llama-one-kv-head": ("LlamaForCausalLM", {"num_key_value_heads": 1}, 24),
    "llama-wide-heads": ("LlamaForCausalLM", {"head_dim": 20}, 24),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, 24),
    "llama-gelu": ("LlamaForCausalLM", {"hidden_act": "gelu"}, 24),
    "llama3": ("LlamaForCausalLM", {"rope_scaling": LLAMA3, "rope_theta": 500.0}, 80),
    "llama3-new-spelling": (
        "LlamaForCausalLM",
        {"rope_parameters": {**LLAMA3, "rope_theta": 500.0}, "rope_theta": None},
        80,
    ),
    "llama-linear": ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": 3.0}}, 40),
    "llama-dynamic": ("LlamaForCausalLM", {"rope_scaling": {"type": "dynamic", "factor": 3.0}}, 40),
    "mistral-no-window": ("MistralForCausalLM", {"sliding_window": None}, 24),
    "qwen2-half-window": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        24,
    ),
    "qwen2-tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}, 24),
    "qwen2-yarn": ("Qwen2ForCausalLM", {"rope_scaling": YARN}, 80),
    "qwen3-biases": ("Qwen3ForCausalLM", {"attention_bias": True, "tie_word_embeddings": True}, 24),
    "phi3-window": ("Phi3ForCausalLM", {"sliding_window": 7}, 24),
    "phi3-longrope": ("Phi3ForCausalLM", LONGROPE, 80),
    "phi3-longrope-short": ("Phi3ForCausalLM", {**LONGROPE, "max_position_embeddings": 64}, 40),
    "phi4-partial": ("Phi3ForCausalLM", {"partial_rotary_factor": 0.75}, 24),
    "smollm3-window": ("SmolLM3ForCausalLM", {"use_sliding_window": True, "sliding_window": 5}, 24),
    "gemma2-untied": ("Gemma2ForCausalLM", {"tie_word_embeddings": False}, 24),
    "gemma2-no-caps": ("Gemma2ForCausalLM", {"attn_logit_softcapping": None, "final_logit_softcapping": None}, 24),
    "gemma3-two-ropes": ("Gemma3ForCausalLM", {"rope_theta": 5000.0, "rope_local_base_freq": 100.0}, 24),
    "gemma3-new-spelling": ("Gemma3ForCausalLM", {"rope_theta": None, "rope_parameters": NESTED}, 24),
    "gemma3-linear": ("Gemma3ForCausalLM", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 24),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[int]]:
    """A checkpoint and a prompt."""
    architecture, values, length = CASES[request.param]
    prompt = torch.randint(4, 320, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    return write_checkpoint(tmp_path, architecture, seed=7, **values), prompt


@pytest.mark.cases(test=6)
@torch.inference_mode()
def test_logits_equal_transformers(case: tuple[Path, list[int]]) -> None:
    directory, prompt = case
    expected = reference_logits(directory, prompt)
    model = load(directory)

    whole = model(context_of(prompt, PlainAttend()))
    torch.testing.assert_close(whole, expected, **TOLERANCE)

    attend, half = PlainAttend(), len(prompt) // 2
    some = model(context_of(prompt[:half], attend, logit_rows=[2, half - 1]))
    torch.testing.assert_close(some, expected[[2, half - 1]], **TOLERANCE)
    for position in range(half, len(prompt)):
        row = model(context_of(prompt[position : position + 1], attend, start=position))
        torch.testing.assert_close(row[0], expected[position], **TOLERANCE)
