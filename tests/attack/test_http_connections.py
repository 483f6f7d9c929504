"""Connections: how many there may be, how long a head may take, and clients that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket

import pytest

from app.api import connection_limits as connection_limits_module
from app.api import http_protocol
from app.server.process import RESERVED_FILES, connection_limits
from app.settings import Settings
from tests.api.scripted_service import ScriptedService, deltas
from tests.attack.attack_server import Answer, attacked, get, post, read_all, until

STREAM = post("/generate", b'{"prompt":"x","stream":true}')
LONG = "x" * 100_000
NUM_DELTAS = 2_000


def talkative() -> ScriptedService:
    """Each answer is 200 MB, made as fast as it is taken."""
    return ScriptedService(scripts=[deltas(*[LONG] * NUM_DELTAS)])


def test_readers_that_stop_lose_their_connection_and_their_bytes_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with attacked(talkative(), write_timeout_seconds=0.3) as server, contextlib.ExitStack() as stack:
        for _ in range(24):
            connection = stack.enter_context(server.connect(SO_RCVBUF=4096))
            connection.sendall(STREAM)
        until(lambda: len(server.service.requests) == 24)
        waiting = [each.transport.get_write_buffer_size() for each in server.server.server_state.connections]
        assert max(waiting) < 64 * 1024 + 3 * len(LONG)
        until(lambda: server.num_connections == 0 and server.service.num_open == 0)
        assert server.ask(get("/healthz", b"connection: close")).status == 200
    assert "its client read too little in 0.3 s" in caplog.text


def test_a_slow_but_steady_reader_is_kept() -> None:
    service = ScriptedService(scripts=[deltas(*[LONG] * 8)])
    with attacked(service, write_timeout_seconds=30) as server, server.connect(SO_RCVBUF=65536) as connection:
        connection.sendall(STREAM.replace(b"host: x", b"host: x\r\nconnection: close"))
        assert len(read_all(connection)) > 8 * len(LONG)


def test_a_last_response_that_is_not_read_ends_too() -> None:
    """The response is complete for the application; its bytes still wait."""
    service = ScriptedService(scripts=[deltas("x" * 20_000_000)])
    with attacked(service, write_timeout_seconds=0.3) as server, server.connect(SO_RCVBUF=4096) as connection:
        connection.sendall(post("/generate", b'{"prompt":"x"}', b"connection: close"))
        until(lambda: server.service.num_open == 0 and len(service.requests) == 1)
        until(lambda: server.num_connections == 0)


def test_unread_bytes_are_bounded_in_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits_module, "MAX_UNREAD_BYTES", 30_000_000)
    service = ScriptedService(scripts=[deltas("x" * 20_000_000)])
    with attacked(service, write_timeout_seconds=600) as server, contextlib.ExitStack() as stack:
        for number in range(3):
            connection = stack.enter_context(server.connect(SO_RCVBUF=4096))
            connection.sendall(post("/generate", b'{"prompt":"x"}'))
            until(lambda number=number: len(service.requests) == number + 1 and service.num_open == 0)  # type: ignore[misc]
            until(lambda: sum(each.num_unsent for each in set(server.server.server_state.connections)) > 0)
        until(lambda: server.num_connections == 1)  # the others waited longer, and one of this size fits


def test_idle_connections_yield_to_new_ones(caplog: pytest.LogCaptureFixture) -> None:
    with attacked(max_connections=8) as server, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(server.connect()) for _ in range(8)]
        until(lambda: server.num_connections == 8)
        idle[0].sendall(get("/healthz"))  # the first is now the one that was idle for the shortest time
        assert b'"alive"' in idle[0].recv(4096)
        for _ in range(4):
            with server.connect() as connection:
                connection.sendall(get("/healthz", b"connection: close"))
                assert Answer.of(read_all(connection)).status == 200
        assert read_all(idle[1]) == b""
        idle[0].sendall(get("/healthz"))
        assert b"HTTP/1.1 200" in idle[0].recv(4096)
    assert caplog.text.count("the limit of max_connections") == 1


def test_busy_connections_do_not_and_the_refusal_says_so(caplog: pytest.LogCaptureFixture) -> None:
    gate = asyncio.Event()
    service = ScriptedService(scripts=[[gate, *deltas("done")]])
    with attacked(service, max_connections=2) as server, contextlib.ExitStack() as stack:
        busy = [stack.enter_context(server.connect()) for _ in range(2)]
        for connection in busy:
            connection.sendall(post("/generate", b'{"prompt":"x"}'))
        until(lambda: service.num_waiting == 2)
        with server.connect() as connection:
            refused = Answer.of(read_all(connection))
        assert (
            refused.status == 503
            and refused.headers["retry-after"] == "1"
            and refused.json["error"]["code"] == "overloaded"
        )
        server.release(gate)
        for connection in busy:
            assert connection.recv(12) == b"HTTP/1.1 200"
    assert "the limit of max_connections" in caplog.text


@pytest.mark.parametrize("before", [b"", get("/healthz")])
def test_a_head_has_a_deadline_also_the_second_one(before: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_SECONDS", 0.3)
    with attacked() as server, server.connect() as connection:
        if before:
            connection.sendall(before)
            assert connection.recv(12) == b"HTTP/1.1 200"
        connection.sendall(b"GET / HT")
        read_all(connection)


def test_open_files_bound_connections(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    assert connection_limits(Settings()).max_connections == 64 - RESERVED_FILES
    assert "this process may open 64 files" in caplog.text
    caplog.clear()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, 64))
    assert connection_limits(Settings(max_connections=7)).max_connections == 7
    assert not caplog.text


def test_many_connections_at_once_leave_the_server_serving() -> None:
    with attacked(max_connections=50) as server, contextlib.ExitStack() as stack:
        for _ in range(300):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
        until(lambda: server.num_connections <= 50)
        assert server.ask(get("/healthz", b"connection: close")).status == 200
