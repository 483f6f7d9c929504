"""Calibration: times this machine with a checkpoint's shapes, within a time budget, before weights are read.

The results are the peak rates of memory and products, and the times of trial steps with the KV memory and runners that
serving uses. If samples vary too much, the least of them are kept and the trial says why it is noisy.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TypeVar

import torch

from app.backends.base import BaseBackend
from app.backends.selection import select_backend
from app.engine.build import ReportStage
from app.engine.calibration.session import CalibrationSubject, CalibrationTimer, TrialSession
from app.engine.calibration.stages import COARSE_LAYERS, COARSE_TRIAL, FULL_TRIAL, TrialScope
from app.hardware.decision import Measurements, TrialTimes
from app.hardware.plan.precision import INT4_PRECISIONS
from app.hardware.step_times import throttle_corrected_clock
from armature_kernels.ceilings import (
    COPY_BYTES,
    FREE_MEMORY_FRACTION,
    CopyBandwidthProbe,
    DeviceMatmulThroughputProbe,
    MatmulThroughputProbe,
    ReadBandwidthProbe,
    cache_bytes,
    is_faster_in_four_bits,
)
from armature_kernels.timing import Clock, crossover_rows, monotone_table

# Size of the buffer for the read rate: four times a large cache, filled in some hundredths of a second.
READ_BYTES = 2**27
PRODUCT_SHAPES = ((256, 2048, 2048),)
Kind = TypeVar("Kind")  # how a precision is multiplied
# dtype in which a device multiplies each precision; the backend's dtype for others, such as four bits.
_DEVICE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


def measure_cpu_peaks(precisions: Iterable[str], threads: int, cache_bytes: int, part: float = 1.0) -> Measurements:
    """Return the best of short samples that no quota interrupts, times the `part` of the CPU that the quota leaves."""
    torch.set_num_threads(threads)
    with closing(ReadBandwidthProbe(threads, max(READ_BYTES, 2 * cache_bytes))) as reading:
        read = reading.sample()
    kinds = {name: _product_kind(name) for name in precisions}
    rates = _product_rates(kinds, lambda kind: MatmulThroughputProbe(kind[0], PRODUCT_SHAPES, kind[1]).sample())
    # a rate that is not itself is NaN: no form multiplies this precision on this machine
    products = {name: part * rate for name, rate in rates.items() if rate == rate}
    return Measurements(read_bytes_per_second=part * read, products_per_second=products)


def _product_kind(precision: str) -> tuple[torch.dtype, int]:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(precision, torch.int8)
    return dtype, 4 if precision in INT4_PRECISIONS and is_faster_in_four_bits() else 8


def measure_device_peaks(backend: BaseBackend, precisions: Iterable[str]) -> Measurements:
    """Return the rate of a copy, counting reads and writes. A kernel that only reads comes close to it."""
    size = min(COPY_BYTES, backend.free_bytes() // FREE_MEMORY_FRACTION)
    read = CopyBandwidthProbe(backend.device, backend.synchronize, size).sample()
    dtypes = {name: _DEVICE_DTYPES.get(name, backend.dtype) for name in precisions}
    products = _product_rates(
        dtypes, lambda dtype: DeviceMatmulThroughputProbe(backend.device, backend.synchronize, dtype).sample()
    )
    return Measurements(read_bytes_per_second=read, products_per_second=products)


def _product_rates(kinds: Mapping[str, Kind], sample: Callable[[Kind], float]) -> dict[str, float]:
    """Return the rate of products by precision. Precisions that are multiplied in the same way are sampled once."""
    rates = {kind: sample(kind) for kind in dict.fromkeys(kinds.values())}
    return {name: rates[kind] for name, kind in kinds.items()}


# seconds for both measurements of the peaks; a smaller budget means a model for which they do not matter
PEAKS_SECONDS = 0.4
PRECISIONS_SHARE = 0.4  # share of the budget for a coarse trial of every precision that may be chosen
THREADS_SHARE = 0.25  # share of the rest for a coarse trial of the thread counts
COPY_SHARE = 0.25  # share of the rest for prompts in eight bits in addition to four
# A precision is dropped after one step only if it would not be chosen even if it were faster by this factor: one step
# is not a median.
CLEARLY_SLOWER = 1.25
MAX_OVER_CEILINGS = 2.5  # times of reading plus computing at the best rates, above which a step was surely disturbed
# The same of a trial, which is then repeated. On quiet cores of Zen 3, int4 takes 0.7 of that time, int8 and bf16 0.9 to 1.1.
MAX_TRIAL_OVER_CEILINGS = 1.7
AGAIN_SHARE, AGAIN_ROUNDS = 0.3, 4  # share of the time that is left for timing again then; single steps in turns


def measure_machine(
    subject: CalibrationSubject, budget_seconds: float, report: ReportStage, clock: Clock | None = None
) -> Measurements:
    """Measure on the thread that will serve, which keeps the last thread count until the backend is configured.

    Under a CPU quota the seconds are those under the quota, and the budget is the same CPU time.
    """
    quota, threads = subject.plans[0].cpu.throttling_quota, subject.threads[0]
    part = 1.0 if quota is None else quota / threads
    clock = clock or throttle_corrected_clock(quota)
    began = clock()
    backend = select_backend(subject.plans[0])
    backend.configure(subject.plans[0])
    with torch.inference_mode():
        if subject.plans[0].placement.device != "cpu":
            subject = replace(subject, cache_bytes=cache_bytes(backend.device))
            _compile_kernels(subject, report)
        timer = CalibrationTimer(clock() + budget_seconds / part, report, clock)
        if budget_seconds <= 4 * PEAKS_SECONDS:
            found = _measure_trials(subject, timer, Measurements())
        else:
            report("calibrating: ceilings")
            before = _peaks(subject, backend, part)
            found = _with_peaks(
                before,
                _measure_trials(subject, timer.reserving(PEAKS_SECONDS / part), before),
                _peaks(subject, backend, part),
            )
    gc.collect()  # release the synthetic weights before the real ones are loaded
    return replace(found, seconds=clock() - began)


def _compile_kernels(subject: CalibrationSubject, report: ReportStage) -> None:
    """Compile the kernels of a device on first use, outside the budget: without a cache this takes minutes."""
    report("calibrating: compiling kernels")
    model_trial = TrialSession(subject, subject.plans[0], CalibrationTimer(0.0, report)).model_trial(
        TrialScope(0, COARSE_LAYERS, COARSE_TRIAL.most_outputs)
    )
    for shape in model_trial.trial_steps(FULL_TRIAL):
        report(f"calibrating: compiling kernels ({shape.kind}, {shape.size})")
        model_trial.step(shape)()


def _peaks(subject: CalibrationSubject, backend: BaseBackend, part: float = 1.0) -> Measurements:
    precisions = dict.fromkeys(plan.weights.precision for plan in subject.plans)
    if subject.plans[0].placement.device == "cpu":
        return measure_cpu_peaks(precisions, subject.threads[0], subject.cache_bytes, part)
    return measure_device_peaks(backend, precisions)


def _with_peaks(before: Measurements, found: Measurements, after: Measurements) -> Measurements:
    """Combine the trials with the peaks before and after them: the mean bandwidth, the faster products."""
    assert before.read_bytes_per_second and after.read_bytes_per_second, "both were read"
    read = (before.read_bytes_per_second + after.read_bytes_per_second) / 2
    rates = {
        name: max(rate, after.products_per_second.get(name, 0.0)) for name, rate in before.products_per_second.items()
    }
    return replace(found, read_bytes_per_second=read, products_per_second=rates)


def _measure_trials(subject: CalibrationSubject, timer: CalibrationTimer, found: Measurements) -> Measurements:
    """Try every precision that may be chosen, then every thread count, then measure the full table of the plan."""
    plan, threads = subject.plans[0], subject.threads[0]
    found = _try_precisions(subject, timer, found)
    coarse = [*found.trials]
    if len(subject.plans) > 1:
        name = subject.choose(found)[0]
        plan = next((candidate for candidate in subject.plans if candidate.weights.precision == name), plan)
    if len(subject.threads) > 1:
        counts = TrialSession(subject, plan, timer.share(THREADS_SHARE)).trials(subject.threads, COARSE_TRIAL)
        coarse = [*counts, *_not_remeasured(coarse, counts)]
        asked = subject.choose(replace(found, trials=tuple(coarse)))[1]
        threads = asked if asked in subject.threads else threads
    try_int8_copy = subject.copy is not None and plan.weights.precision in INT4_PRECISIONS
    session = TrialSession(subject, plan, timer.share(1 - COPY_SHARE) if try_int8_copy else timer)
    full = session.trials((threads,), FULL_TRIAL)
    if not full and not coarse:
        return found if found.single_steps else replace(found, fallback=session.noise)
    timed = {trial.precision for trial in full}
    found = replace(
        found,
        trials=(*full, *_not_remeasured(coarse, full)),
        single_steps={name: seconds for name, seconds in found.single_steps.items() if name not in timed},
    )
    is_steady = bool(full) and not full[0].noise
    return _with_int8_copy(subject, timer, found, full[0]) if try_int8_copy and is_steady else found


def _try_precisions(subject: CalibrationSubject, timer: CalibrationTimer, found: Measurements) -> Measurements:
    """Time every precision briefly, the fastest first.

    A precision whose first step is so slow that it cannot be chosen leaves its time to the others. Where making the
    models takes the time, the first steps alone are known.
    """
    threads, precisions_timer = subject.threads[0], timer.share(PRECISIONS_SHARE)
    sessions: dict[str, TrialSession] = {}
    for index, candidate in enumerate(subject.plans):
        if index and timer.is_over:
            break
        name = candidate.weights.precision
        session = TrialSession(subject, candidate, precisions_timer.share(1 / (len(subject.plans) - index)))
        sessions[name] = session
        first = session.first_step_seconds(threads)
        if first is not None and _cannot_be_chosen(subject, found, name, first):
            found = replace(found, single_steps={**found.single_steps, name: first})
            continue
        trials = session.trials((threads,), COARSE_TRIAL)
        if trials:
            found = replace(found, trials=(*found.trials, *trials))
        elif first is not None:
            found = replace(found, single_steps={**found.single_steps, name: first})
    if len(sessions) == 1:
        return found
    if _seems_busy(found, sessions):
        found = _with_steps_again(found, sessions, threads, timer.share(AGAIN_SHARE))
    return _with_trials_again(found, sessions, threads, timer.share(AGAIN_SHARE))


def _seems_busy(found: Measurements, sessions: Mapping[str, TrialSession]) -> bool:
    """Return whether other work seems to have lengthened first steps: their runs differ, or all took far too long."""
    is_disturbed = any(session.is_disturbed for session in sessions.values())
    return is_disturbed or len(_plausible_steps(found, sessions)) < len(found.single_steps)


def _with_steps_again(
    found: Measurements, sessions: Mapping[str, TrialSession], threads: int, timer: CalibrationTimer
) -> Measurements:
    """Time the single steps again, in turns, and leave out the ones that are implausible even then."""
    steps = dict(found.single_steps)
    seconds = max(0.0, timer.deadline - timer.clock()) / (AGAIN_ROUNDS * max(1, len(steps)))
    while steps and not timer.is_over:
        for name in steps:
            steps[name] = sessions[name].first_step_seconds(threads, seconds) or steps[name]
    found = replace(found, single_steps=steps)
    is_disturbed = any(session.is_disturbed for session in sessions.values())
    return replace(found, single_steps=_plausible_steps(found, sessions)) if is_disturbed else found


def _with_trials_again(
    found: Measurements, sessions: Mapping[str, TrialSession], threads: int, timer: CalibrationTimer
) -> Measurements:
    """Try precisions again whose steps took far longer than the best rates allow; the faster of both trials counts."""
    least, trials = _least_seconds(found, sessions), list(found.trials)
    slow = [
        index
        for index, trial in enumerate(trials)
        if trial.decode_seconds and _one_row(trial) > MAX_TRIAL_OVER_CEILINGS * least[trial.precision]
    ]
    for done, index in enumerate(slow):
        session = sessions[trials[index].precision]
        session.timer = timer.share(1 / (len(slow) - done))
        trials[index] = min(trials[index], *session.trials((threads,), COARSE_TRIAL), key=_one_row)
    return replace(found, trials=tuple(trials))


def _one_row(trial: TrialTimes) -> float:
    return min(trial.decode_seconds.values())


def _plausible_steps(found: Measurements, sessions: Mapping[str, TrialSession]) -> dict[str, float]:
    """Return the single steps that took not much longer than reading and computing at the best rates that are known."""
    least = _least_seconds(found, sessions)
    return {name: took for name, took in found.single_steps.items() if took <= MAX_OVER_CEILINGS * least[name]}


def _least_seconds(found: Measurements, sessions: Mapping[str, TrialSession]) -> dict[str, float]:
    """Return the seconds of a decode step of one sequence, at the best rates that are known, by precision."""
    trials = {trial.precision: _one_row(trial) for trial in found.trials if trial.decode_seconds}
    timed = {**trials, **found.single_steps}
    work = {name: sessions[name].step_work() for name in timed}
    read = max([found.read_bytes_per_second or 0.0, *(work[name][0] / took for name, took in timed.items())])

    def seconds(name: str) -> float:
        nbytes, operations = work[name]
        products = found.products_per_second.get(name, 0.0)
        return nbytes / read + (operations / products if products > 0 else math.inf)

    return {name: seconds(name) for name in timed}


def _cannot_be_chosen(subject: CalibrationSubject, found: Measurements, name: str, seconds: float) -> bool:
    """Return whether a precision whose decode step of one sequence took `seconds` would lose by the plan's rules."""
    known = [*found.single_steps.values(), *(_one_row(trial) for trial in found.trials)]
    optimistic = replace(found, single_steps={**found.single_steps, name: seconds / CLEARLY_SLOWER})
    return bool(known) and seconds > CLEARLY_SLOWER * min(known) and subject.choose(optimistic)[0] != name


