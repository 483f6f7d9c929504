"""Decisions made before weights are read: host facts, the checkpoint, measurements and the plan.

Measurements come from this start, or from the calibration file of an earlier one. Without them the plan is
provisional: it sets the environment that torch reads when it is imported, and decides what to measure. A calibration
file holds measurements of this machine with one checkpoint's shapes. It is used only while nothing that affects the
measurements has changed (see `calibration_key`), and several processes may share the folder. If a file cannot be read,
the machine is measured again; if one cannot be written, that is logged.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.errors import NoRecipe, PlanImpossible, StepFailed
from app.hardware.decision import Measurements, TrialTimes
from app.hardware.facts import Facts, Needs, to_json_value
from app.hardware.plan import precision
from app.hardware.plan.estimates import EstimateInputs, by_expected_speed, known_timing
from app.hardware.plan.expected_speed import SpeedInputs, SpeedLimits, estimate_speed
from app.hardware.plan.plan import ServingPlan, make_plan
from app.hardware.plan.threads import CONTENDED_GAIN
from app.hardware.plan.trials import TrialTiming, TrialTimings
from app.hardware.probe import software
from app.hardware.probe.probe import probe
from app.hardware.step_times import StepTimeTable
from app.metrics.load_progress import LoadProgress
from app.server.adapters import check_device, planned_adapters
from app.server.draft_model import planned_draft
from app.server.model_source import open_or_fetch_model
from app.server.quality_notes import QualityNotes, planned_needs
from app.settings import Settings, settings_with
from app.version import VERSION
from app.weights.cache_file import FileUnusable, atomic_write, differences, log_not_kept, open_trusted
from app.weights.checkpoint import Checkpoint
from app.weights.forms import RECIPES
from app.weights.lora.adapter import ServedAdapters
from app.weights.open import OpenedModel

if TYPE_CHECKING:
    from app.engine.calibration.session import CalibrationSubject

log = logging.getLogger(__name__)

UNDER_LOAD = "fewer threads were much faster, so other work probably used the cores"
FORMAT = 4  # version of what is measured and how: raise it when older measurements would mislead
FOLDER = "calibration"
MAX_BYTES = 2**20  # limit for one file: a longer one was not written by this program


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measurements, the time they were taken (seconds since 1970), and `from_cache`: an earlier start took them."""

    measurements: Measurements
    measured_at: float
    from_cache: bool

    def to_json(self) -> dict[str, Any]:
        """Return the fields of `GET /info`: the measurements, their age in seconds, and `from_cache`."""
        age = max(0.0, time.time() - self.measured_at)
        fields: dict[str, Any] = to_json_value(self.measurements)
        return {"from_cache": self.from_cache, "age_seconds": round(age, 1), "measurements": fields}


class CalibrationFile:
    """The calibration file of one key, which may or may not exist."""

    def __init__(self, folder: Path | None, key: Mapping[str, str]) -> None:
        """Compute the file's path from `key`. With `folder` None, nothing is read or kept."""
        self.key = dict(key)
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()
        self.file = None if folder is None else folder / FOLDER / f"{digest[:32]}.json"

    def read(self) -> Calibration | None:
        """Return the kept calibration, or None if the machine must be measured."""
        if self.file is None:
            return None
        try:
            return _parsed(_bytes_of(self.file), self.key)
        except FileNotFoundError:
            self._log_other_keys(self.file.parent)
            return None
        except (OSError, FileUnusable) as error:
            log.warning("the calibration in %s cannot be used (%s): measuring again", self.file, error)
            return None

    def _log_other_keys(self, folder: Path) -> None:
        """Log that calibrations of these shapes exist for another machine or version.

        They are never used, and they are left for the machine or version that made them.
        """
        others = []
        for file in folder.glob("*.json"):
            with suppress(OSError, FileUnusable, ValueError, KeyError, TypeError, RecursionError):
                others.append(json.loads(_bytes_of(file))["key"])
        same = [key for key in others if isinstance(key, dict) and key.get("shapes") == self.key["shapes"]]
        differ = differences(self.key, same)
        if differ:
            log.info("calibrations of this model in %s differ in %s: they are not used and stay there", folder, differ)

    def write(self, calibration: Calibration) -> None:
        """Write the calibration for the next start, or log that it cannot be written.

        Noisy ones and those of single steps are kept too: they are a better start than none. Only measurements that the
        plan could not use (`fallback`) are not.
        """
        found = calibration.measurements
        if self.file is None or found.fallback or not (found.trials or found.single_steps):
            return
        fields = {
            "key": self.key,
            "measured_at": calibration.measured_at,
            "measurements": to_json_value(calibration.measurements),
        }
        try:
            with atomic_write(self.file) as stream:
                stream.write(json.dumps(fields).encode())
        except OSError as error:
            log_not_kept(self.file, "the calibration", error)

    def forget(self, calibration: Calibration) -> None:
        """Remove the file, because the machine no longer performs as measured: the next start measures again.

        A newer calibration, which another process has written since then, is left in place.
        """
        if self.file is None:
            return
        with suppress(OSError, FileUnusable):  # the file is gone already, or this process may not remove it
            if _parsed(_bytes_of(self.file), self.key).measured_at == calibration.measured_at:
                self.file.unlink()
                log.info(
                    "the calibration in %s no longer holds and was removed: the next start measures again", self.file
                )


