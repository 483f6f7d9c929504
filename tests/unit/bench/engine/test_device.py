"""`armature bench engine` on the simulated device: the same work, compared with that device's ceilings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from app.backends import selection
from app.hardware.facts import CudaDevice, Facts, TorchBuild
from app.hardware.plan.plan import ServingPlan, make_plan
from app.hardware.probe.probe import probe
from app.settings import Settings
from app.weights.checkpoint import Checkpoint, open_checkpoint
from app.weights.forms import RECIPES
from armature_bench.console import BenchOutcome
from armature_bench.engine import ceilings, decoder, encoder
from armature_bench.engine.decoder import EngineBenchOptions
from armature_kernels import ceilings as device_ceilings
from simulated_device import SimulatedDeviceBackend
from tiny_checkpoints import write_checkpoint
from tiny_encoders import write_encoder

GPU = CudaDevice(0, "NVIDIA H200", (9, 0), 141 * 2**30, free_bytes=140 * 2**30)


@pytest.fixture(autouse=True)
def _on_the_twin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(selection, "DEVICE_BACKENDS", {"cuda": SimulatedDeviceBackend})
    monkeypatch.setattr(ceilings, "COPY_BYTES", 2**16)
    monkeypatch.setattr(device_ceilings, "MIN_PRODUCT_SIZE", 32)
    monkeypatch.setattr(device_ceilings, "MAX_PRODUCT_SIZE", 32)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def planned(checkpoint: Checkpoint, **asked: Any) -> tuple[ServingPlan, Facts]:
    facts = dataclasses.replace(probe(), cuda=(GPU,), torch=TorchBuild("2.13.0", cuda="13.0"))
    settings = Settings(threads=1, precision="fp32", max_batch_tokens=512, **asked)
    return make_plan(facts, None, settings, checkpoint.needs(), RECIPES.keys()), facts


def figures(outcome: BenchOutcome) -> dict[str, Any]:
    return {figure.name: figure for figure in outcome.figures}


def test_a_decoder_on_a_device(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "tiny"))
    plan, facts = planned(checkpoint, max_running_seqs=8, kv_cache_bytes=2**24)
    found = decoder.measure_decoder_engine(checkpoint, plan, facts, EngineBenchOptions(rounds=1, steps=4))
    told = figures(found)
    assert found.complete
    assert found.subject.endswith(", fp32, cuda")
    assert {"decode ×1", "decode ×8", "memory copy, both ways", "products, float32"} <= told.keys()
    longest = max(tokens for tokens in decoder.PROMPTS if tokens < plan.memory.max_model_len)
    together, alone = told[f"prefill 8 × {longest}"], told[f"prefill {longest}"]
    assert together.parts["tok/s"] == pytest.approx(8 * longest / together.value * 1e3)
    assert alone.parts["tok/s"] == pytest.approx(longest / alone.value * 1e3)


def test_an_encoder_on_a_device(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_encoder(tmp_path / "bert"))
    plan, facts = planned(checkpoint)
    found = encoder.measure_encoder_engine(
        checkpoint, plan, facts, None, EngineBenchOptions(rounds=1, rows=(1, 4), prompts=(16,))
    )
    told = figures(found)
    assert {"×1 of 16", "×4 of 16", "memory copy, both ways"} <= told.keys()
    assert told["×4 of 16"].parts["samples/s"] > 0


def test_a_device_is_given_larger_batches() -> None:
    assert max(load.texts for load in encoder.encoder_loads(EngineBenchOptions(1), 512, on_device=True)) == 256
    assert max(load.texts for load in encoder.encoder_loads(EngineBenchOptions(1), 512)) == 32
