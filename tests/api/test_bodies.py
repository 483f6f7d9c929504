"""The memory that large bodies share: who gets it, who waits, whose upload ends, and when it is free again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.api import bodies
from app.api.bodies import BodyMemory, BodyShare
from app.api.middleware import RequestGate
from app.errors import Overloaded
from tests.api.scripted_service import Conversation, ScriptedService


class Upload(BodyShare):
    """A share that notes that its upload was ended."""

    __slots__ = ("has_ended",)

    def __init__(self, address: str, num_bytes: int) -> None:
        self.has_ended = False
        super().__init__(address, num_bytes, self.note_end)

    def note_end(self) -> None:
        self.has_ended = True


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_address_that_holds_least_is_served_first(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = BodyMemory(100)
    first, second = Upload("large", 60), Upload("large", 40)
    await memory.take(first)
    await memory.take(second)
    waiting = {name: Upload(name, 40) for name in ("large", "small")}
    tasks = {name: asyncio.create_task(memory.take(each)) for name, each in waiting.items()}
    await turns()
    memory.give_back(second)
    await turns()
    assert (tasks["small"].done(), tasks["large"].done()) == (True, False)
    memory.give_back(first)
    memory.give_back(first)
    await asyncio.gather(*tasks.values())
    assert memory.num_bytes == 80
    for each in waiting.values():
        memory.give_back(each)
    assert memory.num_bytes == 0 and not memory._bytes_of and not memory._waiting


async def test_an_upload_that_stalled_ends_for_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "STALLED_SECONDS", 0.0)
    memory = BodyMemory(100)
    complete, small, large = Upload("large", 40), Upload("small", 20), Upload("large", 40)
    for each in (complete, small, large):
        await memory.take(each)
    complete.end = None
    waiting = Upload("new", 30)
    task = asyncio.create_task(memory.take(waiting))
    await turns()
    assert [each.has_ended for each in (complete, small, large)] == [False, False, True]
    memory.give_back(large)
    await task
    memory.give_back(waiting)


async def test_an_upload_that_goes_on_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = BodyMemory(100)
    moving, trickling = Upload("a", 50), Upload("a", 50)
    for each in (moving, trickling):
        await memory.take(each)
        each.progressed_at -= 10
    now = asyncio.get_running_loop().time()
    moving.bring(bodies.STALLED_BYTES, now)
    trickling.bring(1, now)
    task = asyncio.create_task(memory.take(Upload("b", 10)))
    await turns()
    assert (moving.has_ended, trickling.has_ended) == (False, True)
    memory.give_back(trickling)
    await task


async def test_too_many_that_wait_are_refused_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_WAITING_BODIES", 2)
    memory = BodyMemory(10)
    held = Upload("a", 10)
    await memory.take(held)
    greedy = [asyncio.create_task(memory.take(Upload("greedy", 10))) for _ in range(2)]
    await turns()
    with pytest.raises(Overloaded):
        await memory.take(Upload("greedy", 10))
    other = asyncio.create_task(memory.take(Upload("other", 10)))
    await turns()
    assert [task.done() for task in (*greedy, other)] == [False, True, False]
    with pytest.raises(Overloaded):
        await greedy[1]
    for task in (greedy[0], other):
        task.cancel()
    await asyncio.gather(greedy[0], other, return_exceptions=True)
    assert not memory._waiting


async def test_small_bodies_are_served_while_large_ones_have_all_memory(app: Any, service: ScriptedService) -> None:
    gate = gate_of(app)
    held = Upload("x", 100)
    gate.body_memory = BodyMemory(100)
    await gate.body_memory.take(held)
    talk = Conversation(app, "/generate", b'{"prompt":"' + b"x" * 60_000 + b'"}')
    await talk.over()
    assert talk.sent[0]["status"] == 200


async def test_memory_is_free_once_a_body_is_parsed(app: Any, service: ScriptedService) -> None:
    """Eight complete bodies padded with blanks locked all others out until their answers ended."""
    memory = gate_of(app).body_memory = BodyMemory()
    service.scripts = [[asyncio.Event()]]
    talk = Conversation(app, "/generate", b" " * 1_000_000 + b'{"prompt":"x"}')
    while not service.num_waiting:
        await asyncio.sleep(0.001)
    assert memory.num_bytes == 0
    talk.release()
    await talk.over()


async def test_a_body_that_is_too_slow_ends_with_408(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "PACE_SECONDS", 0.01)
    talk = Conversation(app, "/generate", [])
    await talk.over()
    assert talk.sent[0]["status"] == 408
    assert (b"connection", b"close") in talk.sent[0]["headers"]


def gate_of(app: Any) -> RequestGate:
    gate = app._serve
    assert isinstance(gate, RequestGate)
    return gate
