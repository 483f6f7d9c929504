"""llama.cpp computes the same as we do from the file that `armature bench quality --peer llama.cpp` writes for it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from app.hardware.probe.probe import probe
from app.settings import DEMO_DIRECTORY, load_settings
from app.weights.checkpoint import open_checkpoint
from armature_bench.engine.llama_cpp import LlamaCppPeer
from armature_bench.engine.quality import QualityJob, measure_quality

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"),
]


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_it_reads_the_same_model(tmp_path) -> None:
    checkpoint = open_checkpoint(DEMO_DIRECTORY)
    settings = load_settings(precision="fp32", cache_dir=str(tmp_path), threads="1", kv_cache_bytes="16MiB")[0]
    outcome = measure_quality(QualityJob(checkpoint, settings, probe()), None, 1024, LlamaCppPeer())
    figures = {figure.name: figure for figure in outcome.figures}
    assert outcome.complete
    stored = figures["llama.cpp as stored"]
    assert stored.ratio == pytest.approx(1.0, abs=0.005)
    assert stored.parts["same top token, %"] > 98
    assert figures["llama.cpp Q8_0"].ratio == pytest.approx(1.0, abs=0.01)
    sizes = [figures[f"llama.cpp {name}"].parts["bytes"] for name in ("as stored", "Q8_0", "Q4_0")]
    assert sizes == sorted(sizes, reverse=True)
