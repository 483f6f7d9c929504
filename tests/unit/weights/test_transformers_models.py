"""Which models are left to transformers, what a plan reads of them, and what is refused, without importing torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from app.errors import CheckpointInvalid, PlanImpossible
from app.hardware.plan.engine import decide_engine
from app.models import transformers_config
from app.models.transformers_config import TransformersConfig, class_table
from app.settings import Settings
from app.weights.checkpoint import open_checkpoint
from armature_kernels.linear.layout import LAYOUTS
from tiny_checkpoints import write_checkpoint, write_tokenizer, write_weights

MAMBA = {
    "architectures": ["MambaForCausalLM"], "model_type": "mamba", "vocab_size": 320, "hidden_size": 32,
    "num_hidden_layers": 2, "state_size": 8,
}  # fmt: skip


def write(directory: Path, **values: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({**MAMBA, **values}))
    write_weights(
        directory, {"backbone.norm_f.weight": torch.ones(32), "backbone.embeddings.weight": torch.ones(320, 32)}
    )
    write_tokenizer(directory)
    return directory


def test_a_model_that_is_not_native_is_left_to_transformers(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path))
    assert checkpoint.kind == "decoder" and isinstance(checkpoint.model_config, TransformersConfig)
    needs = checkpoint.needs()
    assert needs.engine == "transformers" and needs.architecture == "MambaForCausalLM"
    assert needs.bytes_by_precision["bf16"] == 2 * (32 + 320 * 32) and needs.generates
    # The embedding and the norm, and the output layer that is tied to it.
    assert needs.bytes_by_precision["int8"] == 4 * (32 + 320 * 32) + LAYOUTS["int8/32"].nbytes(320, 32)
    decision = decide_engine(Settings(), needs)
    assert decision.value == "transformers" and "MambaForCausalLM is not native" in decision.reason
    with pytest.raises(CheckpointInvalid, match="state-space"):
        open_checkpoint(tmp_path, "native")


def test_a_native_model_is_left_to_it_where_that_is_asked_for(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    assert open_checkpoint(directory).needs().engine == "native"
    needs = open_checkpoint(directory, "transformers").needs()
    assert needs.engine == "transformers"
    assert needs.kv_elements_per_token == open_checkpoint(directory).needs().kv_elements_per_token
    assert decide_engine(Settings(engine="transformers"), needs).reason.startswith("Asked for")


def test_without_the_extra_the_refusal_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class_table.cache_clear()
    monkeypatch.setattr(transformers_config, "find_spec", lambda name: None)
    try:
        with pytest.raises(
            CheckpointInvalid, match=r"MambaForCausalLM is not supported.*pip install 'armature-serve\[transformers\]'"
        ):
            open_checkpoint(write(tmp_path))
    finally:
        class_table.cache_clear()


@pytest.mark.parametrize(
    "values, said",
    [
        (
            {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "own.Own"}},
            "trust_remote_code stays off",
        ),
        (
            {"architectures": ["OwnForSequenceClassification"], "auto_map": {"AutoModel": "own.Own"}},
            "not supported as an encoder.*trust_remote_code stays off",
        ),
        ({"architectures": ["T5ForConditionalGeneration"]}, "encoder that reads the text.*has no class"),
        ({"hidden_size": "32"}, "hidden_size must be an integer"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights of a MambaForCausalLM"),
    ],
)
def test_what_transformers_cannot_serve_either_is_refused_by_its_name(
    values: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointInvalid, match=said):
        open_checkpoint(write(tmp_path, **values))


@pytest.mark.parametrize(
    "values, kind",
    [
        ({"architectures": ["XLMWithLMHeadModel"]}, "encoder"),  # it fills masks
        ({"architectures": ["XLMWithLMHeadModel"], "causal": True}, "decoder"),
        ({"architectures": ["Qwen2AudioForConditionalGeneration"], "text_config": MAMBA}, "decoder"),
        ({"architectures": ["VoxtralForConditionalGeneration"], "text_config": MAMBA}, "decoder"),  # of texts alone
    ],
)
def test_a_class_of_several_tables_does_what_its_configuration_says(
    values: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    assert open_checkpoint(write(tmp_path, **values)).kind == kind


@pytest.mark.parametrize(
    "setting",
    [
        {"draft_model": Path("other")},
        {"lora": ("a=b",)},
        {"deterministic": "on"},
        {"precision": "int4-small"},
        {"compile": "on"},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_a_setting_of_native_engines_is_refused_by_its_name(setting: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(PlanImpossible, match=next(iter(setting)) if "precision" not in setting else "int4-small"):
        decide_engine(Settings(**setting), open_checkpoint(write(tmp_path)).needs())
