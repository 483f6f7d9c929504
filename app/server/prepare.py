"""Decisions made before weights are read: host facts, the checkpoint, measurements and the plan.

Without measurements, of this start or an earlier one, the plan is provisional: it sets the environment that torch reads
when it is imported, and decides what to measure.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.engine.calibration.cache import Calibration, CalibrationFile, calibration_key
from app.errors import NoRecipe, PlanImpossible, StepFailed
from app.hardware.decision import Measurements, TrialTimes
from app.hardware.facts import Facts, Needs
from app.hardware.plan import precision
from app.hardware.plan.plan import ServingPlan, make_plan
from app.hardware.plan.shares import divide_machine
from app.hardware.plan.speed import (
    EstimateInputs,
    SpeedInputs,
    SpeedLimits,
    TrialTiming,
    TrialTimings,
    by_expected_speed,
    estimate_speed,
    known_timing,
)
from app.hardware.plan.threads import CONTENDED_GAIN
from app.hardware.probe.host_files import HostFiles
from app.hardware.probe.probe import probe
from app.hardware.step_times import StepTimeTable
from app.metrics.load_progress import LoadProgress
from app.models.decoders.config import ModelConfig
from app.models.transformers_config import TransformersConfig
from app.server.adapters import planned_adapters
from app.server.model_source import missing_model, open_or_fetch_model, planned_draft
from app.settings import Settings, parse_kept_layers
from app.version import VERSION
from app.weights.cache_file import FileUnusable, atomic_write, file_identity, log_not_kept, open_trusted
from app.weights.checkpoint import Checkpoint
from app.weights.forms import QUANTIZED, RECIPES, kept_layer_bytes
from app.weights.hub.cache import HubName
from app.weights.hub.fetch import fetch_or_use_cached
from app.weights.lora.adapter import ServedAdapters
from app.weights.open import OpenedModel
from app.weights.shards import check_shardable, shard_config

if TYPE_CHECKING:
    from app.engine.calibration.measure import CalibrationSubject

log = logging.getLogger(__name__)
UNDER_LOAD = "fewer threads were much faster, so other work probably used the cores"
OTHER_WORK = "other programs used {cores:.1f} cores meanwhile"
# What other programs may use: cores, or a share of all of them. /proc/stat counts hundredths of a second.
MAX_OTHER_CORES, MAX_OTHER_SHARE, LEAST_OTHER_SECONDS = 0.2, 0.05, 0.05
BUDGET_SECONDS = 5.0  # budget for measuring at a start; the first one packs weights too, which takes longer
CALIBRATE_COMMAND_SECONDS = 10.0  # budget of the command `armature calibrate`
SMALL_WEIGHT_BYTES = 64 * 2**20  # any choice serves a smaller model well, so it is measured only briefly
SMALL_BUDGET_SECONDS = 0.3
# Part of a shared cache that speeds up a thread's reads noticeably. A guest with two cores may see the host's whole L3: with
# 480 MiB of it, both read 51 GB/s from 64 MiB, 43 from 128, 37 from 256, and 36 from 512 and more.
THREAD_CACHE_BYTES = 64 * 2**20
FEW_THREADS = 3  # up to this many, every number of threads is tried; above it, the planned number and one fewer
ReportStage = Callable[[str | LoadProgress], None]
log = logging.getLogger(__name__)
FORMAT = 1  # version of the formats and of the measurement: raise it when older figures would mislead
FOLDER = "packs"
_MAX_BYTES = 2**12


class QualityNotes:
    """The note of one checkpoint with these settings, which may not exist yet."""

    def __init__(self, checkpoint: OpenedModel, settings: Settings) -> None:
        self._file: Path | None = None
        folder = settings.cache_directory
        if folder is None or not isinstance(checkpoint, Checkpoint):
            return
        key = [VERSION, FORMAT, settings.keep_layers, *(file_identity(file) for file in checkpoint.content_files)]
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
        self._file = folder / FOLDER / f"{digest[:32]}.quality"

    def read(self) -> dict[str, float]:
        """Return the cost of each precision that was measured; empty if there is no usable note."""
        if self._file is None:
            return {}
        try:
            with os.fdopen(open_trusted(self._file), encoding="utf-8") as stream:
                noted = json.loads(stream.read(_MAX_BYTES))
            return {name: float(noted[name]) for name in QUANTIZED if name in noted}
        except (OSError, ValueError, TypeError, FileUnusable, RecursionError):
            return {}

    def write(self, costs: Mapping[str, float]) -> None:
        if self._file is None or costs == self.read():
            return
        try:
            with atomic_write(self._file) as stream:
                stream.write(json.dumps(dict(costs)).encode())
        except OSError as error:
            log_not_kept(self._file, "the measured cost in quality", error)


def planned_needs(checkpoint: OpenedModel, settings: Settings) -> Needs:
    """Return a checkpoint's needs with noted costs and kept layers. Raises `SettingsInvalid` for unknown layers."""
    needs = checkpoint.needs()
    with suppress(OSError):  # a file that vanished is reported when it is read
        needs = replace(needs, quality_costs=QualityNotes(checkpoint, settings).read())
    kept = parse_kept_layers(settings.keep_layers)
    if not kept or not isinstance(checkpoint, Checkpoint) or not isinstance(checkpoint.model_config, ModelConfig):
        return needs
    changed = {
        name: size + kept_layer_bytes(checkpoint.model_config, name, kept) if name in QUANTIZED else size
        for name, size in needs.bytes_by_precision.items()
    }
    return replace(needs, bytes_by_precision=changed)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result of `prepare`. `calibration` is None if nothing was measured; `is_final`: the plan stays."""

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
    parts: tuple[Facts, ...] = ()  # of the machine, one for each of several engines; `facts` is the first one

    @property
    def model_name(self) -> str:
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

        Only the expected speed changes. Noisy times of other precisions and single steps are dropped: they cannot be
        compared. The next start estimates those precisions in proportion to these times.
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

    def for_engine(self, number: int) -> Prepared:
        """Return the start of one of several engines: the plan of its part of the machine, with the first one's figures."""
        if number == 0:
            return self
        measurements, facts = None if self.calibration is None else self.calibration.measurements, self.parts[number]
        plan = _plan(facts, measurements, self.settings, self.needs)
        if plan.memory.max_model_len < self.plan.memory.max_model_len:
            raise PlanImpossible(
                f"Engine {number} of {len(self.parts)} has memory for {plan.memory.max_model_len} tokens of a text, the first one for"
                f" {self.plan.memory.max_model_len}: set max_model_len to at most {plan.memory.max_model_len}."
            )
        return replace(self, facts=facts, plan=plan, is_final=True)

    def with_calibration(self, calibration: Calibration) -> Prepared:
        plan = _plan(self.facts, calibration.measurements, self.settings, self.needs)
        return replace(self, plan=plan, calibration=calibration, is_final=True)

    def with_quality_cost(self, cost: float) -> Prepared:
        """Return a copy whose plan knows the cost in quality, noted for the next start; it may change `auto`."""
        costs = {**self.needs.quality_costs, self.plan.weights.precision: cost}
        QualityNotes(self.checkpoint, self.settings).write(costs)
        needs = replace(self.needs, quality_costs=costs)
        measurements = None if self.calibration is None else self.calibration.measurements
        return replace(self, needs=needs, plan=_plan(self.facts, measurements, self.settings, needs))


