"""Pictures of a GGUF model: the text is that of the checkpoint from which its two files were written."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy
import pytest

from app.engine.transformers.mmproj import GgufTower
from app.errors import CheckpointInvalid
from app.models.decoders.config import ModelConfig
from app.service.prompt import render_chat
from app.service.served_model import ServedDecoder
from app.weights.checkpoint import open_checkpoint
from gguf_files import write_mmproj, write_reader_gguf
from picture_checkpoints import Reference, template, write_reader
from tests.parity.test_pictures import TALKS, WIDE, Served, file_of, serve

NAME = "SmolVLMForConditionalGeneration/llama"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    source = tmp_path_factory.mktemp("reader") / "model"
    return source, write_reader(source, NAME)


@pytest.mark.parametrize("kind", ["F32", pytest.param("F16", marks=pytest.mark.full)])
def test_the_text_is_that_of_the_checkpoint(written: tuple[Path, Reference], tmp_path: Path, kind: str) -> None:
    source, reference = written
    model, _ = write_reader_gguf(source, tmp_path, kind)
    (tmp_path / "chat.jinja").write_text(template("<image>"))
    one: Served = serve(model, reference, cache_dir=tmp_path / "cache", chat_template=tmp_path / "chat.jinja")
    assert isinstance(one.model, ServedDecoder) and one.model.pictures is not None, one.model.no_pictures
    try:
        rendered = render_chat(one.model, one.request(TALKS["two"]).messages or (), {})
        assert rendered.count("<image>") == 2
        texts = one.texts(list(TALKS.values()))
        if kind == "F32":
            assert texts == [one.expected(talk) for talk in TALKS.values()]
        else:
            assert texts[-1] == one.expected(TALKS["text"]), "the text model has other weights"
    finally:
        one.model.close()


def test_a_tower_in_bf16_has_nearly_the_same_vectors(written: tuple[Path, Reference], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_reader_gguf(written[0], tmp_path)[0])
    config, part = checkpoint.model_config, checkpoint.picture_part
    assert isinstance(config, ModelConfig) and part is not None
    towers = [GgufTower(part, checkpoint.location, config, dtype) for dtype in ("float32", "bfloat16")]
    read = [tower.read(file_of(WIDE), "messages", True).runs[0].data for tower in towers]
    plain, rounded = (numpy.frombuffer(data, "<f4") for data in read)
    assert 0.999 < plain @ rounded / numpy.linalg.norm(plain) / numpy.linalg.norm(rounded) < 1.0


def test_which_file_is_the_picture_part(
    written: tuple[Path, Reference], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, _ = written
    model, part = write_reader_gguf(source, tmp_path)
    found = open_checkpoint(tmp_path).picture_part
    assert found is not None and found.file == part, "a directory with a model and its part is one model"
    other = part.rename(tmp_path / "part.gguf")
    assert open_checkpoint(model).picture_part is None
    given = open_checkpoint(model, mmproj=other).picture_part
    assert given is not None and given.file == other
    for name in ("mmproj-a.gguf", "model.mmproj-f16.gguf"):
        write_mmproj(source, tmp_path / name)
    with caplog.at_level(logging.WARNING):
        assert open_checkpoint(model).picture_part is None
    assert "name one with --mmproj" in caplog.text
    with pytest.raises(CheckpointInvalid, match="mmproj is for GGUF models"):
        open_checkpoint(source, mmproj=other)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "another projector": ({"projector": "mlp"}, "a projector of type 'mlp'; supported is 'idefics3'"),
    "too many layers": ({"layers": 10**6}, r"v\.blk\.999999\.ffn_down\.weight is missing"),
    "a missing tensor": (
        {"without": "model.vision_model.encoder.layers.1.layer_norm2.bias"},
        "has 31 tensors in layers, and 2 layers have 32",
    ),
    "a missing projector": (
        {"without": "model.connector.modality_projection.proj.weight"},
        r"mm\.model\.fc\.weight is missing",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_file_that_does_not_fit_is_refused(name: str, written: tuple[Path, Reference], tmp_path: Path) -> None:
    changed, reason = FAULTS[name]
    model, part = write_reader_gguf(written[0], tmp_path)
    with pytest.raises(CheckpointInvalid, match=reason):
        open_checkpoint(model, mmproj=write_mmproj(written[0], part, **changed))
    assert open_checkpoint(model).picture_part is None, "one that only lies there stops no start"
