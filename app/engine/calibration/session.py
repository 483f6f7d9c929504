"""Trials of one plan: its model with synthetic weights, and the seconds of its steps."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from app.backends.base import DeviceBackend
from app.backends.selection import select_device_backend, select_host_backend
from app.engine.build import ReportStage
from app.engine.calibration.stages import (
    COARSE_TRIAL,
    CpuTrialStage,
    ModelTrial,
    RunBatch,
    TrialScope,
    TrialShape,
    TrialStep,
    random_heads,
)
from app.engine.calibration.synthetic_weights import SyntheticMemory
from app.engine.calibration.trials import DecoderTrial, EncoderTrial, ProgramTrial, RunTexts, TextRunnerFactory
from app.engine.decoder.device_runner import DeviceDecoderRunner
from app.engine.decoder.kv_cache import KvShape, kv_dtype
from app.engine.decoder.paged_kv_cache import PagedKvCache
from app.engine.encoder.batching import EncodeState
from app.engine.encoder.device_runner import DeviceEncoderRunner
from app.engine.scheduler.batch import ScheduledSpan, make_sequence
from app.engine.scheduler.queues import EngineLimits
from app.hardware.decision import Measurements, TrialTimes
from app.hardware.plan.plan import ServingPlan
from app.messages import Encode, Generate, SamplingParams, Text
from app.models.decoders.config import ModelConfig
from app.models.decoders.decoder import Decoder
from app.models.encoders.config import EncoderConfig
from app.models.encoders.encoder import Encoder
from app.weights.program import ProgramCheckpoint
from armature_kernels.attention.paged import PAGE_TOKENS
from armature_kernels.timing import NO_TIME, Clock, TimedBlock, TimedPoint, TimingRounds, extrapolate_by_size

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
        """True if no time is left."""
        return self.clock() >= self.deadline

    def share(self, part: float) -> CalibrationTimer:
        """Return a timer for a part of the time that is left."""
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
        """Return the model for these steps, built once."""
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
        return DeviceDecoderRunner(
            model,
            self._kv_cache,
            self._backend,
            limits,
            "" if self._plan.steps.compile else self._plan.decisions["compile"].reason,
        ).run

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
