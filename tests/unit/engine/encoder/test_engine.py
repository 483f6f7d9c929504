"""The encoder's engine: what it refuses, what a failing step costs whom, and what it says of itself."""

from __future__ import annotations

import pytest

from app.errors import ContextLengthExceeded, InvalidRequest, RequestError, ServiceStopping, StepFailed, WrongModelKind
from app.messages import Abort, ArraysReady, Encode, RequestFailed, Text
from encoder_simulation import MAX_LEN, POISON, EncoderSimulation, encode


def refused(order: Encode) -> RequestError:
    sim = EncoderSimulation()
    (event,) = sim.engine.add(order)
    assert isinstance(event, RequestFailed) and not sim.engine.has_work
    return event.error


@pytest.mark.parametrize(
    ("order", "error"),
    [
        (encode("r"), InvalidRequest),
        (encode("r", 3, outputs=()), InvalidRequest),
        (encode("r", 3, 0), InvalidRequest),
        (encode("r", 3, MAX_LEN + 1), ContextLengthExceeded),
        (encode("r", 3, outputs=("logits",)), WrongModelKind),
        (Encode("r", (Text((1, 2), type_ids=(0,)),), ("embedding",), 0.0), InvalidRequest),
    ],
)
def test_a_bad_request_never_reaches_a_batch(order: Encode, error: type[RequestError]) -> None:
    assert type(refused(order)) is error


def test_the_answer_is_in_the_order_of_the_texts() -> None:
    sim = EncoderSimulation(budget=16)
    sim.engine.add(encode("r", 3, 12, 7, outputs=("embedding", "last_hidden_state")))
    while sim.engine.has_work:
        sim.step()
    assert len(sim.runner.batches) == 2
    told = sim.told["r"]
    assert isinstance(told, ArraysReady) and told.num_tokens == 22
    embedding = told.arrays["embedding"]
    assert (embedding.datatype, embedding.shape) == ("FP32", (3, 2))
    assert list(memoryview(embedding.data).cast("f")) == [100, 3, 150, 12, 200, 7]
    assert told.arrays["last_hidden_state"].shape == (22, 1)
    assert list(memoryview(told.arrays["last_hidden_state"].data).cast("f"))[:4] == [100, 101, 102, 150]


def test_times_count_from_arrival_and_from_the_first_step() -> None:
    sim = EncoderSimulation(budget=16)
    sim.now = 5.0
    sim.engine.add(encode("r", 12, 12, at=2.0))
    sim.step()  # at 6
    sim.step()  # at 7
    told = sim.told["r"]
    assert isinstance(told, ArraysReady)
    assert (told.timings.queue_seconds, told.timings.encode_seconds) == (4.0, 1.0)


def test_a_text_that_breaks_its_step_fails_nobody_else() -> None:
    sim = EncoderSimulation()
    sim.engine.add(encode("good", 5))
    sim.engine.add(encode("poison", 5, first=POISON))
    sim.engine.add(encode("better", 5))
    sim.step()
    assert sim.told == {} and len(sim.runner.batches[0]) == 3
    sim.engine.add(encode("late", 5))
    while sim.engine.has_work:
        sim.step()
    failed = [name for name, event in sim.told.items() if isinstance(event, RequestFailed)]
    assert failed == ["poison"] and len(sim.told) == 4
    assert [len(batch) for batch in sim.runner.batches] == [3, 1, 1, 1, 1]


def test_a_request_that_was_tried_alone_and_went_well_shares_steps_again() -> None:
    sim = EncoderSimulation(budget=8)
    sim.engine.add(encode("many", 6, 6, 6))
    sim.engine.add(encode("small", 1))
    sim.runner.broken = True
    sim.step()
    sim.runner.broken = False
    sim.step()
    sim.step()
    sim.step()
    assert [{span.request.message.request_id for span in batch} for batch in sim.runner.batches[1:]] == [
        {"many"},
        {"small"},
        {"many"},
    ]
    sim.engine.add(encode("tiny", 2))
    sim.step()
    assert {span.request.message.request_id for span in sim.runner.batches[-1]} == {"many", "tiny"}


def test_who_is_aborted_gets_no_events_and_leaves_room() -> None:
    sim = EncoderSimulation()
    sim.engine.add(encode("gone", 5))
    assert sim.engine.abort(Abort("gone")) == [] == sim.engine.abort(Abort("unknown"))
    assert not sim.engine.has_work and sim.engine.step() == [] and sim.told == {}


def test_an_end_is_reported_to_all() -> None:
    sim = EncoderSimulation()
    for name in ("a", "b"):
        sim.engine.add(encode(name, 5))
    events = sim.engine.fail_all(ServiceStopping("The server is stopping."))
    assert [event.request_id for event in events] == ["a", "b"] and not sim.engine.has_work


def test_a_failure_outside_of_any_batch_ends_all() -> None:
    sim = EncoderSimulation()
    sim.engine.add(encode("a", 5))
    (event,) = sim.engine.fail()
    assert isinstance(event, RequestFailed) and isinstance(event.error, StepFailed)


def test_it_says_how_it_stands() -> None:
    sim = EncoderSimulation(budget=16)
    sim.engine.add(encode("many", 10, 10, 10))
    sim.engine.add(encode("small", 6))
    sim.step()
    now = sim.engine.snapshot()
    assert (now.num_running, now.num_waiting, now.queue) == (1, 0, (20,))
    stats = sim.engine.stats
    assert stats is not None
    assert (stats.encode_tokens, stats.num_encode_sequences, stats.encode_pairs) == (16, 2, 136)
