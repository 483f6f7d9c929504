"""Clients that leave: before, during and after prefill, streaming or not; what was computed for them is freed."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlparse

import pytest

from tests.live.live_server import LiveServer, until


class Caller:
    """A client on a bare socket, since it must be able to hang up at any moment."""

    def __init__(self, server: LiveServer, **body: Any) -> None:
        place = urlparse(server.url)
        assert place.hostname is not None
        self.socket = socket.create_connection((place.hostname, place.port or 80), timeout=60)
        content = json.dumps({"prompt": "Once upon a time", "ignore_eos": True, "max_tokens": 200, **body}).encode()
        head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        self.socket.sendall(head.encode() + content)

    def hang_up(self) -> None:
        self.socket.close()


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("stream", [False, True])
def test_before_prefill(server: LiveServer, stream: bool) -> None:
    server.reins.hold()
    first = Caller(server, max_tokens=1)
    assert server.reins.reached.wait(60)  # the engine is busy with another: ours waits
    waiting = Caller(server, stream=stream, prompt="the one that leaves")
    until(lambda: server.find_served.service.num_open == 2)
    waiting.hang_up()
    until(lambda: server.find_served.service.num_open == 1)
    server.reins.release()
    assert b"200 OK" in first.socket.recv(4096)
    first.hang_up()
    until(lambda: server.idle)
    assert all(
        len(span.sequence.token_ids) < 20
        for batch in server.reins.batches
        for span in batch.spans
        if batch.num_tokens > 20
    )


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("stream", [False, True])
def test_during_prefill(server: LiveServer, stream: bool) -> None:
    server.reins.hold()
    caller = Caller(server, stream=stream)
    assert server.reins.reached.wait(60)
    caller.hang_up()
    until(lambda: server.find_served.service.num_open == 0)
    server.reins.release()
    until(lambda: server.idle)
    assert len(server.reins.batches) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_while_tokens_come(server: LiveServer, stream: bool) -> None:
    aborted = server.metric("armature_requests_total", api="native", outcome="aborted")
    caller = Caller(server, stream=stream)
    until(lambda: len(server.reins.batches) > 3)
    server.reins.hold()
    assert server.reins.reached.wait(60)
    caller.hang_up()
    until(lambda: server.find_served.service.num_open == 0)
    num_batches = len(server.reins.batches)
    server.reins.release()
    until(lambda: server.idle)
    assert len(server.reins.batches) == num_batches
    assert num_batches < 200
    assert server.metric("armature_requests_total", api="native", outcome="aborted") == aborted + 1


def test_in_the_middle_of_its_body(server: LiveServer) -> None:
    place = urlparse(server.url)
    assert place.hostname is not None
    for sent in (
        b"POST",
        b"POST /generate HTTP/1.1\r\n",
        b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{",
    ):
        with socket.create_connection((place.hostname, place.port or 80), timeout=60) as caller:
            caller.sendall(sent)
    assert server.find_served.service.num_open == 0
