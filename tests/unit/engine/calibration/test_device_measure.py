"""Calibration on the simulated device: trial steps run, and ceilings come from copies and products."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from app.backends import selection
from app.engine.calibration import measure as measuring
from app.engine.calibration import measure as peaks
from app.engine.calibration.measure import CalibrationSubject, DeviceTrialStage, device_text_runner, measure_machine
from app.engine.calibration.synthetic_weights import TrialScope
from app.engine.calibration.trials import CONTEXT_ROWS, FULL_TRIAL, DecoderTrial, EncoderTrial, TrialStep
from app.hardware.facts import CudaDevice, TorchBuild
from app.hardware.plan.plan import ServingPlan, make_plan
from app.hardware.probe.probe import probe
from app.settings import Settings
from app.weights.checkpoint import Checkpoint, open_checkpoint
from app.weights.forms import RECIPES
from armature_kernels import ceilings
from armature_kernels.ceilings import CopyBandwidthProbe, DeviceMatmulThroughputProbe, cache_bytes
from simulated_device import RepeatedWork, SimulatedDeviceBackend
from tiny_checkpoints import write_checkpoint
from tiny_encoders import write_encoder

CPU = torch.device("cpu")
GPU = CudaDevice(0, "NVIDIA H200", (9, 0), 141 * 2**30, free_bytes=140 * 2**30)


class DeviceWithStream(SimulatedDeviceBackend):
    """Records work only after `configure`, which makes the stream for it on a GPU."""

    def capture(self, work: Callable[[], None]) -> RepeatedWork:
        """Return an object that calls `work` again."""
        assert self.is_configured, "there is no stream to record on yet"
        return super().capture(work)


@pytest.fixture(autouse=True)
def _on_the_twin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(selection, "DEVICE_BACKENDS", {"cuda": DeviceWithStream})
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def plan_of(checkpoint: Checkpoint, **settings: Any) -> ServingPlan:
    facts = dataclasses.replace(probe(), cuda=(GPU,), torch=TorchBuild("2.13.0", cuda="13.0"))
    asked = {"threads": 1, "precision": "fp32", "max_batch_tokens": 128, "max_running_seqs": 12, **settings}
    plan = make_plan(facts, None, Settings(**asked), checkpoint.needs(), RECIPES.keys())
    assert plan.placement.device == "cuda"
    return plan


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_checkpoint(tmp_path_factory.mktemp("stage") / "tiny", num_hidden_layers=8))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(
        write_encoder(tmp_path_factory.mktemp("stage") / "bert", num_hidden_layers=8, max_position_embeddings=256)
    )


def rehearsal_of(decoder: Checkpoint, **settings: Any) -> DecoderTrial:
    plan = plan_of(decoder, **settings)
    return DecoderTrial(
        decoder.model_config,
        plan,
        CPU,
        partial(DeviceTrialStage, SimulatedDeviceBackend(torch.float32)),
        TrialScope(0, 4),
    )


@pytest.mark.parametrize("compiled", ["auto", "off"])
def test_every_trial_step_runs(decoder: Checkpoint, compiled: str) -> None:
    with torch.inference_mode():
        rehearsal = rehearsal_of(decoder, compile=compiled)
        shapes = rehearsal.trial_steps(FULL_TRIAL)
        assert any(shape.context for shape in shapes)
        for shape in shapes:
            picked: Any = rehearsal.step(shape)()  # logits that are not finite would raise
            assert len(picked) == (shape.size if shape.kind == "decode" else 1)


def test_as_many_sequences_are_tried_as_may_run(decoder: Checkpoint) -> None:
    assert rehearsal_of(decoder).decode_rows() == [1, 2, 4, 8, 12]
    assert rehearsal_of(decoder, max_running_seqs=100).decode_rows()[-1] == 100, (
        "a device takes more than a processor's 64"
    )


def test_contexts_are_there_when_a_step_attends_to_them(decoder: Checkpoint) -> None:
    with torch.inference_mode():
        rehearsal = rehearsal_of(decoder)
        stage: Any = rehearsal._stage
        assert rehearsal.context > 0
        rehearsal.step(next(shape for shape in rehearsal.trial_steps(FULL_TRIAL) if shape.context))
        for slot in range(CONTEXT_ROWS):
            rows = torch.tensor([stage._kv_cache.row(slot, position) for position in range(rehearsal.context)])
            for layer in stage._kv_cache.layers:
                assert bool((layer.keys[rows].abs().amax((1, 2)) > 0).all())


def test_what_was_timed_is_reported_for_the_whole_model(decoder: Checkpoint) -> None:
    rehearsal = rehearsal_of(decoder)
    seconds = {
        shape: 1e-3 * shape.layers + 1e-5 * shape.size * shape.layers
        for shape in rehearsal.trial_steps(FULL_TRIAL)
        if not shape.context
    }
    trial = rehearsal.summarize(1, seconds)
    assert trial is not None
    assert trial.decode_seconds[1] == pytest.approx(
        1e-3 * rehearsal.decode_layers + 1e-5 * rehearsal.decode_layers, rel=0.01
    )
    assert trial.read_bytes > 0


def test_batches_of_texts_run(encoder: Checkpoint) -> None:
    with torch.inference_mode():
        plan, backend = plan_of(encoder), SimulatedDeviceBackend(torch.float32)
        rehearsal = EncoderTrial(
            encoder.encoder, plan, TrialScope(0, 4), backend.device, device_text_runner(backend, plan)
        )
        for shape in [shape for shape in rehearsal.trial_steps(FULL_TRIAL) if shape.size <= 256]:
            rows: Any = rehearsal.step(shape)()
            assert torch.frombuffer(bytearray(rows[0]["embedding"]), dtype=torch.float32).isfinite().all()


@pytest.mark.full
def test_a_device_is_measured_whole(decoder: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "COPY_BYTES", 2**16)
    monkeypatch.setattr(ceilings, "MIN_PRODUCT_SIZE", 32)
    monkeypatch.setattr(ceilings, "MAX_PRODUCT_SIZE", 32)
    monkeypatch.setattr(measuring, "PEAKS_SECONDS", 0.01)
    now, step = [0.0], DecoderTrial.step

    def timed(rehearsal: DecoderTrial, shape: TrialStep) -> Callable[[], None]:
        run = step(rehearsal, shape)

        def work() -> None:
            run()
            now[0] += (1e-3 + 1e-5 * shape.size) * shape.layers + 1e-9 * shape.size * shape.context * shape.layers

        return work

    monkeypatch.setattr(DecoderTrial, "step", timed)
    plan = plan_of(decoder)
    told: list[str] = []
    found = measure_machine(
        CalibrationSubject(decoder.model_config, (plan,), (1,), lambda found: ("fp32", 1)),
        3.0,
        told.append,
        lambda: now[0],
    )
    assert told[0] == "calibrating: compiling kernels", "before the clock runs"
    assert found.fallback == ""
    assert (found.read_bytes_per_second or 0) > 0
    assert found.products_per_second.keys() == {"fp32"}
    assert found.trials[0].decode_seconds.keys() >= {1, 2, 4, 8}


# ---- ceilings ----------------------------------------------------------------------------------------------------------


class Clock:
    """Seconds pass when the device is waited for: a fixed time for each thing asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, each: float) -> None:
        self.now, self.each, self.asked = 0.0, each, 0
        monkeypatch.setattr(ceilings.time, "perf_counter", lambda: self.now)

    def synchronize(self) -> None:
        self.now += self.each * ceilings.QUEUE_DEPTH if self.asked % 2 else 0.0
        self.asked += 1