def prepare(settings: Settings) -> Prepared:
    """Probe the machine, open or fetch the checkpoint, and make a plan without torch. Raises `StartupError`."""
    facts = probe()
    checkpoint = open_or_fetch_model(settings)
    return with_kept_calibration(facts, settings, checkpoint)


@dataclass(frozen=True, slots=True)
class UnfetchedModel:
    """What is known of a start before its model is on this machine. `plan` is the one without a model."""

    settings: Settings
    facts: Facts
    plan: ServingPlan
    name: HubName

    @property
    def model_name(self) -> str:
        return next(iter(self.settings.served_model_name), self.name.repo_id)

    def fetch(self, report: ReportStage) -> Prepared:
        """Fetch the model and prepare the start as for any other. Raises `StartupError`."""
        fetch_or_use_cached(self.name, report)
        return prepare(self.settings)


def prepare_start(settings: Settings) -> Prepared | UnfetchedModel:
    """Prepare a start as far as the model's files are on this machine. Raises `StartupError`."""
    name = missing_model(settings)
    if name is None:
        return prepare(settings)
    facts = probe()
    return UnfetchedModel(settings, facts, make_plan(facts, None, settings, None, RECIPES.keys()), name)


def with_kept_calibration(facts: Facts, settings: Settings, checkpoint: OpenedModel) -> Prepared:
    """Make the plan with the calibration of an earlier start, if one exists and may be used."""
    if settings.tensor_parallel > 1:
        check_shardable(checkpoint, settings.tensor_parallel)
    adapters = planned_adapters(settings, checkpoint)
    needs = planned_needs(checkpoint, settings)
    if adapters is not None:
        needs = replace(needs, adapter_elements=adapters.num_elements)
    draft = planned_draft(settings, checkpoint)
    needs = replace(needs, draft=None if draft is None else draft.needs())
    plan = _plan(facts, None, settings, needs)
    parts = divide_machine(facts, plan.placement.device, settings.data_parallel)
    if len(parts) > 1:
        facts = parts[0]
        plan = _plan(facts, None, settings, needs)
    shapes = checkpoint.model_config if isinstance(checkpoint, Checkpoint) else checkpoint.fingerprint
    calibration_file = CalibrationFile(settings.cache_directory, calibration_key(facts, settings, plan, shapes))
    is_final = not plan.steps.calibrate
    prepared = Prepared(
        settings, facts, checkpoint, needs, plan, calibration_file, None, is_final, adapters, draft, parts
    )
    found = calibration_file.read() if plan.steps.calibrate and settings.calibrate != "on" else None
    return prepared if found is None else prepared.with_calibration(found)


