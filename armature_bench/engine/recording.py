"""Two comparisons: decode with eager and recorded steps, and the cost of recording each step's duration and cause.

Decode runs in the plan's precision and in FP32, alternating in one run, with torch.compile beside them (`compiled.py`).
The second comparison runs no model: the steps are described, and everything that serving does with such a description
is timed.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from app.engine.build import BuildRequest
from app.engine.decoder.build import build_decoder_engine
from app.engine.decoder.cpu_runner import DecoderReplay
from app.errors import NoRecipe, PlanImpossible
from app.hardware.decision import TrialTimes
from app.hardware.facts import Facts
from app.hardware.plan.plan import ServingPlan, make_plan
from app.hardware.probe.cgroup import find_cpu_stat
from app.hardware.probe.host_files import HostFiles
from app.hardware.step_times import StepTimeTable
from app.metrics.gauges import throttled_seconds
from app.metrics.instruments import Metrics
from app.metrics.step_monitor import SlowStepDetector, StepMonitor, StepRecorder, first_touch_seconds
from app.metrics.steps import EngineSnapshot, ExpectedSpeed, SpeedDrift, StepStats, StepTimeModel
from app.settings import Settings
from app.weights.checkpoint import Checkpoint
from app.weights.forms import RECIPES
from app.weights.open import OpenedModel
from armature_bench.console import AdvanceProgress, BenchOutcome, Figure, compute_spread, percentile, progress
from armature_bench.engine.compiled import DTYPES, measure_torch_steps, missing_compiler, torch_steps
from armature_bench.engine.driver import DecoderDriver
from armature_bench.http.workload import TokenPrompts

ROWS = (1, 8)
STEPS_PER_ROUND = 40
EAGER, RECORDED = "eager", "recorded"
DISABLED_REASON = "switched off by this bench"


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of the bench: repetitions, how many sequences decode together, and the dtypes of torch's own steps."""

    rounds: int
    rows: Sequence[int] = ROWS
    dtypes: Sequence[str] = tuple(DTYPES)


