"""Quality of quantized weights on a real model: the targets of docs/quality.md, on fewer tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from app.bench.engine.quality import QualityJob, measure_quality
from app.hardware.probe.probe import probe
from app.kernels.native.arguments import OpCode
from app.kernels.native.operations import has_kernel
from app.settings import load_settings
from app.weights.checkpoint import open_checkpoint
from real_model import real_model

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library"),
]


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


# Margins: 1,024 tokens show a ratio of perplexities with an error of about 1% in eight bits and 3% in four.
@pytest.mark.parametrize(("precision", "most", "least_agreement"), [("int8", 1.015, 95.0), ("int4", 1.09, 86.0)])
def test_little_is_lost(tmp_path, precision: str, most: float, least_agreement: float) -> None:
    checkpoint = open_checkpoint(real_model())
    settings = load_settings(precision=precision, cache_dir=str(tmp_path), threads="1", kv_cache_bytes="64MiB")[0]
    outcome = measure_quality(QualityJob(checkpoint, settings, probe()), None, 1024)
    figures = {figure.name: figure for figure in outcome.figures}
    ratio = figures[precision].ratio
    assert ratio is not None and 0.98 < ratio < most
    assert figures[precision].parts["same top token, %"] > least_agreement
    if precision == "int4":  # llama.cpp's Q4_K_M of this model, without a vocabulary
        assert figures["int4"].parts["bytes"] < 103.7e6
