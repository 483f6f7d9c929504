"""The worker thread: it loads, steps and reports; errors are reported, and no request is left waiting when it ends."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

import pytest

from app.engine import worker as worker_module
from app.engine.decoder.engine import DecoderEngine
from app.engine.worker import MAX_FAILED_STEPS, Engine, Worker
from app.errors import CheckpointInvalid, ServiceStopping
from app.messages import Abort, Command, Event, Generate, RequestFailed, SamplingParams, SequenceFinished, Stop
from app.metrics.steps import StepStats
from encoder_simulation import POISON, EncoderSimulation, encode
from engine_simulation import Simulation
from worker_bench import PATIENCE_SECONDS, Bench, request


class CountedMailbox:
    """The worker's mailbox, which counts how often it is looked into while there may be work."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Command] = SimpleQueue()
        self.looks = 0
        self.put, self.empty = self.queue.put, self.queue.empty

    def get(self, block: bool = True) -> Command:
        self.looks += 1
        return self.queue.get(block)


def test_it_serves_and_reports_once_a_step(bench: Bench) -> None:
    bench.worker.put(request("a"))
    bench.worker.put(request("b"))
    bench.start()
    assert {event.request_id for event in bench.heard_until(2, SequenceFinished)} == {"a", "b"}
    steps = [bench.steps.get(timeout=PATIENCE_SECONDS) for _ in range(3)]
    assert [stats.num_sequences for stats, _ in steps] == [2, 2, 2]
    assert steps[0][1].num_running == 2 and steps[2][1].num_running == 0
    assert bench.worker.state == bench.worker.stage == "ready"


