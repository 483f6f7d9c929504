"""A real nginx in front of two servers: it deals by weights and by connections, and holds no piece of a stream back."""

from __future__ import annotations

import re
import socket
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from examples.nginx.upstream_weights import lines
from external_tools import ROOT, tool
from tools.peers.nginx import Nginx, whole
from tools.peers.ports import free_ports

PATIENCE = 10.0  # a server holds its second piece back for longer than a client waits


class Backend:
    """Answers with its name, in two pieces where it is asked for `/stream`; the second comes once `gate` is open."""

    def __init__(self, name: str) -> None:
        self.gate = threading.Event()
        self.status = 200
        backend = self

        class Answer(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                pieces = [name.encode()] * (2 if self.path == "/stream" else 1)
                self.send_response(backend.status)
                self.send_header("Content-Length", str(sum(map(len, pieces))))
                self.end_headers()
                for piece in pieces[:-1]:
                    self.wfile.write(piece)
                    self.wfile.flush()
                    backend.gate.wait(2 * PATIENCE)
                self.wfile.write(pieces[-1])

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

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


@pytest.fixture
def pair() -> Iterator[tuple[Backend, Backend]]:
    with closing(Backend("a")) as a, closing(Backend("b")) as b:
        yield a, b


def test_a_server_that_is_no_address_is_reported() -> None:
    tool("nginx")
    with pytest.raises(SystemExit, match="nginx does not start"):
        Nginx(lambda folder: whole(folder, "  upstream servers {\n    server not an address;\n  }\n"), [9])


def test_without_nginx_it_says_where_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.peers.nginx.PLACES", "")
    with pytest.raises(SystemExit, match="nginx-light"):
        Nginx(lambda folder: whole(folder, ""), [9])


# ---- the configuration in examples/ ----------------------------------------------------------------------------------


def post(url: str) -> tuple[int, str]:
    """The status and who answered."""
    try:
        with urllib.request.urlopen(url, b"{}", timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture
def documented(pair: tuple[Backend, Backend]) -> Iterator[str]:
    """examples/nginx/nginx.conf as it stands, but for the port and the folder, with weights as the tool writes them."""
    tool("nginx")
    (port,) = free_ports(1)
    text = (ROOT / "examples" / "nginx" / "nginx.conf").read_text().replace("listen 80;", f"listen 127.0.0.1:{port};")

    def written(folder: Path) -> str:
        (folder / "armature-servers.conf").write_text(lines({pair[0].address: 100, pair[1].address: 25}))
        return whole(folder, text.replace("/etc/nginx/", f"{folder}/"))

    nginx = Nginx(written, [port])
    yield f"http://127.0.0.1:{port}"
    nginx.end()


def test_as_documented_no_piece_of_a_stream_is_held_back(documented: str, pair: tuple[Backend, Backend]) -> None:
    with urllib.request.urlopen(f"{documented}/stream", timeout=PATIENCE) as answer:
        assert answer.read(1) == b"a", "the server has not written the rest"
        pair[0].gate.set()
        assert answer.read() == b"a"


def test_as_documented_who_is_busy_is_passed_over(documented: str, pair: tuple[Backend, Backend]) -> None:
    """A stream stays open at the first server, the more able one: whoever comes meanwhile goes to the other."""
    with urllib.request.urlopen(f"{documented}/stream", timeout=PATIENCE) as held:
        assert held.read(1) == b"a"
        assert [post(documented) for _ in range(4)] == [(200, "b")] * 4
        pair[0].gate.set()
        held.read()


def test_as_documented_turns_follow_the_weights(documented: str) -> None:
    assert Counter(post(documented) for _ in range(10)) == {(200, "a"): 8, (200, "b"): 2}


def test_as_documented_another_is_asked_where_one_is_full(documented: str, pair: tuple[Backend, Backend]) -> None:
    pair[0].status = 429
    assert {post(documented) for _ in range(10)} == {(200, "b")}


def test_as_documented_a_full_house_is_reported_as_such(documented: str, pair: tuple[Backend, Backend]) -> None:
    """The servers' own 429, with their Retry-After, never a 502: nginx has not taken them for dead."""
    pair[0].status = pair[1].status = 429
    assert {post(documented)[0] for _ in range(10)} == {429}
    pair[0].status = 200
    assert post(documented) == (200, "a")


def test_as_documented_who_is_gone_costs_nobody_an_answer(documented: str, pair: tuple[Backend, Backend]) -> None:
    pair[0].close()
    assert {post(documented) for _ in range(10)} == {(200, "b")}


@pytest.mark.full
def test_as_documented_a_machine_that_is_gone_costs_a_second_and_no_answer(
    documented: str, pair: tuple[Backend, Backend]
) -> None:
    """Its packets are dropped: connecting times out, which nginx does not count among errors."""
    port = pair[0].server.server_port
    pair[0].close()
    with closing(socket.socket()) as silent, ExitStack() as others:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        silent.bind(("127.0.0.1", port))
        silent.listen(0)
        for _ in range(4):  # a full queue drops what else arrives
            waiting = others.enter_context(closing(socket.socket()))
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        assert {post(documented) for _ in range(5)} == {(200, "b")}


def test_as_documented_connecting_may_be_tried_again_and_a_response_that_times_out_may_not() -> None:
    text = (ROOT / "examples" / "nginx" / "nginx.conf").read_text()
    times = {
        name: float(re.findall(rf"{name} (\d+)s;", text)[0]) for name in ("proxy_read_timeout", "proxy_connect_timeout")
    }
    limit = float(re.findall(r"proxy_next_upstream_timeout (\d+)s;", text)[0])
    assert times["proxy_connect_timeout"] < limit < times["proxy_read_timeout"]
