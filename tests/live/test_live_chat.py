"""`armature chat` on a pseudo-terminal and in a pipe, with a real server, and with one that it starts and ends itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live.live_server import LiveServer, until
from tests.live.pseudo_terminal import pseudo_terminal

CHAT = [sys.executable, "-m", "app", "chat"]


def test_a_conversation_on_a_terminal(server: LiveServer) -> None:
    with pseudo_terminal("chat", "--url", server.url, "--max-tokens", "4", "--temperature", "0") as chat:
        chat.wait_for("/help lists the commands.")
        chat.type("/sta\t\n")  # the tab key completes it
        chat.wait_for("The speed of each answer is shown.")
        chat.type("Once upon a time\n")
        chat.wait_for(" tokens/s, first after ")
        server.reins.hold()
        chat.type("Again\n")
        until(server.reins.reached.is_set)
        chat.type("\x03")
        chat.wait_for("Stopped. Ctrl-C again leaves.")
        server.reins.release()
        until(lambda: server.idle)  # the request has ended in the server too
        chat.type("/exi\t\n")
        assert chat.status() == 0


def test_ctrl_c_twice_and_ctrl_d_leave(server: LiveServer) -> None:
    with pseudo_terminal("chat", "--url", server.url) as chat:
        chat.wait_for("> ")
        chat.interrupt_input()
        chat.wait_for("Ctrl-C again, Ctrl-D or /exit leaves.")
        chat.wait_for("> ")
        chat.interrupt_input()
        assert chat.status() == 0
    with pseudo_terminal("chat", "--url", server.url) as chat:
        chat.wait_for("> ")
        chat.type("\x04")
        assert chat.status() == 0


def test_a_pipe_has_the_answer_alone(server: LiveServer) -> None:
    ran = subprocess.run(
        [*CHAT, "--url", server.url, "--max-tokens", "4"], input="Once upon\n", capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("\n")
    assert ran.stderr == "The answer ended at its limit of tokens.\n"


@pytest.mark.full
def test_it_starts_a_server_and_ends_it(tiny: Path) -> None:
    with pseudo_terminal("chat", "--model", str(tiny), "--threads", "1", "--max-tokens", "4") as chat:
        chat.wait_for("/help lists the commands.")
        [own] = _children_of(chat.process.pid)
        assert os.getpgid(own) != os.getpgid(chat.process.pid), "the terminal sends Ctrl-C to a group of processes"
        chat.type("Once\n")
        chat.wait_for("The answer ended at its limit of tokens.")
        chat.process.kill()  # it cannot end its server any more
        until(lambda: not _is_running(own))


@pytest.mark.full
def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    ran = subprocess.run(
        [*CHAT, "hi", "--model", str(tmp_path)], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert "config.json" in ran.stderr.splitlines()[-1]
    assert "Traceback" not in ran.stderr


def _children_of(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in children]


def _is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
