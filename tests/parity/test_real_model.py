"""Quality of quantized weights on a real model: the targets of docs/quality.md, on fewer tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from app.hardware.probe.probe import probe
from app.settings import load_settings
from app.weights.checkpoint import open_checkpoint
from armature_bench.console import Figure
from armature_bench.engine.quality import QualityJob, measure_quality
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from quantized_files import write_as_gptq
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


def measured(directory: Path, precision: str, cache: Path, tokens: int = 1024) -> Mapping[str, Figure]:
    settings = load_settings(precision=precision, cache_dir=str(cache), threads="1", kv_cache_bytes="64MiB")[0]
    outcome = measure_quality(QualityJob(open_checkpoint(directory), settings, probe()), None, tokens)
    return {figure.name: figure for figure in outcome.figures}


@pytest.mark.nightly
# Margins: 1,024 tokens show a ratio of perplexities with an error of about 1% in eight bits and 3% in four.
@pytest.mark.parametrize(
    ("precision", "most", "least_agreement"),
    [("int8", 1.015, 95.0), ("int4", 1.09, 86.0)],
)
def test_little_is_lost(tmp_path: Path, precision: str, most: float, least_agreement: float) -> None:
    figures = measured(real_model(), precision, tmp_path)
    ratio = figures[precision].ratio
    assert ratio is not None and 0.98 < ratio < most
    assert figures[precision].parts["same top token, %"] > least_agreement
    if precision == "int4":  # llama.cpp's Q4_K_M of this model, without a vocabulary
        assert figures["int4"].parts["bytes"] < 103.7e6


@pytest.mark.nightly
@pytest.mark.parametrize("group", [32, 64])
def test_codes_that_are_kept_cost_little(tmp_path: Path, group: int) -> None:
    """Against the values of the codes: scales and minimums are rounded to BF16, activations and the output layer to eight bits."""
    directory = write_as_gptq(real_model(), tmp_path / "gptq", group)
    assert open_checkpoint(directory).needs().codes_precision == "int4"
    kept = measured(directory, "int4", tmp_path, tokens=4096)["int4"]
    assert kept.ratio is not None and 0.99 < kept.ratio < 1.01 and kept.parts["same top token, %"] > 95
