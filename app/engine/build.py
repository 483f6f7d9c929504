"""Builds the engine of a checkpoint by its kind and the device, importing only the modules of what is served."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from app.backends.base import BaseBackend, HostBackend
from app.backends.selection import HOST_BACKENDS
from app.engine.worker import Engine
from app.errors import PlanImpossible, raise_kernel_errors_as
from app.hardware.plan.plan import ServingPlan
from app.metrics.load_progress import LoadProgress
from app.metrics.steps import StepTimeModel
from app.models.encoders.encoder import Encoder
from app.weights.checkpoint import Checkpoint
from app.weights.load import Model, PackCalibrator, Packing, ReportCost, load_model
from app.weights.lora.adapter import ServedAdapters
from app.weights.packs import PackFolder
from app.weights.program import ProgramCheckpoint
from app.weights.tensor_reader import explaining_values_not_finite
from armature_kernels.linear.linear import ExactLinear, Linear

ReportStage = Callable[[str | LoadProgress], None]  # called with the stage of loading: a name, or how far it is
CheckpointT = TypeVar("CheckpointT", bound=Checkpoint | ProgramCheckpoint)
EngineT = TypeVar("EngineT", bound=Engine)
RunnerT = TypeVar("RunnerT")
ModelT = TypeVar("ModelT")
DeviceT = TypeVar("DeviceT", bound=BaseBackend)
SelectDevice = Callable[[ServingPlan], DeviceT]  # a function of backends/selection.py that selects the kind of device
# Module and function of each builder. Key: the kind, and True for a CPU. Programs are planned only for CPUs.
_BUILDERS: Mapping[tuple[str, bool], tuple[str, str]] = {
    ("decoder", True): ("app.engine.decoder.build", "build_decoder_engine"),
    ("encoder", True): ("app.engine.encoder.build", "build_encoder_engine"),
    ("program", True): ("app.engine.program", "build_program_engine"),
    ("decoder", False): ("app.engine.decoder.build", "build_device_decoder_engine"),
    ("encoder", False): ("app.engine.encoder.build", "build_device_encoder_engine"),
}
# The same by kind, for models that the library transformers computes, on any device.
_TRANSFORMERS: Mapping[str, tuple[str, str]] = {
    "decoder": ("app.engine.transformers.build", "build_transformers_engine"),
    "encoder": ("app.engine.transformers.build", "build_transformers_engine"),
}


def ignore_stage(stage: str | LoadProgress) -> None: ...


def ignore_cost(cost: float) -> None: ...


@dataclass(frozen=True, slots=True)
class BuildRequest(Generic[CheckpointT]):
    """The inputs of a builder.

    `report` gets each stage of loading and `report_cost` the cost in quality of quantized weights; either may raise, to
    stop or to load in another precision. The engine updates `step_time_model` after each step. `adapters` None: the
    model gets none.
    """

    checkpoint: CheckpointT
    plan: ServingPlan
    report: ReportStage = ignore_stage
    step_time_model: StepTimeModel = field(default_factory=StepTimeModel)
    eos_token_ids: Collection[int] = ()
    report_cost: ReportCost = ignore_cost
    adapters: ServedAdapters | None = None
    draft: Checkpoint | None = None

    @property
    def eager_reason(self) -> str:
        return "" if self.plan.steps.compile else self.plan.decisions["compile"].reason


@dataclass(frozen=True, slots=True)
class BuiltEngine(Generic[EngineT, RunnerT, ModelT]):
    engine: EngineT
    runner: RunnerT
    model: ModelT
    backend: BaseBackend


def build(request: BuildRequest[Any]) -> Engine:
    """Build the engine on the thread that will run its steps. Raises a `StartupError` if the plan cannot be served."""
    on_host, needs = request.plan.placement.device in HOST_BACKENDS, request.checkpoint.needs()
    module, function = _TRANSFORMERS[needs.kind] if needs.engine == "transformers" else _BUILDERS[needs.kind, on_host]
    with raise_kernel_errors_as(PlanImpossible):
        built: BuiltEngine[Engine, Any, Any] = getattr(import_module(module), function)(request)
    return built.engine


def load_on_device(request: BuildRequest[Checkpoint], select: SelectDevice[DeviceT]) -> tuple[Model, DeviceT]:
    plan, report = request.plan, request.report
    backend = prepare_device(request, select)
    folder = plan.weights.pack_folder
    packs = None if folder is None else PackFolder(Path(folder), percent_reporter(report, "keeping packed weights"))
    progress = LoadReporter(report)

    def make_calibrator() -> PackCalibrator | None:
        from app.engine.calibration.streaming import calibration_for

        return calibration_for(request.checkpoint, plan, cast(HostBackend, backend))

    def measure_encoder(model: Encoder, exact: Callable[[Linear], ExactLinear]) -> float | None:
        from app.engine.calibration.streaming import measure_encoder_cost

        return measure_encoder_cost(request.checkpoint, plan, model, exact)

    packing = Packing(
        packs,
        make_calibrator,
        measure_encoder=measure_encoder,
        report_cost=request.report_cost,
        report_layers=progress.show_layers,
    )
    with explaining_values_not_finite(request.checkpoint):
        return load_model(request.checkpoint, plan, backend, progress.show_bytes, packing), backend


def prepare_device(request: BuildRequest[Any], select: SelectDevice[DeviceT]) -> DeviceT:
    request.report("preparing the device")
    backend = select(request.plan)
    backend.configure(request.plan)
    request.report("loading weights")
    return backend


class LoadReporter:
    """Reports the phases of loading weights, each new percentage of one, and how many linear layers are done."""

    def __init__(self, report: ReportStage) -> None:
        self._report = report
        self._phase, self._began, self._percent = "loading weights", time.monotonic(), -1
        self._bytes, self._layers = (0, 1), (0, 0)

    def show_layers(self, phase: str, done: int, total: int) -> None:
        """Note the phase, and how many of its linear layers are done; a new phase is reported at once."""
        self._layers = (done, total)
        if phase != self._phase:
            self._phase, self._began = phase, time.monotonic()
            self._show()

    def show_bytes(self, done: int, total: int) -> None:
        self._bytes, percent = (done, total), 100 * done // max(total, 1)
        if percent != self._percent:
            self._percent = percent
            self._show()

    def _show(self) -> None:
        self._report(LoadProgress(self._phase, *self._bytes, *self._layers, time.monotonic() - self._began))


def percent_reporter(report: ReportStage, stage: str) -> Callable[[int, int], None]:
    """Return a callback for (done, total) that reports each new percentage of `stage`."""
    last_percent = -1

    def progress(done: int, total: int) -> None:
        nonlocal last_percent
        now = 100 * done // max(total, 1)
        if now != last_percent:
            last_percent = now
            report(f"{stage}, {now}%")

    return progress