def calibration_key(facts: Facts, settings: Settings, plan: ServingPlan, shapes: object) -> dict[str, str]:
    """Return everything that decides how long a step takes, as names and values of the calibration's key.

    These are the processor, the part of it that may be used, the model's shapes and the code; never a host name.
    Cores are counted, not named: another process on other cores of the same kind finds the same calibration.
    """
    gpu, allowed = plan.gpu(facts), facts.allowed_cpus
    cores = [(core.kind, core.numa_node, sum(cpu in allowed for cpu in core.cpu_ids)) for core in facts.cores]
    return {
        "format": str(FORMAT),
        "cpu": repr(to_json_value(facts.cpu)),
        "isa": " ".join([*sorted(facts.isa), str(facts.sve_bits)]),
        "caches": repr(to_json_value(facts.caches)),
        "quota": str(facts.cgroup.quota_cores),
        "cores": repr(sorted(core for core in cores if core[2])),
        "huge pages": str(facts.huge_pages.transparent),
        "shapes": repr(shapes),
        "asked": repr({name: getattr(settings, name) for name in settings_with(is_measured=True)}),
        "device": f"{plan.placement.device} {gpu.name if gpu else ''}".strip(),  # equal for GPUs of the same model
        "threads": f"{plan.cpu.threads} {plan.cpu.wait_policy}",
        "version": VERSION,
        "torch": facts.torch.version if facts.torch else "",
        "native": f"{software.native_library_hash()} {plan.weights.kernels} {os.environ.get('ARMATURE_ISA', '')}",
    }


def _bytes_of(file: Path) -> bytes:
    descriptor = open_trusted(file)
    try:
        return os.read(descriptor, MAX_BYTES)
    finally:
        os.close(descriptor)


def _parsed(text: bytes, key: Mapping[str, str]) -> Calibration:
    """Parse a calibration file.

    Raises:
        FileUnusable: The text is not a calibration, or it has another key.
    """
    try:
        fields = json.loads(text)
        if fields["key"] != dict(key):
            raise FileUnusable("it was made for another machine, model or version")
        return Calibration(_measurements(fields["measurements"]), float(fields["measured_at"]), from_cache=True)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileUnusable("it is damaged") from error


def _measurements(fields: Mapping[str, Any]) -> Measurements:
    trials = tuple(_trial(trial) for trial in fields["trials"])
    return Measurements(**{**fields, "trials": trials})


def _trial(fields: Mapping[str, Any]) -> TrialTimes:
    tables = {name: {int(size): float(seconds) for size, seconds in fields[name].items()} for name in _TABLES}
    return TrialTimes(**{**fields, **tables})


_TABLES = ("decode_seconds", "prefill_seconds", "encode_seconds")


