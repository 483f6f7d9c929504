"""The committed demo encoder: a small sentence-transformers directory that says something of what texts mean; and how it was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[4]
DEMO = ROOT / "app" / "demo" / "bert"


def read(name: str) -> Any:
    """One of the JSON files."""
    return json.loads((DEMO / name).read_text(encoding="utf-8"))


def test_it_is_complete_and_at_most_five_megabytes() -> None:
    files = [path for path in DEMO.rglob("*") if path.is_file()]
    assert {path.relative_to(DEMO).as_posix() for path in files} == {
        "1_Pooling/config.json", "README.md", "config.json", "config_sentence_transformers.json", "model.safetensors",
        "modules.json", "sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert sum(path.stat().st_size for path in files) <= 5_000_000


def test_the_weights_are_what_the_config_says() -> None:
    config = read("config.json")
    with safe_open(DEMO / "model.safetensors", framework="numpy") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118 (not a dict)
        dtypes = {weights.get_slice(name).get_dtype() for name in shapes}
    assert dtypes == {"F16"}
    assert shapes["embeddings.word_embeddings.weight"] == [config["vocab_size"], config["hidden_size"]]
    assert (
        len({name.split(".")[2] for name in shapes if name.startswith("encoder.layer.")}) == config["num_hidden_layers"]
    )
    assert read("1_Pooling/config.json")["word_embedding_dimension"] == config["hidden_size"]
    assert read("sentence_bert_config.json")["max_seq_length"] == config["max_position_embeddings"]


def test_like_texts_lie_together() -> None:
    from tools.demo_models.encoder_files import load
    from tools.demo_models.evaluate_encoder import embedded

    net, tokenizer = load(DEMO)
    assert tokenizer.encode("Hello").tokens[0] == "[CLS]"
    texts = [
        "A kitten is dozing in the sun.",
        "The cat sleeps on the warm window sill.",
        "The bank raised its interest rates.",
    ]
    cosines = embedded(net, tokenizer, texts) @ embedded(net, tokenizer, texts).T
    assert cosines[0, 1] > cosines[0, 2] + 0.1


def test_agreement_sees_a_difference() -> None:
    from tools.demo_models.evaluate_encoder import agreement, spearman

    assert spearman(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([-5.0, 0.1, 0.2])) == pytest.approx(1.0)
    assert spearman(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([3.0, 2.0, 1.0])) == pytest.approx(-1.0)
    vectors = torch.nn.functional.normalize(torch.randn(40, 8, generator=torch.Generator().manual_seed(0)))
    assert agreement(vectors, vectors) == (pytest.approx(1.0), 1.0)
    correlation, found = agreement(vectors, vectors.roll(1, 0))
    assert abs(correlation) < 0.3
    assert found < 0.5


def test_texts_are_the_same_for_a_seed_and_held_out_ones_are_few() -> None:
    from tools.demo_models.encoder_texts import is_held_out, phrases

    words = ["water", "house", "tree", "green", "walks"]
    drawn = [[next(made) for _ in range(500)] for made in (phrases(words, 3), phrases(words, 3), phrases(words, 4))]
    assert drawn[0] == drawn[1] != drawn[2]
    assert 0 < sum(map(is_held_out, set(drawn[0]))) < 0.1 * len(set(drawn[0]))