def calibrate(prepared: Prepared, report: ReportStage, budget_seconds: float | None = None) -> Prepared:
    """Measure if needed and return the final plan, on the thread that will compute; it imports torch."""
    if prepared.is_final:
        return prepared
    from app.engine.calibration.measure import measure_machine

    budget = measuring_budget_seconds(prepared.checkpoint) if budget_seconds is None else budget_seconds
    began, other_before = time.monotonic(), other_cpu_seconds(prepared.facts.allowed_cpus)
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
    other = other_cpu_seconds(prepared.facts.allowed_cpus) - other_before
    cores = other / max(time.monotonic() - began, LEAST_OTHER_SECONDS)
    most = max(MAX_OTHER_CORES, MAX_OTHER_SHARE * len(prepared.facts.allowed_cpus))
    if found.trials and other > LEAST_OTHER_SECONDS and cores > most:
        found = _as_noisy(found, OTHER_WORK.format(cores=cores))
    final = prepared.with_calibration(Calibration(found, time.time(), from_cache=False))
    if measured_under_load(prepared, final):
        prepared.calibration_file.write(Calibration(_as_noisy(found, UNDER_LOAD), time.time(), from_cache=False))
    elif final.calibration is not None:
        prepared.calibration_file.write(final.calibration)
    return final


def _as_noisy(found: Measurements, noise: str) -> Measurements:
    log.warning("the calibration is kept as a noisy one: %s", noise)
    return replace(found, trials=tuple(one if one.noise else replace(one, noise=noise) for one in found.trials))


def other_cpu_seconds(cpu_ids: Collection[int], files: HostFiles | None = None) -> float:
    """Return the time that others have used the CPUs: programs, or the host of a virtual machine; 0 if unknown."""
    text = (files or HostFiles(Path("/"))).text("/proc/stat")
    if text is None:
        return 0.0
    lines = [line.split() for line in text.splitlines() if re.match(r"cpu\d", line)]
    used = [[int(number) for number in fields[1:9]] for fields in lines if int(fields[0][3:]) in cpu_ids]
    idle = slice(3, 5)  # idle, and idle while a disk reads
    return sum(sum(each) - sum(each[idle]) for each in used) / os.sysconf("SC_CLK_TCK") - time.process_time()


def measured_under_load(before: Prepared, after: Prepared) -> bool:
    """Return True if other work seems to have used the cores: later starts then take the times as noisy."""
    trials = TrialTimings.from_measurements(after.calibration.measurements if after.calibration else None)
    fewer = trials.find(*_precision_and_threads(after.plan))
    planned = trials.find(after.plan.weights.precision, before.plan.cpu.threads)
    return fewer is not None and planned is not None and fewer.speedup_over(planned) > CONTENDED_GAIN


def measuring_budget_seconds(checkpoint: OpenedModel) -> float:
    """Return the seconds that a start may spend on measuring."""
    small = checkpoint.needs().weight_bytes < SMALL_WEIGHT_BYTES
    return SMALL_BUDGET_SECONDS if small else BUDGET_SECONDS


def measurement_subject(prepared: Prepared) -> CalibrationSubject:
    """Return what to measure: each precision that may be chosen, the fastest first, and the numbers of threads."""
    from app.engine.calibration.measure import CalibrationSubject

    facts, settings, checkpoint, plan = prepared.facts, prepared.settings, prepared.checkpoint, prepared.plan
    names = [plan.weights.precision, *_other_precisions(prepared)]
    if checkpoint.needs().generates:  # other models serve the planned precision, whatever the speed of others
        inputs = EstimateInputs(facts, prepared.needs, plan.weights.kernels, plan.placement.device)
        names = by_expected_speed(inputs, names, plan.cpu.threads)
    plans = [plan_variant for name in names if (plan_variant := _plan_for_precision(prepared, name)) is not None]
    int4 = next((name for name in precision.INT4_PRECISIONS if name in names), None)
    copies = settings.int8_copy != "off" and int4 is not None and checkpoint.needs().generates
    model = checkpoint.model_config if isinstance(checkpoint, Checkpoint) else checkpoint
    assert not isinstance(model, TransformersConfig), "only native engines are measured"
    if isinstance(model, ModelConfig):
        model = shard_config(model, settings.tensor_parallel)
    return CalibrationSubject(
        model,
        tuple(plans),
        _thread_counts(settings, plan),
        lambda found: _precision_and_threads(_plan(facts, found, settings, prepared.needs)),
        _plan_for_precision(prepared, int4, int8_copy="on") if copies and int4 is not None else None,
        min(max((cache.size_bytes for cache in facts.caches), default=0), plan.cpu.threads * THREAD_CACHE_BYTES),
    )


def _precision_and_threads(plan: ServingPlan) -> tuple[str, int]:
    return plan.weights.precision, plan.cpu.threads


def _other_precisions(prepared: Prepared) -> list[str]:
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
    if kind != "cpu":  # nothing is quantized there for its speed (precision.py)
        return []
    exact = precision.exact_precision(prepared.facts, kind, needs, level)
    names = (exact, *precision.AUTO_PRECISIONS, *kleidi)
    return [name for name in names if name != prepared.plan.weights.precision]


def _plan_for_precision(prepared: Prepared, name: str, int8_copy: str = "off") -> ServingPlan | None:
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
