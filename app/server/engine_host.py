"""The half of a server that must be in the process that computes: what measures the machine, loads the model and steps.

The other half serves (`startup.py`). Between them are plain messages: commands and events (`app/messages.py`), and the
messages of this file, which the host tells. In one process both are calls; between two, `engine_process.py` and
`engine_child.py` send them. Torch is imported on the worker thread only, after the plan has set the environment that
thread pools read.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Event as Flag
from typing import TYPE_CHECKING, Any

from app.engine.decoder.engine import DecoderEngine
from app.engine.worker import Callbacks
from app.errors import PrecisionTooCostly, ServiceStopping
from app.hardware.imports import collection_paused
from app.hardware.plan.precision import describe_cost
from app.hardware.probe.cgroup import find_cpu_stat
from app.hardware.probe.host_files import HostFiles
from app.metrics.gauges import throttled_seconds
from app.metrics.load_progress import LoadProgress
from app.metrics.step_monitor import SlowStepDetector, StepBegin, StepMonitor, first_touch_seconds
from app.metrics.steps import Cause, EngineSnapshot, ExpectedSpeed, SpeedDrift, SpeedState, StepStats, StepTimeModel
from app.models.encoders.config import EncoderConfig
from app.models.transformers_tasks import TaskConfig
from app.server.adapters import AdapterReader, adapter_reader
from app.server.prepare import Prepared, UnfetchedModel, calibrate
from app.weights.cache_file import PACKS, checkpoint_fingerprint
from app.weights.checkpoint import Checkpoint
from app.weights.program import ProgramCheckpoint

if TYPE_CHECKING:
    from app.engine.scheduler.batch import Grammars
    from app.engine.worker import Engine
    from app.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
MAX_IDLE_ATTEMPTS = 20  # attempts to time steps while idle; on a busy machine or under load each may fail
# What is otherwise imported in the first idle time. An import takes time, and fails where no more files can be opened.
_IMPORTED_LATER = ("app.engine.calibration.idle",)

# ---- what a host tells -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageBegun:
    """A stage of loading: one that is only a name, or how far it is."""

    stage: str | LoadProgress


@dataclass(frozen=True, slots=True)
class PlanChanged:
    """The plan, its measurements or the model's files have changed. `is_loading`: the weights are loaded by this plan."""

    prepared: Prepared
    is_loading: bool = False


@dataclass(frozen=True, slots=True)
class EngineReady:
    snapshot: EngineSnapshot


@dataclass(frozen=True, slots=True)
class SpeedChanged:
    """The present speeds, and the `speculation` object of `GET /info`; None where there is none."""

    speed: SpeedState | None
    speculation: dict[str, Any] | None


HostMessage = StageBegun | PlanChanged | EngineReady | SpeedChanged


@dataclass(frozen=True, slots=True)
class EngineTexts:
    """What an engine needs to know of the texts of its tokens. `preparing` is waited for before the engine is ready."""

    eos_token_ids: Collection[int] = ()
    grammars: Grammars | None = None
    preparing: Sequence[Future[None]] = ()


@dataclass(frozen=True, slots=True)
class HostSurroundings:
    """What a host is connected to. `texts` is called once the plan is final, and may take seconds.

    `is_alone` is False if the process has workers of other models, whose threads it must not bind.
    """

    tell: Callable[[HostMessage], None]
    texts: Callable[[Prepared], EngineTexts]
    record: Callable[[float, StepStats, Cause | None], None]
    began: StepBegin
    slowed_by: Callable[[], Cause | None] = lambda: None
    is_alone: bool = True


