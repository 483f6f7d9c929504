"""From an encoder's checkpoint and a plan for a GPU to an engine that answers, on a fake device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from app.backends import selection
from app.engine.build import BuildRequest, build
from app.engine.encoder.batching import TextSpan
from app.engine.encoder.build import build_device_encoder_engine
from app.engine.encoder.device_runner import DeviceEncoderRunner
from app.engine.encoder.engine import EncoderEngine
from app.hardware.facts import CudaDevice
from app.hardware.plan.plan import ServingPlan
from app.messages import ArraysReady, Encode, Text
from app.weights.checkpoint import Checkpoint, open_checkpoint
from planned_machines import GIB, ON_GPUS, machine, plan
from simulated_device import SimulatedDeviceBackend
from tiny_encoders import Modules, write_encoder

GPU = CudaDevice(0, "NVIDIA H200", (9, 0), 141 * GIB, 140 * GIB, "GPU-1", "580.65.06")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_encoder(tmp_path_factory.mktemp("build") / "tiny", modules=Modules()))


@pytest.fixture(scope="module")
def planned(checkpoint: Checkpoint) -> ServingPlan:
    made = plan(machine(cuda=(GPU,)), checkpoint.needs(), ON_GPUS, device="cuda", precision="fp32", threads=1)
    return changed(made, batch_target_tokens=256, max_batch_tokens=256)


@pytest.fixture(autouse=True)
def twin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setitem(selection.DEVICE_BACKENDS, "cuda", SimulatedDeviceBackend)  # type: ignore[call-overload]
    yield
    torch.set_num_threads(threads)


def changed(planned: ServingPlan, **values: object) -> ServingPlan:
    return planned.changed(**values)


def test_the_plans_device_says_which_engine_answers(checkpoint: Checkpoint, planned: ServingPlan) -> None:
    told: list[str] = []
    engine = build(BuildRequest(checkpoint, planned, told.append))
    assert isinstance(engine, EncoderEngine) and isinstance(engine.runner, DeviceEncoderRunner)
    assert told[0] == "preparing the device" and "recording steps, 100%" in told
    assert engine.runner.replay.most_tokens == 143 and engine.runner.replay.reason == ""
    assert engine.add(Encode("r", (Text((5, 6, 7)), Text((8, 9))), ("embedding",), 0.0)) == []
    (answer,) = engine.step()
    assert isinstance(answer, ArraysReady) and answer.arrays["embedding"].shape == (2, 32)
    vectors = torch.frombuffer(bytearray(answer.arrays["embedding"].data), dtype=torch.float32).view(2, 32)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(2))
    assert engine.runner.replay.num_runs == 1 and engine.stats is not None and engine.stats.encode_tokens == 5


def test_nothing_is_recorded_where_the_plan_says_so(checkpoint: Checkpoint, planned: ServingPlan) -> None:
    replay = build_device_encoder_engine(BuildRequest(checkpoint, changed(planned, compile=False))).runner.replay
    assert (replay.most_tokens, replay.reason) == (0, planned.decisions["compile"].reason)


def test_a_warm_up_that_wants_too_much_memory_ends_nothing(
    checkpoint: Checkpoint, planned: ServingPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = DeviceEncoderRunner.launch

    def scarce(runner: DeviceEncoderRunner, spans: Sequence[TextSpan]) -> object:
        if sum(span.num_tokens for span in spans) > 100:
            raise torch.OutOfMemoryError("planted")
        return launch(runner, spans)

    monkeypatch.setattr(DeviceEncoderRunner, "launch", scarce)
    engine = build_device_encoder_engine(BuildRequest(checkpoint, planned)).engine
    engine.add(Encode("r", tuple(Text((5,) * 60) for _ in range(4)), ("embedding",), 0.0))
    events = [event for _ in range(6) for event in engine.step()]
    assert [type(event) for event in events] == [ArraysReady]


def test_a_device_that_fails_to_record_computes_eagerly(
    checkpoint: Checkpoint, planned: ServingPlan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(SimulatedDeviceBackend, "capture", failing)
    replay = build_device_encoder_engine(BuildRequest(checkpoint, planned)).runner.replay
    assert replay.most_tokens == 0 and "could not be recorded: planted" in replay.reason
    assert "computed eagerly" in caplog.text
