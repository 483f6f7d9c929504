"""First steps of every engine: configure the device and load the checkpoint, with progress reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from app.backends.base import Device
from app.hardware.plan import ServingPlan
from app.weights.checkpoint import Checkpoint
from app.weights.load import Model, load_model
from app.weights.pack_cache import Packs

Report = Callable[[str], None]  # called with the stage of loading, as text for people
Kind = TypeVar("Kind", bound=Device)
Select = Callable[[ServingPlan], Kind]  # a function of backends/selection.py that selects the kind of device


def load(checkpoint: Checkpoint, plan: ServingPlan, report: Report, select: Select[Kind]) -> tuple[Model, Kind]:
    """Configure the device and load the model. Raises a `StartupError` if the plan cannot be served."""
    backend = prepared_device(plan, report, select)
    folder = plan.pack_folder.value
    packs = None if folder is None else Packs(Path(folder), percent(report, "keeping packed weights"))
    return load_model(checkpoint, plan, backend, percent(report, "loading weights"), packs), backend


def prepared_device(plan: ServingPlan, report: Report, select: Select[Kind]) -> Kind:
    """Return the device, configured by the plan on this thread."""
    report("preparing the device")
    backend = select(plan)
    backend.configure(plan)
    report("loading weights")
    return backend


def percent(report: Report, stage: str) -> Callable[[int, int], None]:
    """Return a callback for (done, total) that reports each new percentage of `stage`."""
    told = -1

    def progress(done: int, total: int) -> None:
        nonlocal told
        now = 100 * done // max(total, 1)
        if now != told:
            told = now
            report(f"{stage}, {now}%")

    return progress
