"""The worker's loop next to other work: the log and the counters show the effect of each step."""

from __future__ import annotations

import gc
import mmap
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from app.engine.worker import Callbacks, Worker
from app.errors import RequestError
from app.messages import Abort, Encode, Event, Stop, Text
from app.metrics.instruments import Metrics
from app.metrics.step_monitor import UPDATE_SECONDS, SlowStepDetector, StepMonitor, StepRecorder
from app.metrics.steps import EngineSnapshot, ExpectedSpeed, SpeedDrift, StepStats, StepTimeModel

PATIENCE_SECONDS = 10.0
QUICK = 1e-4
PAGES, FAULT_SECONDS = 4000, 1e-7


class Deeds:
    """An engine whose steps are what a test wants done; each takes at least as long as it takes."""

    batching_delay_seconds = 0.0

    def __init__(self, deeds: list[Callable[[], object]], model: StepTimeModel) -> None:
        self.stats: StepStats | None = None
        self.model = model
        self.deeds = deeds
        self.orders = 0

    @property
    def has_work(self) -> bool:
        return self.orders > 0 and bool(self.deeds)

    def add(self, order: Encode) -> list[Event]:
        self.orders += 1
        return []

    def step(self) -> list[Event]:
        began = time.perf_counter()
        self.deeds.pop(0)()
        self.stats = StepStats(max(time.perf_counter() - began, QUICK), encode_tokens=8, num_encode_sequences=1)
        self.model.observe(self.stats)
        return []

    def abort(self, command: Abort) -> list[Event]:
        return []

    def fail(self) -> list[Event]:
        return []

    def fail_all(self, error: RequestError) -> list[Event]:
        return []

    def check(self) -> None: ...

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot()


class Watched:
    """A worker that is done once the deeds are."""

    def __init__(self, fault_seconds: float | None = FAULT_SECONDS) -> None:
        self.now = 0.0
        self._fault_seconds = fault_seconds
        self.metrics = Metrics()
        self.log = self.metrics.step_log
        self.recorder = StepRecorder(self.metrics, lambda: self.now)
        self.watch = StepMonitor(self.recorder.record, self.recorder.began[0], clock=lambda: self.now)
        self.model = StepTimeModel()
        self.done: SimpleQueue[StepStats] = SimpleQueue()
        self.was_enabled: list[bool] = []

    def counted(self) -> dict[str, float]:
        """How often each cause was counted."""
        (family,) = [one for one in parse_text(self.metrics.render()[0].decode()) if one.name == "armature_step_stalls"]
        return {sample.labels["cause"]: sample.value for sample in family.samples if sample.value}

    def run(self, *deeds: Callable[[], object]) -> list[str]:
        """Causes of the steps, in order; twenty that do nothing come first."""
        every = [*(20 * [lambda: None]), *deeds]
        engine, wanted = Deeds(every, self.model), len(every)
        callbacks = Callbacks(self._note_step, lambda error: None)
        worker = Worker(lambda report: self._settled(engine), self.watch)
        worker.put(Encode("all", (Text((1,)),), ("embedding",), 0.0))
        worker.start(callbacks)
        for _ in range(wanted):
            self.done.get(timeout=PATIENCE_SECONDS)
        worker.put(Stop())
        worker.join(PATIENCE_SECONDS)
        assert not worker.alive
        told: list[str] = self.log.since(0)["steps"]["cause"][20:]
        return told

    def _note_step(self, events: list[Event], snapshot: EngineSnapshot, stats: StepStats | None) -> None:
        if stats is not None:
            self.done.put(stats)

    def _settled(self, engine: Deeds) -> Deeds:
        if self._fault_seconds is not None:
            self.watch.watch_slow_steps(
                SlowStepDetector(self.model, self.watch.gc_control, fault_seconds=self._fault_seconds)
            )
        return engine


@pytest.fixture
def watched() -> Iterator[Watched]:
    yield Watched()
    gc.unfreeze()
    assert gc.isenabled()


