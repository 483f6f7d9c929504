"""`armature calibrate`: measure this machine with a model's shapes now, for longer than a start does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from app.errors import PlanImpossible
from app.explanation import Explained
from app.hardware.probe import probe
from app.preparation import PATIENT_SECONDS, calibrate, looked_up
from app.settings import Settings
from app.weights.opening import open_model


def calibrated(settings: Settings) -> Explained:
    """Measure this machine and return the measurements and the chosen plan.

    Raises:
        StartupError: Nothing can be measured.
    """
    prepared = looked_up(probe(), settings.model_copy(update={"calibrate": "on"}), open_model(settings.checkpoint_directory))
    if prepared.is_final:
        raise PlanImpossible(f"There is nothing to measure. {prepared.plan.calibrate.reason}")
    os.environ.update(prepared.plan.environment())  # must be set before torch is imported: its thread pools read it then
    with _stages() as report:
        measured = calibrate(prepared, report, PATIENT_SECONDS)
    assert measured.calibration is not None, "it was not final"
    found, checkpoint, again = measured.calibration.measurements, measured.checkpoint, measured.kept.read()
    is_kept = again is not None and again.measured_at == measured.calibration.measured_at
    where = f"kept in {measured.kept.file}" if is_kept else "not kept"
    origin = f"just now, in {found.seconds:.1f} s; {where}"
    return Explained(checkpoint.name, measured.facts, checkpoint.needs(), measured.plan, found, origin)


@contextmanager
def _stages() -> Iterator[Callable[[str], None]]:
    """Yield a callback that shows the current stage on standard error; silent if that is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage: None
        return
    with console.status("importing torch") as status:
        yield lambda stage: status.update(stage)
