"""Messages between the server and an engine's process: whole, in order, and without waiting for the other end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from app import errors
from app.errors import RequestError
from app.hardware.step_times import StepTimes, StepTimeTable
from app.messages import (
    Abort,
    Array,
    ArraysReady,
    Command,
    Encode,
    Generate,
    GrammarSource,
    Infer,
    LoadedAdapter,
    PromptScored,
    RequestFailed,
    SamplingParams,
    SequenceFinished,
    SetAdapter,
    Stop,
    Text,
    Timings,
    TokenLogprob,
    TokenScore,
    TokensReady,
)
from app.metrics.steps import EngineSnapshot, StepStats
from app.server.channel import Channel, Output, Pickled

LOGPROB = TokenLogprob(3, -0.5, ((3, -0.5), (4, -1.5)))
COMMANDS: tuple[Command, ...] = (
    Generate(
        "a", (1, 2), SamplingParams(stop=("x",), logit_bias=((1, 2.0),)), 0.5, ((1,),),
        GrammarSource("regex", "a+", "regex"), LoadedAdapter(1, 2), "salt", "definition",
    ),
    Encode("b", (Text((1, 2), (0, 1), 1),), ("embedding",), 1.0, True, 8),
    Infer("c", {"x": Array("FP32", (1, 2), b"12345678")}, ("y",), 1.0),
    Abort("a", "timeout", 1),
    SetAdapter(1, True),
    Stop(),
)  # fmt: skip
OUTPUT = Output(
    [
        PromptScored("a", (TokenScore(1, -0.1, 1, ((1, -0.1),)),)),
        TokensReady("a", 1, (5, 6), (LOGPROB,), Timings(0.1, 0.2)),
        SequenceFinished("a", 0, "stop", Timings(), 2, (7,), (LOGPROB,), 9, LOGPROB),
        ArraysReady("b", {"embedding": Array("FP32", (1,), b"1234")}, Timings(), 3),
    ],
    EngineSnapshot(1, 2, rows=((1, 2),), queue=(3,), step_times=StepTimes(StepTimeTable(((1, 0.1),), ()), 64)),
    StepStats(0.1, decode_tokens=1),
    5.0,
    "page_fault",
)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """The server's and the engine's, with a small buffer."""
    ours, theirs = socket.socketpair()
    for one in (ours, theirs):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server, engine = Channel(ours, is_engine=False), Channel(theirs, is_engine=True)
    yield server, engine
    server.close()
    engine.close()


def received(channel: Channel, number: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < number:
        found += channel.receive()
    return found


def test_every_command_and_event_arrives_as_it_was(ends: tuple[Channel, Channel]) -> None:
    server, engine = ends
    for command in COMMANDS:
        server.send(command)
    assert tuple(received(engine, len(COMMANDS))) == COMMANDS
    engine.send(OUTPUT)
    engine.send(Pickled.of({"any": "object"}))
    output, rare = received(server, 2)
    assert output == OUTPUT and rare.message() == {"any": "object"}


def every_error(kind: type[RequestError] = RequestError) -> Iterator[type[RequestError]]:
    yield kind
    for one in kind.__subclasses__():
        yield from every_error(one)


def test_every_error_of_a_request_arrives_with_its_fields(ends: tuple[Channel, Channel]) -> None:
    server, engine = ends
    for kind in every_error():
        error = kind("why", 2.5) if issubclass(kind, errors.Overloaded) else kind("why", "field")
        engine.send(Output([RequestFailed("a", error)], EngineSnapshot()))
        (output,) = received(server, 1)
        found = output.events[0].error
        assert (type(found), found.message, vars(found)) == (kind, "why", vars(error))


def test_a_full_socket_neither_blocks_the_sender_nor_loses_anything(ends: tuple[Channel, Channel]) -> None:
    server, engine = ends
    for number in range(5_000):  # nobody reads: a sender that waited would hang here
        engine.send(one_token(number))
        server.send(Abort(str(number)))
    reading = threading.Thread(target=lambda: commands.extend(received(engine, 5_000)))
    commands: list[Any] = []
    reading.start()
    outputs = received(server, 5_000)
    reading.join()
    assert [one.events[0].token_ids for one in outputs] == [(number,) for number in range(5_000)]
    assert commands == [Abort(str(number)) for number in range(5_000)]


def one_token(number: int) -> Output:
    return Output([TokensReady("a", 0, (number,))], EngineSnapshot())


def test_a_tensor_of_64_mib_passes(ends: tuple[Channel, Channel]) -> None:
    server, engine = ends
    data = bytes(range(256)) * 2**18
    server.send(Infer("a", {"x": Array("UINT8", (len(data),), data)}, (), 0.0))
    server.send(Stop())
    command, stop = received(engine, 2)
    assert command.inputs["x"].data == data and stop == Stop()


def test_an_end_that_is_closed_is_noticed(ends: tuple[Channel, Channel]) -> None:
    server, engine = ends
    server.close()
    with pytest.raises(EOFError):
        engine.receive()
    engine.send(OUTPUT)
    engine.send(OUTPUT)
    engine.flush(60.0)
