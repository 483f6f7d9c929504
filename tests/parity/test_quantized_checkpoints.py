"""Checkpoints that other libraries quantized: logits are those of transformers with the values that the formats hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from loaded_models import load
from quantized_files import FORMATS, quantized, write_values
from reference_attention import PlainAttend, context_of
from reference_models import reference_logits

PROMPT = list(range(5, 29))
KEPT = {name: kind.kept for name, kind in FORMATS.items() if kind.kept}
# Blocks of 128 need weights of several.
OVERRIDES: dict[str, dict[str, Any]] = {"fp8 in blocks of 128": {"hidden_size": 160, "intermediate_size": 320}}


@torch.inference_mode()
def logits(directory: Path, precision: str = "float32") -> torch.Tensor:
    found: torch.Tensor = load(directory, precision)(context_of(PROMPT, PlainAttend()))
    return found.float()


@pytest.mark.cases(test=4)
@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    overrides = OVERRIDES.get(name, {})
    directory, values = quantized(tmp_path, name, **overrides)
    expected = reference_logits(write_values(tmp_path, values, **overrides), PROMPT)
    torch.testing.assert_close(logits(directory), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.cases(test=3)
@pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")
@pytest.mark.parametrize("name", KEPT)
def test_kept_codes_give_the_logits_of_their_values(tmp_path: Path, name: str) -> None:
    """Activations and the output layer are rounded to eight bits, and weights in four bits are not rounded again."""
    directory, values = quantized(tmp_path, name)
    exact = write_values(tmp_path, values)
    expected = reference_logits(exact, PROMPT)
    kept, rounded = ((logits(one, KEPT[name]) - expected).norm() / expected.norm() for one in (directory, exact))
    assert kept < 0.015
    if KEPT[name] == "int4" and FORMATS[name].options.get("bits", 4) == 4:  # rounding finds fewer codes again
        assert 2 * kept < rounded


@pytest.mark.parametrize("name", ["fp8 in blocks", "w4a16", "mlx"])
def test_keys_that_are_values_are_read_twice(tmp_path: Path, name: str) -> None:
    sizes = {"architecture": "Gemma4UnifiedForCausalLM", "head_dim": 64, "global_head_dim": 128}
    directory, values = quantized(tmp_path, name, **sizes)
    torch.testing.assert_close(logits(directory), logits(write_values(tmp_path, values, **sizes)), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["fp8 in blocks", "w8a16"])
def test_latent_attention_reads_rows_in_the_order_of_the_file(tmp_path: Path, name: str) -> None:
    """So its layers may be quantized, though its rotary embeddings rotate neighbours."""
    sizes = {"architecture": "DeepseekV3ForCausalLM", "q_lora_rank": 96, "kv_lora_rank": 96, "v_head_dim": 16}
    sizes |= {"moe_intermediate_size": 64, "head_dim": None}
    directory, values = quantized(tmp_path, name, **sizes)
    torch.testing.assert_close(logits(directory), logits(write_values(tmp_path, values, **sizes)), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("Qwen3_5ForCausalLM", "fp8 in blocks"),
        ("Qwen3_5ForCausalLM", "gptq"),
        ("Qwen3_5ForCausalLM", "awq"),
        ("Qwen3_5ForCausalLM", "mlx"),
        ("Qwen3_5ForCausalLM", "mxfp4"),
        ("Qwen3NextForCausalLM", "w8a16"),
    ],
)
def test_layers_with_a_state_are_read_in_the_order_of_the_file(tmp_path: Path, architecture: str, name: str) -> None:
    """Their products, the gates of attention among its queries, and fused rows of key heads, may be quantized."""
    sizes: dict[str, Any] = {
        "architecture": architecture,
        "head_dim": 64,
        "linear_num_value_heads": 8,
        "hidden_size": 64,
    }
    sizes |= {"linear_key_head_dim": 32, "linear_value_head_dim": 64, "linear_num_key_heads": 2}
    sizes |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "intermediate_size": 128}
    if architecture == "Qwen3_5ForCausalLM":
        sizes = {key: value for key, value in sizes.items() if "expert" not in key and "moe" not in key}
    directory, values = quantized(tmp_path, name, **sizes)
    exact = write_values(tmp_path, values, **sizes)
    torch.testing.assert_close(logits(directory), logits(exact), atol=1e-3, rtol=1e-3)
    if has_kernel(OpCode.LINEAR_INT) and FORMATS[name].kept:
        expected, kept = logits(exact), logits(directory, FORMATS[name].kept)
        assert (kept - expected).norm() < 0.05 * expected.norm()