class EngineHost:
    """Loads the engine of one model on the worker thread, and does what is due between its steps."""

    def __init__(self, start: Prepared | UnfetchedModel, surroundings: HostSurroundings) -> None:
        self._start, self._surroundings, self._tell = start, surroundings, surroundings.tell
        self.stopping = Flag()  # set to end loading
        self.monitor = StepMonitor(surroundings.record, surroundings.began, self._tell_speed)
        self.step_time_model = StepTimeModel()
        self._adapter_reader: AdapterReader | None = None
        self._idle_attempts = 0
        self._engine: Engine | None = None
        self._told_speed: SpeedChanged | None = None
        self._cpu_stat = find_cpu_stat(HostFiles(Path("/")))

    def callbacks(
        self,
        on_output: Callable[[list[Any], EngineSnapshot, StepStats | None], None],
        on_fatal: Callable[[BaseException], None],
    ) -> Callbacks:
        on_pause = None if self._start.settings.prompt_cache is None else save_prefixes
        return Callbacks(on_output, on_fatal, on_idle=self.use_idle_time, on_pause=on_pause)

    def read_adapter(self, path: str, slot: int) -> None:
        """Read an adapter's weights for a slot, on any thread. Raises `InvalidRequest`."""
        assert self._adapter_reader is not None, "clients may load adapters once the model is loaded"
        self._adapter_reader(path, slot)

    @property
    def prepared(self) -> Prepared:
        assert isinstance(self._start, Prepared), "the model is fetched first"
        return self._start

    def _set_plan(self, prepared: Prepared, is_loading: bool = False) -> None:
        self._start = prepared
        self._tell(PlanChanged(prepared, is_loading))

    # ---- on the worker thread ----------------------------------------------------------------------------------------

    def build(self, report: Callable[[str | LoadProgress], None]) -> Engine:
        def report_stage(stage: str | LoadProgress) -> None:
            if self.stopping.is_set():
                raise ServiceStopping("The server received the signal to stop while it was loading.")
            report(stage)
            self._tell(StageBegun(stage))

        self._engine = engine = self._build_calibrated(report_stage)
        for name, decision in self.prepared.plan.decisions.items():
            log.debug("plan: %s = %s (%s)", name, decision.value, decision.reason)
        if self._surroundings.is_alone:
            bind_service_threads(self.prepared.plan.cpu.service_cpu_ids)
        self._tell_speed()
        self._tell(EngineReady(engine.snapshot()))
        return engine

    def _build_calibrated(self, report_stage: Callable[[str | LoadProgress], None]) -> Engine:
        """Measure the machine, and build the engine, again if its quality changes the plan."""
        start = self._start.fetch(report_stage) if isinstance(self._start, UnfetchedModel) else self._start
        os.environ.update(start.plan.environment())  # torch's thread pools read it at import
        if len(start.parts) > 1 and start.plan.placement.device == "cpu":
            with suppress(AttributeError, OSError):  # no Linux, or a sandbox refuses it: the cores are shared
                os.sched_setaffinity(0, start.facts.allowed_cpus)  # of this thread, and of those that it starts
        hashing = hash_ahead(start)  # while imports use one core
        if not isinstance(start.checkpoint, ProgramCheckpoint):
            report_stage("reading the tokenizer")
        self._set_plan(start)
        report_stage("importing torch")
        began = time.monotonic()
        with collection_paused():
            import torch  # noqa: F401  # imported here so that the time is logged

            for name in _IMPORTED_LATER:
                import_module(name)
        log.debug("torch imported in %.1f s", time.monotonic() - began)
        wait(hashing)  # it would disturb the measurement
        self._start = calibrate(self.prepared, report_stage)
        while True:
            try:
                return self._build_planned(report_stage)
            except PrecisionTooCostly as found:
                log.warning("%s: loading the weights in %s", found.message, self.prepared.plan.weights.precision)

    def _build_planned(self, report_stage: Callable[[str | LoadProgress], None]) -> Engine:
        """Build the engine of the present plan. Raises `PrecisionTooCostly` if `auto` may not spend its quality."""
        from app.engine.build import BuildRequest, build

        prepared = self.prepared
        step_time_model = StepTimeModel(
            prepared.expected_step_times, is_measured=prepared.plan.speed.speed_source == "measured"
        )
        self._watch_drift(prepared, step_time_model)
        self._set_plan(prepared, is_loading=True)
        texts = self._surroundings.texts(prepared)
        began = time.monotonic()
        with self._suggest_cpu_on_failure():
            engine = build(
                BuildRequest(
                    prepared.checkpoint,
                    prepared.plan,
                    report_stage,
                    step_time_model,
                    texts.eos_token_ids,
                    self.take_quality_cost,
                    prepared.adapters,
                    prepared.draft,
                )
            )
        if isinstance(engine, DecoderEngine):
            engine.grammars = texts.grammars
            self._adapter_reader = adapter_reader(
                prepared.settings, prepared.adapters, prepared.checkpoint, engine.adapters
            )
        wait(texts.preparing)  # the vocabulary is built while no other thread runs Python
        self.step_time_model = step_time_model
        self.monitor.watch_slow_steps(self._slow_step_detector(step_time_model))
        log.debug("weights loaded and warmed up in %.1f s", time.monotonic() - began)
        return engine

    def take_quality_cost(self, cost: float) -> None:
        """Plan again with the measured cost. Raises `PrecisionTooCostly` if the plan chooses another precision."""
        before = self.prepared.plan.decisions["precision"]
        self._set_plan(self.prepared.with_quality_cost(cost))
        now = self.prepared.plan.decisions["precision"]
        if now.value != before.value:
            kind = self.prepared.needs.kind
            raise PrecisionTooCostly(f"Weights in {before.value}: {describe_cost(kind, cost)}. {now.reason}")
        log.debug("plan: precision = %s (%s)", now.value, now.reason)

    def use_idle_time(self, engine: Engine, is_wanted: Callable[[], bool]) -> bool:
        """Capture more steps, then time some if the start could not, or not well; return True to be called again."""
        if isinstance(engine, DecoderEngine) and not engine.use_idle_time(is_wanted):
            return True
        prepared = self.prepared
        expected = prepared.estimated_trial if prepared.plan.steps.calibrate else None
        if expected is None:
            return False
        from app.engine.calibration.idle import IdleMeasurement, IdleSubject

        self._idle_attempts += 1
        if isinstance(prepared.checkpoint, ProgramCheckpoint):
            subject = IdleSubject(prepared.plan, expected, program=prepared.checkpoint)
        else:
            config = prepared.checkpoint.model_config
            outputs = config.outputs if isinstance(config, EncoderConfig) else ()
            subject = IdleSubject(prepared.plan, expected, config.vocab_size, outputs)
        trial = IdleMeasurement(subject, engine, is_wanted).run()
        if trial is None:
            return self._idle_attempts < MAX_IDLE_ATTEMPTS
        self._set_plan(prepared.with_idle_trial(trial))
        self.step_time_model.use_table(self.prepared.step_time_table)
        self._watch_drift(self.prepared, self.step_time_model)
        self._tell_speed()
        log.info("measured while idle: %s", self.prepared.plan.decisions["capacity_tokens_per_second"].reason)
        return False

    @contextmanager
    def _suggest_cpu_on_failure(self) -> Iterator[None]:
        """Log that `device=cpu` remains possible if loading on a GPU fails; the failure itself is raised as usual."""
        device, done = self.prepared.plan.placement.device, False
        try:
            yield
            done = True
        finally:
            if device != "cpu" and not done and not self.stopping.is_set():
                log.error("loading on %s failed; set device=cpu to serve on the processor instead", device)

    def _tell_speed(self) -> None:
        """Tell the present speeds and acceptance, if they have changed."""
        engine = self._engine
        speculation = engine.scheduler.speculation if isinstance(engine, DecoderEngine) else None
        speed = None if self.monitor.drift is None else self.monitor.drift.speed
        now = SpeedChanged(speed, None if speculation is None else speculation.to_json())
        if now != self._told_speed:
            self._told_speed = now
            self._tell(now)

    def _watch_drift(self, prepared: Prepared, model: StepTimeModel) -> None:
        calibration_file, calibration, plan = prepared.calibration_file, prepared.calibration, prepared.plan
        if model.table is None:
            return
        expected = ExpectedSpeed(
            plan.speed.capacity_tokens_per_second,
            plan.speed.roofline_ratio,
            not model.is_measured,
            prepared.calibration_spread,
        )

        def forget() -> None:
            if calibration is not None:
                calibration_file.forget(calibration)

        self.monitor.watch_drift(SpeedDrift(model, expected, forget))

    def _slow_step_detector(self, model: StepTimeModel) -> SlowStepDetector:
        return SlowStepDetector(
            model,
            self.monitor.gc_control,
            lambda: throttled_seconds(self._cpu_stat),
            first_touch_seconds(),
            self._surroundings.slowed_by,
        )


