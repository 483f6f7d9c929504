"""Decisions made before weights are read: host facts, the checkpoint, measurements and the plan.

Measurements come from an earlier start or from this one. Without them the plan is provisional: it sets the
environment that torch reads when it is imported, and decides what to measure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from app.calibration import Calibration, Kept, key_of
from app.errors import NoRecipe, PlanImpossible, StepFailed
from app.hardware import precision
from app.hardware.decision import Measurements, Trial
from app.hardware.facts import Facts
from app.hardware.parallel import CONTENDED_GAIN
from app.hardware.plan import ServingPlan, make_plan
from app.hardware.probe import probe
from app.hardware.step_seconds import StepSeconds
from app.hardware.trials import Trials
from app.settings import Settings
from app.weights.checkpoint import Checkpoint
from app.weights.opening import Opened, open_model
from app.weights.recipes import RECIPES

if TYPE_CHECKING:
    from app.engine.measuring import Subject

log = logging.getLogger(__name__)

BUDGET_SECONDS = 3.0  # budget for measuring at a start
PATIENT_SECONDS = 10.0  # budget of the command `armature calibrate`
SMALL_WEIGHT_BYTES = 64 * 2**20  # any choice serves a smaller model well, so it is measured only briefly
SMALL_BUDGET_SECONDS = 0.3
FEW_THREADS = 3  # up to this many, every number of threads is tried; above it, the planned number and one fewer
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result of `prepare`.

    `calibration` is None if nothing was measured, yet or at all. `is_final`: the plan will not change.
    """

    settings: Settings
    facts: Facts
    checkpoint: Opened
    plan: ServingPlan
    kept: Kept
    calibration: Calibration | None = None
    is_final: bool = True

    @property
    def model_name(self) -> str:
        """Name of the model in requests and responses."""
        return self.settings.served_model_name or self.checkpoint.name

    @property
    def step_seconds(self) -> StepSeconds | None:
        """Measured step times of the plan, or None if they were not measured."""
        trial = self._trial()
        return None if trial is None else StepSeconds.of(trial)

    def _trial(self) -> Trial | None:
        if self.calibration is None or self.calibration.measurements.fallback:
            return None
        wanted = (self.plan.precision.value, self.plan.threads.value)
        found = [one for one in self.calibration.measurements.trials if (one.precision, one.threads) == wanted]
        return next((one for one in found if one.int8_copy == self.plan.int8_copy.value), next(iter(found), None))

    def planned_with(self, calibration: Calibration) -> Prepared:
        """Return a copy with this calibration and the final plan made from it."""
        plan = _plan(self.facts, calibration.measurements, self.settings, self.checkpoint)
        return replace(self, plan=plan, calibration=calibration, is_final=True)


def prepare(settings: Settings) -> Prepared:
    """Probe the machine, open the checkpoint, read earlier measurements, and make a plan.

    This takes milliseconds and does not import torch.

    Raises:
        StartupError: The settings, the checkpoint and the machine do not fit together.
    """
    facts = probe()
    checkpoint = open_model(settings.checkpoint_directory)
    log.info("serving %s from %s", checkpoint.needs().architecture, checkpoint.directory)
    prepared = looked_up(facts, settings, checkpoint)
    if prepared.is_final:
        _tell(prepared.plan)
    return prepared


def looked_up(facts: Facts, settings: Settings, checkpoint: Opened) -> Prepared:
    """Make the plan with the calibration of an earlier start, if one exists and may be used."""
    plan = _plan(facts, None, settings, checkpoint)
    kept = Kept(settings.cache_directory, key_of(facts, settings, plan, _shapes(checkpoint)))
    prepared = Prepared(settings, facts, checkpoint, plan, kept, is_final=not plan.calibrate.value)
    found = kept.read() if plan.calibrate.value and settings.calibrate != "on" else None
    return prepared if found is None else prepared.planned_with(found)


def calibrate(prepared: Prepared, report: Report, budget_seconds: float | None = None) -> Prepared:
    """Measure if needed and return the final plan.

    Run this on the thread that will compute; it imports torch.
    """
    if prepared.is_final:
        return prepared
    from app.engine.measuring import measure

    budget = budget_for(prepared.checkpoint) if budget_seconds is None else budget_seconds
    began = time.monotonic()
    report("calibrating")
    try:
        found = measure(subject(prepared), budget, report)
    except (
        StepFailed,
        PlanImpossible,
        RuntimeError,
        OSError,
        MemoryError,
    ) as error:  # a failed measurement must not end the start
        found = Measurements(fallback=f"measuring failed: {error}", seconds=time.monotonic() - began)
    if found.fallback:
        log.warning("calibration: decided from facts alone, because %s (%.1f s)", found.fallback, found.seconds)
    else:
        log.info("calibrated in %.1f s", found.seconds)
    final = prepared.planned_with(Calibration(found, time.time(), from_cache=False))
    if beside_other_work(prepared, final):
        log.warning("the calibration is not kept: fewer threads were much faster, so other work probably used the cores")
    elif final.calibration is not None:
        prepared.kept.keep(final.calibration)
    _tell(final.plan)
    return final


