"""Each family of decoders against transformers, logit for logit in FP32, on tiny checkpoints that transformers writes.

So the names, orders and shapes of the stored tensors are those of published files, not ours.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.models.decoders.families import DECODER_FAMILIES
from app.weights.checkpoint import open_checkpoint
from loaded_models import load
from picture_checkpoints import FAMILIES
from reference_attention import PlainAttend, context_of
from served_families import SERVED, VARIANTS, expected_logits, prompt_of, write_family
from tiny_checkpoints import write_tokenizer

FAST = (
    "GraniteForCausalLM",
    "GPT2LMHeadModel",
    "falcon-new",
    "Olmo2ForCausalLM",
    "CohereForCausalLM",
    "DeepseekV3ForCausalLM",
    "Lfm2ForCausalLM",
    "Gemma3nForCausalLM",
)
CASES = {name: (name, values) for name, values in SERVED.items()} | dict(VARIANTS)


def test_every_family_is_compared() -> None:
    """test_pictures.py has those that read pictures, test_assistant_head.py the heads."""
    heads = {name for name in DECODER_FAMILIES if "Assistant" in name}
    assert set(SERVED) | set(FAMILIES) | heads == set(DECODER_FAMILIES)


def test_the_other_half_of_a_model_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    architecture = "Gemma3ForConditionalGeneration"
    write_family(tmp_path, architecture, SERVED[architecture])
    write_tokenizer(tmp_path)
    with caplog.at_level("INFO"):
        checkpoint = open_checkpoint(tmp_path)
    assert not any("vision" in name for name in checkpoint.tensors)
    assert "only the text half is served" in caplog.text and "vision_tower" in caplog.text


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
@torch.inference_mode()
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    architecture, values = CASES[name]
    write_family(tmp_path, architecture, values)
    write_tokenizer(tmp_path)
    prompt = prompt_of(24)
    expected = expected_logits(tmp_path, architecture, prompt)
    tolerance = {"atol": 2e-4 * min(1.0, float(expected.std())), "rtol": 0.0}
    model = load(tmp_path)

    whole = model(context_of(prompt, PlainAttend()))
    torch.testing.assert_close(whole, expected, **tolerance)

    attend, half = PlainAttend(), len(prompt) // 2
    some = model(context_of(prompt[:half], attend, logit_rows=[2, half - 1]))
    torch.testing.assert_close(some, expected[[2, half - 1]], **tolerance)
    for position in range(half, len(prompt)):
        row = model(context_of(prompt[position : position + 1], attend, start=position))
        torch.testing.assert_close(row[0], expected[position], **tolerance)