def _not_remeasured(older: Iterable[TrialTimes], newer: Sequence[TrialTimes]) -> list[TrialTimes]:
    known = {(trial.precision, trial.threads) for trial in newer}
    return [trial for trial in older if (trial.precision, trial.threads) not in known]


def _with_int8_copy(
    subject: CalibrationSubject, timer: CalibrationTimer, found: Measurements, int4: TrialTimes
) -> Measurements:
    """Measure four bits for few rows with eight bits for many, and above how many rows eight bits are faster."""
    assert subject.copy is not None, "the caller has checked it"
    sizes = tuple(sorted({64, 128, max(int4.prefill_seconds)}))
    eight = TrialSession(subject, subject.copy, timer).trials(
        (int4.threads,), replace(COARSE_TRIAL, rows=COARSE_TRIAL.rows[:1], tokens=sizes)
    )
    if not eight or eight[0].noise:
        return found
    many = eight[0].prefill_seconds
    rows = crossover_rows(int4.prefill_seconds, many)
    prefill = {
        size: min(seconds, many[size]) if rows is not None and size > rows and size in many else seconds
        for size, seconds in int4.prefill_seconds.items()
    }
    both = replace(int4, prefill_seconds=monotone_table(prefill) or prefill, int8_copy=True)
    return replace(found, trials=(*found.trials, both), most_few_rows=rows)
