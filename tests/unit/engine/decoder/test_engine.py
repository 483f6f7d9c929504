"""The engine's step: what it counts, and what a step that raises leaves behind."""

from __future__ import annotations

import pytest

from app.engine.scheduler.batch import Batch, SampledTokens
from app.engine.scheduler.scheduler import EngineLimits
from app.errors import ServiceStopping, StepFailed
from app.messages import Event
from engine_simulation import DeviceBroke, Simulation


def two_running() -> Simulation:
    sim = Simulation()
    for name in ("a", "b"):
        sim.add(name, [ord(name)] * 20, ignore_eos=True)
    sim.step()
    return sim


def test_a_step_is_counted() -> None:
    sim = two_running()
    sim.add("c", [ord("a")] * 20 + [1, 2, 3])
    sim.step()
    stats = sim.engine.stats
    assert stats is not None
    assert (stats.prefill_tokens, stats.decode_tokens, stats.cached_tokens, stats.preempted) == (3, 2, 20, 0)
    assert (stats.num_sequences, stats.num_prefill_sequences, stats.num_decode_sequences) == (3, 1, 2)
    assert stats.seconds > 0


def test_an_idle_step_does_nothing() -> None:
    sim = Simulation()
    assert sim.engine.step() == [] and sim.engine.stats is None and not sim.engine.has_work


def test_a_step_that_raises_ends_its_batch_once_and_the_engine_goes_on() -> None:
    sim = two_running()
    sim.add("late", [3] * 100)  # some of it waits for its turn: not in the first batch
    sim.runner.broken = True
    sim.step()
    sim.runner.broken = False
    assert {name for name, told in sim.failures.items() if isinstance(told.error, StepFailed)} >= {"a", "b"}
    assert sim.pool.used_tokens == 0, "what a broken step may have written is not kept"
    sim.add("next", [ord("a")] * 20, max_tokens=1)
    sim.finish()
    assert sim.endings["next", 0].reason in ("stop", "length")


def test_those_outside_the_broken_batch_go_on() -> None:
    sim = two_running()
    for name in ("c", "d", "e"):
        sim.add(name, [ord(name)] * 30, max_tokens=1)
    sim.runner.broken = True
    sim.step()
    sim.runner.broken = False
    assert set(sim.failures) == {"a", "b", "c", "d"}, "e had no place in the batch"
    sim.finish()
    assert set(sim.endings) == {("e", 0)}


def test_endings_that_a_broken_update_swallowed_are_reported_as_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = two_running()
    update = sim.scheduler.update

    def breaks_late(batch: Batch, picked: list[SampledTokens]) -> list[Event]:
        for span in batch.spans:
            span.sequence.max_length = 0  # all of them end in this step
        update(batch, picked)
        raise DeviceBroke

    monkeypatch.setattr(type(sim.scheduler), "update", lambda self, batch, picked: breaks_late(batch, picked))
    sim.step()
    assert set(sim.failures) == {"a", "b"} and not sim.engine.has_work


def test_a_scheduler_that_raises_ends_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = two_running()

    def schedule(_: object) -> Batch:
        raise DeviceBroke

    monkeypatch.setattr(type(sim.scheduler), "schedule", schedule)
    with pytest.raises(DeviceBroke):
        sim.engine.step()
    sim.hear(sim.engine.fail())
    assert set(sim.failures) == {"a", "b"} and not sim.engine.has_work


def test_all_can_be_notified_that_it_is_over() -> None:
    sim = two_running()
    sim.add("waiting", [1])
    sim.hear(sim.engine.fail_all(ServiceStopping("over")))
    assert set(sim.failures) == {"a", "b", "waiting"} and not sim.engine.has_work


def test_what_is_computed_a_second_time_is_counted() -> None:
    sim = Simulation(capacity=60, limits=EngineLimits(max_model_len=60, max_running_seqs=4, max_batch_tokens=64))
    for name, token in (("old", 1), ("young", 2)):
        sim.add(name, [token] * 20, max_tokens=25, ignore_eos=True)
    counted = []
    while sim.engine.has_work:
        sim.step()
        assert sim.engine.stats is not None
        counted.append((sim.engine.stats.preempted, sim.engine.stats.recomputed_tokens))
    first = next(index for index, (preempted, _) in enumerate(counted) if preempted)
    assert all(again == 0 for _, again in counted[: first + 1])
    again = sum(again for _, again in counted)
    assert again == sim.runner.computed_tokens - 2 * (20 + 24) + 1, (
        "with the last token, which was picked and never computed"
    )
    assert again > 10


def test_a_first_step_of_its_shape_is_said_to_be_one() -> None:
    sim = two_running()
    assert sim.engine.stats is not None and not sim.engine.stats.is_first
    sim.runner.is_first = True
    sim.step()
    assert sim.engine.stats.is_first and sim.engine.stats.decode_tokens == 2
