"""The door: ids, keys, the size of bodies, clients that leave, and a server that stops; message by message over ASGI."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from app.api import bodies
from app.api.middleware import RequestGate
from tests.api.scripted_service import Conversation, ScriptedService, deltas

PROMPT = b'{"prompt": "a"}'
STREAM = b'{"prompt": "a", "stream": true}'
Talk = Callable[..., Conversation]


def status(conversation: Conversation) -> int:
    return int(conversation.sent[0]["status"])


def header(conversation: Conversation, name: str) -> str | None:
    return next((value.decode() for key, value in conversation.sent[0]["headers"] if key == name.encode()), None)


@pytest.mark.parametrize("path", ["/v1/completions", "/nothing", "/healthz", "/metrics"])
async def test_every_answer_has_an_id(client: httpx.AsyncClient, path: str) -> None:
    first, second = await client.get(path), await client.get(path)
    assert first.headers["x-request-id"] != second.headers["x-request-id"]


@pytest.mark.parametrize("offered", ["abc-123", "x" * 128, "!~"])
async def test_a_sane_id_is_echoed(client: httpx.AsyncClient, offered: str) -> None:
    assert (await client.get("/healthz", headers={"x-request-id": offered})).headers["x-request-id"] == offered


@pytest.mark.parametrize("offered", ["", "x" * 129, "a b", "a\tb", "é".encode().decode("latin-1")])
async def test_any_other_is_not(client: httpx.AsyncClient, offered: str) -> None:
    sent = {"x-request-id": offered.encode("latin-1")}
    answered = (await client.get("/healthz", headers=sent)).headers["x-request-id"]
    assert answered != offered
    assert len(answered) == 32


async def test_keys(build: Callable[..., Any]) -> None:
    transport = httpx.ASGITransport(build(api_keys=("one", "zwei-ü")))
    async with httpx.AsyncClient(transport=transport, base_url="http://armature") as client:
        for key in ("one", "zwei-ü"):
            sent = {"authorization": f"Bearer {key}".encode()}
            assert (
                await client.post("/generate", content=PROMPT, headers=sent | {"content-type": "application/json"})
            ).is_success
        for wrong in ("Bearer two", "Bearer ", "one", "Basic one", "Bearer one2"):
            refused = await client.post("/v1/completions", content=PROMPT, headers={"authorization": wrong})
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["type"] == "authentication_error"
        assert (await client.get("/info/steps")).status_code == 401
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await client.get(path)).status_code == 200


async def test_a_body_that_says_it_is_too_large_is_not_read(conversation: Talk) -> None:
    talk = conversation("/v1/completions", [b"x" * 2**20] * 100, {"content-length": str(100 * 2**20)})
    await talk.over()
    assert status(talk) == 413
    assert header(talk, "connection") == "close"
    assert json.loads(talk.body)["error"]["code"] == "body_too_large"
    assert talk.received_before_answer == 0


async def test_one_that_does_not_say_is_read_to_the_limit_and_no_further(conversation: Talk) -> None:
    talk = conversation("/generate", [b"x" * 2**20] * 100)
    await talk.over()
    assert status(talk) == 413
    assert set(json.loads(talk.body)["error"]) == {"code", "message", "field"}
    assert talk.received_before_answer == bodies.MAX_BODY_BYTES + 2**20


async def test_what_a_refused_client_still_sends_is_thrown_away(conversation: Talk) -> None:
    talk = conversation("/generate", [b"x" * 2**20] * 100)
    await talk.over()
    assert talk.received == 100 * 2**20
    assert talk.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


async def test_a_body_in_pieces_is_one_body(conversation: Talk) -> None:
    talk = conversation("/generate", [b'{"pro', b'mpt": ', b'"a"}'])
    await talk.over()
    assert status(talk) == 200


@pytest.mark.parametrize(
    ("encoding", "size", "is_quick"),
    [("", 20, True), ("", 64 * 1024, True), ("", 64 * 1024 + 1, False), ("gzip", 20, False)],
)
async def test_a_small_body_that_has_arrived_has_no_deadline_and_is_the_same(
    monkeypatch: pytest.MonkeyPatch, encoding: str, size: int, is_quick: bool
) -> None:
    sent = gzip.compress(b"x" * size) if encoding else b"x" * size
    deadlines: list[float] = []
    timeout = asyncio.timeout
    monkeypatch.setattr(asyncio, "timeout", lambda seconds: deadlines.append(seconds) or timeout(seconds))  # type: ignore[func-returns-value]

    async def read(has_arrived: bool) -> bytes:
        messages = [{"type": "http.request", "body": sent}, {"type": "http.disconnect"}]
        headers = [(b"content-length", str(len(sent)).encode()), (b"content-encoding", encoding.encode())]
        extensions = {bodies.HAS_ARRIVED: lambda: has_arrived}
        scope = {"path": "/generate", "headers": headers, "extensions": extensions, "client": ("127.0.0.1", 1)}

        async def receive() -> Any:
            return messages.pop(0)

        async def find_check(_: Any) -> None:
            return None

        body = bodies.ArrivingBody(scope, receive, bodies.BodyMemory())
        await body.read(find_check)
        content = bytes(body.content)
        body.release()
        assert not body.content
        with pytest.raises(bodies.ClientDisconnected):
            await bodies.ArrivingBody(scope, receive, bodies.BodyMemory()).read(find_check)
        return content

    assert await read(has_arrived=False) == b"x" * size and len(deadlines) == 2
    assert await read(has_arrived=True) == b"x" * size and len(deadlines) == (2 if is_quick else 4)


async def test_all_bodies_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 100)
    monkeypatch.setattr(bodies, "SMALL_BODY_BYTES", 10)
    monkeypatch.setattr(bodies, "WAIT_SECONDS", 0.01)

    async def never(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    door = RequestGate(never)
    door.body_memory = memory = bodies.BodyMemory(800)
    held = [Conversation(door, "/generate", b"x" * 100) for _ in range(8)]
    while memory.num_bytes < 800:
        await asyncio.sleep(0)
    refused = Conversation(door, "/generate", b"x" * 100)
    await refused.over()
    assert status(refused) == 429
    held[0].release()
    await held[0].over()
    assert memory.num_bytes == 100 * (len(held) - 1)
    for talk in held[1:]:
        talk.release()
        await talk.over()
    assert memory.num_bytes == 0


@pytest.mark.parametrize(
    ("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("Identity", bytes)]
)
async def test_a_compressed_body_is_made_plain(
    conversation: Talk, encoding: str, compress: Callable[[bytes], bytes]
) -> None:
    body = compress(b'{"prompt": "a"}')
    talk = conversation("/generate", [body[:9], body[9:]], headers={"content-encoding": encoding})
    await talk.over()
    assert status(talk) == 200


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("br", b"{}"),
        ("gzip", b'{"prompt": "a"}'),
        ("gzip", gzip.compress(b'{"prompt": "a"}', mtime=0)[:-3]),
        ("gzip", gzip.compress(b'{"prompt": "a"}', mtime=0) + b"more"),
        ("gzip", b""),
    ],
)
async def test_a_body_that_is_not_what_it_says(conversation: Talk, encoding: str, body: bytes) -> None:
    talk = conversation("/generate", body, headers={"content-encoding": encoding})
    await talk.over()
    assert status(talk) == 400


async def test_a_small_body_that_would_become_a_large_one(conversation: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 2**16)
    talk = conversation("/generate", gzip.compress(b" " * 2**24), headers={"content-encoding": "gzip"})
    talk.release()
    await talk.over()
    assert status(talk) == 413


async def test_only_bodies_with_binary_tensors_may_be_larger(
    conversation: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 100)
    monkeypatch.setattr(bodies, "MAX_TENSOR_BODY_BYTES", 200)
    header = {"inference-header-content-length": "2"}
    for path, headers, length, expected in [
        ("/v2/models/demo/infer", header, 200, 400),  # read: `infer` is nothing for a decoder
        ("/v2/models/demo/infer", header, 201, 413),
        ("/v2/models/demo/infer", {}, 200, 413),
        ("/generate", header, 200, 413),
    ]:
        talk = conversation(path, b" " * length, headers=headers)
        talk.release()
        await talk.over()
        assert status(talk) == expected, (path, headers, length)


async def test_a_body_that_never_comes(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_SECONDS", 0.01)
    talk = Conversation(app, "/generate", [])
    await talk.over()
    assert status(talk) == 408


async def test_a_client_that_leaves_before_its_body_is_nobody(app: Any, service: ScriptedService) -> None:
    talk = Conversation(app, "/generate", [])
    talk.release()
    await talk.over()
    assert talk.sent == []
    assert service.requests == []


@pytest.mark.parametrize("body", [PROMPT, STREAM])
@pytest.mark.parametrize("begun", [0, 1])
async def test_a_client_that_leaves_ends_its_request(
    conversation: Talk, service: ScriptedService, body: bytes, begun: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "armature.requests")
    never = asyncio.Event()
    service.scripts = [[*deltas("a")[:begun], never]]
    talk = conversation("/generate", body)
    while not service.num_open:
        await asyncio.sleep(0)
    if body is STREAM and begun:
        await talk.until(2)
    talk.release()
    await talk.over()
    assert service.num_open == 0
    assert all(message["type"] != "http.response.start" for message in talk.sent) or begun
    (line,) = [record.getMessage() for record in caplog.records if record.name == "armature.requests"]
    assert line.startswith("POST /generate 499 id=")


@pytest.mark.parametrize("stream", [b"false", b"true"])
async def test_a_client_that_leaves_ends_all_its_prompts(
    conversation: Talk, service: ScriptedService, stream: bytes
) -> None:
    service.scripts = [[*deltas("a")[:1], asyncio.Event()], [asyncio.Event()]]
    talk = conversation("/v1/completions", b'{"prompt": ["x", "y", "z"], "stream": ' + stream + b"}")
    while service.num_waiting < 3:
        await asyncio.sleep(0)
    talk.release()
    await talk.over()
    assert service.num_open == 0


async def test_a_client_that_leaves_while_it_does_not_read(app: Any, service: ScriptedService) -> None:
    """The server is stuck in `send`, not in the service: the request must end all the same."""
    talk = Conversation(app, "/generate", STREAM, reads=False)
    await talk.until(1)
    talk.release()
    await talk.over()
    assert service.num_open == 0


async def test_a_client_that_neither_reads_nor_leaves_cannot_hold_up_a_stop(app: Any, service: ScriptedService) -> None:
    talk = Conversation(app, "/generate", STREAM, reads=False)
    await talk.until(1)
    talk.task.cancel()  # the end of draining
    await talk.until(2)
    talk.task.cancel()  # the end of the loop
    await asyncio.wait([talk.task], timeout=10)
    assert talk.task.cancelled()
    assert service.num_open == 0


@pytest.mark.parametrize("body", [PROMPT, STREAM])
async def test_a_server_that_stops_notifies_those_it_cuts_off(
    conversation: Talk, service: ScriptedService, body: bytes
) -> None:
    service.scripts = [[*deltas("a")[:1], asyncio.Event()]]
    talk = conversation("/v1/completions", body)
    while not service.num_open:
        await asyncio.sleep(0)
    if body is STREAM:
        await talk.until(2)
    talk.task.cancel()
    await talk.over()
    assert service.num_open == 0
    last = talk.body.split(b"data: ")[-1]
    assert json.loads(last)["error"]["code"] == "service_stopping"
    assert talk.sent[-1]["more_body"] is False
    assert status(talk) == (200 if body is STREAM else 503)


async def test_events_are_sent_as_they_come(conversation: Talk, service: ScriptedService) -> None:
    gate = asyncio.Event()
    pieces = deltas("a", "b")
    service.scripts = [[pieces[0], gate, *pieces[1:]]]
    talk = conversation("/generate", STREAM)
    await talk.until(2)
    assert header(talk, "content-type") == "text/event-stream; charset=utf-8"
    assert json.loads(talk.body.removeprefix(b"data: "))["text"] == "a"
    gate.set()
    await talk.over()
    assert talk.body.count(b"data: ") == 3


async def test_each_request_has_a_line(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "armature.requests"):
        await client.post("/nothing?q=secret", content=PROMPT, headers={"x-request-id": "mine"})
        await client.get("/healthz")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "armature.requests"]
    assert line.startswith(
        "POST /nothing 404 id=mine prompt_tokens=0 completion_tokens=0 queue_ms=- first_token_ms=- total_ms="
    )
