"""llama.cpp as a peer of the quality bench: what it needs, what its process is asked, and what it reports."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from app.errors import CheckpointInvalid
from app.settings import DEMO_DIRECTORY
from app.weights.checkpoint import Checkpoint, open_checkpoint
from armature_bench.console import MeasurementFailed
from armature_bench.engine import llama_cpp, llama_cpp_process
from armature_bench.engine.llama_cpp import FORMATS, LlamaCppPeer, PeerEvent, run_process


@pytest.fixture(scope="module")
def demo() -> Checkpoint:
    return open_checkpoint(DEMO_DIRECTORY)


def interpreter(folder: Path, status: int, message: str = "") -> str:
    """Return a program that ends with this status whatever it is asked."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\necho '{message}' >&2\nexit {status}\n")
    file.chmod(0o755)
    return str(file)


def test_a_missing_package_is_named_with_its_remedy(demo, tmp_path, monkeypatch) -> None:
    peer = LlamaCppPeer(interpreter(tmp_path, 1, "No module named llama_cpp"))
    with pytest.raises(MeasurementFailed, match=r"No module named llama_cpp.*pip install gguf llama-cpp-python"):
        peer.require(demo)
    with pytest.raises(MeasurementFailed, match="--peer-python /nowhere/python: No such file"):
        LlamaCppPeer("/nowhere/python").require(demo)
    monkeypatch.setattr(llama_cpp, "find_spec", lambda name: None)
    with pytest.raises(MeasurementFailed, match=r"needs the packages gguf and llama-cpp-python: pip install"):
        peer.require(demo)


def test_disk_space_is_checked_first(demo, tmp_path, monkeypatch) -> None:
    peer = LlamaCppPeer(interpreter(tmp_path, 0))
    peer.require(demo)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(MeasurementFailed, match="set TMPDIR"):
        peer.require(demo)


def test_a_model_that_gguf_cannot_describe_is_refused(demo) -> None:
    other = replace(demo, model_config=replace(demo.decoder, architecture="MistralForCausalLM"))
    with pytest.raises(CheckpointInvalid, match="MistralForCausalLM cannot be converted"):
        LlamaCppPeer().require(other)


def test_events_arrive_in_order(tmp_path) -> None:
    lines = [{"name": "a", "file_bytes": 7}, {"name": "a", "nats": 1.5, "likeliest": [3, 4]}]
    script = f"print({json.dumps(lines[0])!r}); print({json.dumps(lines[1])!r})"
    with (tmp_path / "log").open("w+") as log:
        events = list(run_process([sys.executable, "-c", script], log))
    assert events == [PeerEvent("a", file_bytes=7), PeerEvent("a", nats=1.5, likeliest=(3, 4))]


def test_a_failed_process_is_quoted(tmp_path) -> None:
    script = "import sys; print('{\"name\": \"a\"}'); sys.exit('unknown tensor type')"
    with (tmp_path / "log").open("w+") as log, pytest.raises(MeasurementFailed, match="status 1: unknown tensor type"):
        list(run_process([sys.executable, "-c", script], log))


def test_a_process_that_is_left_early_is_ended(tmp_path, monkeypatch) -> None:
    started: list[subprocess.Popen[str]] = []

    class Recorded(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    script = 'import signal; print(\'{"name": "a"}\', flush=True); signal.pause()'
    with (tmp_path / "log").open("w+") as log:
        events = run_process([sys.executable, "-c", script], log)
        assert next(events).name == "a"
        events.close()
    assert started[0].returncode == -9


class FakeLlamaCpp:
    """As much of llama-cpp-python as quantizing needs."""

    LLAMA_FTYPE_MOSTLY_Q8_0 = 7
    LLAMA_FTYPE_MOSTLY_Q6_K = 18
    LLAMA_FTYPE_MOSTLY_Q4_K_M = 15
    LLAMA_FTYPE_MOSTLY_Q4_0 = 2

    def __init__(self, status: int = 0) -> None:
        self.status, self.asked = status, []  # type: tuple[int, list[tuple[int, int]]]

    def llama_backend_init(self) -> None: ...

    def llama_model_quantize_default_params(self) -> SimpleNamespace:
        return SimpleNamespace()

    def llama_model_quantize(self, source: bytes, file: bytes, params: SimpleNamespace) -> int:
        self.asked.append((params.ftype, params.nthread))
        Path(file.decode()).write_bytes(b"x" * params.ftype)
        return self.status


def fake_scores(api: Any, file: Path, windows: list[list[int]], threads: int) -> Iterator[tuple[float, list[int]]]:
    return ((float(len(window)), window[1:]) for window in windows)


def test_each_format_is_quantized_and_read(tmp_path, monkeypatch) -> None:
    api = FakeLlamaCpp()
    monkeypatch.setattr(llama_cpp_process, "import_module", lambda name: api)
    monkeypatch.setattr(llama_cpp_process, "scores", fake_scores)
    source = tmp_path / "stored.gguf"
    source.write_bytes(b"x" * 100)
    job = {"source": str(source), "formats": dict(FORMATS), "windows": [[1, 2], [1, 3, 4]], "threads": 3}
    events = [llama_cpp.parse_event(event) for event in llama_cpp_process.run(job)]
    sizes = {event.name: event.file_bytes for event in events if event.file_bytes}
    assert sizes == dict(zip(FORMATS, (100, 7, 18, 15, 2), strict=True))
    assert [event.likeliest for event in events if event.name == "llama.cpp Q4_0"] == [(), (2,), (3, 4)]
    assert api.asked == [(7, 3), (18, 3), (15, 3), (2, 3)]
    assert list(tmp_path.iterdir()) == [source]


def test_a_refused_quantization_ends_the_process(tmp_path) -> None:
    with pytest.raises(SystemExit, match="could not quantize: code 1"):
        llama_cpp_process.quantize(FakeLlamaCpp(status=1), tmp_path / "a.gguf", "LLAMA_FTYPE_MOSTLY_Q4_0", 1)


def test_the_loss_is_torchs() -> None:
    generator = np.random.default_rng(0)
    count = llama_cpp_process.CHUNK_TOKENS + 3
    logits = (10 * generator.normal(size=(count, 50))).astype(np.float32)
    targets = generator.integers(0, 50, count)
    nats, likeliest = llama_cpp_process.score(logits, targets)
    expected = torch.nn.functional.cross_entropy(torch.tensor(logits), torch.tensor(targets), reduction="sum")
    assert nats == pytest.approx(float(expected), rel=1e-5)
    assert likeliest == logits.argmax(1).tolist()