def read_tokenizer(checkpoint: Checkpoint | ProgramCheckpoint, cache: Path | None = None) -> Tokenizer | None:
    """Try the checkpoint's tokenizer, noted in `cache` if it passes, and read it; None if the service needs none."""
    if isinstance(checkpoint, ProgramCheckpoint) or isinstance(checkpoint.model_config, TaskConfig):
        return None
    from app.text.tokenizer_check import try_and_load

    config = checkpoint.model_config
    lowercases = isinstance(config, EncoderConfig) and config.lowercases
    return try_and_load(checkpoint.location, cache, lowercases)


def hash_ahead(prepared: Prepared) -> Sequence[Future[str]]:
    """Hash the checkpoint's files on other threads if packs are kept, for `PackFolder.open`, which raises errors."""
    folder, checkpoint = prepared.plan.weights.pack_folder, prepared.checkpoint
    if folder is None or not isinstance(checkpoint, Checkpoint):
        return ()
    pool = ThreadPoolExecutor(1, thread_name_prefix="armature-hash")
    hashing = pool.submit(checkpoint_fingerprint, checkpoint, Path(folder) / PACKS, prepared.plan.cpu.threads)
    pool.shutdown(wait=False)
    return (hashing,)


def bind_service_threads(cpu_ids: tuple[int, ...]) -> None:
    """Restrict all other threads that Python started, and the ones that they start, to these CPUs; empty: none.

    They serve HTTP, tokenize, log and read the power. A refusal is only logged.
    """
    if not cpu_ids:
        return
    here = threading.get_native_id()
    for thread in threading.enumerate():
        if thread.native_id is not None and thread.native_id != here:
            try:
                os.sched_setaffinity(thread.native_id, cpu_ids)
            except ProcessLookupError:
                continue  # it has ended meanwhile
            except (AttributeError, OSError, ValueError) as error:
                log.warning("threads that do not compute cannot be bound to CPUs %s: %s", list(cpu_ids), error)
                return


def save_prefixes(engine: Engine, is_wanted: Callable[[], bool]) -> None:
    """Keep the prefixes that the engine computed, on the worker thread, until `is_wanted` returns True."""
    if isinstance(engine, DecoderEngine):
        engine.save_prefixes(is_wanted)
