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
from app.service.served_model import ServedDecoder
from app.weights.checkpoint import open_checkpoint
from gguf_files import READERS, write_mmproj, write_reader_gguf
from picture_checkpoints import FORMS, Reference, template, write_reader
from tests.parity.test_pictures import TALKS, WIDE, Served, file_of, serve

NAME = "SmolVLMForConditionalGeneration/llama"


def written_as(name: str, folder: Path) -> tuple[Path, Reference]:
    # What the published models have and files do not say.
    text = {"Mistral3": {"sliding_window": None}, "Gemma3": {"query_pre_attn_scalar": 8}}.get(
        name.partition("For")[0], {}
    )
    return folder / "model", write_reader(folder / "model", name, **text)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    return written_as(NAME, tmp_path_factory.mktemp("reader"))


def started(model: Path, name: str, reference: Reference, folder: Path) -> Served:
    (folder / "chat.jinja").write_text(template(FORMS[name]()[2]))
    one: Served = serve(model, reference, cache_dir=folder / "cache", chat_template=folder / "chat.jinja")
    assert isinstance(one.model, ServedDecoder) and one.model.pictures is not None, one.model.no_pictures
    return one


@pytest.mark.parametrize(
    "name", [NAME, *(pytest.param(name, marks=pytest.mark.full) for name in READERS if name != NAME)]
)
def test_the_text_is_that_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    source, reference = written_as(name, tmp_path)
    model, _ = write_reader_gguf(name, source, reference, tmp_path / "gguf")
    one = started(model, name, reference, tmp_path)
    try:
        assert one.texts([TALKS["text"]]) == [one.expected(TALKS["text"])], "the text model has other weights"
        talks = [TALKS["two"], TALKS["earlier"]]
        assert one.texts(talks) == [one.expected(talk) for talk in talks]
    finally:
        one.model.close()


def test_a_tower_in_bf16_has_nearly_the_same_vectors(written: tuple[Path, Reference], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_reader_gguf(NAME, written[0], written[1], tmp_path, "F16")[0])
    config, part = checkpoint.model_config, checkpoint.picture_part
    assert isinstance(config, ModelConfig) and part is not None
    towers = [GgufTower(part, checkpoint.location, config, 1.0, dtype) for dtype in ("float32", "bfloat16")]
    read = [tower.read_all([(file_of(WIDE), "messages")], True)[0][0].runs[0].data for tower in towers]
    plain, rounded = (numpy.frombuffer(data, "<f4") for data in read)
    assert 0.999 < plain @ rounded / numpy.linalg.norm(plain) / numpy.linalg.norm(rounded) < 1.0


def test_which_file_is_the_picture_part(
    written: tuple[Path, Reference], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, reference = written
    model, part = write_reader_gguf(NAME, source, reference, tmp_path)
    found = open_checkpoint(tmp_path).picture_part
    assert found is not None and found.file == part, "a directory with a model and its part is one model"
    other = part.rename(tmp_path / "part.gguf")
    assert open_checkpoint(model).picture_part is None
    given = open_checkpoint(model, mmproj=other).picture_part
    assert given is not None and given.file == other
    for name in ("mmproj-a.gguf", "model.mmproj-f16.gguf"):
        write_mmproj(NAME, reference, tmp_path / name)
    with caplog.at_level(logging.WARNING):
        assert open_checkpoint(model).picture_part is None
    assert "name one with --mmproj" in caplog.text
    with pytest.raises(CheckpointInvalid, match="mmproj is for GGUF models"):
        open_checkpoint(source, mmproj=other)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "another projector": (
        {"values": {"clip.projector_type": "glm4v"}},
        "a projector of type 'glm4v'; supported are idefics3, mlp, qwen2vl_merger",
    ),
    "of another model": (
        {"values": {"clip.projector_type": "qwen2vl_merger"}},
        "'qwen2vl_merger', which is not for a LlamaForCausalLM: it is for Qwen2VLForConditionalGeneration",
    ),
    "too many layers": ({"values": {"block_count": 10**6}}, r"tensor v\.blk\.2\.[a-z0-9_.]+ is missing"),
    "another activation": ({"values": {"clip.use_gelu": False}}, "have GELU, and clip.use_gelu is not true"),
    "other patches": ({"values": {"image_size": 56}}, "has 16 rows for 8 x 8 patches"),
    "a missing tensor": ({"without": "v.blk.1.ln2.bias"}, r"tensor v\.blk\.1\.ln2\.bias is missing"),
    "a missing projector": ({"without": "mm.model.fc.weight"}, "its projector gives no vectors of 32 values"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_file_that_does_not_fit_is_refused(name: str, written: tuple[Path, Reference], tmp_path: Path) -> None:
    changed, reason = FAULTS[name]
    model, part = write_reader_gguf(NAME, written[0], written[1], tmp_path)
    with pytest.raises(CheckpointInvalid, match=reason):
        open_checkpoint(model, mmproj=write_mmproj(NAME, written[1], part, **changed))
    assert open_checkpoint(model).picture_part is None, "one that only lies there stops no start"
