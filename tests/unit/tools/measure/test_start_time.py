"""A start lasts from the process's beginning to its first answer, and the server is gone afterwards."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tools.measure.start_time import _report, start
from tools.peers.servers import ServerSpec

STUB = """
import os, socket, sys
open(sys.argv[1], "w").write(str(os.getpid()))
listener = socket.create_server(("127.0.0.1", int(sys.argv[2])))
answers = [b"HTTP/1.1 503 loading\\r\\nContent-Length: 0\\r\\n\\r\\n"] * 2 + [b"HTTP/1.1 404 no\\r\\nContent-Length: 0\\r\\n\\r\\n"]
answers.append(b'HTTP/1.1 200 OK\\r\\nConnection: close\\r\\n\\r\\ndata: {"choices": [{"text": "a"}]}\\n\\n')
connection, _ = listener.accept()
for answer in answers:
    connection.recv(1 << 16)
    connection.sendall(answer)
connection.close()
sys.stdin.read()
listener.accept()
"""


def test_a_server_is_asked_until_it_answers_and_then_ended(tmp_path: Path) -> None:
    script, noted = tmp_path / "stub.py", tmp_path / "pid"
    script.write_text(STUB)
    assert (
        asyncio.run(start(ServerSpec.parse(f"stub={sys.executable} -S {script} {noted} {{port}}"))) > 0.05
    )  # it loaded at first
    assert not Path(f"/proc/{noted.read_text()}").exists()


def test_other_starts_are_reported_as_multiples_of_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    _report([], {"ours": [2.0, 4.0], "other": [30.0, 40.0]})
    assert "other                   35.00 s to the first token, 12.5 times the first's" in capsys.readouterr().out
