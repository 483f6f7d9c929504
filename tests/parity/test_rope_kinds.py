"""Every kind of rotary embedding against transformers, beyond the original context, in families that have it.

Checkpoints are written by transformers, as in `test_families_logits.py`, with its own defaults for what is not given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.models.decoders.rope import ROPE_KINDS
from app.weights.checkpoint import open_checkpoint
from loaded_models import load
from reference_attention import PlainAttend, context_of
from served_families import SERVED, expected_logits, prompt_of, write_family
from tiny_checkpoints import write_tokenizer

LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
    "beta_fast": 8.0,
    "beta_slow": 0.5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "factor": 2.0}


def longrope(half: int, **more: Any) -> dict[str, Any]:
    factors = {"short_factor": [1.0 + 0.1 * n for n in range(half)], "long_factor": [1.5 + n for n in range(half)]}
    return {"rope_type": "longrope", "original_max_position_embeddings": 32, "rope_theta": 500.0, **factors, **more}


def nested(full: dict[str, Any]) -> dict[str, Any]:
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}


# name: architecture, rope_parameters, the longest context
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "linear llama": ("LlamaForCausalLM", LINEAR, 256),
    "linear falcon": ("FalconForCausalLM", LINEAR, 2048),
    "linear neox": ("GPTNeoXForCausalLM", {**LINEAR, "partial_rotary_factor": 0.5}, 256),
    "linear gemma3": ("Gemma3ForCausalLM", nested(LINEAR), 256),
    "dynamic qwen2": ("Qwen2ForCausalLM", DYNAMIC, 256),
    "dynamic hunyuan": ("HunYuanDenseV1ForCausalLM", {**DYNAMIC, "alpha": 1000.0}, 256),
    "yarn qwen3": ("Qwen3ForCausalLM", YARN, 256),
    "yarn far": ("Qwen2ForCausalLM", {**YARN, "factor": 16.0}, 512),
    "yarn exact borders": ("LlamaForCausalLM", {**YARN, "truncate": False}, 256),
    "yarn own attention factor": ("MistralForCausalLM", {**YARN, "attention_factor": 1.7}, 256),
    "yarn one mscale": ("LlamaForCausalLM", {**YARN, "mscale": 0.7}, 256),
    "yarn two mscales": ("LlamaForCausalLM", {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3}, 256),
    "yarn mscale of 0": ("DeepseekV3ForCausalLM", {**YARN, "mscale": 0.7, "mscale_all_dim": 0}, 256),
    "yarn deepseek": ("DeepseekV3ForCausalLM", {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}, 256),
    "yarn youtu": ("YoutuForCausalLM", {**YARN, "mscale": 0.9, "mscale_all_dim": 0.9}, 256),
    "yarn minicpm3": ("MiniCPM3ForCausalLM", {**YARN, "mscale_all_dim": 0.6}, 256),
    "yarn neighbours": ("CohereForCausalLM", YARN, 256),
    "yarn partial": ("GlmForCausalLM", {**YARN, "partial_rotary_factor": 0.5}, 256),
    "yarn gpt-oss": ("GptOssForCausalLM", {**YARN, "truncate": False}, 256),
    "yarn olmo3": ("Olmo3ForCausalLM", nested({**YARN, "attention_factor": 1.2}), 256),
    "llama3 llama": ("LlamaForCausalLM", LLAMA3, 256),
    "llama3 smollm3": ("SmolLM3ForCausalLM", LLAMA3, 256),
    "llama3 partial": ("NemotronForCausalLM", {**LLAMA3, "partial_rotary_factor": 0.5}, 256),
    "longrope phi3": ("Phi3ForCausalLM", longrope(4, factor=8.0), 256),
    "longrope own attention factor": ("Phi3ForCausalLM", longrope(4, factor=8.0, attention_factor=1.4), 256),
    "longrope minicpm3": ("MiniCPM3ForCausalLM", longrope(2, factor=8.0), 256),
    "longrope partial": ("Phi3ForCausalLM", longrope(3, factor=8.0, partial_rotary_factor=0.75), 256),
    "proportional llama": ("LlamaForCausalLM", PROPORTIONAL, 256),
    "proportional granite": ("GraniteForCausalLM", {**PROPORTIONAL, "partial_rotary_factor": 1.0}, 256),
}
FAST = (
    "linear llama",
    "yarn two mscales",
    "yarn deepseek",
    "longrope partial",
    "proportional llama",
    "dynamic hunyuan",
)
OURS = {"default", "su", "mrope"}  # other names of kinds, and none of transformers


def test_every_kind_is_compared() -> None:
    import transformers.modeling_rope_utils as reference

    assert set(reference.ROPE_INIT_FUNCTIONS) == set(ROPE_KINDS) - OURS == {name.split()[0] for name in CASES}


@pytest.mark.parametrize("name", [one if one in FAST else pytest.param(one, marks=pytest.mark.full) for one in CASES])
@torch.inference_mode()
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    architecture, rope, longest = CASES[name]
    values = {"original_max_position_embeddings": 32} if architecture == "Phi3ForCausalLM" else {}
    write_family(tmp_path, architecture, {**SERVED[architecture], **values, "rope_parameters": rope}, seed=3)
    write_tokenizer(tmp_path)
    prompt = prompt_of(80)
    expected = expected_logits(tmp_path, architecture, prompt)
    assert open_checkpoint(tmp_path).decoder.max_model_len == longest
    found = load(tmp_path)(context_of(prompt, PlainAttend()))
    torch.testing.assert_close(found, expected, atol=3e-4 * min(1.0, float(expected.std())), rtol=0.0)


@torch.inference_mode()
def test_positions_of_a_text_are_the_same_in_all_three_sections_of_mrope(tmp_path: Path) -> None:
    from reference_models import reference_logits
    from tiny_checkpoints import write_checkpoint

    scaling = {"type": "mrope", "mrope_section": [1, 1, 2]}
    plain = write_checkpoint(tmp_path / "plain", "Qwen2ForCausalLM")
    sections = write_checkpoint(tmp_path / "sections", "Qwen2ForCausalLM", rope_scaling=scaling)
    prompt = prompt_of(40)
    found = load(sections)(context_of(prompt, PlainAttend()))
    torch.testing.assert_close(found, reference_logits(plain, prompt), atol=1e-4, rtol=0.0)