BUDGET_SECONDS = 5.0  # budget for measuring at a start; the first one packs weights too, which takes longer
CALIBRATE_COMMAND_SECONDS = 10.0  # budget of the command `armature calibrate`
SMALL_WEIGHT_BYTES = 64 * 2**20  # any choice serves a smaller model well, so it is measured only briefly
SMALL_BUDGET_SECONDS = 0.3
# Part of a shared cache that speeds up a thread's reads noticeably. A guest with two cores may see the host's whole L3: with
# 480 MiB of it, both read 51 GB/s from 64 MiB, 43 from 128, 37 from 256, and 36 from 512 and more.
THREAD_CACHE_BYTES = 64 * 2**20
FEW_THREADS = 3  # up to this many, every number of threads is tried; above it, the planned number and one fewer
ReportStage = Callable[[str | LoadProgress], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result of `prepare`.

    `needs` are the checkpoint's with these settings. `calibration` is None if nothing was measured, yet or at all.
    `is_final`: the plan will not change.
    """

    settings: Settings
    facts: Facts
    checkpoint: OpenedModel
    needs: Needs
    plan: ServingPlan
    calibration_file: CalibrationFile
    calibration: Calibration | None = None
    is_final: bool = True
    adapters: ServedAdapters | None = None
    draft: Checkpoint | None = None

    @property
    def model_name(self) -> str:
        """Name of the model in requests and responses."""
        return next(iter(self.settings.served_model_name), self.checkpoint.name)

    @property
    def step_time_table(self) -> StepTimeTable | None:
        """Measured step times of the plan, or None if they were not measured."""
        trial = self._trial()
        return None if trial is None else StepTimeTable.from_trial(trial)

    @property
    def expected_step_times(self) -> StepTimeTable | None:
        """Measured step times of the plan, or estimated ones; None if there is nothing to estimate them from."""
        measured = self.step_time_table
        if measured is not None:
            return measured
        estimate = known_timing(self._estimate_inputs, self.plan.weights.precision, self.plan.cpu.threads)
        return None if estimate is None else estimate.steps

    @property
    def _estimate_inputs(self) -> EstimateInputs:
        plan, measurements = self.plan, None if self.calibration is None else self.calibration.measurements
        return EstimateInputs(self.facts, self.needs, plan.weights.kernels, plan.placement.device, measurements)

    @property
    def estimated_trial(self) -> TrialTimes | None:
        """Estimated or noisy step times of the plan; None if they are measured or unknown."""
        if self.plan.speed.speed_source not in ("estimated", "noisy"):
            return None
        estimate = known_timing(self._estimate_inputs, self.plan.weights.precision, self.plan.cpu.threads)
        return None if estimate is None else replace(estimate.trial, int8_copy=self.plan.weights.int8_copy)

    def with_idle_trial(self, trial: TrialTimes) -> Prepared:
        """Return a copy with the step times that the idle server measured, and keep them for the next start.

        Only the expected speed changes: what is served stays as it was planned. Noisy times of other precisions are
        dropped, and single steps measured beside them: whatever slowed them down did not slow these times down, so they
        cannot be compared. The next start estimates those precisions in proportion to these times.
        """
        before = Measurements() if self.calibration is None else self.calibration.measurements
        steady = tuple(one for one in before.trials if not one.noise)
        trial = replace(trial, noise="", spread=0.0)
        measurements = replace(before, trials=(trial, *steady), fallback="", is_partial=True)
        if before.fallback or len(steady) < len(before.trials):
            measurements = replace(measurements, single_steps={})
        calibration = Calibration(measurements, time.time(), from_cache=False)
        self.calibration_file.write(calibration)
        plan, timing = self.plan, TrialTiming(trial, StepTimeTable.from_trial(trial))
        limits = SpeedLimits(plan.memory.batch_target_tokens, plan.memory.max_running_seqs, plan.memory.weight_bytes)
        speed = estimate_speed(measurements, SpeedInputs(self.needs, plan.weights.precision, limits, timing))
        return replace(self, plan=replace(plan, speed=speed), calibration=calibration)

    def _trial(self) -> TrialTimes | None:
        if self.calibration is None or self.calibration.measurements.fallback:
            return None
        planned = (self.plan.weights.precision, self.plan.cpu.threads, "")
        found = [
            one for one in self.calibration.measurements.trials if (one.precision, one.threads, one.noise) == planned
        ]
        return next((one for one in found if one.int8_copy == self.plan.weights.int8_copy), next(iter(found), None))

    @property
    def calibration_spread(self) -> float | None:
        """Relative spread of the samples behind the plan's step times, noisy or not; None if there are none."""
        trial = self._trial() or (self.estimated_trial if self.plan.speed.speed_source == "noisy" else None)
        return None if trial is None else trial.spread

    def with_calibration(self, calibration: Calibration) -> Prepared:
        """Return a copy with this calibration and the final plan made from it."""
        plan = _plan(self.facts, calibration.measurements, self.settings, self.needs)
        return replace(self, plan=plan, calibration=calibration, is_final=True)

    def with_quality_cost(self, cost: float) -> Prepared:
        """Return a copy whose plan knows what its precision costs in quality; `auto` may choose another one then.

        The figure is noted for the next start.
        """
        costs = {**self.needs.quality_costs, self.plan.weights.precision: cost}
        QualityNotes(self.checkpoint, self.settings).write(costs)
        needs = replace(self.needs, quality_costs=costs)
        measurements = None if self.calibration is None else self.calibration.measurements
        return replace(self, needs=needs, plan=_plan(self.facts, measurements, self.settings, needs))


def prepare(settings: Settings) -> Prepared:
    """Probe the machine, open the checkpoint, read earlier measurements, and make a plan.

    This takes milliseconds and does not import torch; a model of the hub that is not in its cache is fetched before.

    Raises:
        StartupError: The settings, the checkpoint and the machine do not fit together.
    """
    facts = probe()
    checkpoint = open_or_fetch_model(settings)
    return with_kept_calibration(facts, settings, checkpoint)


def with_kept_calibration(facts: Facts, settings: Settings, checkpoint: OpenedModel) -> Prepared:
    """Make the plan with the calibration of an earlier start, if one exists and may be used."""
    adapters = planned_adapters(settings, checkpoint)
    needs = planned_needs(checkpoint, settings)
    if adapters is not None:
        needs = replace(needs, adapter_elements=adapters.num_elements)
    draft = planned_draft(settings, checkpoint)
    needs = replace(needs, draft=None if draft is None else draft.needs())
    plan = _plan(facts, None, settings, needs)
    check_device(adapters, plan)
    calibration_file = CalibrationFile(
        settings.cache_directory, calibration_key(facts, settings, plan, _shapes(checkpoint))
    )
    is_final = not plan.steps.calibrate
    prepared = Prepared(settings, facts, checkpoint, needs, plan, calibration_file, None, is_final, adapters, draft)
    found = calibration_file.read() if plan.steps.calibrate and settings.calibrate != "on" else None
    return prepared if found is None else prepared.with_calibration(found)


def calibrate(prepared: Prepared, report: ReportStage, budget_seconds: float | None = None) -> Prepared:
    """Measure if needed and return the final plan.

    Run this on the thread that will compute; it imports torch.
    """
    if prepared.is_final:
        return prepared
    from app.engine.calibration.measure import measure_machine

    budget = measuring_budget_seconds(prepared.checkpoint) if budget_seconds is None else budget_seconds
    began = time.monotonic()
    report("calibrating")
    try:
        found = measure_machine(measurement_subject(prepared), budget, report)
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
        log.debug("calibrated in %.1f s", found.seconds)
        for trial in found.trials:
            if trial.noise:
                log.warning(
                    "calibration: the times of %s are the least of their samples, since %s",
                    trial.precision,
                    trial.noise,
                )
        for name, seconds in found.single_steps.items():
            log.info("calibration: only one step of %s was timed, which took %.2f s", name, seconds)
    final = prepared.with_calibration(Calibration(found, time.time(), from_cache=False))
    if measured_under_load(prepared, final):
        log.warning("the calibration is kept as a noisy one: %s", UNDER_LOAD)
        noisy = tuple(trial if trial.noise else replace(trial, noise=UNDER_LOAD) for trial in found.trials)
        prepared.calibration_file.write(Calibration(replace(found, trials=noisy), time.time(), from_cache=False))
    elif final.calibration is not None:
        prepared.calibration_file.write(final.calibration)
    return final


def measured_under_load(before: Prepared, after: Prepared) -> bool:
    """Return True if other work seems to have used the cores while they were measured.

    Such measurements serve this start as they are, and later ones as noisy ones.
    """
    trials = TrialTimings.from_measurements(after.calibration.measurements if after.calibration else None)
    fewer = trials.find(*_precision_and_threads(after.plan))
    planned = trials.find(after.plan.weights.precision, before.plan.cpu.threads)
    return fewer is not None and planned is not None and fewer.speedup_over(planned) > CONTENDED_GAIN


def _shapes(checkpoint: OpenedModel) -> object:
    """Return the object whose text identifies the shapes that decide the step times."""
    return checkpoint.model_config if isinstance(checkpoint, Checkpoint) else checkpoint.fingerprint


def measuring_budget_seconds(checkpoint: OpenedModel) -> float:
    """Return the seconds that a start may spend on measuring."""
    small = checkpoint.needs().weight_bytes < SMALL_WEIGHT_BYTES
    return SMALL_BUDGET_SECONDS if small else BUDGET_SECONDS


def measurement_subject(prepared: Prepared) -> CalibrationSubject:
    """Return what to measure: each precision that may be chosen, the fastest first, and the numbers of threads."""
    from app.engine.calibration.session import CalibrationSubject

    facts, settings, checkpoint, plan = prepared.facts, prepared.settings, prepared.checkpoint, prepared.plan
    names = [plan.weights.precision, *_other_precisions(prepared)]
    if checkpoint.needs().generates:  # other models serve the planned precision, whatever the speed of others
        inputs = EstimateInputs(facts, prepared.needs, plan.weights.kernels, plan.placement.device)
        names = by_expected_speed(inputs, names, plan.cpu.threads)
    plans = [plan_variant for name in names if (plan_variant := _plan_for_precision(prepared, name)) is not None]
    int4 = next((name for name in precision.INT4_PRECISIONS if name in names), None)
    copies = settings.int8_copy != "off" and int4 is not None and checkpoint.needs().generates
    return CalibrationSubject(
        checkpoint.model_config if isinstance(checkpoint, Checkpoint) else checkpoint,
        tuple(plans),
        _thread_counts(settings, plan),
        lambda found: _precision_and_threads(_plan(facts, found, settings, prepared.needs)),
        _plan_for_precision(prepared, int4, int8_copy="on") if copies and int4 is not None else None,
        min(max((cache.size_bytes for cache in facts.caches), default=0), plan.cpu.threads * THREAD_CACHE_BYTES),
    )


def _precision_and_threads(plan: ServingPlan) -> tuple[str, int]:
    return plan.weights.precision, plan.cpu.threads


def _other_precisions(prepared: Prepared) -> list[str]:
    """Return the other precisions that the plan may choose once they are measured."""
    needs = prepared.checkpoint.needs()
    kleidi = precision.kleidi_candidates(prepared.facts, prepared.plan.placement.device)
    if prepared.settings.weight_format != "auto":
        return [*kleidi] if prepared.settings.weight_format == "int4" else []
    if (
        not needs.generates
    ):  # int8 may be chosen for vectors; of other results its speedup is reported, if the model is large enough
        return (
            ["int8"] if needs.weight_bytes >= SMALL_WEIGHT_BYTES and prepared.plan.weights.precision != "int8" else []
        )
    if needs.num_parameters < precision.MIN_PARAMETERS:
        return []
    kind, level = prepared.plan.placement.device, prepared.plan.weights.kernels
    exact = precision.exact_precision(prepared.facts, kind, needs, level)
    names = (exact, *precision.AUTO_PRECISIONS, *kleidi)
    return [name for name in names if name != prepared.plan.weights.precision]


def _plan_for_precision(prepared: Prepared, name: str, int8_copy: str = "off") -> ServingPlan | None:
    """Return the plan for a precision, or None if that precision is not possible."""
    settings = prepared.settings.with_weight_format(name, int8_copy=int8_copy, device=prepared.plan.placement.device)
    try:
        return _plan(prepared.facts, None, settings, prepared.needs)
    except (NoRecipe, PlanImpossible):
        return None


def _thread_counts(settings: Settings, plan: ServingPlan) -> tuple[int, ...]:
    planned = plan.cpu.threads
    if settings.threads != "auto" or planned == 1 or plan.placement.device != "cpu":  # they do not speed up a device
        return (planned,)
    return tuple(range(planned, 0, -1)) if planned <= FEW_THREADS else (planned, planned - 1)


def _plan(facts: Facts, measurements: Measurements | None, settings: Settings, needs: Needs) -> ServingPlan:
    return make_plan(facts, measurements, settings, needs, RECIPES.keys())