def test_a_copy_counts_what_it_reads_and_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, each=0.5)
    assert CopyBandwidthProbe(CPU, clock.synchronize, 1000).sample() == pytest.approx(1000 / 0.5)


def test_products_grow_until_one_keeps_the_device_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "MIN_PRODUCT_SIZE", 16)
    monkeypatch.setattr(ceilings, "MAX_PRODUCT_SIZE", 64)
    quick = DeviceMatmulThroughputProbe(CPU, Clock(monkeypatch, each=1e-6).synchronize, torch.float32)
    slow_clock = Clock(monkeypatch, each=0.1)
    slow = DeviceMatmulThroughputProbe(CPU, slow_clock.synchronize, torch.float32)
    assert (quick.size, slow.size) == (64, 16)
    assert slow.sample() == pytest.approx(2 * 16**3 / 0.1)


def test_four_bits_multiply_in_the_backends_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []

    class Ceiling:
        def __init__(self, device: torch.device, synchronize: object, dtype: torch.dtype) -> None:
            asked.append(dtype)

        def sample(self) -> float:
            return 7.0

    monkeypatch.setattr(peaks, "DeviceMatmulThroughputProbe", Ceiling)
    monkeypatch.setattr(peaks, "COPY_BYTES", 2**12)
    found = peaks.measure_device_peaks(SimulatedDeviceBackend(torch.bfloat16), ["bf16", "int4", "fp32"])
    assert found.products_per_second == {"bf16": 7.0, "int4": 7.0, "fp32": 7.0}
    assert asked == [torch.bfloat16, torch.float32]


def test_an_unknown_cache_is_taken_for_a_large_one() -> None:
    assert cache_bytes(CPU) == 64 * 2**20
