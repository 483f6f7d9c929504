"""Steps that fail one after the other: whether it is their requests or the device is looked at, and leaves no trace."""

from __future__ import annotations

import pytest

from app.engine.scheduler.batch import Batch, SampledTokens
from app.engine.worker import MAX_FAILED_STEPS
from app.messages import Generate, RequestFailed, SamplingParams, SequenceFinished
from encoder_simulation import EncoderSimulation
from engine_simulation import DeviceBroke, Simulation
from synchronous_runner import AtOnce
from worker_bench import Bench

POISON_ID = 99  # a token that is never picked


class Poisonable:
    """Computes for everyone but for those whose prompts hold the poison."""

    model_seconds = 0.0
    is_first = False
    is_native = False

    def __init__(self, sim: Simulation) -> None:
        self.runner = sim.runner

    def run(self, batch: Batch) -> list[SampledTokens]:
        if any(POISON_ID in span.sequence.token_ids for span in batch.spans):
            raise ValueError("what this client asked for")
        return self.runner.run(batch)


def test_requests_that_break_their_own_steps_end_nothing_but_themselves(bench: Bench) -> None:
    """A client may send the same bad request for ever: the device computes, so nobody restarts."""
    bench.sim.engine.runner = AtOnce(Poisonable(bench.sim))
    bench.start()
    for number in range(3 * MAX_FAILED_STEPS):
        bench.worker.put(Generate(f"bad{number}", (1, POISON_ID), SamplingParams(), 0.0))
        bench.heard_until(1, RequestFailed)
    bench.worker.put(Generate("good", (1, 2), SamplingParams(max_tokens=2, ignore_eos=True), 0.0))
    assert [event.request_id for event in bench.heard_until(1, SequenceFinished)] == ["good"]
    assert bench.worker.state == "ready" and bench.fatal.empty()
    assert bench.sim.pool.in_use_tokens() == 0, "the checks have left no trace"


def test_requests_that_are_not_finite_end_nothing_but_themselves(bench: Bench) -> None:
    bench.sim.runner.not_finite = {f"bad{number}" for number in range(3 * MAX_FAILED_STEPS)}
    bench.start()
    for name in sorted(bench.sim.runner.not_finite):
        bench.worker.put(Generate(name, (1, 2), SamplingParams(), 0.0))
        bench.heard_until(1, RequestFailed)
    bench.worker.put(Generate("good", (1, 2), SamplingParams(max_tokens=2, ignore_eos=True), 0.0))
    assert [event.request_id for event in bench.heard_until(1, SequenceFinished)] == ["good"]
    assert bench.worker.state == "ready" and bench.fatal.empty()


def test_a_device_on_which_nothing_is_finite_is_lost(bench: Bench) -> None:
    names = [f"bad{number}" for number in range(MAX_FAILED_STEPS)]
    bench.sim.runner.not_finite = {*names, "check"}
    bench.start()
    for name in names:
        bench.worker.put(Generate(name, (1, 2), SamplingParams(), 0.0))
        bench.heard_until(1, RequestFailed)
    assert "not finite" in str(bench.fatal.get(timeout=60))
    assert bench.worker.state == "failed"


def test_the_check_is_beside_those_who_run() -> None:
    sim = Simulation()
    sim.add("a", [1] * 20, ignore_eos=True, max_tokens=5, seed=1)
    sim.step()
    used = sim.pool.used_tokens
    sim.engine.check()
    assert sim.pool.used_tokens == used
    sim.finish()
    assert sim.endings["a", 0].reason == "length"
    sim.runner.broken = True
    with pytest.raises(DeviceBroke):
        sim.engine.check()
    assert sim.pool.in_use_tokens() == 0


def test_where_there_is_no_slot_the_check_learns_nothing() -> None:
    sim = Simulation(num_slots=1)
    sim.add("a", [1] * 20, ignore_eos=True, max_tokens=5)
    sim.step()
    sim.runner.broken = True
    sim.engine.check()


def test_an_encoder_is_checked_with_a_text_of_its_own() -> None:
    sim = EncoderSimulation()
    sim.engine.check()
    assert [span.text.token_ids for span in sim.runner.batches[-1]] == [(0,)] and not sim.engine.has_work
    sim.runner.broken = True
    with pytest.raises(RuntimeError):
        sim.engine.check()
