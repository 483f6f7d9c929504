"""Cost of recording each step's duration and cause: the step monitor and the metrics alone, without running steps.

No model is run. The steps are described, and everything that serving does with such a description is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from app.bench.console import progress
from app.bench.stats import Figure, Outcome, spread
from app.drift import Drift, Promise
from app.gauges import throttled_seconds
from app.hardware.cgroup import find_cpu_stat
from app.hardware.decision import Trial
from app.hardware.facts import Facts
from app.hardware.files import Files
from app.hardware.step_seconds import StepSeconds
from app.measured import Snapshot, StepStats
from app.metrics import Metrics
from app.stalls import Stalls, Usual, first_touch_seconds
from app.step_watch import StepWatch

TARGET_MICROSECONDS = 20.0
INSTRUMENTS = "with counters and histograms"
STEPS_PER_SAMPLE, SAMPLES_PER_ROUND = 20, 500
TABLE = StepSeconds.of(Trial("int4", 2, {1: 0.016, 8: 0.030}, {128: 0.2}, context_token_seconds=1e-6))
DECODE = StepStats(0.031, decode_tokens=8, num_sequences=8, num_decode_sequences=8, model_seconds=0.030, context_tokens=800)
MIXED = StepStats(
    TABLE.mixed(8, 64, 800),
    64,
    decode_tokens=8,
    num_sequences=9,
    num_prefill_sequences=1,
    num_decode_sequences=8,
    context_tokens=800,
)
SLOW = StepStats(0.310, decode_tokens=8, num_sequences=8, num_decode_sequences=8, context_tokens=800)


class Serving:
    """The step monitor and metrics, connected to each other as `startup` does it."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.metrics.drift = Drift(Promise(TABLE, {}, {}))
        self.watch = StepWatch(self.metrics.steps, self.metrics.on_stall, self.metrics.look)
        garbage = self.watch.garbage
        cpu_stat = find_cpu_stat(Files(Path("/")))
        self.watch.stalls = Stalls(
            Usual(TABLE), lambda: garbage.seconds, lambda: throttled_seconds(cpu_stat), first_touch_seconds()
        )
        self._snapshot = Snapshot()
        self._turn = 0

    def watched(self, step: StepStats) -> None:
        """Pass one step to the step monitor."""
        self.watch.begin()
        self.watch.end(step)
        self.watch.rest()

    def by_turns(self, *steps: StepStats) -> None:
        """Pass one of `steps` to the monitor, in rotation: if every step were slow, slow steps would be normal."""
        self._turn += 1
        self.watched(steps[self._turn % len(steps)])

    def both(self, step: StepStats) -> None:
        """Pass one step to the step monitor and to the metrics."""
        self.watch.begin()
        self.watch.end(step)
        self.metrics.on_step(step, self._snapshot)
        self.watch.rest()


def measure(facts: Facts, rounds: int) -> Outcome:
    """Measure the microseconds per step. Ctrl-C keeps the measurements so far."""
    serving = Serving()
    works: Mapping[str, Callable[[], None]] = {
        "a step that decodes": lambda: serving.watched(DECODE),
        "a step that a prompt joined": lambda: serving.watched(MIXED),
        "every second step is slow, with its cause": lambda: serving.by_turns(DECODE, SLOW),
        f"a step that decodes, {INSTRUMENTS}": lambda: serving.both(DECODE),
        f"a step that a prompt joined, {INSTRUMENTS}": lambda: serving.both(MIXED),
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
    return Outcome("recording", "cost of recording each step", figures, {"machine": facts.to_json()}, complete)


def _microseconds(work: Callable[[], None]) -> float:
    """Return the mean microseconds of many calls: a single call is hardly longer than reading the clock."""
    began = time.perf_counter()
    for _ in range(STEPS_PER_SAMPLE):
        work()
    return (time.perf_counter() - began) / STEPS_PER_SAMPLE * 1e6


def _figure(name: str, samples: list[float]) -> Figure:
    found = spread(samples)
    target = None if name.endswith(INSTRUMENTS) else TARGET_MICROSECONDS
    return Figure(name, found.p50, "µs", p99=found.p99, target=target, at_most=True, parts={"least": found.smallest})
