"""HTTP as it is specified: requests with an Upgrade, HEAD, HTTP/1.0, half-closed connections, hosts, and what is no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator

import pytest

from app.api import http_protocol
from tests.api.scripted_service import deltas
from tests.attack.attack_server import JSON, Answer, AttackServer, attacked, get, post, read_all, until

BODY = b'{"prompt":"Once"}'
SMUGGLED = get("/info/steps?after=0", b"x-request-id: SMUGGLED", b"connection: close")
CLOSE = b"connection: close"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
H2C = (
    b"connection: Upgrade, HTTP2-Settings",
    b"upgrade: h2c",
    b"http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
)
WEBSOCKET = (b"connection: Upgrade", b"upgrade: websocket")


@pytest.fixture
def server() -> Iterator[AttackServer]:
    with attacked() as found:
        yield found


def answers(connection: socket.socket, number: int) -> list[Answer]:
    """Reads so many final responses with a content-length; a half-closed connection may get interim ones between them."""
    data, found = b"", []
    while len(found) < number:
        received = connection.recv(65536)
        assert received, (data, found)
        data += received
        while b"\r\n\r\n" in data:
            if data.startswith(INTERIM):  # the final response may come later
                data = data.removeprefix(INTERIM)
                continue
            answer = Answer.of(data)
            length = int(answer.headers["content-length"])
            if len(answer.body) < length:
                break
            found.append(Answer(answer.status, answer.headers, answer.body[:length]))
            data = answer.body[length:]
    assert not data
    return found


@pytest.mark.parametrize("lines", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_behind_an_upgrade_is_the_body(
    server: AttackServer, lines: tuple[bytes, ...], together: bool, chunked: bool
) -> None:
    request = post("/generate", BODY, *lines)
    if chunked:
        request = request.replace(b"content-length: 17", b"transfer-encoding: chunked")
        request = request.removesuffix(BODY) + b"11\r\n" + BODY + b"\r\n0\r\n\r\n"
    parts = (
        [request]
        if together
        else [request[: request.index(b"\r\n\r\n") + 4], request[request.index(b"\r\n\r\n") + 4 :]]
    )
    with server.connect() as connection:
        for part in parts:
            connection.sendall(part)
            if part is not parts[-1]:  # the last one may be answered before anyone looks
                until(lambda: len(server.server.server_state.tasks) == 1)
        (first,) = answers(connection, 1)
        connection.sendall(post("/generate", BODY))  # the connection goes on
        (second,) = answers(connection, 1)
    assert [first.status, second.status] == [200, 200]
    assert len(server.service.requests) == 2


@pytest.mark.parametrize("lines", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
def test_a_request_within_such_a_body_is_not_one(server: AttackServer, lines: tuple[bytes, ...]) -> None:
    head = post("/generate", SMUGGLED, *lines).removesuffix(SMUGGLED)
    with server.connect() as connection:
        connection.sendall(head)
        until(lambda: server.num_connections == 1)
        connection.sendall(SMUGGLED)
        (only,) = answers(connection, 1)
        connection.shutdown(socket.SHUT_WR)
        rest = read_all(connection)
    assert only.status == 400 and b"SMUGGLED" not in rest and rest == b""


def test_get_with_an_upgrade_and_connect(server: AttackServer) -> None:
    with server.connect() as connection:
        connection.sendall(get("/healthz", *H2C) + get("/healthz"))
        assert [answer.status for answer in answers(connection, 2)] == [200, 200]
    for target in (b"x:443", b"/healthz", b"*"):
        request = get("/", method="CONNECT").replace(b" / ", b" %b " % target)
        refused = server.ask(request + get("/healthz", CLOSE))
        assert refused.status == 400 and refused.json["error"]["code"] == "invalid_request"


@pytest.mark.cases(test=1)
@pytest.mark.parametrize(
    "path", ["/healthz", "/readyz", "/metrics", "/v1/models", "/v1/models/demo", "/v2/health/live", "/openapi.json"]
)
def test_head_where_get_is(server: AttackServer, path: str) -> None:
    full = server.ask(get(path, CLOSE))
    head = server.ask(get(path, CLOSE, method="HEAD"))
    assert (head.status, head.body) == (full.status, b"")
    assert head.headers["content-length"] == full.headers["content-length"] == str(len(full.body))


def test_a_stream_to_http_1_0_is_not_chunked(server: AttackServer) -> None:
    answer = server.ask(post("/generate", b'{"prompt":"Once","stream":true}', version="1.0"))
    assert answer.status == 200 and "transfer-encoding" not in answer.headers
    events = [json.loads(line[6:]) for line in answer.body.decode().split("\n\n") if line]
    assert "".join(event["text"] for event in events) == "Hello there"
    plain = server.ask(post("/generate", BODY, version="1.0"))
    assert plain.json["text"] == "Hello there"


@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_connection_gets_its_response(server: AttackServer, stream: bool) -> None:
    gate = asyncio.Event()
    server.service.scripts = [[gate, *deltas("Hello", " there")]]
    with server.connect() as connection:
        connection.sendall(post("/generate", b'{"prompt":"x","stream":%b}' % str(stream).lower().encode()))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(25).startswith(
            b"HTTP/1.1 100 "
        )  # the server saw it, and asks whether the client is there
        until(lambda: server.service.num_waiting == 1)
        server.release(gate)
        answer = Answer.of(read_all(connection))
    assert answer.status == 200 and b"there" in answer.body
    until(lambda: server.num_connections == 0)


@pytest.mark.parametrize("slow", [False, True])
def test_pipelined_requests_before_a_half_close_are_all_answered(server: AttackServer, slow: bool) -> None:
    """With `slow`, the last response comes only after the interim one."""
    gate = asyncio.Event()
    server.service.scripts = [[gate, *deltas("Hello", " there")] if slow else deltas("Hello", " there")]
    with server.connect() as connection:
        connection.sendall(get("/healthz") + get("/healthz") + post("/generate", BODY))
        connection.shutdown(socket.SHUT_WR)
        if slow:
            assert [answer.status for answer in answers(connection, 2)] == [200] * 2
            assert connection.recv(len(INTERIM)) == INTERIM
            server.release(gate)
        assert [answer.status for answer in answers(connection, 1 if slow else 3)] == [200] * (1 if slow else 3)
        assert read_all(connection) == b""


def test_a_client_that_left_is_still_noticed(server: AttackServer) -> None:
    """A closed connection looks like a half-closed one until it is written to."""
    server.service.scripts = [[asyncio.Event()]]
    with server.connect() as connection:
        connection.sendall(post("/generate", BODY))
        until(lambda: server.service.num_open == 1)
    until(lambda: server.service.num_open == 0)
    until(lambda: server.num_connections == 0)


def test_half_a_body_is_no_request(server: AttackServer) -> None:
    with server.connect() as connection:
        connection.sendall(post("/generate", BODY)[:-3])
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""
    assert not server.service.requests


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /v1/models HTTP/1.1\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nhost: a\r\nhost: b\r\n", 400),
        (b"GET /v1/models HTTP/1.0\r\n", 200),
        (b"GET /v1/models HTTP/1.1\r\nhost: a\r\n", 200),
    ],
)
def test_a_request_names_one_host(server: AttackServer, head: bytes, status: int) -> None:
    answer = server.ask(head + CLOSE + b"\r\n\r\n")
    assert answer.status == status
    if status == 400:
        assert "Host" in answer.json["error"]["message"] and answer.headers["x-request-id"]


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"GET  HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_json(server: AttackServer, data: bytes) -> None:
    answer = server.ask(data)
    assert answer.status == 400 and answer.headers["content-type"] == "application/json"
    assert answer.json["error"]["code"] == "invalid_request" and answer.headers["x-request-id"]


@pytest.mark.cases(test=3)
@pytest.mark.parametrize(
    "lines",
    [
        b"transfer-encoding: gzip, chunked",
        b"transfer-encoding: gzip",
        b"transfer-encoding: identity",
        b"transfer-encoding: chunked;x=1",
        b"transfer-encoding: gzip\r\ntransfer-encoding: chunked",
        b"transfer-encoding: chunked\r\ntransfer-encoding: chunked",
        b"transfer-encoding: chunked, chunked",
        b"transfer-encoding: chunked\r\ncontent-length: 5",
        b"content-length: 5\r\ntransfer-encoding: chunked",
        b"content-length: 5, 5",
    ],
)
def test_a_framing_that_is_not_understood_ends_the_connection(server: AttackServer, lines: bytes) -> None:
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\n" + JSON + lines + b"\r\n\r\n"
    answer = server.ask(head + b"0\r\n\r\n" + SMUGGLED)
    assert answer.status == 400 and answer.json["error"]["code"] == "invalid_request"
    assert answer.headers["connection"] == "close" and b"HTTP/1.1" not in answer.body
    assert not server.service.requests


def test_http_1_0_has_no_transfer_codings_and_the_usual_spelling_may_vary(server: AttackServer) -> None:
    body = b"11\r\n" + BODY + b"\r\n0\r\n\r\n"
    head = (
        b"POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + JSON + b"transfer-encoding:  Chunked \r\n\r\n"
    )
    assert server.ask(head + body).status == 200
    assert server.ask(head.replace(b"1.1", b"1.0") + body).status == 400


@pytest.mark.parametrize("step", [1_000, 4_096, 10**6])
@pytest.mark.parametrize(("extra", "status"), [(0, 200), (1, 431), (70_000, 431)])
def test_a_head_has_32_kib(server: AttackServer, step: int, extra: int, status: int) -> None:
    """Whether it comes in one packet or in many, and also the second one of a connection."""
    head = get("/healthz", CLOSE, b"x: %b")
    head = head % (b"a" * (http_protocol.MAX_HEAD_BYTES - len(head) + 2 + extra))
    with server.connect() as connection, contextlib.suppress(ConnectionError):
        connection.sendall(get("/healthz"))
        assert answers(connection, 1)[0].status == 200
        for at in range(0, len(head), step):
            connection.sendall(head[at : at + step])
        answer = Answer.of(read_all(connection))
        assert answer.status == status and answer.headers["connection"] == "close"
        assert status == 200 or answer.json["error"]["code"] == "invalid_request"


def test_the_end_of_a_head_may_be_cut_anywhere(server: AttackServer) -> None:
    """What follows is a body and counts among no head."""
    body = b'{"prompt":"' + b"x" * 100_000 + b'"}'
    request = post("/generate", body, CLOSE)
    end = len(request) - len(body)
    for cut in range(end - 4, end + 1):
        with server.connect() as connection:
            connection.sendall(request[:cut])
            if cut < end:  # the server has what was sent
                until(lambda: any(each._unfinished_bytes for each in set(server.server.server_state.connections)))
            connection.sendall(request[cut:])
            assert Answer.of(read_all(connection)).status == 200


def test_trailers_are_bounded_too(server: AttackServer) -> None:
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\n" + JSON + b"transfer-encoding: chunked\r\n\r\n"
    with server.connect() as connection, contextlib.suppress(ConnectionError):
        connection.sendall(head + b"0\r\n" + b"x: y\r\n" * 20_000)
        assert Answer.of(read_all(connection)).status == 431


def test_garbage_behind_a_request_does_not_cut_its_response(server: AttackServer) -> None:
    gate = asyncio.Event()
    server.service.scripts = [[*deltas("Hello", " there")[:1], gate, *deltas("Hello", " there")[1:]]]
    with server.connect() as connection:
        connection.sendall(post("/generate", b'{"prompt":"x","stream":true}'))
        data = connection.recv(65536)
        connection.sendall(b"\x00garbage\r\n\r\n")
        until(lambda: server.service.num_waiting == 1)
        server.release(gate)
        data += read_all(connection)
    stream, _, after = data.partition(b"0\r\n\r\n")
    assert b" there" in stream and b"400" not in stream
    assert Answer.of(after).status == 400


def test_bytes_in_a_body_and_no_complete_request(server: AttackServer) -> None:
    """A broken chunk within a body is answered, and the request ends."""
    answer = server.ask(b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n")
    assert answer.status == 400
    until(lambda: server.num_connections == 0)
    assert not server.service.requests


class Writes(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes | None] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.seen.append(bytes(data))

    def close(self) -> None:
        self.seen.append(None)


async def test_parts_of_a_response_that_come_in_one_turn_of_the_event_loop_are_one_write() -> None:
    transport, large = Writes(), b"x" * (http_protocol.MAX_JOINED_BYTES + 1)
    output = http_protocol.JoinedWrites(transport, asyncio.get_running_loop())
    output.write(b"head ")
    output.write(b"event")
    assert not transport.seen
    await asyncio.sleep(0)
    assert transport.seen == [b"head event"]
    for part in (b"one", large, b"two"):
        output.write(part)
    output.close()
    await asyncio.sleep(0)
    assert transport.seen[1:] == [b"one", large, b"two", None]
