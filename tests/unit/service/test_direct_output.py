"""Plain tokens go to their client at once, and everything else to the reader of the stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest

from app.errors import InvalidRequest
from app.messages import SequenceFinished, TokensReady
from app.service.requests import ChoiceFinished, DirectOutput, StreamEvent, TextDelta
from app.text.detokenizer import IncrementalDetokenizer
from fake_worker import TIMINGS, finished, request, serving, tokenizer


class Connection:
    """A client's connection: what was written to it, and whether it takes more."""

    def __init__(self) -> None:
        self.written: list[tuple[str, tuple[int, ...]]] = []
        self.output = DirectOutput(self.emit)

    def emit(self, text: str, token_ids: Sequence[int]) -> None:
        self.written.append((text, tuple(token_ids)))

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.written)


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def read(service: Any, found: list[StreamEvent], connection: Connection, **params: Any) -> None:
    async with aclosing(service.generate(request(params=params), connection.output)) as stream:
        found.extend([event async for event in stream])


async def answer(pieces: Sequence[str], connection: Connection, found: list[StreamEvent], **params: Any) -> float:
    """Send the pieces of a text, each with a step of its own, and return the number of completion tokens counted."""
    async with serving() as (service, worker, clock):
        reader = asyncio.ensure_future(read(service, found, connection, **params))
        (order,) = await worker.orders()
        timings = TIMINGS
        for piece in pieces:
            clock.seconds += 0.5
            events = [
                TokensReady(order.request_id, 0, (one,), timings=timings if place == 0 else None)
                for place, one in enumerate(ids_of(piece))
            ]
            timings = None  # type: ignore[assignment]
            service.on_events(events)
            await turns()
        count = sum(len(ids_of(piece)) for piece in pieces)
        service.on_events([finished(order.request_id, "length", count)])
        await reader
        samples = service._client.metrics.samples("tokens")
        return next(sample.value for sample in samples if sample.labels.get("kind") == "completion")


async def test_after_the_first_token_the_reader_gets_the_end_alone() -> None:
    connection, found = Connection(), list[StreamEvent]()
    assert await answer(["a", "b", "c"], connection, found) == 3
    assert connection.written == [("b", tuple(ids_of("b"))), ("c", tuple(ids_of("c")))]
    *_, first, end = found
    assert isinstance(first, TextDelta)
    assert first.text == "a"
    assert isinstance(end, ChoiceFinished)
    assert end.num_completion_tokens == end.usage.completion_tokens == 3


async def test_parts_of_a_character_are_written_together() -> None:
    connection, found = Connection(), list[StreamEvent]()
    await answer(["a", "\N{OWL}"], connection, found)
    assert len(ids_of("\N{OWL}")) > 1
    assert connection.written == [("\N{OWL}", tuple(ids_of("\N{OWL}")))]


async def test_a_client_that_must_read_first_gets_what_waits_from_the_reader() -> None:
    connection, found = Connection(), list[StreamEvent]()
    connection.output.flow.write_paused = True
    await answer(["a", "b", "c"], connection, found)
    assert connection.written == []
    assert [event.text for event in found if isinstance(event, TextDelta)] == ["a", "b", "c"]


async def test_what_waits_is_written_as_one_event() -> None:
    connection, found = Connection(), list[StreamEvent]()
    async with serving() as (service, worker, _):
        reader = asyncio.ensure_future(read(service, found, connection))
        (order,) = await worker.orders()
        for place, one in enumerate(ids_of("abcd")):
            service.on_events([TokensReady(order.request_id, 0, (one,), timings=None if place else TIMINGS)])
        await turns()
        assert connection.text == "bcd"
        assert len(connection.written) == 1
        service.on_events([SequenceFinished(order.request_id, 0, "length", num_completion_tokens=4)])
        await reader
    assert isinstance(found[-1], ChoiceFinished)


@pytest.mark.parametrize("params", [{"n": 2}, {"logprobs": 1}, {"stop": ("x",)}], ids=str)
async def test_other_events_are_left_to_the_reader(params: dict[str, Any]) -> None:
    connection, found = Connection(), list[StreamEvent]()
    async with serving() as (service, worker, _):
        reader = asyncio.ensure_future(read(service, found, connection, **params))
        (order,) = await worker.orders()
        for place, one in enumerate(ids_of("abc")):
            service.on_events([TokensReady(order.request_id, 0, (one,), timings=None if place else TIMINGS)])
            await turns()
        for choice in range(params.get("n", 1)):
            service.on_events([finished(order.request_id, "length", 3, choice)])
        await reader
    assert connection.written == []
    assert "".join(event.text for event in found if isinstance(event, TextDelta)) == "abc"


async def test_the_gaps_between_tokens_are_in_the_metrics() -> None:
    connection, found = Connection(), list[StreamEvent]()
    async with serving() as (service, worker, clock):
        reader = asyncio.ensure_future(read(service, found, connection))
        (order,) = await worker.orders()
        for place, one in enumerate(ids_of("abc")):
            service.on_events([TokensReady(order.request_id, 0, (one,), timings=None if place else TIMINGS)])
            await turns()
            clock.seconds += 0.5
        service.on_events([finished(order.request_id, "length", 3)])
        await reader
        samples = service._client.metrics.samples("inter_token_latency_seconds")
    assert {sample.name.rpartition("_")[2]: sample.value for sample in samples if "bucket" not in sample.name} == {
        "count": 2,
        "sum": 1.0,
    }


async def test_a_token_that_cannot_be_decoded_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    broken, whole = Connection(), Connection()
    async with serving() as (service, worker, _):
        readers = [asyncio.ensure_future(read(service, [], one)) for one in (broken, whole)]
        orders = await worker.orders(2)
        first, second = ids_of("ab")
        service.on_events([TokensReady(order.request_id, 0, (first,), timings=TIMINGS) for order in orders])
        await turns()
        push = IncrementalDetokenizer.push
        failed: list[IncrementalDetokenizer] = []

        def fail_once(self: IncrementalDetokenizer, token_id: int) -> str:
            if not failed:
                failed.append(self)
                raise InvalidRequest("cannot decode")
            return push(self, token_id)

        monkeypatch.setattr(IncrementalDetokenizer, "push", fail_once)
        service.on_events([TokensReady(order.request_id, 0, (second,)) for order in orders])
        service.on_events([finished(orders[1].request_id, "length", 2)])
        with pytest.raises(InvalidRequest, match="cannot decode"):
            await readers[0]
        await readers[1]
    assert (broken.text, whole.text) == ("", "b")
    assert orders[0].request_id in {abort.request_id for abort in worker.aborts}
