"""Arrangements of threads are commands that differ in what they say, and threads are told apart by whether they compute."""

from __future__ import annotations

from tools.compare_threads import ARRANGEMENTS, USUAL, arranged
from tools.peers.serve_arranged import WORKER, roles


def test_every_arrangement_is_a_command_of_its_own() -> None:
    commands = {name: arranged(name, "python", "--model m --port {port}", threads=2).command for name in ARRANGEMENTS}
    assert len(set(commands.values())) == len(ARRANGEMENTS)
    assert set(USUAL.split(",")) <= ARRANGEMENTS.keys()
    start = ("python", "-m", "tools.peers.serve_arranged")
    assert commands["spins-1000"] == (*start, "--spins", "1000", "--", "--model", "m", "--port", "{port}")
    assert commands["one-thread-fewer"] == (*start, "--", "--model", "m", "--port", "{port}", "--threads", "1")


def test_the_worker_and_threads_unknown_to_python_compute() -> None:
    python = {1: "MainThread", 2: WORKER, 3: "armature-text_0"}
    assert roles([1, 2, 3, 4], python) == {1: False, 2: True, 3: False, 4: True}
    assert roles([1, 4], {1: "MainThread"}) == {}