class Noting:
    """A `StepObserver` that writes down what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def begin(self) -> None:
        self.told.append("begin")

    def end(self, step: StepStats) -> None:
        self.told.append("end")

    def events_sent(self) -> None:
        self.told.append("rest")

    def idle(self) -> None:
        self.told.append("idle")

    def close(self) -> None:
        self.told.append("close")


def test_who_watches_knows_of_every_step_and_every_pause(bench: Bench) -> None:
    watch = bench.worker._observer = Noting()
    bench.worker.put(request("a", max_tokens=2))
    bench.start()
    bench.heard_until(1, SequenceFinished)
    bench.sim.runner.broken = True
    bench.worker.put(request("b"))
    bench.heard_until(1, RequestFailed)
    bench.worker.put(Stop())
    bench.end()
    step = ["begin", "end", "rest"]
    assert watch.told == ["idle", *step, *step, "idle", "begin", "idle", "close"], (
        "a step that failed has no time of its own"
    )


def test_an_idle_engine_takes_no_step_and_blocks(bench: Bench) -> None:
    """Per request: one blocking look into the mailbox, one that finds it empty, one step. A loop that spins would look far more often."""
    mailbox = bench.worker._mailbox = CountedMailbox()
    bench.start()
    for name in ("a", "b", "c"):
        bench.worker.put(request(name, max_tokens=1))
        bench.heard_until(1, SequenceFinished)
    bench.worker.put(Stop())
    bench.end()
    assert len(bench.sim.runner.batches) == 3
    assert mailbox.looks == 3 * 2 + 1


def test_a_refusal_is_reported_without_a_step(bench: Bench) -> None:
    bench.start()
    bench.worker.put(Generate("empty", (), SamplingParams(), 0.0))
    assert isinstance(bench.heard()[0], RequestFailed)
    assert bench.sim.runner.batches == []


def test_an_abort_is_obeyed_between_steps(bench: Bench) -> None:
    bench.worker.put(request("a", max_tokens=100))
    bench.worker.put(Abort("a"))
    bench.start()
    assert [event.reason for event in bench.heard_until(1, SequenceFinished)] == ["aborted"]  # type: ignore[union-attr]


def test_a_step_that_raises_is_reported_and_the_next_request_is_served(bench: Bench) -> None:
    bench.sim.runner.broken = True
    bench.worker.put(request("a"))
    bench.start()
    assert [event.request_id for event in bench.heard_until(1, RequestFailed)] == ["a"]
    bench.sim.runner.broken = False
    bench.worker.put(request("b"))
    assert [event.request_id for event in bench.heard_until(1, SequenceFinished)] == ["b"]
    assert bench.worker.state == "ready" and bench.fatal.empty()


def test_steps_that_keep_failing_end_the_worker() -> None:
    bench = Bench()
    bench.sim.runner.broken = True
    bench.start()
    for number in range(MAX_FAILED_STEPS):
        bench.worker.put(request(f"r{number}"))
        bench.heard_until(1, RequestFailed)
    bench.end()
    assert bench.worker.state == "failed"
    assert type(bench.fatal.get(timeout=PATIENCE_SECONDS)).__name__ == "DeviceBroke"


def test_a_good_step_between_failures_starts_the_count_again(bench: Bench) -> None:
    bench.start()
    for number in range(2 * MAX_FAILED_STEPS):
        bench.sim.runner.broken = number % 2 == 0
        bench.worker.put(request(f"r{number}", max_tokens=1))
        bench.heard_until(1, RequestFailed if number % 2 == 0 else SequenceFinished)
    assert bench.worker.alive


def test_what_the_device_cannot_survive_fails_everyone_at_once() -> None:
    bench = Bench(fatal=True)
    bench.sim.runner.broken = True
    for number in range(6):  # four run at a time
        bench.worker.put(request(f"r{number}"))
    bench.start()
    assert len({event.request_id for event in bench.heard_until(6, RequestFailed)}) == 6
    bench.end()
    assert bench.worker.state == "failed" and not bench.fatal.empty()
    with pytest.raises(ServiceStopping):
        bench.worker.put(request("late"))
    bench.worker.put(Abort("late"))


def test_loading_reports_its_stage() -> None:
    reported, go_on = threading.Event(), threading.Event()
    sim = Simulation()

    def build(report: Callable[[str], None]) -> DecoderEngine:
        report("weights")
        reported.set()
        go_on.wait(PATIENCE_SECONDS)
        return sim.engine

    bench = Bench(build)
    assert not bench.worker.alive and bench.worker.state == "loading"
    bench.start()
    reported.wait(PATIENCE_SECONDS)
    assert (bench.worker.state, bench.worker.stage, bench.worker.alive) == ("loading", "weights", True)
    go_on.set()
    bench.worker.put(Stop())
    bench.end()
    assert bench.worker.state == "stopped" and bench.fatal.empty()


def test_a_failed_load_ends_it_with_the_reason_and_notifies_waiting_requests() -> None:
    error = CheckpointInvalid("config.json is missing.")

    def build(report: Callable[[str], None]) -> Engine:
        raise error

    bench = Bench(build)
    bench.worker.put(request("early"))
    bench.start()
    assert bench.fatal.get(timeout=PATIENCE_SECONDS) is error
    bench.end()
    assert bench.worker.state == "failed" and bench.worker.error is error
    assert [event.request_id for event in bench.heard()] == ["early"]


def test_stop_notifies_everyone_and_ends_the_thread(bench: Bench) -> None:
    for command in (request("a", max_tokens=100), Stop(), request("behind")):
        bench.worker.put(command)
    bench.start()
    failed = bench.heard_until(2, RequestFailed)
    assert {event.request_id for event in failed} == {"a", "behind"}
    assert all(isinstance(event.error, ServiceStopping) for event in failed if isinstance(event, RequestFailed))
    bench.end()
    assert bench.worker.state == "stopped" and bench.fatal.empty()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_worker_itself_is_fatal_not_silent() -> None:
    bench = Bench()
    bench.worker.put(request("same"))
    bench.worker.put(request("same"))  # the service never does this: an assertion fires
    bench.start()
    assert isinstance(bench.fatal.get(timeout=PATIENCE_SECONDS), AssertionError)
    bench.end()
    assert bench.worker.state == "failed"


class Patient:
    """A mailbox that is empty at first, of an engine that waits: what comes meanwhile is in its next step."""

    def __init__(self, late: Command | None) -> None:
        self.late, self.wait_measured = late, 0.0

    def get(self, block: bool = True, timeout: float | None = None) -> Command:
        late, self.late = self.late, None
        if timeout is None or late is None:
            self.late = late
            raise Empty
        self.wait_measured += timeout
        return late


@pytest.mark.parametrize("patience", [0.0, 0.25])
def test_a_step_waits_as_long_as_its_engine_has_patience(patience: float) -> None:
    bench, mailbox = Bench(), Patient(request("late"))
    bench.sim.engine.add(request("first"))
    bench.sim.engine.batching_delay_seconds = patience
    bench.worker._mailbox = mailbox  # type: ignore[assignment]
    assert bench.worker._take_commands(bench.sim.engine) == ([], False)
    assert mailbox.wait_measured == patience and (mailbox.late is None) == (patience > 0.0)


def test_a_step_that_ended_nobody_is_tried_again_and_does_not_count() -> None:
    sim = EncoderSimulation()
    worker = Worker(lambda report: sim.engine)
    for name in ("a", "b", "poison", "poisonous"):
        sim.engine.add(encode(name, 5, first=POISON if name.startswith("poison") else 100))
    heard: list[Event] = []
    while sim.engine.has_work:
        heard += worker._step(sim.engine)[0]
    assert worker.error is None  # three steps failed, of which one ended nobody
    assert [event.request_id for event in heard] == ["a", "b", "poison", "poisonous"]


def test_a_device_that_flies_is_served_like_any_other(bench: Bench) -> None:
    """Steps launched ahead, arrivals and an abort between them, and the last word of each."""
    bench.sim.flying()
    bench.start()
    for name in ("a", "b", "c"):
        bench.worker.put(request(name, max_tokens=40))
    bench.heard()
    bench.worker.put(Abort("b"))
    bench.worker.put(request("late", max_tokens=5))
    reasons = {event.request_id: event.reason for event in bench.heard_until(4, SequenceFinished)}  # type: ignore[union-attr]
    assert reasons.keys() == {"a", "b", "c", "late"} and reasons["late"] == "length"
    bench.worker.put(Stop())
    bench.end()
    assert bench.sim.engine._launched_ahead is None and any(batch.ahead for batch in bench.sim.runner.batches)


def test_a_want_of_memory_is_no_failure_of_the_device(bench: Bench) -> None:
    bench.sim.runner.most_tokens = 2
    bench.start()
    for number in range(2 * MAX_FAILED_STEPS):
        bench.worker.put(request(f"r{number}"))
    assert len(bench.heard_until(2 * MAX_FAILED_STEPS, SequenceFinished)) == 2 * MAX_FAILED_STEPS
    assert bench.worker.alive and bench.steps.qsize() > 2 * MAX_FAILED_STEPS


class IdleWork:
    """What the worker is given to do while it is idle: notes the calls, and waits until a command has come."""

    def __init__(self, again: int = 0, error: Exception | None = None) -> None:
        self.calls: SimpleQueue[bool] = SimpleQueue()
        self.begun, self._again, self._error = threading.Event(), again, error

    def __call__(self, engine: Engine, is_wanted: Callable[[], bool]) -> bool:
        self.calls.put(is_wanted())
        self.begun.set()
        self._again -= 1
        if self._error is not None:
            raise self._error
        return self._again >= 0


@pytest.fixture
def _soon_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "IDLE_SECONDS", 0.001)


@pytest.mark.usefixtures("_soon_idle")
@pytest.mark.parametrize("error", [None, RuntimeError("a step failed")])
def test_idle_time_is_used_until_nothing_is_left_to_do(bench: Bench, error: Exception | None) -> None:
    work = IdleWork(again=0 if error else 2, error=error)
    bench.callbacks = dataclasses.replace(bench.callbacks, on_idle=work)
    bench.start()
    assert work.begun.wait(PATIENCE_SECONDS)
    bench.worker.put(request("a"))
    bench.heard_until(1, SequenceFinished)
    bench.worker.put(Stop())
    bench.end()
    assert 1 <= work.calls.qsize() <= 3
    assert bench.worker.state == "stopped", "a failure of idle work ends nothing"


def test_every_pause_is_used_and_the_end_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "PAUSE_SECONDS", 0.001)
    work = IdleWork(again=100)
    bench.callbacks = dataclasses.replace(bench.callbacks, on_pause=work)
    bench.start()
    for name in "ab":
        assert work.begun.wait(PATIENCE_SECONDS)
        work.begun.clear()
        bench.worker.put(request(name))
        bench.heard_until(1, SequenceFinished)
    assert work.begun.wait(PATIENCE_SECONDS)
    before = work.calls.qsize()
    bench.worker.put(Stop())
    bench.end()
    assert work.calls.qsize() == before + 1
    assert not any(work.calls.get() for _ in range(before + 1)), "nobody waited as it began"


def test_work_at_the_end_is_told_when_its_time_is_over(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "CLOSE_SECONDS", 0.01)
    ended = threading.Event()

    def work(engine: Engine, is_wanted: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_wanted() and time.monotonic() < deadline:
            pass
        assert is_wanted()
        ended.set()

    bench.callbacks = dataclasses.replace(bench.callbacks, on_pause=work)
    bench.worker.put(Stop())
    bench.start()
    bench.end()
    assert ended.is_set() and bench.worker.state == "stopped"


def test_nothing_is_done_while_commands_come(bench: Bench) -> None:
    work = IdleWork(again=10)
    bench.callbacks = dataclasses.replace(bench.callbacks, on_idle=work)
    for name in "ab":
        bench.worker.put(request(name))
    bench.worker.put(Stop())
    bench.start()
    bench.end()
    assert work.calls.empty()
