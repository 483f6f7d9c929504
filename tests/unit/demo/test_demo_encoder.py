"""The committed demo encoder: a small sentence-transformers directory that says something of what texts mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[3]
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
    from transformers import BertModel

    net, tokenizer = (
        BertModel.from_pretrained(DEMO, dtype=torch.float32).eval(),
        Tokenizer.from_file(str(DEMO / "tokenizer.json")),
    )
    texts = [
        "A kitten is dozing in the sun.",
        "The cat sleeps on the warm window sill.",
        "The bank raised its interest rates.",
    ]
    ids = [torch.tensor([tokenizer.encode(text).ids]) for text in texts]
    with torch.inference_mode():
        vectors = torch.nn.functional.normalize(torch.cat([net(row).last_hidden_state.mean(1) for row in ids]))
    kitten, cat, bank = vectors
    assert tokenizer.encode("Hello").tokens[0] == "[CLS]"
    assert kitten @ cat > kitten @ bank + 0.1
