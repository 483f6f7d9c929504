"""Every value of transformers' configuration classes is followed, refused, or known to have no effect."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import picture_checkpoints
from app.errors import CheckpointInvalid
from app.models.config_reader import FOLLOWED_WHERE_NEEDED, REFUSED, WITHOUT_EFFECT, AskedValues, unknown_keys
from app.models.decoders.config import ModelConfig
from app.models.decoders.families import DECODER_FAMILIES
from app.models.encoders.config_reader import read_encoder
from app.weights.checkpoint import read_model_config
from encoder_families import FAMILIES
from served_families import SERVED, TEXT_HALVES, VARIANTS
from tiny_checkpoints import config_values

DECODERS = {**{name: (name, values) for name, values in SERVED.items()}, **VARIANTS}
READERS = {name: (name, make()[0]) for name, make in picture_checkpoints.FAMILIES.items()}


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)  # transformers doubts some of the tiny values
    yield
    logging.disable(logging.NOTSET)


def as_saved(config: Any, architecture: str, given: Mapping[str, Any]) -> AskedValues:
    """The values of a config as its file has them, with what a class adds when it is made."""
    saved = json.loads(json.dumps(config.to_dict()))
    return AskedValues({**given, **saved, "architectures": [architecture]})


@pytest.mark.parametrize("name", [*DECODERS, *READERS])
def test_every_value_of_a_decoder_is_known(name: str) -> None:
    from transformers import AutoConfig

    architecture, given = (DECODERS | READERS)[name]
    config = AutoConfig.for_model(DECODER_FAMILIES[architecture].model_type, **given)
    values = as_saved(config, architecture, given)
    ModelConfig.from_hf(values)
    copied = ["hidden_size"] if name.startswith(("Ovis2", "PaliGemma")) else []  # of the text model, beside its section
    assert unknown_keys(values) == copied


@pytest.mark.parametrize("name", FAMILIES)
def test_every_value_of_an_encoder_is_known(name: str) -> None:
    import transformers

    config_class = getattr(transformers, f"{name}Config", None)
    if config_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}Config")
    same = {"embedding_size": 768, "hidden_size": 768} if name == "Electra" else {}
    values = as_saved(config_class(**same), f"{name}Model", {})
    read_encoder(values)
    assert unknown_keys(values) == []


def test_what_is_read_is_not_listed_as_without_effect() -> None:
    """A value that decides the computation of every family, so that the walk can fail."""
    values = AskedValues(config_values())
    ModelConfig.from_hf(values)
    assert {"hidden_size", "rms_norm_eps", "tie_word_embeddings", "rope_theta"} <= values.asked
    assert not {"hidden_size", "rms_norm_eps", "rope_theta"} & WITHOUT_EFFECT - FOLLOWED_WHERE_NEEDED


@pytest.mark.parametrize(
    ("architecture", "values"),
    [
        ("LlamaForCausalLM", {"attn_logit_softcapping": 50.0}),
        ("LlamaForCausalLM", {"logits_scaling": 8.0}),
        ("Qwen2ForCausalLM", {"final_logit_softcapping": 30.0}),
        ("Qwen3ForCausalLM", {"clip_qkv": 8}),
        ("MistralForCausalLM", {"is_encoder_decoder": True}),
        ("Phi3ForCausalLM", {"embedding_multiplier": 2.0}),
        ("Gemma2ForCausalLM", {"use_qk_norm": True}),
    ],
)
def test_values_that_the_family_does_not_follow_are_refused(
    architecture: str, values: dict[str, Any], tmp_path: Path
) -> None:
    (name,) = values
    (tmp_path / "config.json").write_text(json.dumps(config_values(architecture, **values)))
    with pytest.raises(CheckpointInvalid, match=f"{name} is .*, which this architecture does not have here"):
        read_model_config(tmp_path, "native")
    for neutral in (*REFUSED[name], None):
        (tmp_path / "config.json").write_text(json.dumps(config_values(architecture, **{name: neutral})))
        read_model_config(tmp_path, "native")


def test_unknown_names_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.disable(logging.NOTSET)
    (tmp_path / "config.json").write_text(json.dumps(config_values(of_tomorrow=1, use_cache=False)))
    with caplog.at_level("INFO"):
        read_model_config(tmp_path)
    assert "not known here and without effect: of_tomorrow" in caplog.text and "use_cache" not in caplog.text


def test_text_halves_are_looked_at() -> None:
    half = {**SERVED["Gemma3ForConditionalGeneration"]["text_config"], "clip_qkv": 3, "of_tomorrow": 1}
    values = AskedValues({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": half})
    ModelConfig.from_hf(values)
    with pytest.raises(CheckpointInvalid, match=r"text_config\.clip_qkv is 3"):
        unknown_keys(values)
    assert "Gemma3ForConditionalGeneration" not in TEXT_HALVES
