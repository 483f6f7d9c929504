"""Step times under a CPU quota are corrected by CPU time, whether a step was throttled or not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from app.engine.scheduler.policy import PrefillBudget
from app.hardware.step_times import StepTimeTable, ThrottleCorrection, throttle_corrected_clock
from app.metrics.steps import ExpectedSpeed, SpeedDrift, StepStats, StepTimeModel
from encoder_simulation import EncoderSimulation, encode
from engine_simulation import Simulation

QUOTA, PERIOD = 0.25, 0.1
STEP = 0.004  # seconds of a CPU: six steps run through in each period, and the seventh waits for the next


@dataclass
class Throttled:
    """A machine with a quota that one thread uses up: `cpu` and `wall` seconds so far."""

    cpu: float = 0.0
    wall: float = 0.0
    remaining: float = field(default=QUOTA * PERIOD)

    def compute(self, seconds: float) -> float:
        """What it takes by the wall's clock."""
        began = self.wall
        self.cpu += seconds
        while seconds > self.remaining:
            seconds -= self.remaining
            self.wall += self.remaining + (1 - QUOTA) * PERIOD
            self.remaining = QUOTA * PERIOD
        self.remaining -= seconds
        self.wall += seconds
        return self.wall - began

    def steps(self, count: int, stretch: ThrottleCorrection) -> Iterator[StepStats]:
        for _ in range(count):
            stretch.begin()
            seconds = self.compute(STEP)
            model = 0.9 * seconds
            yield StepStats(
                seconds,
                decode_tokens=1,
                num_decode_sequences=1,
                model_seconds=model,
                throttle_correction=stretch.of(seconds),
            )


def test_the_clock_goes_as_the_quota_lets_it() -> None:
    assert throttle_corrected_clock(None) is time.perf_counter
    assert throttle_corrected_clock(QUOTA, lambda: 3.0)() == 12.0


def test_the_throttle_correction_is_cpu_time_over_the_quota_and_the_wall_time() -> None:
    machine = Throttled()
    stretch = ThrottleCorrection(QUOTA, lambda: machine.cpu)
    stretch.begin()
    assert stretch.of(machine.compute(0.01)) == pytest.approx(4.0)  # it ran through
    stretch.begin()
    assert stretch.of(machine.compute(0.02)) == pytest.approx(0.08 / 0.095)  # it was stopped once
    assert stretch.of(0.0) == 1.0


def test_without_a_quota_nothing_is_corrected() -> None:
    stretch = ThrottleCorrection()
    stretch.begin()
    assert stretch.of(0.5) == 1.0
    assert StepStats(0.5).corrected_seconds == 0.5


def test_what_was_reported_under_a_quota_still_holds_after_many_steps() -> None:
    """By the wall's clock alone most steps take a quarter of what was promised, and the capacity would be told four times too high."""
    machine, table = Throttled(), StepTimeTable(((1, STEP / QUOTA),), ((1, STEP / QUOTA),))
    pace = PrefillBudget(64, model=StepTimeModel(table))
    drift = SpeedDrift(pace.model, ExpectedSpeed({"decode": {1: QUOTA / STEP}}, {}))
    steps = list(machine.steps(200, ThrottleCorrection(QUOTA, lambda: machine.cpu)))
    for step in steps:
        pace.observe(step)
    drift.update()
    assert drift.speed.capacity()["decode"][1] == pytest.approx(200 / machine.wall, rel=0.05)
    assert not drift.speed.drifted
    assert pace.step_times is not None
    assert pace.step_times.decode_factor == pytest.approx(1.0)


class Doubling(ThrottleCorrection):
    """Says that steps usually take twice as long, once it was told that one began."""

    began = False

    def begin(self) -> None:
        self.began = True

    def of(self, seconds: float) -> float:
        assert self.began
        return 2.0


def test_every_engine_reports_it_with_its_step() -> None:
    decoder, encoder = Simulation(), EncoderSimulation()
    decoder.engine.throttle_correction, encoder.engine.throttle_correction = Doubling(), Doubling()
    decoder.add("a", [1, 2, 3])
    encoder.engine.add(encode("a", 4))
    for simulation in (decoder, encoder):
        simulation.step()
        assert simulation.engine.stats is not None
        assert simulation.engine.stats.throttle_correction == 2.0
