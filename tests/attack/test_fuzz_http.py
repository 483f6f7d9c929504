"""Generated HTTP heads: each gets a status below 500 or a closed connection, and the server serves afterwards."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hypothesis_examples import FUZZ_EXAMPLES, examples
from tests.live.live_server import PATIENCE, LiveServer

COUNT = FUZZ_EXAMPLES or examples(200)
TOKENS = st.sampled_from(
    [b"GET", b"POST", b"HEAD", b" ", b"/", b"/healthz", b"/generate", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/9.9", b"\r\n", b"\n", b"\r", b":",
     b"Host: localhost", b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 99999999999999999999",
     b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Connection: close", b"Upgrade: h2c",
     b"Expect: 100-continue", b"0\r\n\r\n", b"ffffffff\r\n",
     b"\x00", b"\xff", b"a" * 5_000, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01"]
)  # fmt: skip
GOOD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def answer_to(url: str, content: bytes) -> bytes:
    """What the server says to these bytes, after which the client sends no more."""
    parts = urlsplit(url)
    received = b""
    with socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=PATIENCE) as connection:
        try:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(65_536):
                received += chunk
        except ConnectionError:
            pass
    return received


@settings(max_examples=COUNT, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(head=st.one_of(st.lists(TOKENS, max_size=30).map(b"".join), st.binary(max_size=200)))
@example(
    head=b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
)
@example(head=b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 5_000 + b"\r\n")
def test_generated_heads(server: LiveServer, head: bytes) -> None:
    received = answer_to(server.url, head)
    if received:
        assert received.startswith(b"HTTP/1."), received[:100]
        assert received[9:10] in b"1234", received[:100]
    assert b"200 OK" in answer_to(server.url, GOOD)
