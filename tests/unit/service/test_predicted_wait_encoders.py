"""Predicted waits of texts, held against the engine's own queue played through on a machine whose steps take what the table says."""

from __future__ import annotations

from random import Random

import pytest

from app.engine.encoder.batching import TextCapacity, TextQueue
from app.hardware.step_times import StepTimes, StepTimeTable
from app.messages import Encode, Text
from app.metrics.steps import EngineSnapshot
from app.service.admission import TypicalRequest, first_token_seconds

BUDGET = 512
STEPS = StepTimeTable((), (), encode_points=((16, 0.004), (128, 0.010), (512, 0.032)))
TEMPO = StepTimes(STEPS, BUDGET)
HABITS = TypicalRequest(1.0, 256)


def wait(now: EngineSnapshot, *newcomers: tuple[float, int]) -> float:
    """Of the last, from its moment on."""
    found = first_token_seconds(now, list(newcomers), newcomers[-1][0], HABITS)
    assert found is not None
    return found


def queued(*queue: int, at: float = 5.0) -> EngineSnapshot:
    return EngineSnapshot(stepped_at=at, queue=queue, step_times=TEMPO)


def test_an_idle_machine_begins_at_once() -> None:
    assert wait(queued(), (9.0, 128)) == pytest.approx(0.010)
    assert wait(queued(), (9.0, 2 * 512 + 16)) == pytest.approx(2 * 0.032 + 0.004)
    assert wait(queued(), (8.996, 128), (9.0, 16)) == pytest.approx(0.006 + 0.004), "the one before began when it came"


def test_the_step_under_way_is_waited_for() -> None:
    assert wait(queued(128), (5.004, 16)) == pytest.approx(0.006 + 0.004)
    assert wait(queued(128), (7.0, 16)) == pytest.approx(0.004), "one that is late may end any moment"


def test_a_short_one_does_not_wait_for_a_request_of_two_thousand_texts() -> None:
    long = 2048 * 128
    assert wait(queued(long), (5.0, 16)) == pytest.approx(0.032 + 0.032)
    assert wait(queued(long), (5.0, 1024)) == pytest.approx(0.032 + 4 * 0.032), "half of each step is the long one's"
    assert wait(queued(16), (5.0, 16), (5.0, long)) == pytest.approx(0.004 + long / 512 * 0.032, rel=0.01)


def test_a_machine_that_got_slower_is_reckoned_with() -> None:
    slow = EngineSnapshot(stepped_at=5.0, step_times=StepTimes(STEPS, BUDGET, encode_factor=2.0))
    assert wait(slow, (9.0, 128)) == pytest.approx(0.020)


def test_a_programs_rows_go_as_they_came() -> None:
    in_turn = StepTimes(STEPS, BUDGET, oldest_first=True)
    now = EngineSnapshot(stepped_at=5.0, queue=(4 * 512,), step_times=in_turn)
    assert wait(now, (5.0, 16)) == pytest.approx(4 * 0.032 + 0.004), "a short one waits for all that is before it"
    assert wait(now, (5.0, 16), (5.0, 112)) == pytest.approx(4 * 0.032 + 0.010)
    assert wait(EngineSnapshot(stepped_at=5.0, step_times=in_turn), (9.0, 512 + 16)) == pytest.approx(0.036)


@pytest.mark.parametrize("per_second", [20.0, 60.0, 110.0])
def test_waits_are_predicted_under_a_light_a_heavy_and_too_heavy_a_load(per_second: float) -> None:
    random = Random(1)
    errors = sorted(abs(told - taken) / taken for told, taken in _played(random, per_second, 300))
    assert len(errors) == 300
    assert errors[150] < 0.15 and errors[270] < 0.8


def _played(random: Random, per_second: float, number: int) -> list[tuple[float, float]]:
    """Foretold and taken, of each request; now and then one has many texts."""
    arrivals, moment = [], 0.0
    for index in range(number):
        moment += random.expovariate(per_second)
        lengths = [
            min(512, int(random.lognormvariate(3.7, 0.8)) + 2) for _ in range(random.choice([1, 1, 1, 1, 4, 40]))
        ]
        arrivals.append(Encode(str(index), tuple(Text((1,) * length) for length in lengths), ("embedding",), moment))
    queue, now, told, taken = TextQueue(), 0.0, dict[str, float](), dict[str, float]()
    while len(taken) < number:
        if not len(queue):
            now = max(now, arrivals[0].arrived_at)
        ends, began, snapshot = now, now, queued(*(each.tokens_left for each in queue.requests), at=now)
        if len(queue):
            spans = queue.take(TextCapacity(BUDGET, 256))
            ends = now + STEPS.encode(sum(span.num_tokens for span in spans))
        sent: list[tuple[float, int]] = []
        while arrivals and arrivals[0].arrived_at <= ends:
            order = arrivals.pop(0)
            sent.append((order.arrived_at, sum(len(text.token_ids) for text in order.texts)))
            told[order.request_id] = wait(snapshot, *sent)
            queue.add(order)
        if ends > began:
            for span in spans:
                span.request.results[span.index] = {}
                if span.request.is_done:
                    queue.remove(span.request.message.request_id)
                    taken[span.request.message.request_id] = ends - span.request.message.arrived_at
        now = ends
    return [(told[name], taken[name]) for name in taken]
