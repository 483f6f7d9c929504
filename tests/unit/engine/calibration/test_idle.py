"""An idle server times its own steps: the times are those of the engine, and a client's request ends it at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from app.engine.calibration import idle
from app.engine.calibration.idle import IdleMeasurement, IdleSubject
from app.hardware.decision import TrialTimes
from app.metrics.steps import StepStats
from encoder_simulation import EncoderSimulation
from engine_simulation import Simulation
from planned_machines import machine, plan

EXPECTED = TrialTimes("int4", 2, {1: 1.0, 8: 2.0}, {32: 3.0}, 1e-6, 10**9, 2e9)
TEXTS = TrialTimes("bf16", 2, {}, {}, encode_seconds={16: 1.0})


class TimedEngine:
    """A simulated engine whose steps take as long as the test says."""

    def __init__(self, engine: Any, seconds: Callable[[StepStats], float]) -> None:
        self._engine, self._seconds, self.num_steps = engine, seconds, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def stats(self) -> StepStats | None:
        found = self._engine.stats
        return None if found is None else _with_seconds(found, self._seconds(found))

    def step(self) -> Any:
        self.num_steps += 1
        return self._engine.step()


def _with_seconds(stats: StepStats, seconds: float) -> StepStats:
    import dataclasses

    return dataclasses.replace(stats, seconds=seconds, throttle_correction=1.0)


def steady(stats: StepStats) -> float:
    return 0.001 * (1 + stats.decode_tokens) + 0.0001 * stats.prefill_tokens


def subject(expected: TrialTimes = EXPECTED, **asked: Any) -> IdleSubject:
    made = plan(machine(), **{"max_batch_tokens": 64, "max_running_seqs": 4, "max_model_len": 200, **asked})
    return IdleSubject(made, expected, vocab_size=10, outputs=("embedding",))


def never() -> bool:
    return False


def test_the_times_are_those_of_the_engine() -> None:
    engine: Any = TimedEngine(Simulation().engine, steady)
    found = IdleMeasurement(subject(), engine, never).run()
    assert found is not None
    assert found.decode_seconds == pytest.approx({1: 0.002, 4: 0.005})
    assert found.prefill_seconds.keys() == {32, 64}
    assert found.prefill_seconds[64] == pytest.approx(0.001 * 2 + 0.0064, rel=0.2)
    assert (found.context_token_seconds, found.read_bytes) == (1e-6, 10**9), "what is not timed stays estimated"
    assert not engine.has_work


@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_request_ends_it_at_once(after: int) -> None:
    sim = Simulation()
    engine: Any = TimedEngine(sim.engine, steady)
    assert IdleMeasurement(subject(), engine, lambda: engine.num_steps >= after).run() is None
    assert engine.num_steps == after
    assert not engine.has_work, "its own requests are gone"
    sim.add("client", (1, 2, 3), max_tokens=2, ignore_eos=True)
    while sim.engine.has_work:
        sim.step()
    assert ("client", 0) in sim.endings


def test_steps_that_would_keep_a_client_waiting_are_not_timed() -> None:
    def slow(stats: StepStats) -> float:
        return 0.3 if stats.prefill_tokens or stats.decode_tokens > 1 else 0.2

    found = IdleMeasurement(subject(), TimedEngine(Simulation().engine, slow), never).run()  # type: ignore[arg-type]
    assert found is not None
    assert (found.decode_seconds.keys(), found.prefill_seconds.keys()) == ({1}, {32})


def test_a_busy_machine_gives_nothing() -> None:
    turn = iter(range(10**6))
    busy: Any = TimedEngine(Simulation().engine, lambda stats: (0.001, 0.01, 0.003)[next(turn) % 3])
    assert IdleMeasurement(subject(), busy, never).run() is None


def test_texts_are_timed_too() -> None:
    engine: Any = TimedEngine(EncoderSimulation().engine, lambda stats: 1e-5 * stats.encode_tokens)
    asked = subject(TEXTS, max_batch_tokens=512, max_model_len=16)
    found = IdleMeasurement(asked, engine, never).run()
    assert found is not None and not found.decode_seconds
    assert all(seconds == pytest.approx(1e-5 * size) for size, seconds in found.encode_seconds.items())
    assert idle.SAMPLES >= 3
