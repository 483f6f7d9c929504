"""The quality bench on a tiny checkpoint: what it cuts a text into, what it holds against FP32, and what Ctrl-C leaves."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from app.engine.calibration.streaming import WindowScorer
from app.hardware.probe.probe import probe
from app.settings import load_settings
from app.weights.checkpoint import Checkpoint, open_checkpoint
from armature_bench.console import BenchOutcome
from armature_bench.engine.llama_cpp import LlamaCppPeer, PeerEvent
from armature_bench.engine.quality import (
    PRECISION_PAIRS,
    REFERENCE,
    PrecisionScore,
    QualityJob,
    host_precisions,
    measure_quality,
)
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
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
    found, parts = values(outcome), {figure.name: figure.parts for figure in outcome.figures}
    assert outcome.complete and not outcome.details["refused"]
    assert found["bf16"] == pytest.approx(found["fp32"], rel=0.02)
    assert parts["fp32"]["same top token, %"] == 100.0
    assert parts["bf16"]["same top token, %"] > 80
    assert parts["fp32"]["bytes per weight"] == 4.0  # as stored, the embedding too
    assert 2.0 < parts["bf16"]["bytes per weight"] < 3.0  # which is not rounded
    assert parts["bf16"]["bytes"] == parts["bf16"]["bytes per weight"] * subject.checkpoint.needs().num_parameters
    assert found["bf16, int8 KV"] == pytest.approx(found["bf16"], rel=0.02)
    assert found["bf16, int8 KV"] != found["bf16"]
    assert "bytes" not in parts["bf16, int8 KV"]  # they are bf16's
    if has_kernel(OpCode.LINEAR_INT):
        assert found["int8"] == pytest.approx(found["fp32"], rel=0.05)
        assert found["int4"] == pytest.approx(found["fp32"], rel=0.3)
        assert found["int4"] != found["int8"]


def test_every_precision_of_a_processor_is_measured():
    assert host_precisions()[0] == REFERENCE
    assert {"bf16", "int8", "int4"} <= set(host_precisions()) and "fp16" not in host_precisions()
    assert set(PRECISION_PAIRS) >= {*host_precisions(), "int4, int8 KV"} and "fp32, int8 KV" not in PRECISION_PAIRS


@dataclass(frozen=True)
class FakePeer(LlamaCppPeer):
    """Expects every next token, in one format of 100 bytes, and is then interrupted or not."""

    ending: type[BaseException] | None = None

    def require(self, checkpoint: Checkpoint) -> None: ...

    def read(self, checkpoint: Checkpoint, windows: list[list[int]], threads: int) -> Generator[PeerEvent, None, None]:
        yield PeerEvent("llama.cpp Q8_0", file_bytes=100)
        for window in windows:
            yield PeerEvent("llama.cpp Q8_0", nats=2.0 * (len(window) - 1), likeliest=tuple(window[1:]))
        if self.ending is not None:
            raise self.ending


def test_a_peer_is_held_against_our_fp32(subject, text):
    outcome = measure_quality(replace_precision(subject, "bf16"), text, None, FakePeer())
    figures = {figure.name: figure for figure in outcome.figures}
    peer = figures["llama.cpp Q8_0"]
    assert outcome.complete and peer.value == pytest.approx(math.exp(2.0))
    assert peer.ratio == pytest.approx(peer.value / figures["fp32"].value) and peer.against == "FP32"
    assert peer.parts["bytes"] == 100 and 0 <= peer.parts["same top token, %"] < 100
    assert "llama.cpp Q4_0" not in figures  # nothing was read with it
    assert "int8" not in figures


def test_ctrl_c_in_a_peer_keeps_what_was_read(subject, text):
    outcome = measure_quality(replace_precision(subject, "bf16"), text, None, FakePeer(ending=KeyboardInterrupt))
    assert not outcome.complete and "llama.cpp Q8_0" in values(outcome)


def replace_precision(job: QualityJob, precision: str) -> QualityJob:
    return replace(job, settings=job.settings.model_copy(update={"precision": precision}))


def test_a_config_of_torchao_is_held_against_fp32_alone(subject, text):
    name = "torchao:IntxWeightOnlyConfig(weight_dtype=int4, granularity=PerGroup(16))"
    outcome = measure_quality(replace(subject, settings=subject.settings.with_weight_format(name)), text, None)
    figures = {figure.name: figure for figure in outcome.figures}
    assert figures.keys() == {"fp32", name}
    assert figures[name].ratio == pytest.approx(1, rel=0.3) and figures[name].value != figures["fp32"].value
    assert figures[name].parts["bytes per weight"] < 3.0  # of this model half are the embedding and the output layer


@pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")
def test_kept_layers_leave_the_reference_as_it_is(subject, text):
    kept = subject.settings.model_copy(update={"precision": "int4-small", "keep_layers": "lm_head=bf16"})
    figures = {figure.name: figure for figure in measure_quality(replace(subject, settings=kept), text, None).figures}
    plain = replace_precision(subject, "int4-small")
    usual = {figure.name: figure for figure in measure_quality(plain, text, None).figures}
    assert figures["fp32"].value == usual["fp32"].value
    assert figures["int4-small"].parts["bytes"] > usual["int4-small"].parts["bytes"]


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
    assert ratios["bf16"] == pytest.approx(1.0, rel=0.02)
    assert "bf16, int8 KV" not in values(outcome)
    assert values(outcome)["bf16"] != pytest.approx(values(outcome)["fp32"], rel=1e-3)
    assert not any(name.startswith("int") for name in values(outcome))


def test_scores_by_hand():
    half, all_wrong = PrecisionScore(), PrecisionScore()
    half.add_window(2.0, torch.tensor([1, 2]))
    half.add_window(1.0, torch.tensor([3, 4]))
    all_wrong.add_window(5.0, torch.tensor([1, 9]))
    assert half.perplexity(2) == pytest.approx(2.117, rel=1e-3)
    assert half.perplexity(1) == pytest.approx(2.718, rel=1e-3)
    assert all_wrong.agreement(half) == 0.5
