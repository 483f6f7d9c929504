"""A real nginx in front of two servers: it deals by weights and by connections, and holds no piece of a stream back."""

from __future__ import annotations

import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from outside_tools import tool
from tools.peers.nginx import Nginx, Rule

PATIENCE = 10.0  # a server holds its second piece back for longer than a client waits


class Backend:
    """Answers with its name, in two pieces where it is asked for `/stream`; the second comes once `gate` is open."""

    def __init__(self, name: str) -> None:
        self.gate = threading.Event()
        backend = self

        class Answer(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                pieces = [name.encode()] * (2 if self.path == "/stream" else 1)
                self.send_response(200)
                self.send_header("Content-Length", str(sum(map(len, pieces))))
                self.end_headers()
                for piece in pieces[:-1]:
                    self.wfile.write(piece)
                    self.wfile.flush()
                    backend.gate.wait(2 * PATIENCE)
                self.wfile.write(pieces[-1])

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.address = f"127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@contextmanager
def before(*backends: Backend, **rules: Rule) -> Iterator[Nginx]:
    tool("nginx")
    nginx = Nginx([each.address for each in backends], rules)
    try:
        yield nginx
    finally:
        nginx.end()


@pytest.fixture
def pair() -> Iterator[tuple[Backend, Backend]]:
    with closing(Backend("a")) as a, closing(Backend("b")) as b:
        yield a, b


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        text: str = answer.read().decode()
        return text


def test_turns_follow_the_weights(pair: tuple[Backend, Backend]) -> None:
    with before(*pair, plain=Rule((1, 1)), able=Rule((4, 1))) as nginx:
        for name, shares in (("plain", {"a": 10, "b": 10}), ("able", {"a": 16, "b": 4})):
            assert Counter(get(nginx.urls[name]) for _ in range(20)) == shares


def test_no_piece_of_a_stream_is_held_back(pair: tuple[Backend, Backend]) -> None:
    with (
        before(*pair, plain=Rule((1, 1))) as nginx,
        urllib.request.urlopen(f"{nginx.urls['plain']}/stream", timeout=PATIENCE) as answer,
    ):
        assert answer.read(1) == b"a", "the server has not written the rest"
        pair[0].gate.set()
        assert answer.read() == b"a"


def test_who_is_busy_is_passed_over(pair: tuple[Backend, Backend]) -> None:
    """A stream stays open at the first server: whoever comes meanwhile goes to the other."""
    with (
        before(*pair, able=Rule((1, 1), least_connections=True)) as nginx,
        urllib.request.urlopen(f"{nginx.urls['able']}/stream", timeout=PATIENCE) as held,
    ):
        assert held.read(1) == b"a"
        assert [get(nginx.urls["able"]) for _ in range(4)] == ["b"] * 4
        pair[0].gate.set()
        held.read()


def test_a_server_that_is_no_address_is_told() -> None:
    tool("nginx")
    with pytest.raises(SystemExit, match="nginx does not start"):
        Nginx(["not an address"], {"plain": Rule((1,))})


def test_without_nginx_it_says_where_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.peers.nginx.PLACES", "")
    with pytest.raises(SystemExit, match="nginx-light"):
        Nginx(["127.0.0.1:9"], {"plain": Rule((1,))})