@dataclass(slots=True)
class ReplayMode:
    """One engine, and its mode: eager or recorded steps."""

    precision: str
    mode: str
    driver: DecoderDriver
    replay: DecoderReplay
    seconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def measure(self, rows: int) -> None:
        """Time one round of decode steps with `rows` sequences.

        The first steps of a round are not counted: they reload what another engine evicted from the processor caches.
        """
        self.replay.reason = DISABLED_REASON if self.mode == EAGER else ""
        self.driver.decode(rows, STEPS_PER_ROUND // 8)
        self.seconds[rows] += self.driver.decode(rows, STEPS_PER_ROUND)


def measure_replay(
    checkpoint: OpenedModel, plan: ServingPlan, facts: Facts, settings: Settings, options: ReplayOptions
) -> BenchOutcome:
    """Measure the engines of a decoder, built as for serving, and torch.compile. Ctrl-C keeps the measurements."""
    figures, complete = list[Figure](), True
    if isinstance(checkpoint, Checkpoint) and checkpoint.kind == "decoder":
        figures, complete = _measure_engines(checkpoint, plan, facts, settings, options)
    reason = missing_compiler()
    with torch.inference_mode():
        torch.set_num_threads(plan.cpu.threads)
        try:
            steps = torch_steps(checkpoint, options.rows, options.dtypes) if complete else iter(())
            for figure in measure_torch_steps(steps, options.rounds, can_compile=reason is None):
                figures.append(figure)
        except KeyboardInterrupt:
            complete = False
    details = {"machine": facts.to_json(), "plan": plan.to_json(), "torch": torch.__version__}
    subject, notes = f"{checkpoint.name}, {plan.cpu.threads} threads", () if reason is None else (reason,)
    return BenchOutcome("eager", subject, tuple(figures), details, complete, notes)


def _measure_engines(
    checkpoint: Checkpoint, plan: ServingPlan, facts: Facts, settings: Settings, options: ReplayOptions
) -> tuple[list[Figure], bool]:
    """Return the figures of the plan's precision and of FP32, and whether the measurement is complete."""
    plans = {plan.weights.precision: plan, **_in_fp32(checkpoint, facts, settings)}
    complete, modes = True, list[ReplayMode]()
    with progress(options.rounds * len(options.rows), "loading") as advance, torch.inference_mode():
        for precision, own in plans.items():
            modes += _replay_modes(precision, checkpoint, own)
        try:
            _run_rounds(options, modes, advance)
        except KeyboardInterrupt:
            complete = False
    return list(_figures(modes, options.rows)), complete


def _in_fp32(checkpoint: Checkpoint, facts: Facts, settings: Settings) -> dict[str, ServingPlan]:
    """Return the FP32 plan, or nothing if the machine lacks the memory for it."""
    changed = settings.with_weight_format("fp32", kv_precision="auto", int8_copy="off")
    try:
        return {"fp32": make_plan(facts, None, changed, checkpoint.needs(), RECIPES.keys())}
    except (NoRecipe, PlanImpossible):
        return {}


def _replay_modes(precision: str, checkpoint: Checkpoint, plan: ServingPlan) -> list[ReplayMode]:
    built = build_decoder_engine(BuildRequest(checkpoint, plan))
    built.engine.scheduler.speculation = None  # a step must produce exactly one token per row
    replay = built.runner.model
    assert isinstance(replay, DecoderReplay), "decoders are built with one"
    driver = DecoderDriver(
        built.engine, TokenPrompts(range(2, checkpoint.decoder.vocab_size)), plan.memory.max_model_len
    )
    kinds = (EAGER,) if replay.reason else (EAGER, RECORDED)
    return [ReplayMode(precision, how, driver, replay) for how in kinds]


def _run_rounds(options: ReplayOptions, modes: list[ReplayMode], advance: AdvanceProgress) -> None:
    for _ in range(options.rounds):
        for rows in options.rows:
            for mode in modes:
                mode.measure(rows)
            advance(f"decode ×{rows}")


def _figures(modes: list[ReplayMode], rows_measured: Sequence[int]) -> Iterator[Figure]:
    """Yield the figures; each is compared with the last engine, which is FP32 if it fits in memory."""
    for rows in rows_measured:
        last = statistics.median(modes[-1].seconds[rows] or [0.0])
        for mode in modes:
            if seconds := mode.seconds[rows]:
                middle = statistics.median(seconds)
                yield Figure(
                    f"decode ×{rows}, {mode.precision}, {mode.mode}",
                    middle * 1e3,
                    "ms",
                    p99=percentile(seconds, 0.99) * 1e3,
                    ratio=last / middle,
                    against=f"{modes[-1].precision}, {modes[-1].mode}",
                    parts={"tok/s": rows / middle},
                )


TARGET_MICROSECONDS = 20.0
INSTRUMENTS = "with counters and histograms"
STEPS_PER_SAMPLE, SAMPLES_PER_ROUND = 20, 500
STEP_TIMES = StepTimeTable.from_trial(
    TrialTimes("int4", 2, {1: 0.016, 8: 0.030}, {128: 0.2}, context_token_seconds=1e-6)
)
DECODE_STEP = StepStats(
    0.031, decode_tokens=8, num_sequences=8, num_decode_sequences=8, model_seconds=0.030, context_tokens=800
)
MIXED_STEP = StepStats(
    STEP_TIMES.mixed(8, 64, 800),
    64,
    decode_tokens=8,
    num_sequences=9,
    num_prefill_sequences=1,
    num_decode_sequences=8,
    context_tokens=800,
)
SLOW_STEP = StepStats(0.310, decode_tokens=8, num_sequences=8, num_decode_sequences=8, context_tokens=800)


class StepInstruments:
    """The step time model, the step monitor and the metrics, connected to each other as `startup` does it."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        recorder = StepRecorder(self.metrics)
        self.watch = StepMonitor(recorder.record, recorder.began[0])
        self._model = StepTimeModel(STEP_TIMES)
        self.watch.watch_drift(SpeedDrift(self._model, ExpectedSpeed({}, {})))
        cpu_stat = find_cpu_stat(HostFiles(Path("/")))
        self.watch.watch_slow_steps(
            SlowStepDetector(
                self._model,
                self.watch.gc_control,
                lambda: throttled_seconds(cpu_stat),
                first_touch_seconds(),
            )
        )
        self._snapshot = EngineSnapshot()
        self._next_step = 0

    def monitor_step(self, step: StepStats) -> None:
        self.watch.begin()
        self._model.observe(step)
        self.watch.end(step)
        self.watch.events_sent()

    def monitor_rotating(self, *steps: StepStats) -> None:
        """Pass one of `steps` to the monitor, in rotation: if every step were slow, slow steps would be normal."""
        self._next_step += 1
        self.monitor_step(steps[self._next_step % len(steps)])

    def monitor_and_count(self, step: StepStats) -> None:
        self.watch.begin()
        self._model.observe(step)
        self.watch.end(step)
        self.metrics.on_step(step, self._snapshot)
        self.watch.events_sent()


def measure_step_recording(facts: Facts, rounds: int) -> BenchOutcome:
    """Measure the microseconds per step. Ctrl-C keeps the measurements so far."""
    serving = StepInstruments()
    works: Mapping[str, Callable[[], None]] = {
        "a step that decodes": lambda: serving.monitor_step(DECODE_STEP),
        "a step that a prompt joined": lambda: serving.monitor_step(MIXED_STEP),
        "every second step is slow, with its cause": lambda: serving.monitor_rotating(DECODE_STEP, SLOW_STEP),
        f"a step that decodes, {INSTRUMENTS}": lambda: serving.monitor_and_count(DECODE_STEP),
        f"a step that a prompt joined, {INSTRUMENTS}": lambda: serving.monitor_and_count(MIXED_STEP),
    }
    samples: dict[str, list[float]] = {name: [] for name in works}
    complete = True
    with progress(rounds * len(works), "recording") as advance:
        try:
            for _ in range(rounds):
                for name, work in works.items():
                    samples[name] += [_microseconds(work) for _ in range(SAMPLES_PER_ROUND)]
                    advance(name)
        except KeyboardInterrupt:
            complete = False
        finally:
            serving.watch.close()
    figures = tuple(_figure(name, taken) for name, taken in samples.items() if taken)
    return BenchOutcome("recording", "cost of recording each step", figures, {"machine": facts.to_json()}, complete)


def _microseconds(work: Callable[[], None]) -> float:
    """Return the mean microseconds of many calls: a single call is hardly longer than reading the clock."""
    began = time.perf_counter()
    for _ in range(STEPS_PER_SAMPLE):
        work()
    return (time.perf_counter() - began) / STEPS_PER_SAMPLE * 1e6


def _figure(name: str, samples: list[float]) -> Figure:
    found = compute_spread(samples)
    target = None if name.endswith(INSTRUMENTS) else TARGET_MICROSECONDS
    return Figure(name, found.p50, "µs", p99=found.p99, target=target, at_most=True, parts={"least": found.smallest})
