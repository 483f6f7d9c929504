"""Errors and their frames are freed at once: a cycle of them would hold the body of a request until it is collected."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

import app
from tests.live.live_server import LiveServer, until

OURS = str(Path(app.__file__).parent)
LONG = "word " * 50_000


@pytest.fixture
def cycles() -> Iterator[list[Any]]:
    """Objects that only the collector of cycles freed during the test, after `gc.collect()`."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def frames(found: list[Any]) -> set[str]:
    gc.collect()
    return {
        each.f_code.co_qualname
        for each in found
        if isinstance(each, FrameType) and each.f_code.co_filename.startswith(OURS)
    }


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/generate", {"prompt": LONG}, 400),
        ("/v1/completions", {"prompt": [LONG, "a"]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], "stream": True}, 400),
        ("/v1/chat/completions", {"messages": "x"}, 400),
        ("/v1/messages", {"model": "unknown", "max_tokens": 0, "messages": [{"role": "user", "content": "a"}]}, 400),
        ("/generate", {"prompt": [[1]] * 50_000}, 400),
        ("/v1/completions", {"messages": [{"role": "user", "content": LONG}]}, 400),
        ("/nowhere", {"prompt": "a"}, 404),
    ],
)
def test_an_error_leaves_no_cycle(
    server: LiveServer, cycles: list[Any], path: str, body: dict[str, Any], status: int
) -> None:
    assert server.client.post(path, json=body).status_code == status
    assert server.client.get("/healthz").status_code == 200  # the loop has ended what the request needed
    assert frames(cycles) == set()


def test_a_client_that_leaves_leaves_no_cycle(server: LiveServer, cycles: list[Any]) -> None:
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/generate", json={"prompt": "a", "max_tokens": 60, "ignore_eos": True}, timeout=0.001)
    until(lambda: server.idle)
    assert frames(cycles) == set()
