"""Connections: how many there may be, how long a head may take, and clients that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import threading
from pathlib import Path

import pytest

from app.api import access as access_module
from app.api import http_protocol
from app.api.access import RESERVED_CONNECTIONS, ConnectionLimits
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
    monkeypatch.setattr(access_module, "MAX_UNREAD_BYTES", 30_000_000)
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


def test_pipelined_requests_are_parsed_one_ahead_and_all_answered() -> None:
    """A client that reads nothing has little in memory, whatever it sends; one that reads gets every response."""
    number = 3_000
    with attacked(send_buffer=4096) as server, server.connect(SO_RCVBUF=4096) as connection:
        sending = threading.Thread(target=connection.sendall, args=(get("/healthz") * number,))
        sending.start()
        until(lambda: server.num_connections == 1)
        (protocol,) = server.server.server_state.connections
        until(lambda: protocol.flow.write_paused)
        assert len(protocol.pipeline) <= 1
        assert len(protocol._unparsed) - protocol._num_parsed <= http_protocol.MAX_UNPARSED_BYTES + 256 * 1024
        assert protocol.num_unsent < 256 * 1024
        data = b""
        while data.count(b'{"status":"alive"}') < number:
            data += connection.recv(65536)
        sending.join()
        assert data.count(b"HTTP/1.1 200") == number


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("path", ["/info", "/v1/models", "/nothing"])
def test_a_client_that_pipelines_and_reads_nothing_is_cut_off(path: str) -> None:
    with attacked(send_buffer=4096, write_timeout_seconds=0.3) as server, server.connect(SO_RCVBUF=4096) as connection:
        with contextlib.suppress(ConnectionError):
            while True:
                connection.sendall(get(path) * 1_000)
        until(lambda: server.num_connections == 0)


def test_a_client_that_leaves_ends_its_request_before_a_pipelined_one(caplog: pytest.LogCaptureFixture) -> None:
    service = ScriptedService(scripts=[[asyncio.Event()]])
    with attacked(service) as server:
        with server.connect() as connection:
            connection.sendall(post("/generate", b'{"prompt":"x"}') + get("/healthz") * 3)
            until(lambda: service.num_waiting == 1)
        until(lambda: service.num_open == 0 and server.num_connections == 0)
    assert "failed" not in caplog.text


def test_requests_behind_a_chunked_body_are_bounded() -> None:
    """Its end is not known before it is parsed, so several may come with it."""
    gate = asyncio.Event()
    service = ScriptedService(scripts=[[gate, *deltas("done")]])
    body = post("/generate", b"", b"transfer-encoding: chunked").replace(b"content-length: 0\r\n", b"")
    body += b'e\r\n{"prompt":"x"}\r\n0\r\n\r\n'
    few = get("/healthz").replace(b"host: x", b"host:x")
    with attacked(service) as server, server.connect() as connection:
        connection.sendall(body + few * (http_protocol.MAX_PARSED_REQUESTS + 10))
        server.release(gate)
        data = read_all(connection)
    assert data.count(b"HTTP/1.1 200") == http_protocol.MAX_PARSED_REQUESTS + 1
    assert data.count(b"HTTP/1.1 400") == 1 and data.endswith(b"}}")


def test_requests_that_do_not_arrive_give_way_and_are_told() -> None:
    with attacked(max_connections=6) as server, contextlib.ExitStack() as stack:
        unfinished = [stack.enter_context(server.connect()) for _ in range(6)]
        for number, connection in enumerate(unfinished):
            connection.sendall(post("/generate", b'{"prompt":"x"}')[:-1])
            until(lambda number=number: len(server.server.server_state.tasks) == number + 1)  # type: ignore[misc]
        assert server.ask(post("/generate", b'{"prompt":"x"}', b"connection: close")).status == 200
        refused = Answer.of(read_all(unfinished[0]))
        assert refused.status == 503 and refused.json["error"]["code"] == "overloaded"
        unfinished[5].sendall(b"}")
        assert unfinished[5].recv(12) == b"HTTP/1.1 200"


def test_probes_are_answered_beyond_the_limit() -> None:
    gate = asyncio.Event()
    service = ScriptedService(scripts=[[gate, *deltas("done")]])
    with attacked(service, max_connections=2) as server, contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(server.connect()).sendall(post("/generate", b'{"prompt":"x"}'))
        until(lambda: service.num_waiting == 2)
        for path in ("/healthz", "/readyz", "/v2/health/live", "/health", "/ping?x=1"):
            answer = server.ask(get(path))
            assert answer.status == 200 and answer.headers["connection"] == "close", path
        for request in (get("/v1/models"), get("/healthzz"), post("/generate", b"{}")):
            assert server.ask(request).status == 503
        silent = [stack.enter_context(server.connect()) for _ in range(RESERVED_CONNECTIONS)]
        until(lambda: server.num_connections == 2 + RESERVED_CONNECTIONS)
        assert server.ask(get("/healthz")).status == 200
        assert Answer.of(read_all(silent[0])).status == 503
        server.release(gate)


class FakeConnection:
    def __init__(self, address: str) -> None:
        self.address, self.fate = address, ""

    def drop(self) -> None:
        self.fate = "dropped"

    def refuse(self) -> None:
        self.fate = "refused"


def test_the_address_with_the_most_connections_gives_way() -> None:
    limits = ConnectionLimits(max_connections=4)
    small, *large = [FakeConnection(address) for address in ("small", "large", "large", "large")]
    for each in (small, *large):
        assert limits.enter(each)
        limits.receiving[each] = None
    assert limits.enter(FakeConnection("new"))
    assert (small.fate, [each.fate for each in large]) == ("", ["dropped", "", ""])
    limits.leave(large[0])
    limits.idle[small] = limits.idle[large[2]] = None
    assert limits.enter(FakeConnection("other"))
    assert (small.fate, large[2].fate) == ("", "dropped")  # an idle one of the largest address first
    limits.leave(large[2])
    assert limits.enter(FakeConnection("third"))
    assert small.fate == "dropped"  # an idle one gives way to a request that arrives
    assert limits.num_connections == 5


def test_handshakes_that_never_begin_count_and_give_way(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    trust = ssl.create_default_context(cafile=str(cert))
    with attacked(tls_cert=cert, tls_key=key, max_connections=4) as server, contextlib.ExitStack() as stack:
        limits = server.limits
        silent = [stack.enter_context(server.connect()) for _ in range(12)]
        until(lambda: limits.num_connections == 4)
        assert sum(limits._per_address.values()) == 4
        with server.connect() as plain, trust.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
            connection.sendall(get("/healthz", b"connection: close"))
            assert Answer.of(read_all(connection)).status == 200
        assert read_all(silent[0]) == b""
        for each in silent:
            each.close()
        until(lambda: limits.num_connections == 0)
        assert not limits.idle and not limits._per_address


def test_open_files_bound_connections(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    assert connection_limits(Settings()).max_connections == 64 - RESERVED_FILES > 0
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
