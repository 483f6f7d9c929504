"""The beginning of every engine that serves a checkpoint's layers: the device made ready, and the weights in it, told step by step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from app.backends.base import Backend
from app.backends.selection import select_backend
from app.hardware.plan import ServingPlan
from app.weights.checkpoint import Checkpoint
from app.weights.load import Model, load_model
from app.weights.pack_cache import Packs

Report = Callable[[str], None]  # told the stage of loading, in words for people


def load(checkpoint: Checkpoint, plan: ServingPlan, report: Report) -> tuple[Model, Backend]:
    """Raises a `StartupError` where the plan cannot be served."""
    report("preparing the device")
    backend = select_backend(plan)
    backend.configure(plan)
    report("loading weights")
    folder = plan.pack_folder.value
    packs = None if folder is None else Packs(Path(folder), _percent(report, "keeping packed weights"))
    return load_model(checkpoint, plan, backend, _percent(report, "loading weights"), packs), backend


def _percent(report: Report, stage: str) -> Callable[[int, int], None]:
    told = -1

    def progress(done: int, total: int) -> None:
        nonlocal told
        percent = 100 * done // max(total, 1)
        if percent != told:
            told = percent
            report(f"{stage}, {percent}%")

    return progress