def beside_other_work(before: Prepared, after: Prepared) -> bool:
    """Return True if other work seems to have used the cores while they were measured.

    Such measurements serve this start but are not kept for later ones.
    """
    trials = Trials.of(after.calibration.measurements if after.calibration else None)
    fewer = trials.at(*_choice(after.plan))
    planned = trials.at(after.plan.precision.value, before.plan.threads.value)
    return fewer is not None and planned is not None and fewer.gain_over(planned) > CONTENDED_GAIN


def _shapes(checkpoint: Opened) -> object:
    """Return the object whose text identifies the shapes that decide the step times."""
    return checkpoint.model_config if isinstance(checkpoint, Checkpoint) else checkpoint.fingerprint


def budget_for(checkpoint: Opened) -> float:
    """Return the seconds that a start may spend on measuring."""
    small = checkpoint.needs().weight_bytes < SMALL_WEIGHT_BYTES
    return SMALL_BUDGET_SECONDS if small else BUDGET_SECONDS


def subject(prepared: Prepared) -> Subject:
    """Return what to measure: each precision that may be chosen, and the numbers of threads that may serve."""
    from app.engine.measuring import Subject

    facts, settings, checkpoint, plan = prepared.facts, prepared.settings, prepared.checkpoint, prepared.plan
    names = [plan.precision.value, *_others(prepared)]
    ways = [way for name in names if (way := _way(prepared, name)) is not None]
    copies = settings.int8_copy != "off" and not plan.deterministic.value and "int4" in names and checkpoint.needs().generates
    return Subject(
        checkpoint.model_config if isinstance(checkpoint, Checkpoint) else checkpoint,
        tuple(ways),
        _thread_counts(settings, plan),
        lambda found: _choice(_plan(facts, found, settings, checkpoint)),
        _way(prepared, "int4", int8_copy="on") if copies else None,
        max((cache.size_bytes for cache in facts.caches), default=0),
    )


def _choice(plan: ServingPlan) -> tuple[str, int]:
    return plan.precision.value, plan.threads.value


def _others(prepared: Prepared) -> list[str]:
    """Return the other precisions that the plan may choose once they are measured."""
    needs = prepared.checkpoint.needs()
    if prepared.settings.precision != "auto":
        return []
    if (
        not needs.generates
    ):  # no other precision is chosen, but the speedup of int8 is reported if the model is large enough to measure it
        return ["int8"] if needs.weight_bytes >= SMALL_WEIGHT_BYTES and prepared.plan.precision.value != "int8" else []
    if needs.num_parameters < precision.MIN_PARAMETERS:
        return []
    exact = precision.exact(prepared.facts, prepared.plan.device.value)
    return [name for name in (exact, *precision.ROUNDED) if name != prepared.plan.precision.value]


def _way(prepared: Prepared, name: str, int8_copy: str = "off") -> ServingPlan | None:
    """Return the plan for a precision, or None if that precision is not possible."""
    asked = {"precision": name, "int8_copy": int8_copy, "device": prepared.plan.device.value}
    try:
        return _plan(prepared.facts, None, prepared.settings.model_copy(update=asked), prepared.checkpoint)
    except (NoRecipe, PlanImpossible):
        return None


def _thread_counts(settings: Settings, plan: ServingPlan) -> tuple[int, ...]:
    planned = plan.threads.value
    if settings.threads != "auto" or planned == 1 or plan.device.value != "cpu":  # they do not speed up a device
        return (planned,)
    return tuple(range(planned, 0, -1)) if planned <= FEW_THREADS else (planned, planned - 1)


def _plan(facts: Facts, measurements: Measurements | None, settings: Settings, checkpoint: Opened) -> ServingPlan:
    return make_plan(facts, measurements, settings, checkpoint.needs(), RECIPES.keys())


def _tell(plan: ServingPlan) -> None:
    for name, decision in plan.decisions():
        log.info("plan: %s = %s (%s)", name, decision.value, decision.reason)
