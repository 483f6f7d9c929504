"""A batch launched while another is in flight, and one without enough memory: events and retries."""

from __future__ import annotations

import pytest

from app.engine.encoder.batching import EncodeState, TextBudget, TextCapacity
from app.errors import StepFailed
from app.messages import Abort, ArraysReady, RequestFailed
from encoder_simulation import POISON, EncoderSimulation, FakeRunner, encode


def sizes(sim: EncoderSimulation) -> list[int]:
    return [sum(span.num_tokens for span in batch) for batch in sim.runner.batches]


def drain(sim: EncoderSimulation) -> None:
    """Until all is computed, in far fewer steps than this."""
    for _ in range(50):
        if sim.engine.has_work:
            sim.step()
    assert not sim.engine.has_work


def test_the_next_step_is_launched_while_one_runs_where_it_would_be_full_anyway() -> None:
    sim = EncoderSimulation(budget=16, runner=FakeRunner(overlaps=True))
    sim.engine.add(encode("a", 8, 8, 8, 8, 8))
    sim.step()
    assert sizes(sim) == [16, 16] and len(sim.runner.current_stage) == 1 and sim.told == {}
    sim.step()  # 8 are left: others may come and share the step
    assert sizes(sim) == [16, 16] and sim.runner.current_stage == []
    sim.engine.add(encode("b", 8))
    sim.step()
    assert sizes(sim) == [16, 16, 16] and set(sim.told) == {"a", "b"}


def test_a_runner_that_computes_at_once_has_no_two_batches() -> None:
    sim = EncoderSimulation(budget=16)
    sim.engine.add(encode("a", 8, 8, 8, 8, 8))
    sim.step()
    assert sizes(sim) == [16]


def test_nobody_waits_for_others_while_a_batch_is_under_way() -> None:
    sim = EncoderSimulation(budget=16, runner=FakeRunner(overlaps=True))
    sim.engine.add(encode("a", 16, 16))
    sim.step()
    assert sim.runner.current_stage and sim.engine.batching_delay_seconds == 0.0 and sim.engine.has_work


def test_who_is_aborted_while_its_texts_are_under_way_gets_no_events() -> None:
    sim = EncoderSimulation(budget=16, runner=FakeRunner(overlaps=True))
    sim.engine.add(encode("gone", 16, 16))
    sim.step()
    sim.engine.abort(Abort("gone"))
    assert sim.engine.has_work  # the batch is still to be waited for
    sim.step()
    assert sim.told == {} and not sim.engine.has_work and sim.runner.current_stage == []


def test_a_failed_step_takes_the_one_behind_it_along_and_nobody_else_ends() -> None:
    sim = EncoderSimulation(budget=16, runner=FakeRunner(overlaps=True))
    sim.engine.add(encode("poison", 16, first=POISON))
    sim.engine.add(encode("good", 16, 8, 8))
    sim.step()
    assert sim.told == {} and sizes(sim) == [16, 16]
    drain(sim)
    assert {name: type(event) for name, event in sim.told.items()} == {"poison": RequestFailed, "good": ArraysReady}
    assert sizes(sim)[2:] == [16, 16, 16]  # each alone, with none beside it


def test_times_of_steps_that_overlap_add_up_to_what_passed() -> None:
    sim = EncoderSimulation(budget=16, runner=FakeRunner(overlaps=True))
    sim.engine.add(encode("a", 16, 16, 16, 16))
    seconds = []
    for _ in range(4):
        sim.step()
        assert sim.engine.stats is not None
        seconds.append(sim.engine.stats.seconds)
    assert (
        not sim.engine.has_work and len(seconds) == 4 and sum(seconds) == sim.now - 1.0
    )  # the clock of a test stands still within a step


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_step_without_memory_is_tried_in_parts_and_no_client_is_notified(overlaps: bool) -> None:
    sim = EncoderSimulation(budget=64, runner=FakeRunner(overlaps, memory=20))
    for name in "abcdefgh":
        sim.engine.add(encode(name, 8))
    sim.step()
    assert sim.runner.wanting == [64, 32] and sizes(sim)[0] == 16
    drain(sim)
    assert sizes(sim) == [16, 16, 16, 16] and sim.runner.wanting == [64, 32]  # not tried in vain again
    assert all(isinstance(event, ArraysReady) for event in sim.told.values()) and len(sim.told) == 8


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_text_that_no_step_has_memory_for_ends_its_request_alone(overlaps: bool) -> None:
    sim = EncoderSimulation(budget=64, runner=FakeRunner(overlaps, memory=20))
    for name, length in (("small", 8), ("large", 30), ("other", 8)):
        sim.engine.add(encode(name, length))
    drain(sim)
    failed = sim.told.pop("large")
    assert isinstance(failed, RequestFailed) and isinstance(failed.error, StepFailed)
    assert all(isinstance(event, ArraysReady) for event in sim.told.values()) and len(sim.told) == 2


def test_steps_grow_back() -> None:
    room, spans = TextBudget(8), EncodeState.from_message(encode("a", *[8] * 8)).spans()
    assert room.capacity(64) == TextCapacity(64, 8)
    assert room.shrink(spans) and room.capacity(64) == TextCapacity(32, 4)
    assert (
        room.shrink(spans[:4]) and room.capacity(64) == TextCapacity(16, 2) and room.capacity(10) == TextCapacity(10, 2)
    )
    assert not room.shrink(spans[:1]) and room.capacity(64) == TextCapacity(16, 2)
    seen = []
    for _ in range(64):
        room.succeeded(64)
        seen.append(room.capacity(64).tokens)
    assert seen == [16] * 31 + [32] * 32 + [64]
    assert room.capacity(1000) == TextCapacity(1000, 8)
