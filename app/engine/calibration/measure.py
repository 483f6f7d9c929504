"""Calibration: times this machine with a checkpoint's shapes, within a time budget, before weights are read.

The results are the peak rates of memory and products, and the times of trial steps with the KV memory and runners that
serving uses. If samples vary too much, the least of them are kept and the trial says why it is noisy.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch

from app.backends.base import BaseBackend, DeviceBackend
from app.backends.selection import select_backend, select_device_backend, select_host_backend
from app.engine.build import ReportStage
from app.engine.calibration.synthetic_weights import SyntheticMemory, TrialScope
from app.engine.calibration.trials import (
    COARSE_LAYERS,
    COARSE_TRIAL,
    FULL_TRIAL,
    CpuTrialStage,
    DecoderTrial,
    EncoderTrial,
    ModelTrial,
    ProgramTrial,
    RunBatch,
    RunTexts,
    TextRunnerFactory,
    TrialShape,
    TrialStep,
    random_heads,
)
from app.engine.decoder.device_runner import DeviceDecoderRunner
from app.engine.decoder.kv_cache import KvShape, kv_dtype
from app.engine.decoder.paged_kv_cache import PagedKvCache
from app.engine.encoder.batching import EncodeState
from app.engine.encoder.device_runner import DeviceEncoderRunner
from app.engine.scheduler.batch import Batch, ScheduledSpan, make_sequence
from app.engine.scheduler.scheduler import EngineLimits
from app.hardware.decision import Measurements, TrialTimes
from app.hardware.plan.plan import ServingPlan
from app.hardware.plan.precision import INT4_PRECISIONS
from app.hardware.step_times import throttle_corrected_clock
from app.messages import Encode, Generate, SamplingParams, Text
from app.models.decoders.config import ModelConfig
from app.models.decoders.decoder import Decoder
from app.models.encoders.config import EncoderConfig
from app.models.encoders.encoder import Encoder
from app.weights.program import ProgramCheckpoint
from armature_kernels.attention.paged import PAGE_TOKENS
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
from armature_kernels.timing import (
    NO_TIME,
    Clock,
    TimedBlock,
    TimedPoint,
    TimingRounds,
    crossover_rows,
    extrapolate_by_size,
    monotone_table,
)

# Size of the buffer for the read rate: four times a large cache, filled in some hundredths of a second.
READ_BYTES = 2**27
PRODUCT_SHAPES = ((256, 2048, 2048),)
Kind = TypeVar("Kind")  # how a precision is multiplied
# dtype in which a device multiplies each precision; the backend's dtype for others, such as four bits.
_DEVICE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
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
_FULL_LENGTH_SLOTS = (
    9  # slots that hold a context or a long prompt, each at full length; the other slots hold one token
)
RETRY_FACTOR = 3  # times as many samples if they vary too much, and if there is time
# First steps are repeated for this long, and the shortest counts: other work lengthens most of the runs on a busy machine,
# and what it adds to a step of few layers is multiplied by the others.
FIRST_STEP_SECONDS = 0.1
FIRST_STEP_SHARE = 0.2  # most of the time of a precision that its first step may take
# Runs of a first step, even where making the model took all the time. The first one finds weights outside of the caches and
# page tables: with a mixture of experts it takes five times as long as the next ones.
LEAST_RUNS = 3
MAX_MIDDLE_RUN = 1.3  # the middle run over the shortest from which other work seems to lengthen steps
UNORDERED = "steps with more rows or layers were measured shorter than steps with fewer"
TrialKey = tuple[int, TrialStep]  # (threads, step)


@dataclass(frozen=True, slots=True)
class CalibrationSubject:
    """The model and the plans to measure.

    - `plans`: a plan for each precision that may be chosen, the fastest first as far as that is known.
    - `threads`: the thread counts that may serve, the largest first.
    - `choose`: returns the precision and threads that the plan takes after a coarse trial of all.
    - `copy`: a plan that holds eight bits in addition to four, if that may be chosen.
    - `cache_bytes`: size of the largest cache, as far as the threads profit from it.
    """

    config: ModelConfig | EncoderConfig | ProgramCheckpoint
    plans: tuple[ServingPlan, ...]
    threads: tuple[int, ...]
    choose: Callable[[Measurements], tuple[str, int]]
    copy: ServingPlan | None = None
    cache_bytes: int = 0
    memory: SyntheticMemory = field(default_factory=SyntheticMemory)


@dataclass(frozen=True, slots=True)
class CalibrationTimer:
    """A deadline, its clock, and the progress callback. `report` may raise, to stop."""

    deadline: float
    report: ReportStage
    clock: Clock = time.perf_counter

    @property
    def is_over(self) -> bool:
        return self.clock() >= self.deadline

    def share(self, part: float) -> CalibrationTimer:
        now = self.clock()
        return replace(self, deadline=now + part * max(0.0, self.deadline - now))

    def reserving(self, seconds: float) -> CalibrationTimer:
        return replace(self, deadline=self.deadline - seconds)


class TrialSession:
    """A trial of one plan. `noise` is the reason if it gave no result; `is_disturbed`: other work seems to run."""

    def __init__(self, subject: CalibrationSubject, plan: ServingPlan, timer: CalibrationTimer) -> None:
        self.subject, self.plan, self.timer = subject, plan, timer
        self.noise = ""
        self.is_disturbed = False
        self._least: dict[TrialStep, float] = {}
        self._built: tuple[TrialScope, ModelTrial] | None = None

    def trials(self, threads: Sequence[int], trial_shape: TrialShape) -> list[TrialTimes]:
        """Return one result for each thread count; the thread counts are sampled in turns."""
        if self.timer.is_over and not self._is_built(trial_shape):  # making the model would only delay the start
            self.noise = NO_TIME
            return []
        self.timer.report(f"calibrating: {self.plan.weights.precision}")
        model_trial = self._model_trial(trial_shape)
        blocks = [self._block(model_trial, number, model_trial.trial_steps(trial_shape)) for number in threads]
        rounds: TimingRounds[TrialKey] = TimingRounds(self.timer.deadline, self.timer.clock)
        for rounds.patience in (1, RETRY_FACTOR):
            rounds.run(blocks)
            self.noise = rounds.unusable_reason()
            if not self.noise:
                break
        medians = {} if self.noise else rounds.medians()
        found = [model_trial.summarize(number, _seconds_of_threads(medians, number)) for number in threads]
        trials = [replace(trial, spread=rounds.spread()) for trial in found if trial is not None]
        if not trials:
            is_whole = all(point.key in medians for block in blocks for point in block.points)
            self.noise = self.noise or (UNORDERED if is_whole else NO_TIME)
            trials = self._noisy_trials(model_trial, threads, rounds)
        return trials

    def _noisy_trials(
        self, model_trial: ModelTrial, threads: Sequence[int], rounds: TimingRounds[TrialKey]
    ) -> list[TrialTimes]:
        """Return what the least samples give: other work can only lengthen a step, so they were disturbed least."""
        least = rounds.least()
        found = [model_trial.summarize(number, _seconds_of_threads(least, number), math.inf) for number in threads]
        return [replace(trial, spread=rounds.spread(), noise=self.noise) for trial in found if trial is not None]

    def first_step_seconds(self, threads: int, repeated: float | None = None) -> float | None:
        """Return the seconds of one decode step of one sequence with the whole model, from the shortest runs so far.

        It is repeated for `repeated` seconds; None: for a part of the trial's time. The result is None if the model
        does not decode, or if steps with more layers were not slower.
        """
        self.timer.report(f"calibrating: {self.plan.weights.precision}")
        model_trial = self._model_trial(COARSE_TRIAL)
        if not isinstance(model_trial, DecoderTrial):
            return None
        torch.set_num_threads(threads)
        shapes = [shape for shape in model_trial.trial_steps(COARSE_TRIAL) if (shape.kind, shape.size) == ("decode", 1)]
        if repeated is None:
            left = self.timer.deadline - self.timer.clock()
            repeated = min(FIRST_STEP_SECONDS, FIRST_STEP_SHARE * max(0.0, left))
        samples = self._repeat([model_trial.step(shape) for shape in shapes], repeated)
        for shape, took in zip(shapes, samples, strict=True):
            self._least[shape] = min(*took, self._least.get(shape, math.inf))
            self.is_disturbed |= statistics.median(took) > MAX_MIDDLE_RUN * self._least[shape]
        parts = [(1, shape.layers, self._least[shape]) for shape in shapes]
        return extrapolate_by_size(parts, model_trial.decode_layers).get(1)

    def step_work(self) -> tuple[float, float]:
        """Return the bytes that a decode step of one sequence reads, and its operations."""
        model_trial = self._model_trial(COARSE_TRIAL)
        assert isinstance(model_trial, DecoderTrial), "only decoders have single steps"
        return model_trial.read_bytes, model_trial.operations_per_token

    def _repeat(self, runs: Sequence[Callable[[], object]], seconds: float) -> list[list[float]]:
        """Return the seconds of each function, run in turns, so that other work disturbs all alike."""
        clock, took = self.timer.clock, [list[float]() for _ in runs]
        began = clock()
        while not took[-1] or clock() < began + (FIRST_STEP_SECONDS if len(took[-1]) < LEAST_RUNS else seconds):
            for run, samples in zip(runs, took, strict=True):
                start = clock()
                run()
                samples.append(clock() - start)
        return took

    def _scope(self, trial_shape: TrialShape) -> TrialScope:
        return TrialScope(self.subject.cache_bytes, trial_shape.layers_share, trial_shape.most_outputs)

    def _is_built(self, trial_shape: TrialShape) -> bool:
        return self._built is not None and self._built[0] == self._scope(trial_shape)

    def _model_trial(self, trial_shape: TrialShape) -> ModelTrial:
        if self._built is None or not self._is_built(trial_shape):
            self._built = None  # frees the memory of the other one first
            scope = self._scope(trial_shape)
            self._built = scope, self.model_trial(scope)
        return self._built[1]

    def model_trial(self, scope: TrialScope) -> ModelTrial:
        config, plan = self.subject.config, self.plan
        if isinstance(config, ProgramCheckpoint):
            return ProgramTrial(config, plan)
        if plan.placement.device != "cpu":
            return _device_trial(config, plan, scope)
        if isinstance(config, EncoderConfig):
            return EncoderTrial(config, plan, scope, memory=self.subject.memory)
        backend = select_host_backend(plan)
        stage = partial(CpuTrialStage, backend)
        return DecoderTrial(config, plan, backend.device, stage, scope, self.subject.memory)

    def _block(self, model_trial: ModelTrial, threads: int, shapes: Iterable[TrialStep]) -> TimedBlock[TrialKey]:
        def begin() -> None:
            self.timer.report(f"calibrating: {self.plan.weights.precision}")
            torch.set_num_threads(threads)

        return TimedBlock(begin, [TimedPoint((threads, shape), model_trial.step(shape)) for shape in shapes])


def _seconds_of_threads(medians: Mapping[TrialKey, float], threads: int) -> dict[TrialStep, float]:
    return {shape: seconds for (number, shape), seconds in medians.items() if number == threads}


def _device_trial(config: ModelConfig | EncoderConfig, plan: ServingPlan, scope: TrialScope) -> ModelTrial:
    backend = select_device_backend(plan)
    backend.configure(plan)
    if isinstance(config, EncoderConfig):
        return EncoderTrial(config, plan, scope, backend.device, device_text_runner(backend, plan))
    return DecoderTrial(config, plan, backend.device, partial(DeviceTrialStage, backend), scope)


class DeviceTrialStage:
    """What trial steps of a decoder need on a device, with only as many KV pages as they write."""

    def __init__(self, backend: DeviceBackend, config: ModelConfig, plan: ServingPlan, shape: KvShape) -> None:
        self._backend, self._plan = backend, plan
        pages = shape.num_slots + _FULL_LENGTH_SLOTS * -(-shape.max_len // PAGE_TOKENS)
        self._kv_cache = PagedKvCache(shape, kv_dtype(plan), pages, backend.device)
        self.bytes_per_token = self._kv_cache.bytes_per_token

    def runner(self, model: Decoder) -> RunBatch:
        limits = EngineLimits(
            self._kv_cache.shape.max_len, self._kv_cache.shape.num_slots, self._plan.memory.max_batch_tokens
        )
        eager = "" if self._plan.steps.compile else self._plan.decisions["compile"].reason
        runner, states = DeviceDecoderRunner(model, self._kv_cache, self._backend, limits, eager), self._kv_cache.states

        def run(batch: Batch) -> object:
            for span in batch.spans if states else ():  # any state serves
                states.begin(span.slot, span.start)
            return runner.run(batch)

        return run

    def fill_context(self, slot: int, num_tokens: int) -> None:
        request = Generate(f"remembered-{slot}", (0,) * num_tokens, SamplingParams(max_tokens=1), arrived_at=0.0)
        sequence = make_sequence(request, 0, frozenset())
        span = ScheduledSpan(sequence, 0, num_tokens, slot=slot, prefix_slot=None, prefix_tokens=0, samples=False)
        rows = torch.tensor(self._kv_cache.written_rows((span,)), device=self._backend.device)
        some = random_heads(self._kv_cache.shape, num_tokens).to(self._backend.device)
        for layer in range(self._kv_cache.shape.num_layers):
            self._kv_cache.write(layer, rows, some, some)


def device_text_runner(backend: DeviceBackend, plan: ServingPlan) -> TextRunnerFactory:
    """Return the factory of runners for trial texts on this device, as in `build_device_encoder_engine`."""

    def make(model: Encoder, max_tokens: int) -> RunTexts:
        runner = DeviceEncoderRunner(
            model, backend, max_tokens, "" if plan.steps.compile else plan.decisions["compile"].reason
        )
        if plan.steps.compile:
            one = Encode("rehearsal", (Text((0,)),), model.config.outputs[:1], arrived_at=0.0)
            runner.record(EncodeState.from_message(one).spans())
        return runner.run

    return make


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
    least = _least_seconds(found, sessions)
    return {name: took for name, took in found.single_steps.items() if took <= MAX_OVER_CEILINGS * least[name]}


def _least_seconds(found: Measurements, sessions: Mapping[str, TrialSession]) -> dict[str, float]:
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
