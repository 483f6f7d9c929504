"""Admission control: places, predictions, five hundred clients at once, and the metrics of it."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from app.errors import Overloaded, RequestError, RequestTimeout, StepFailed
from app.hardware.step_times import StepTimes, StepTimeTable
from app.messages import RequestFailed
from app.metrics.steps import EngineSnapshot
from app.service.admission import Admission, OpenCounts, first_token_seconds
from app.service.engine_client import TextPool
from app.service.service import Service
from fake_worker import LIMITS, Client, finished, request, serving, tokens

# Ten milliseconds a token of a prompt; decodes cost nothing to speak of, and wait for as long as anybody likes.
TEMPO = StepTimes(
    StepTimeTable(((1, 1e-5), (8, 1e-5)), ((1, 0.01), (1000, 10.0))), max_tokens=10**6, target_seconds=1e9
)


def admission(snapshot: EngineSnapshot, max_running: int = 2, max_waiting: int = 1) -> Admission:
    made = Admission(lambda: snapshot, clock=lambda: 3.0)
    made.max_running, made.max_waiting = max_running, max_waiting
    return made


async def test_the_next_one_is_refused_and_a_place_that_is_free_is_given_again() -> None:
    async with serving() as (service, worker, _):
        clients = [Client(service, request()) for _ in range(3)]  # two places and one in the queue
        orders = await worker.orders(3)
        with pytest.raises(Overloaded) as caught:
            await Client(service, request()).over()
        assert caught.value.retry_after_seconds >= 1
        service.on_events([finished(orders[0].request_id)])
        await asyncio.wait([client.task for client in clients], return_when=asyncio.FIRST_COMPLETED)
        late = Client(service, request())
        service.on_events([finished(order.request_id) for order in [*orders[1:], (await worker.orders(4))[3]]])
        for client in [*clients, late]:
            await client.over()


def test_places_and_bytes_are_of_all_processes_until_one_has_ended() -> None:
    memory = memoryview(bytearray(8 * OpenCounts.num_values(2))).cast("q")
    counts = [OpenCounts(memory, number) for number in (0, 1)]
    here, there = (Admission(EngineSnapshot, lambda: 3.0, counts=each) for each in counts)
    for each in (here, there):
        each.open(max_running=1, max_waiting=1, max_held_bytes=100)
    own, other = here.permit(), there.permit()
    other.hold(60)
    for each in (here, there):
        with pytest.raises(Overloaded, match="1 running and 1 waiting"):
            each.permit()
    with pytest.raises(Overloaded, match="hold"):
        own.hold(41)
    assert counts[0].clear(1)[OpenCounts.OPEN] == 1
    own.hold(100)
    here.permit().release()
    own.release()
    assert (here.num_open, there.num_open, here.num_held_bytes) == (0, 0, 0)


async def test_five_hundred_clients_at_once_are_answered_or_asked_to_come_back() -> None:
    limits = replace(LIMITS, max_running_seqs=16, max_waiting_requests=84)
    async with serving(limits) as (service, worker, _):
        clients = [Client(service, request(f"prompt {number}", params={"n": 1 + number % 2})) for number in range(500)]
        orders = await worker.orders(100)
        while len(orders) > 0:
            served, orders = orders[:16], orders[16:]
            told = [event for order in served for event in _whole(order.request_id, order.params.n)]
            service.on_events(told)
            await asyncio.sleep(0)
        outcomes = await asyncio.wait_for(
            asyncio.gather(*(client.over() for client in clients), return_exceptions=True), 10
        )
        refused = [outcome for outcome in outcomes if isinstance(outcome, Overloaded)]
        answered = [client for client in clients if client.error is None]
        assert (len(refused), len(answered), service.num_open) == (400, 100, 0)
        assert {client.text for client in answered} == {"hello", "hellohello"}
        assert worker.aborts == []


def _whole(name: str, n: int) -> list[Any]:
    return [
        event
        for choice in range(n)
        for event in [*tokens(name, "hello", choice), finished(name, "stop", choice=choice)]
    ]


def test_nothing_is_predicted_before_it_is_measured() -> None:
    assert admission(EngineSnapshot(num_waiting=9)).predicted_wait_seconds() is None
    assert admission(EngineSnapshot(num_waiting=9)).retry_after_seconds() == 1


def test_who_arrives_waits_for_the_prompts_before_it() -> None:
    made = admission(EngineSnapshot(step_times=TEMPO), max_running=9)
    assert made.predicted_wait_seconds() == pytest.approx(1.28), "a guess of its length, where nobody came yet"
    assert made.send(100) == pytest.approx(1.0)
    assert made.send(50) == pytest.approx(1.5, rel=0.02)
    for _ in range(100):
        made.observe(100, 80, 16)
    assert made.send(50) == pytest.approx(1.5 + 0.1, rel=0.02), "most of a prompt is found in the cache"


def test_a_snapshot_knows_of_whoever_was_sent_before_it() -> None:
    snapshots = [EngineSnapshot(step_times=TEMPO)]
    made = Admission(lambda: snapshots[-1], clock=lambda: 3.0)
    made.max_running = 9
    made.send(1000)
    assert made.send(10) == pytest.approx(10.1, rel=0.01)
    snapshots.append(EngineSnapshot(stepped_at=3.0, step_times=TEMPO))
    assert made.send(10) == pytest.approx(0.1)


def test_a_crowd_between_two_steps_is_reckoned_with_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted_seconds(now: EngineSnapshot, newcomers: list[Any], *rest: Any) -> float | None:
        asked.append(len(newcomers))
        return first_token_seconds(now, newcomers, *rest)

    monkeypatch.setattr("app.service.admission.first_token_seconds", counted_seconds)
    made = admission(EngineSnapshot(step_times=TEMPO), max_running=9)
    waits = [round(made.send(10) or 0.0, 6) for _ in range(320)]
    assert len(asked) < 40
    assert waits == sorted(waits)
    for busy in (made, admission(EngineSnapshot(rows=((1, 9),), step_times=TEMPO))):
        for _ in range(500):
            busy.retry_after_seconds()
    assert len(asked) < 42, "who is refused is told what was worked out for others"


def test_retry_after_has_an_end() -> None:
    assert admission(EngineSnapshot(queue=(10**6,), step_times=TEMPO)).retry_after_seconds() == 600


def test_a_place_is_free_again_after_an_error() -> None:
    made = admission(EngineSnapshot(), max_running=1, max_waiting=0)
    with pytest.raises(StepFailed), made.permit():
        raise StepFailed("no")
    with made.permit(), pytest.raises(Overloaded), made.permit():
        pass
    assert made.num_open == 0


def counted(service: Service) -> dict[str, float]:
    body = service._client.metrics.render()[0].decode()
    samples = [sample for family in parse(body) for sample in family.samples]
    return {",".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}


async def test_every_request_is_counted_once_by_how_it_ended() -> None:
    async with serving(replace(LIMITS, max_running_seqs=9)) as (service, worker, clock):
        clients = [Client(service, request(str(number), params={"n": 1 + (number == 0)})) for number in range(4)]
        orders = {order.token_ids: order.request_id for order in await worker.orders(4)}
        names = [orders[tuple(service.model.tokenizer.encode(str(number)))] for number in range(4)]
        clock.seconds += 3
        for step in zip(tokens(names[0], "abc"), tokens(names[0], "xyz", choice=1), strict=True):
            service.on_events(step)
            await asyncio.sleep(0)  # the loop is told of this step before the clock goes on
            clock.seconds += 0.02
        service.on_events([finished(names[0], "length", 3), finished(names[0], "stop", 3, choice=1)])
        await clients[0].over()
        service.on_events([finished(names[1], "stop", 1, stop_token_id=2), RequestFailed(names[2], StepFailed("no"))])
        clients[3].task.cancel()
        await asyncio.wait([client.task for client in clients])
        with pytest.raises(RequestError):
            await Client(service, request("")).over()
        seen = counted(service)
        ended = {
            name: value for name, value in seen.items() if value and name.startswith("armature_requests_total,native")
        }
        outcomes = {name.rsplit(",", 1)[1]: value for name, value in ended.items()}
        assert outcomes == {"length": 1, "stop": 1, "failed": 1, "aborted": 1, "invalid": 1}
        assert seen["armature_tokens_total,prompt"] == 2
        assert seen["armature_tokens_total,cached"] == 2
        assert seen["armature_tokens_total,completion"] == 7
        assert seen["armature_time_to_first_token_seconds_count"] == 3
        assert seen["armature_time_to_first_token_seconds_sum"] == pytest.approx(9.06)
        assert seen["armature_inter_token_latency_seconds_count"] == 4
        assert seen["armature_time_per_output_token_seconds_count"] == 2
        assert seen["armature_queue_seconds_sum"] == 0.75
        assert seen["armature_decode_seconds_sum"] == pytest.approx(0.08)
        assert seen["armature_request_completion_tokens_sum"] == 7
        assert seen["armature_request_completion_tokens_count"] == 2
        assert seen["armature_request_prompt_tokens_count"] == 4
        assert seen["armature_request_seconds_count,native"] == 4


async def test_the_metrics_see_the_worker_and_the_prediction() -> None:
    async with serving() as (service, worker, _):
        worker.snapshot = EngineSnapshot(num_running=1, num_waiting=2, step_times=TEMPO)
        seen = counted(service)
        assert (seen["armature_requests_waiting"], seen["armature_predicted_wait_seconds"]) == (2, pytest.approx(1.28))
        assert service.snapshot is worker.snapshot


async def test_the_error_of_the_prediction_is_measured_for_one_request_in_a_tenth_of_a_second() -> None:
    async with serving() as (service, worker, clock):
        worker.snapshot = EngineSnapshot(step_times=TEMPO)
        for number in range(9):
            client = Client(service, request())
            order = (await worker.orders(number + 1))[number]
            service.on_events([*tokens(order.request_id, "a"), finished(order.request_id)])
            await client.over()
            clock.seconds += 0.03
        assert counted(service)["armature_predicted_wait_error_ratio_count"] == 3


async def test_a_prompt_that_is_read_for_too_long_times_out_and_a_client_that_leaves_does_not() -> None:
    pool, is_over = TextPool(), threading.Event()
    pool.open(1, timeout_seconds=0.01)
    with pytest.raises(RequestTimeout, match="Reading the prompt"):
        await pool.run(1, is_over.wait)
    pool.open(1, timeout_seconds=60.0)
    task = asyncio.create_task(pool.run(1, is_over.wait))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    is_over.set()
    pool.close()
