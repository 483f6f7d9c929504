"""First steps of every engine: configure the device and load the checkpoint, with progress reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from app.backends.base import BaseBackend
from app.hardware.plan.plan import ServingPlan
from app.weights.checkpoint import Checkpoint
from app.weights.load import (
    Model,
    load_model,
)
from app.weights.packs import PackFolder

ReportStage = Callable[[str], None]  # called with the stage of loading, as text for people
DeviceT = TypeVar("DeviceT", bound=BaseBackend)
SelectDevice = Callable[[ServingPlan], DeviceT]  # a function of backends/selection.py that selects the kind of device


def load_on_device(
    checkpoint: Checkpoint, plan: ServingPlan, report: ReportStage, select: SelectDevice[DeviceT]
) -> tuple[Model, DeviceT]:
    """Configure the device and load the model. Raises a `StartupError` if the plan cannot be served."""
    backend = prepare_device(plan, report, select)
    folder = plan.pack_folder.value
    packs = None if folder is None else PackFolder(Path(folder), percent_reporter(report, "keeping packed weights"))
    return load_model(checkpoint, plan, backend, percent_reporter(report, "loading weights"), packs), backend


def prepare_device(plan: ServingPlan, report: ReportStage, select: SelectDevice[DeviceT]) -> DeviceT:
    """Return the device, configured by the plan on this thread."""
    report("preparing the device")
    backend = select(plan)
    backend.configure(plan)
    report("loading weights")
    return backend


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
