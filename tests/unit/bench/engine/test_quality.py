"""The quality bench on a tiny checkpoint: what it cuts a text into, what it holds against FP32, and what Ctrl-C leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.bench.console import BenchOutcome
from app.bench.engine.quality import PrecisionScore, QualityJob, measure_quality
from app.engine.calibration.perplexity import WindowScorer
from app.hardware.probe.probe import probe
from app.kernels.native.operations import OpCode, has_kernel
from app.settings import load_settings
from app.weights.checkpoint import open_checkpoint
from tiny_checkpoints import write_checkpoint

TEXT = "the cat and the hen\n\nwent there\n---\nanother one\n---\n\n---\nthe last, which is a little longer than the others are"


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> QualityJob:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path_factory.mktemp("quality") / "tiny"))
    return QualityJob(checkpoint, load_settings(threads="1", max_running_seqs="2", kv_cache_bytes="16MiB")[0], probe())


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


def values(outcome: BenchOutcome) -> dict[str, float]:
    return {figure.name: figure.value for figure in outcome.figures}


def test_every_precision_is_held_against_the_first(subject, text):
    outcome = measure_quality(subject, text, None)
    found = values(outcome)
    assert outcome.complete and not outcome.details["refused"]
    assert found["bf16, perplexity"] == pytest.approx(found["fp32, perplexity"], rel=0.02)
    assert found["bf16, same most likely token"] > 80
    assert found["fp32, weights"] == 4.0  # as stored, the embedding too
    assert 2.0 < found["bf16, weights"] < 3.0  # which is not rounded
    assert found["bf16, int8 KV, perplexity"] == pytest.approx(found["bf16, perplexity"], rel=0.02)
    assert found["bf16, int8 KV, perplexity"] != found["bf16, perplexity"]
    assert "bf16, int8 KV, weights" not in found  # they are bf16's
    if has_kernel(OpCode.LINEAR_INT):
        assert found["int8, perplexity"] == pytest.approx(found["fp32, perplexity"], rel=0.05)
        assert found["int4, perplexity"] == pytest.approx(found["fp32, perplexity"], rel=0.3)
        assert found["int4, perplexity"] != found["int8, perplexity"]


def test_a_config_of_torchao_is_held_against_fp32_alone(subject, text):
    name = "torchao:IntxWeightOnlyConfig(weight_dtype=int4, granularity=PerGroup(16))"
    found = values(measure_quality(replace(subject, settings=subject.settings.with_weight_format(name)), text, None))
    assert found.keys() == {
        *(f"{each}, {what}" for each in ("fp32", name) for what in ("perplexity", "weights")),
        f"{name}, same most likely token",
    }
    assert found[f"{name}, perplexity"] == pytest.approx(found["fp32, perplexity"], rel=0.3)
    assert found[f"{name}, perplexity"] != found["fp32, perplexity"]
    assert found[f"{name}, weights"] < 3.0  # of this model half are the embedding and the output layer


def test_ctrl_c_compares_what_both_have_read(subject, text, monkeypatch):
    read, calls = WindowScorer.score, []

    def interrupted(self, window):
        calls.append(window)
        if len(calls) == 5:  # three windows of FP32, one of BF16
            raise KeyboardInterrupt
        return read(self, window)

    monkeypatch.setattr(WindowScorer, "score", interrupted)
    outcome = measure_quality(subject, text, None)
    assert not outcome.complete
    ratios = {figure.name: figure.ratio for figure in outcome.figures}
    assert ratios["bf16, perplexity"] == pytest.approx(1.0, rel=0.02)
    assert "bf16, int8 KV, perplexity" not in values(outcome)
    assert values(outcome)["bf16, perplexity"] != pytest.approx(values(outcome)["fp32, perplexity"], rel=1e-3)
    assert not any(name.startswith("int") for name in values(outcome))


def test_scores_by_hand():
    half, all_wrong = PrecisionScore(), PrecisionScore()
    half.add_window(2.0, torch.tensor([1, 2]))
    half.add_window(1.0, torch.tensor([3, 4]))
    all_wrong.add_window(5.0, torch.tensor([1, 9]))
    assert half.perplexity(2) == pytest.approx(2.117, rel=1e-3)
    assert half.perplexity(1) == pytest.approx(2.718, rel=1e-3)
    assert all_wrong.agreement(half) == 0.5
