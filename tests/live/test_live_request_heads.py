"""Requests that never become one: heads and trailers without end, and silence."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlparse

import pytest

from app.api import http_protocol
from tests.live.live_server import LiveServer

HEAD = b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@contextmanager
def connected(server: LiveServer) -> Iterator[socket.socket]:
    place = urlparse(server.url)
    assert place.hostname is not None
    with socket.create_connection((place.hostname, place.port or 80), timeout=60) as connection:
        yield connection


def pour(connection: socket.socket, piece: bytes, megabytes: int = 64) -> bytes:
    """Sends until the server hangs up, then what it said; nothing where its word was lost with the connection."""
    try:
        for _ in range(megabytes * 2**20 // len(piece)):
            connection.sendall(piece)
        raise AssertionError("the server took everything")
    except (BrokenPipeError, ConnectionResetError):
        pass
    try:
        return connection.recv(4096)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET /", b"a" * 4096),
        (HEAD + b"x-long: ", b"a" * 4096),
        (HEAD, b"x-many: a\r\n" * 400),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"x-many: a\r\n" * 400),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1;", b"a" * 4096),
    ],
    ids=["path", "one header", "many headers", "trailers", "chunk extension"],
)
def test_no_end(server: LiveServer, begin: bytes, piece: bytes) -> None:
    with connected(server) as connection:
        connection.sendall(begin)
        answer = pour(connection, piece)
        assert not answer or answer.startswith(b"HTTP/1.1 4")


def test_a_head_of_some_size_is_fine(server: LiveServer) -> None:
    headers = {f"x-header-{number}": "a" * 1000 for number in range(25)}
    for _ in range(3):  # on one connection: each head is counted by itself
        assert server.client.get("/healthz", headers=headers).status_code == 200


def test_silence(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_SECONDS", 0.05)
    for said in (b"", b"GET / HT"):
        with connected(server) as connection:
            connection.sendall(said)
            with suppress(ConnectionResetError):
                assert connection.recv(4096) == b""
