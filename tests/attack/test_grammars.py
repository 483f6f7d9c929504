"""Grammars of a few characters that would compile for hours: in each field that takes one, and beside other requests."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

from app.text import grammar, grammar_process
from tests.live.live_server import LiveServer, live, until

SCHEMA = {"type": "integer", "multipleOf": 99999989}
REGEX = "(a{1000}){1000}"
LARK = f"start: /{REGEX}/"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT = {"prompt": "hi", "max_tokens": 4}
TOOL = {"type": "object", "properties": {"a": SCHEMA}, "required": ["a"]}
NAMED = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "response_format": ("/v1/completions", {**TEXT, "response_format": NAMED}),
    "guided_json": ("/v1/completions", {**TEXT, "guided_json": SCHEMA}),
    "guided_regex": ("/v1/completions", {**TEXT, "guided_regex": REGEX}),
    "guided_grammar": ("/v1/completions", {**TEXT, "guided_grammar": LARK}),
    "structured_outputs": ("/v1/completions", {**TEXT, "structured_outputs": {"regex": REGEX}}),
    "llama.cpp json_schema": ("/completion", {"prompt": "hi", "n_predict": 4, "json_schema": SCHEMA}),
    "llama.cpp grammar": ("/completion", {"prompt": "hi", "n_predict": 4, "grammar": LARK}),
    "Ollama format": ("/api/generate", {"model": "tiny", "prompt": "hi", "stream": False, "format": SCHEMA}),
    "tools": (
        "/v1/chat/completions",
        {
            **CHAT,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": TOOL}}],
            "tool_choice": "required",
        },
    ),
}


@pytest.mark.cases(ci=4)
@pytest.mark.full
@pytest.mark.parametrize("name", ASKED)
def test_a_hostile_grammar_is_refused_in_every_field(server: LiveServer, name: str) -> None:
    path, body = ASKED[name]
    answer = server.client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    if name != "tools":  # the tiny checkpoint may have no chat template
        assert "CPU time" in answer.text or "memory" in answer.text, answer.text
    assert server.client.post("/v1/completions", json={**TEXT, "guided_regex": "[a-z]{2}"}).status_code == 200


def sent(server: LiveServer, schema: dict[str, Any]) -> socket.socket:
    """Sends a request for text by a schema, and returns the connection."""
    place = urlparse(server.url)
    connection = socket.create_connection((str(place.hostname), place.port or 80), timeout=60)
    content = json.dumps({**TEXT, "guided_json": schema}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    return connection


@pytest.mark.full
def test_other_grammars_do_not_wait_and_a_client_that_leaves_ends_its_own(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "SLOW_SECONDS", 600.0)  # so that nothing but the client's leaving ends it
    monkeypatch.setattr(grammar_process, "_MEMORY_BYTES", 2**32)
    with live(tiny) as server:
        hostile = [sent(server, SCHEMA), sent(server, {**SCHEMA, "multipleOf": 99999971})]
        until(lambda: server.find_served.service.num_open == 2)
        for number in range(3):
            schema = {"type": "object", "properties": {f"a{number}": {"type": "boolean"}}, "required": [f"a{number}"]}
            answer = server.client.post("/v1/completions", json={**TEXT, "max_tokens": 60, "guided_json": schema})
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["text"].startswith(f'{{"a{number}": ')
        assert server.find_served.service.num_open == 2
        for one in hostile:
            one.close()
        until(lambda: server.idle)
        assert server.client.post("/v1/completions", json={**TEXT, "guided_regex": "[a-z]{2}"}).status_code == 200
