"""Calibration: times this machine with a checkpoint's shapes, within a time budget, before any of its weights is read.

The results are `Measurements`, which the plan uses as facts. If samples vary too much for that, the results say so
and the plan does without.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from app.backends.base import Device
from app.backends.selection import device_backend, processor, select_backend
from app.engine import peaks
from app.engine.device_stage import DeviceStage, texts_on
from app.engine.encode_rehearsal import EncodeRehearsal
from app.engine.looks import COARSE, COARSE_LAYERS, FULL, Extent, Look, Rehearsed, StepShape
from app.engine.program_rehearsal import ProgramRehearsal
from app.engine.rehearsal import Rehearsal
from app.engine.stages import CpuStage
from app.hardware.decision import Measurements, Trial
from app.hardware.plan import ServingPlan
from app.hardware.throttling import steady_clock
from app.kernels.calibrate import Block, Clock, Point, Rounds, border, table
from app.kernels.device_ceilings import cache_bytes
from app.models.config import ModelConfig
from app.models.encoder_config import EncoderConfig
from app.weights.program import ProgramCheckpoint

# seconds for both measurements of the peaks; a smaller budget means a model for which they do not matter
CEILINGS_SECONDS = 0.4
PRECISIONS_SHARE = 0.4  # share of the budget for a coarse trial of every precision that may be chosen
THREADS_SHARE = 0.25  # share of the rest for a coarse trial of the thread counts
COPY_SHARE = 0.25  # share of the rest for prompts in eight bits in addition to four
PATIENCE = 3  # times as many samples if they vary too much, and if there is time

Report = Callable[[str], None]
Key = tuple[int, StepShape]  # (threads, step)


@dataclass(frozen=True, slots=True)
class Subject:
    """The model and the plans to measure.

    - `plans`: a plan for each precision that may be chosen.
    - `threads`: the thread counts that may serve, the largest first.
    - `choose`: returns the precision and the thread count that the plan takes after a coarse trial of all.
    - `copy`: a plan that holds eight bits in addition to four, if that may be chosen.
    - `cache_bytes`: size of the machine's largest cache.
    """

    config: ModelConfig | EncoderConfig | ProgramCheckpoint
    ways: tuple[ServingPlan, ...]
    threads: tuple[int, ...]
    choose: Callable[[Measurements], tuple[str, int]]
    copy: ServingPlan | None = None
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Timer:
    """A deadline, its clock, and the progress callback. `report` may raise, to stop."""

    deadline: float
    report: Report
    clock: Clock = time.perf_counter

    def share(self, part: float) -> Timer:
        """Return a timer for a part of the time that is left."""
        now = self.clock()
        return replace(self, deadline=now + part * max(0.0, self.deadline - now))

    def less(self, seconds: float) -> Timer:
        """Return a timer that ends `seconds` earlier."""
        return replace(self, deadline=self.deadline - seconds)


def measure(subject: Subject, budget_seconds: float, report: Report, clock: Clock | None = None) -> Measurements:
    """Measure on the thread that will serve.

    The thread pool keeps the thread count that was tried last, until the backend is configured. Under a CPU quota
    that limits this process, the seconds are those under the quota, and the budget is extended to the same amount
    of CPU time.
    """
    quota, threads = subject.ways[0].throttling_quota.value, subject.threads[0]
    part = 1.0 if quota is None else quota / threads
    clock = clock or steady_clock(quota)
    began = clock()
    backend = select_backend(subject.ways[0])
    backend.configure(subject.ways[0])
    with torch.inference_mode():
        if subject.ways[0].device.value != "cpu":
            subject = replace(subject, cache_bytes=cache_bytes(backend.device))
            _compile(subject, report)
        timer = Timer(clock() + budget_seconds / part, report, clock)
        if budget_seconds <= 4 * CEILINGS_SECONDS:
            found = _trials(subject, timer, Measurements())
        else:
            report("calibrating: ceilings")
            before = _ceilings(subject, backend, part)
            found = _between(
                before, _trials(subject, timer.less(CEILINGS_SECONDS / part), before), _ceilings(subject, backend, part)
            )
    gc.collect()  # release the synthetic weights before the real ones are loaded
    return replace(found, seconds=clock() - began)


def _compile(subject: Subject, report: Report) -> None:
    """Compile the kernels of a device on their first use.

    This can take minutes if no earlier start kept them, so the budget excludes it.
    """
    report("calibrating: compiling kernels")
    rehearsal = Session(subject, subject.ways[0], Timer(0.0, report)).rehearsal(Extent(0, COARSE_LAYERS, COARSE.most_outputs))
    for shape in rehearsal.shapes(FULL):
        report(f"calibrating: compiling kernels ({shape.kind}, {shape.size})")
        rehearsal.step(shape)()


def _ceilings(subject: Subject, backend: Device, part: float = 1.0) -> Measurements:
    precisions = dict.fromkeys(plan.precision.value for plan in subject.ways)
    if subject.ways[0].device.value == "cpu":
        return peaks.of_processor(precisions, subject.threads[0], subject.cache_bytes, part)
    return peaks.of_device(backend, precisions)


def _between(before: Measurements, found: Measurements, after: Measurements) -> Measurements:
    """Combine the trials with the peaks measured before and after them.

    Bandwidth is the mean of both. For products the faster one counts, since only other processes can slow them down.
    """
    assert before.read_bytes_per_second and after.read_bytes_per_second, "both were read"
    read = (before.read_bytes_per_second + after.read_bytes_per_second) / 2
    rates = {name: max(rate, after.products_per_second.get(name, 0.0)) for name, rate in before.products_per_second.items()}
    return replace(found, read_bytes_per_second=read, products_per_second=rates)


def _trials(subject: Subject, timer: Timer, found: Measurements) -> Measurements:
    """Try every precision that may be chosen, then every thread count, then measure the full table of the plan."""
    plan, threads, looked = subject.ways[0], subject.threads[0], list[Trial]()
    if len(subject.ways) > 1:
        looking = timer.share(PRECISIONS_SHARE)
        for index, way in enumerate(subject.ways):
            session = Session(subject, way, looking.share(1 / (len(subject.ways) - index)))
            looked += session.trials((threads,), COARSE)
        name = subject.choose(replace(found, trials=tuple(looked)))[0]
        plan = next((way for way in subject.ways if way.precision.value == name), plan)
    if len(subject.threads) > 1:
        counts = Session(subject, plan, timer.share(THREADS_SHARE)).trials(subject.threads, COARSE)
        looked = [*counts, *_not_again(looked, counts)]
        asked = subject.choose(replace(found, trials=tuple(looked)))[1]
        threads = asked if asked in subject.threads else threads
    copies = subject.copy is not None and plan.precision.value == "int4"
    session = Session(subject, plan, timer.share(1 - COPY_SHARE) if copies else timer)
    full = session.trials((threads,), FULL)
    if not full and not looked:
        return replace(found, fallback=session.noise)
    found = replace(found, trials=(*full, *_not_again(looked, full)))
    return _with_copy(subject, timer, found, full[0]) if copies and full else found


def _not_again(older: Iterable[Trial], newer: Sequence[Trial]) -> list[Trial]:
    known = {(trial.precision, trial.threads) for trial in newer}
    return [trial for trial in older if (trial.precision, trial.threads) not in known]


def _with_copy(subject: Subject, timer: Timer, found: Measurements, lean: Trial) -> Measurements:
    """Measure four bits for few rows with eight bits for many.

    Find the number of rows above which eight bits are faster, and the resulting step times.
    """
    assert subject.copy is not None, "the caller has checked it"
    sizes = tuple(sorted({64, 128, max(lean.prefill_seconds)}))
    eight = Session(subject, subject.copy, timer).trials((lean.threads,), replace(COARSE, rows=COARSE.rows[:1], tokens=sizes))
    if not eight:
        return found
    many = eight[0].prefill_seconds
    rows = border(lean.prefill_seconds, many)
    prefill = {
        size: min(seconds, many[size]) if rows is not None and size > rows and size in many else seconds
        for size, seconds in lean.prefill_seconds.items()
    }
    both = replace(lean, prefill_seconds=table(prefill) or prefill, int8_copy=True)
    return replace(found, trials=(*found.trials, both), most_few_rows=rows)


class Session:
    """A trial of one plan. `noise` is the reason if it gave no result."""

    def __init__(self, subject: Subject, plan: ServingPlan, timer: Timer) -> None:
        self.subject, self.plan, self.timer = subject, plan, timer
        self.noise = ""

    def trials(self, threads: Sequence[int], look: Look) -> list[Trial]:
        """Return one result for each thread count; the thread counts are sampled in turns."""
        self.timer.report(f"calibrating: {self.plan.precision.value}")
        extent = Extent(self.subject.cache_bytes, look.layers_share, look.most_outputs)
        rehearsal = self.rehearsal(extent)
        blocks = [self._block(rehearsal, number, rehearsal.shapes(look)) for number in threads]
        rounds: Rounds[Key] = Rounds(self.timer.deadline, self.timer.clock)
        for rounds.patience in (1, PATIENCE):
            rounds.take(blocks)
            self.noise = rounds.noise()
            if not self.noise:
                break
        medians = {} if self.noise else rounds.medians()
        found = [rehearsal.trial(number, _of_threads(medians, number)) for number in threads]
        trials = [trial for trial in found if trial is not None]
        if not self.noise and not trials:
            self.noise = "steps with more rows or layers were measured shorter than steps with fewer"
        return trials

    def rehearsal(self, extent: Extent) -> Rehearsed:
        """Build the model to time."""
        config, plan = self.subject.config, self.plan
        if isinstance(config, ProgramCheckpoint):
            return ProgramRehearsal(config, plan)
        if plan.device.value != "cpu":
            return _on_device(config, plan, extent)
        if isinstance(config, EncoderConfig):
            return EncodeRehearsal(config, plan, extent)
        backend = processor(plan)
        return Rehearsal(config, plan, backend.device, partial(CpuStage, backend), extent)

    def _block(self, rehearsal: Rehearsed, threads: int, shapes: Iterable[StepShape]) -> Block[Key]:
        def begin() -> None:
            self.timer.report(f"calibrating: {self.plan.precision.value}")
            torch.set_num_threads(threads)

        return Block(begin, [Point((threads, shape), rehearsal.step(shape)) for shape in shapes])


def _on_device(config: ModelConfig | EncoderConfig, plan: ServingPlan, extent: Extent) -> Rehearsed:
    backend = device_backend(plan)
    if isinstance(config, EncoderConfig):
        return EncodeRehearsal(config, plan, extent, backend.device, texts_on(backend, plan))
    return Rehearsal(config, plan, backend.device, partial(DeviceStage, backend), extent)


def _of_threads(medians: Mapping[Key, float], threads: int) -> dict[StepShape, float]:
    return {shape: seconds for (number, shape), seconds in medians.items() if number == threads}
