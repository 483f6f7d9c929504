"""What the ranks of a model on simulated devices need, in processes that import it by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from app.backends.base import DeviceBackend
from app.engine.build import BuildRequest
from app.engine.decoder.device_runner import DeviceDecoderRunner
from app.engine.decoder.tensor_parallel import lead
from app.hardware.plan.plan import ServingPlan
from app.models.decoders.decoder import Decoder
from app.weights.checkpoint import Checkpoint, open_checkpoint
from device_engine import MAX_LEN, DeviceServed
from loaded_models import plan_of
from simulated_device import SimulatedDeviceBackend

LED: list[DeviceServed] = []  # the engine of rank 0, in its process


class Simulated(SimulatedDeviceBackend):
    """A rank whose plan decides nothing that it needs."""

    def configure(self, plan: ServingPlan) -> None:
        torch.set_num_threads(1)


def simulated(plan: ServingPlan) -> DeviceBackend:
    return Simulated(torch.float32)


def made(request: BuildRequest[Checkpoint], model: Decoder, backend: DeviceBackend) -> DeviceDecoderRunner:
    LED.append(DeviceServed(model, backend))
    return LED[-1].runner


def several(directory: Path, ranks: int, on_end: Callable[[], None]) -> DeviceServed:
    """The engine of a model that is split among so many ranks."""
    plan = plan_of("float32", MAX_LEN, "cuda").changed(threads=1)
    lead(BuildRequest(open_checkpoint(directory), plan), (None,) * ranks, simulated, made, on_end)
    return LED[-1]
