"""The client's HTTP, against servers that say byte by byte what they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from armature_bench.console import MeasurementFailed
from armature_bench.http import wire as wires
from armature_bench.http.client import ArmatureClient, stream_request
from armature_bench.http.dialects import GENERATE_DIALECTS, StreamRequest
from armature_bench.http.wire import HttpClient, HttpRequestFailed

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


SILENCE = b"never"


class Script:
    """Answers each request with the next of `answers`, byte by byte; an empty one closes the connection."""

    def __init__(self, *answers: bytes, close: bool = False) -> None:
        self.answers = list(answers)
        self.close = close
        self.heads: list[bytes] = []
        self.connections = 0
        self.asked = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self.tasks.append(task)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while self.answers:
                self.heads.append(await reader.readuntil(b"\r\n\r\n"))
                answer = self.answers.pop(0)
                if answer == SILENCE:
                    self.asked.set()
                    await reader.read()  # until whoever asked has left
                for byte in answer:
                    writer.write(bytes([byte]))
                    await writer.drain()
                if self.close or not answer:
                    break
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@asynccontextmanager
async def talking(script: Script) -> AsyncIterator[HttpClient]:
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    wire = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", api_key="secret")
    async with server:
        yield wire
        wire.close()
        await asyncio.gather(*script.tasks)


async def test_a_connection_is_used_again() -> None:
    script = Script(OK, OK)
    async with talking(script) as wire:
        answers = [await wire.get("/v1/models") for _ in range(2)]
    assert [answer.body for answer in answers] == [b"hi", b"hi"]
    assert script.connections == 1
    assert script.heads[0].startswith(b"GET /v1/models HTTP/1.1\r\n"), "/v1 stands there once"
    assert b"Authorization: Bearer secret\r\n" in script.heads[0]


async def test_a_connection_that_was_closed_while_idle_is_opened_again() -> None:
    script = Script(OK, b"", OK)
    async with talking(script) as wire:
        assert (await wire.get("/")).body == b"hi"
        assert (await wire.get("/")).body == b"hi"
    assert script.connections == 2


async def test_a_request_that_is_given_up_is_not_sent_again() -> None:
    script = Script(OK, SILENCE, OK)
    async with talking(script) as wire:
        await wire.get("/")
        asking = asyncio.create_task(wire.get("/"))
        await script.asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asking, 5.0)
    assert script.connections == 1


async def test_a_body_may_end_with_its_connection() -> None:
    async with talking(Script(b"HTTP/1.1 200 OK\r\n\r\nall of it", close=True)) as wire:
        assert (await wire.get("/")).body == b"all of it"


@pytest.mark.parametrize(
    "answer, kind",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "broken off"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf", "broken off"),
        (b"", "broken off"),
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
    ],
)
async def test_half_an_answer_is_a_failure_with_a_name(answer: bytes, kind: str) -> None:
    async with talking(Script(answer, close=True)) as wire:
        with pytest.raises(HttpRequestFailed) as failed:
            await wire.get("/")
    assert failed.value.kind == kind


async def test_a_refusal_says_what_the_server_said_and_for_how_long() -> None:
    async with talking(Script(b"HTTP/1.1 429 No\r\nRetry-After: 3\r\nContent-Length: 4\r\n\r\nbusy")) as wire:
        answer = await wire.get("/x")
    with pytest.raises(HttpRequestFailed, match="/x answered 429: busy") as failed:
        answer.raise_for_status("/x")
    assert (failed.value.kind, failed.value.retry_after) == ("status 429", 3.0)


async def test_nobody_there_is_a_failure_too() -> None:
    async with talking(Script()) as wire:
        pass
    with pytest.raises(HttpRequestFailed, match="cannot be reached") as failed:
        await wire.get("/")
    assert failed.value.kind == "no connection"
    assert not await ArmatureClient(wire).ready()


async def test_a_server_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wires, "ANSWER_SECONDS", 0.05)
    async with talking(Script(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", OK)) as wire:
        with pytest.raises(HttpRequestFailed) as failed:
            await wire.get("/")
    assert failed.value.kind == "timeout"


@pytest.mark.parametrize("url", ["ftp://somewhere", "http://", "http:///v1"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(MeasurementFailed, match="is not a server address"):
        HttpClient(url)


def chunked(*events: str) -> bytes:
    texts = [f"data: {event}\n\n".encode() for event in events]
    parts = b"".join(f"{len(text):x}\r\n".encode() + text + b"\r\n" for text in texts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + parts + b"0\r\n\r\n"


DELTA = '{"choices":[{"delta":{"content":"a"}}]}'
TEXT = '{"choices":[{"text":"a"}]}'
IDS = '{"index":0,"text":"ab","token_ids":[4,5]}'


@pytest.mark.parametrize(
    "api, events, pieces",
    [
        ("openai", ('{"choices":[{"delta":{"role":"assistant"}}]}', DELTA, DELTA, "[DONE]"), [1, 1]),
        ("completions", (TEXT, '{"choices":[{"text":"","finish_reason":"stop"}]}', "[DONE]"), [1]),
        ("native", (IDS, '{"text":"","token_ids":[],"finish_reason":"length"}'), [2]),
    ],
)
async def test_each_dialect_reports_which_events_bring_tokens(
    api: str, events: tuple[str, ...], pieces: list[int]
) -> None:
    usage = '{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":9}}'
    async with talking(Script(chunked(*events), chunked(*events[:-1], usage))) as wire:
        stream = await stream_request(wire, GENERATE_DIALECTS[api], StreamRequest("x", 2))
        counted = await stream_request(wire, GENERATE_DIALECTS[api], StreamRequest("x", 2))
    assert sum(count for _, count in stream.chunks) == sum(pieces)
    assert stream.num_tokens == sum(pieces)
    assert counted.num_tokens == 9, "the server's own count wins"


@pytest.mark.parametrize(
    "events, kind",
    [
        ((TEXT, '{"error":"full"}'), "ended by an error"),
        ((TEXT, "{"), "not JSON"),
        (("[DONE]",), "no tokens"),
        (("[]",), "not JSON"),
    ],
)
async def test_a_stream_that_fails_in_the_middle_has_a_kind(events: tuple[str, ...], kind: str) -> None:
    async with talking(Script(chunked(*events))) as wire:
        with pytest.raises(HttpRequestFailed) as failed:
            await stream_request(wire, GENERATE_DIALECTS["completions"], StreamRequest("x", 2))
    assert failed.value.kind == kind


async def test_whoever_has_enough_leaves_and_comes_back() -> None:
    script = Script(chunked(*[IDS] * 5), chunked(*[IDS] * 5))
    async with talking(script) as wire:
        left = await ArmatureClient(wire).generate([1], 10, lambda num_pieces: False)
        whole = await ArmatureClient(wire).generate([1], 10)
    assert (left.num_tokens, whole.num_tokens) == (2, 10)
    assert script.connections == 2


async def test_fewer_tokens_than_asked_for_are_no_measurement() -> None:
    async with talking(Script(chunked(IDS))) as wire:
        with pytest.raises(MeasurementFailed, match="asked for 3 tokens, the server sent 2"):
            await ArmatureClient(wire).generate([1], 3)
