"""The clients of an engine: a mailbox that the worker reads itself, and events that go where their requests are."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Empty

import pytest

from app.messages import Abort, ArraysReady, Command, Encode, Generate, SamplingParams, SequenceFinished, TokensReady
from app.metrics.steps import EngineSnapshot, StepStats
from app.server.channel import Channel, ClientHello, Output
from app.server.engine_clients import EngineClients

BUSY = EngineSnapshot(num_running=2)


class Ends:
    """An engine's clients: the main process, and others that connect."""

    def __init__(self, path: Path) -> None:
        ours, theirs = socket.socketpair()
        self.main = Channel(ours, is_engine=False)
        self._path, listener = str(path / "engine"), socket.socket(socket.AF_UNIX)
        listener.bind(self._path)
        listener.listen()
        self.engine, self._listener = EngineClients(Channel(theirs, is_engine=True), listener), listener
        self.opened = [self.main, self.engine.main]

    def connect(self, number: int) -> Channel:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._path)
        self.opened.append(channel := Channel(connection, is_engine=False))
        channel.send(ClientHello(number, 3))
        return channel

    def taken(self) -> list[Command]:
        found = []
        while not self.engine.empty():
            found.append(self.engine.get())
        return found

    def close(self) -> None:
        for each in (*self.opened, *(one.channel for one in self.engine._others.values())):
            each.close()
        for end in (self._listener, self.engine._woken, self.engine._waker):
            end.close()


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path)
    yield made
    made.close()


def generate(request_id: str, n: int = 1) -> Generate:
    return Generate(request_id, (1, 2), SamplingParams(n=n), 0.0)


def outputs(channel: Channel) -> list[Output]:
    return channel.receive(socket.MSG_DONTWAIT)


def test_the_mailbox_has_commands_of_all_in_order(ends: Ends) -> None:
    other = ends.connect(1)
    ends.main.send(generate("a#0"))
    assert ends.engine.get() == generate("a#0")
    other.send(generate("b#1"))
    other.send(Abort("b#1"))
    assert [ends.engine.get(), ends.engine.get()] == [generate("b#1"), Abort("b#1")]
    assert ends.engine.empty()
    for options in ({"block": False}, {"timeout": 0.001}):
        with pytest.raises(Empty):
            ends.engine.get(**options)


def test_a_command_of_the_process_itself_wakes_the_worker(ends: Ends) -> None:
    assert ends.engine.empty()
    putting = threading.Timer(0.01, ends.engine.put, (Abort("a#0"),))
    putting.start()
    assert ends.engine.get(timeout=60.0) == Abort("a#0")
    putting.join()


def test_the_worker_takes_over_from_the_thread_that_reads_while_it_loads(ends: Ends) -> None:
    loading = threading.Thread(target=ends.engine.read_while_loading)
    loading.start()
    ends.main.send(generate("a#0"))
    assert ends.engine.get(timeout=60.0) == generate("a#0")
    loading.join(60.0)
    assert not loading.is_alive()


def test_what_is_taken_otherwise_does_not_reach_the_worker(ends: Ends) -> None:
    ends.engine.take = lambda command: None if isinstance(command, Generate) else command
    for command in (generate("a#0"), Abort("b#3")):
        ends.main.send(command)
    assert ends.engine.get(timeout=60.0) == Abort("b#3")


def test_events_go_to_the_process_of_their_request_and_steps_to_the_main_one(ends: Ends) -> None:
    others = [ends.connect(1), ends.connect(2)]
    for number, each in enumerate(others, 1):
        each.send(generate(f"x#{number}"))
        assert ends.engine.get(timeout=60.0) == generate(f"x#{number}")
    events = [TokensReady(name, 0, (7,)) for name in ("m#0", "x#1", "y#4", "z#5", "m#3")]
    ends.engine.send([*events], BUSY, stats := StepStats(0.1))
    (found,) = outputs(ends.main)
    assert (found.events, found.stats, found.snapshot) == ([events[0], events[4]], stats, BUSY)
    assert [[one.events for one in outputs(each)] for each in others] == [[events[1:3]], [[events[3]]]]
    ends.engine.send([], BUSY)
    assert [one.events for one in outputs(ends.main)] == [[]]
    assert outputs(others[0]) == []  # it has seen this state a moment ago
    ends.engine.send([], EngineSnapshot())
    assert [one.snapshot for one in outputs(others[0])] == [EngineSnapshot()]


def test_the_requests_of_a_process_that_has_ended_are_aborted(ends: Ends) -> None:
    other = ends.connect(1)
    sent = [
        generate("one#1"),
        generate("two#4", n=2),
        generate("gone#7"),
        generate("left#10"),
        Encode("e#13", (), (), 0.0),
    ]
    for command in (*sent, Abort("left#10")):
        other.send(command)
    while len(ends.taken()) == 0 or "e#13" not in next(iter(ends.engine._others.values())).requests.open:
        pass
    ends.engine.send([SequenceFinished(name, 0, "stop") for name in ("two#4", "gone#7")], BUSY)
    ends.engine.send([ArraysReady("e#13", {})], BUSY)
    other.close()
    aborts = [ends.engine.get(timeout=60.0), ends.engine.get(timeout=60.0)]
    assert aborts == [Abort("one#1"), Abort("two#4")] and ends.engine.empty()
    assert [one.events for one in outputs(ends.main)] == [[], []]
