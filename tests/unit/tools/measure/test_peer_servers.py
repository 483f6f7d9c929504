"""Servers under comparison: understood, halted but in their turn, ended with their reason, and measured while all streams run."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.peers.servers import ServerSide, ServerSpec, median_ratio

STUB = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(404)
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'data: {"choices": [{"text": "a"}]}\\n\\ndata: [DONE]\\n\\n')
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def side(tmp_path: Path) -> Iterator[ServerSide]:
    script = tmp_path / "stub.py"
    script.write_text(STUB)
    side = ServerSide(ServerSpec.parse(f"stub={sys.executable} -S {script} {{port}}"))
    yield side
    side.end()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(pid: int, wanted: bool) -> bool:
    """Whether it comes to a halt, or goes on; a signal takes its time."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if (state(pid) == "T") is wanted:
            return True
        os.sched_yield()
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_server_answers_is_halted_and_goes_on(side: ServerSide) -> None:
    assert asyncio.run(side.first_answer()) > 0
    assert side.cpu_seconds() > 0
    pid = side._process.pid
    side.halt()
    assert until(pid, wanted=True)
    with side.awake():
        assert until(pid, wanted=False)
        asyncio.run(side.first_answer())
    assert until(pid, wanted=True)


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    script = tmp_path / "stub.py"
    script.write_text("import sys; sys.exit('no such model, port ' + sys.argv[1])")
    side = ServerSide(ServerSpec.parse(f"broken={sys.executable} -S {script} {{port}}"))
    try:
        with pytest.raises(SystemExit, match=r"broken ended:\nno such model, port \d+"):
            asyncio.run(side.first_answer())
    finally:
        side.end()


def test_a_server_joins_its_groups_before_it_is_one(tmp_path: Path) -> None:
    procs = tmp_path / "cgroup.procs"
    side = ServerSide(ServerSpec.parse("gone=true {port}"), (procs,))
    try:
        side._process.wait()
        assert int(procs.read_text()) == side._process.pid
    finally:
        side.end()


def test_a_command_has_an_environment_and_a_port() -> None:
    spec = ServerSpec.parse("ours=A=1 B='x y' program --port {port} --set c=d")
    assert (spec.name, spec.environment) == ("ours", {"A": "1", "B": "x y"})
    assert spec.command == ("program", "--port", "{port}", "--set", "c=d")


@pytest.mark.parametrize("text", ["program --port {port}", "ours=program", "ours=A=1", "=program {port}"])
def test_a_command_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not NAME|must contain \{port\}"):
        ServerSpec.parse(text)


def test_ratios_are_taken_round_by_round() -> None:
    assert median_ratio([10.0, 40.0, 9.0], [5.0, 10.0, 9.0]) == 2.0
