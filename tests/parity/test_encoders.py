"""Our encoders against transformers' own, hidden state for hidden state in FP32, on tiny random checkpoints of every family.

Tolerance 1e-4 absolute on hidden states of standard deviation about 1: the order of sums differs, nothing else does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from app.messages import Text
from app.models.encoders.encoder import Encoder
from encoder_families import FAMILIES
from loaded_models import load
from reference_encoders import Reference
from run_encoder import encoded, random_texts
from tiny_encoders import SUFFIX, write_encoder

TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
LENGTHS = (5, 1, 120, 17)
ALIKE = ("XLMRoberta", "Camembert", "Llama", "Mistral")  # their heads are another family's
THREE = {"num_labels": 3}
# name: class, what config.json says, lengths of texts
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    **{f"{name}Model": (f"{name}Model", {}, LENGTHS) for name in FAMILIES},
    **{f"{name}{SUFFIX}": (f"{name}{SUFFIX}", THREE, LENGTHS) for name in FAMILIES if name not in ALIKE},
    "cross-encoder": (f"Bert{SUFFIX}", {"num_labels": 1}, LENGTHS),
    "bert-tanh-gelu": ("BertModel", {"hidden_act": "gelu_new"}, LENGTHS),
    "bert-relu": ("BertModel", {"hidden_act": "relu"}, LENGTHS),
    "mpnet-far-apart": ("MPNetModel", {"max_position_embeddings": 302}, (300, 9)),
    "modernbert-all-layers-full": ("ModernBertModel", {"global_attn_every_n_layers": 1}, LENGTHS),
    "modernbert-first-token": (f"ModernBert{SUFFIX}", {**THREE, "classifier_pooling": "cls"}, LENGTHS),
    "eurobert-all-tokens-say": (f"EuroBert{SUFFIX}", {**THREE, "classifier_pooling": "late"}, LENGTHS),
    "eurobert-first-token": (f"EuroBert{SUFFIX}", {**THREE, "classifier_pooling": "bos"}, LENGTHS),
    "nomic-wide-context": ("NomicBertModel", {"max_position_embeddings": 512}, (400, 3)),
}


@pytest.mark.cases(test=5)
@pytest.mark.parametrize("name", CASES)
def test_hidden_states_and_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    architecture, overrides, lengths = CASES[name]
    directory, classifies = write_encoder(tmp_path / "model", architecture, **overrides), architecture.endswith(SUFFIX)
    model, reference = cast(Encoder, load(directory)), Reference(directory, classifies)
    texts = random_texts(lengths, num_types=model.config.num_types)
    outputs = encoded(model, texts, (model.config.outputs[0], "last_hidden_state"))
    torch.testing.assert_close(outputs["last_hidden_state"], reference.hidden(texts), **TOLERANCE)
    if classifies:
        torch.testing.assert_close(outputs["logits"], reference.logits(texts), **TOLERANCE)


@pytest.mark.parametrize("family", ["Roberta", "XLMRoberta", "MPNet", "Bert", "NomicBert"])
def test_the_padding_token_within_a_text_has_the_position_that_transformers_gives_it(
    tmp_path: Path, family: str
) -> None:
    directory = write_encoder(tmp_path / "model", f"{family}Model")
    model, reference = cast(Encoder, load(directory)), Reference(directory, False)
    padding = 1 if model.config.padding_id is None else model.config.padding_id
    texts = [Text(ids) for ids in ((7, padding, 9, 8), (padding,), (padding, padding, 5, padding, 6), (7, 9, padding))]
    outputs = encoded(model, texts, ("last_hidden_state",))
    torch.testing.assert_close(outputs["last_hidden_state"], reference.hidden(texts), **TOLERANCE)


@pytest.mark.parametrize(
    "architecture", [f"Bert{SUFFIX}", f"ModernBert{SUFFIX}", "MPNetModel", "Qwen3Model", "Gemma3TextModel"]
)
def test_a_text_among_others_is_what_it_is_alone(tmp_path: Path, architecture: str) -> None:
    model = cast(Encoder, load(write_encoder(tmp_path / "model", architecture)))
    texts = random_texts(LENGTHS, num_types=model.config.num_types)
    (name, _) = model.config.outputs
    together = encoded(model, texts, (name,))[name]
    alone = torch.cat([encoded(model, (text,), (name,))[name] for text in texts])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("architecture", [f"Roberta{SUFFIX}", f"ModernBert{SUFFIX}", "Qwen3Model"])
def test_what_one_token_says_needs_no_others_behind_the_last_attention(tmp_path: Path, architecture: str) -> None:
    overrides = {"classifier_pooling": "cls"} if "ModernBert" in architecture else {}
    model = cast(Encoder, load(write_encoder(tmp_path / "model", architecture, **overrides)))
    texts = random_texts(LENGTHS)
    (name, _) = model.config.outputs
    starts = torch.tensor([0, 5, 6, 126, 143])
    assert model.rows(starts, (name,)) is not None and model.rows(starts, (name, "last_hidden_state")) is None
    few, all_of_them = encoded(model, texts, (name,)), encoded(model, texts, (name, "last_hidden_state"))
    torch.testing.assert_close(few[name], all_of_them[name], atol=1e-5, rtol=0.0)


# Cosine of each text's vector with FP32's; tiny random models round worse than trained ones: 32 channels average out little.
CLOSE = {"bfloat16": 0.9995, "int8": 0.995}


@pytest.mark.cases(test=11)
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("name", FAMILIES)
def test_rounded_vectors_are_close(tmp_path: Path, name: str, dtype: str) -> None:
    directory = write_encoder(tmp_path / "model", f"{name}Model")
    model = cast(Encoder, load(directory, dtype))
    texts = random_texts(LENGTHS, num_types=model.config.num_types)
    exact = encoded(cast(Encoder, load(directory)), texts, ("embedding",))["embedding"]
    vectors = encoded(model, texts, ("embedding",))["embedding"]
    assert vectors.dtype == torch.float32
    assert F.cosine_similarity(vectors, exact).min() > CLOSE[dtype]
