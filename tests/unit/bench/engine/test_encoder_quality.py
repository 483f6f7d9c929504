"""The quality bench of encoders on tiny ones: the texts that it cuts, the cosines that it finds, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.hardware.probe.probe import probe
from app.settings import load_settings
from app.weights.checkpoint import open_checkpoint
from armature_bench.console import MeasurementFailed
from armature_bench.engine import encoder_quality
from armature_bench.engine.encoder_quality import MAX_WORDS, cut_texts, measure_encoder_quality
from armature_bench.engine.quality import QualityJob
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from tiny_encoders import WORDS, write_encoder


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(" ".join(WORDS[at * at % 8] for at in range(400)), encoding="utf-8")
    return file


def job(directory: Path, architecture: str = "BertModel", precision: str = "auto") -> QualityJob:
    checkpoint = open_checkpoint(write_encoder(directory / "tiny", architecture))
    return QualityJob(checkpoint, load_settings(threads="1", precision=precision)[0], probe())


def test_lengths_are_even_and_no_text_is_cut_off() -> None:
    texts = cut_texts(" ".join(map(str, range(300))), 50)
    lengths = [len(text.split()) for text in texts]
    assert lengths == list(range(1, MAX_WORDS, 4))
    assert texts[0] == "0"
    assert len(set(texts)) == 50
    assert max(int(text.split()[-1]) for text in texts) < 300
    with pytest.raises(MeasurementFailed, match="has 199 words, but 200 are needed"):
        cut_texts("word " * 199, 1)


def test_every_precision_is_held_against_fp32(tmp_path, text) -> None:
    outcome = measure_encoder_quality(job(tmp_path), text, 45)
    figures = {figure.name: figure for figure in outcome.figures}
    assert outcome.complete and not outcome.details["refused"] and outcome.details["texts"] == 45
    assert figures["fp32"].value == 1.0
    assert 0.99 < figures["bf16"].value < figures["bf16"].parts["mean cosine"] < 1.0
    assert figures["bf16"].parts["bytes"] < figures["fp32"].parts["bytes"]
    if has_kernel(OpCode.LINEAR_INT):
        assert figures["int4"].value < figures["int8"].value < 1.0
        assert figures["int8"].target == 0.998


def test_one_precision_and_fp32(tmp_path, text) -> None:
    outcome = measure_encoder_quality(job(tmp_path, precision="bf16"), text, 5)
    assert [figure.name for figure in outcome.figures] == ["fp32", "bf16"]


def test_ctrl_c_compares_what_both_have_read(tmp_path, text, monkeypatch) -> None:
    compute, calls = encoder_quality.compute_vectors, []

    def interrupted(engine, texts):
        calls.append(texts)
        if len(calls) == 5:  # three batches of FP32, one of BF16
            raise KeyboardInterrupt
        return compute(engine, texts)

    monkeypatch.setattr(encoder_quality, "compute_vectors", interrupted)
    outcome = measure_encoder_quality(job(tmp_path), text, 45)
    assert not outcome.complete
    assert [figure.name for figure in outcome.figures] == ["fp32", "bf16"]
    assert outcome.figures[1].value > 0.99


def test_a_classifier_has_no_vectors(tmp_path, text) -> None:
    with pytest.raises(MeasurementFailed, match="classifies texts"):
        measure_encoder_quality(job(tmp_path, "BertForSequenceClassification"), text, 5)
