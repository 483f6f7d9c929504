"""Threads are classified as compute threads or others."""

from __future__ import annotations

from tools.peers.serve_arranged import WORKER, roles


def test_the_worker_and_threads_unknown_to_python_compute() -> None:
    python = {1: "MainThread", 2: WORKER, 3: "armature-text_0"}
    assert roles([1, 2, 3, 4], python) == {1: False, 2: True, 3: False, 4: True}
    assert roles([1, 4], {1: "MainThread"}) == {}