def test_steps_are_counted_by_path() -> None:
    metrics = Metrics()
    recorder = StepRecorder(metrics)
    monitor = StepMonitor(recorder.record, recorder.began[0])
    try:
        for is_native in (False, True, True):
            monitor.begin()
            monitor.end(StepStats(0.01, decode_tokens=1, is_native=is_native))
    finally:
        monitor.idle()
    (family,) = [one for one in parse_text(metrics.render()[0].decode()) if one.name == "armature_engine_steps"]
    counted = {sample.labels["path"]: sample.value for sample in family.samples if sample.name.endswith("_total")}
    assert counted == recorder.steps_json() == {"native": 2, "interpreter": 1}


def touch() -> None:
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        if (small_pages := getattr(mmap, "MADV_NOHUGEPAGE", None)) is not None:
            memory.madvise(small_pages)
        for place in range(0, len(memory), mmap.PAGESIZE):
            memory[place] = 1


def test_the_age_of_a_step_is_reported_while_it_is_under_way_also_after_one_that_failed(watched: Watched) -> None:
    watch, watched.now = watched.watch, 1.0
    assert watched.recorder.step_age_seconds() == 0.0
    watch.begin()
    watched.now += 2.5
    assert watched.recorder.step_age_seconds() == 2.5
    watch.begin()  # the one before raised, so it had no end
    assert watched.recorder.step_age_seconds() == 0.0
    watched.now += 1.0
    watch.idle()
    assert watched.recorder.step_age_seconds() == 0.0
    watch.begin()
    watched.now += 1.0
    watch.end(StepStats(1.0))
    assert watched.recorder.step_age_seconds() == 0.0
    watch.close()


def test_a_step_that_touches_new_memory_stalled_for_page_faults() -> None:
    watched = Watched(fault_seconds=1.0)  # whatever they cost here, they are counted as the greater part
    assert watched.run(touch) == ["page_fault"]
    assert watched.counted()["page_fault"] >= 1
    gc.unfreeze()


def test_a_collection_in_a_step_is_why_it_stalled(watched: Watched) -> None:
    """Somebody asks for one outright; what would come by itself is held."""
    kept: list[list[int]] = []
    assert (
        watched.run(lambda: kept.extend([number] for number in range(50_000)), gc.collect)[-1] == "garbage_collection"
    )
    assert len(kept) == 50_000, "there was much to look through"


def test_no_collection_comes_by_itself_in_a_step(watched: Watched) -> None:
    def allocate() -> None:
        kept = [[number] for number in range(20_000)]
        held.append((gc.isenabled(), watched.watch.gc_control.collections, len(kept)))

    held: list[tuple[bool, int, int]] = []
    watched.run(allocate)
    assert held == [(False, 0, 20_000)]


def test_an_idle_engine_leaves_garbage_to_python(watched: Watched) -> None:
    watched.watch.begin()
    assert not gc.isenabled()
    watched.watch.idle()
    assert gc.isenabled()


def test_every_step_is_logged_with_when_it_began(watched: Watched) -> None:
    before = time.time()
    watched.run()
    told = watched.log.since(0)["steps"]
    assert len(told["at"]) == 20
    assert all(before - 0.001 <= at <= time.time() for at in told["at"])
    assert told["at"] == sorted(told["at"]) and set(told["phase"]) == {"encode"}


class CountedDrift(SpeedDrift):
    """A drift that counts what is asked of it."""

    def __init__(self) -> None:
        super().__init__(StepTimeModel(), ExpectedSpeed({}, {}))
        self.num_updates = 0

    def update(self) -> None:
        self.num_updates += 1


def test_drift_is_updated_once_a_second(watched: Watched) -> None:
    def pass_time() -> None:
        watched.now += 0.3 * UPDATE_SECONDS

    drift = CountedDrift()
    watched.watch.watch_drift(drift)
    watched.run(*(10 * [pass_time]))
    assert drift.num_updates == 2


def test_without_knowing_what_steps_take_they_are_logged_all_the_same() -> None:
    watched = Watched(fault_seconds=None)
    assert watched.run(touch) == [""]
    assert watched.counted() == {}
