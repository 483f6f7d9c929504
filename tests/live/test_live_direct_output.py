"""Tokens that pass the reader of a stream have the bytes that it would write, in a stream and in a whole answer."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from app.api.http_protocol import BoundedProtocol
from app.api.streaming import CollectedCompletion
from app.messages import Event
from app.service.engine_client import EngineClient
from tests.live.live_server import LiveServer, live

CHAT = [{"role": "user", "content": "Once upon"}]
NUM_TOKENS = 40
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "Once"}),
    "completions with usage": ("/v1/completions", {"prompt": "Once", "stream_options": {"include_usage": True}}),
    "completions with an echo": ("/v1/completions", {"prompt": "Once", "echo": True}),
    "chat": ("/v1/chat/completions", {"messages": CHAT}),
    "chat with usage": ("/v1/chat/completions", {"messages": CHAT, "stream_options": {"include_usage": True}}),
    "responses": ("/v1/responses", {"input": "Once upon"}),
    "messages": ("/v1/messages", {"messages": CHAT}),
    "ollama chat": ("/api/chat", {"messages": CHAT}),
    "ollama generate": ("/api/generate", {"prompt": "Twice upon a time"}),
    "native": ("/generate", {"prompt": "Once"}),
    "llama.cpp": ("/completion", {"prompt": "Once"}),
    "oip": ("/v2/models/tiny/generate_stream", {"text_input": "Once"}),
}
WHOLE = (
    "completions",
    "completions with an echo",
    "chat",
    "responses",
    "messages",
    "ollama chat",
    "native",
    "llama.cpp",
)
# Streams whose events have more than the text of a plain token.
GENERAL: dict[str, tuple[str, dict[str, Any]]] = {
    "continuous usage": (
        "/v1/completions",
        {"prompt": "Once", "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "token ids": ("/v1/completions", {"prompt": "Once", "return_token_ids": True}),
    "log-probabilities": ("/v1/completions", {"prompt": "Once", "logprobs": 2}),
    "two choices": ("/v1/completions", {"prompt": "Once", "n": 2}),
    "stop strings": ("/v1/completions", {"prompt": "Once", "stop": ["never written"]}),
}


@pytest.fixture(scope="module")
def steady(tiny: Path) -> Iterator[LiveServer]:
    with live(tiny, speculation="off") as server:  # else a step has as many tokens as pay off at the moment
        yield server


@pytest.fixture
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the readers of streams take each step's events before the engine makes the next ones."""
    on_events = EngineClient.on_events

    def deliver(self: EngineClient, events: Sequence[Event]) -> None:
        on_events(self, events)
        for _ in range(30):  # turns of the event loop
            turn = threading.Event()
            if (loop := self._open_loop()) is not None:
                loop.call_soon_threadsafe(turn.set)
                turn.wait(1)

    monkeypatch.setattr(EngineClient, "on_events", deliver)


def limits(path: str, streams: bool = True) -> dict[str, Any]:
    if path.startswith("/api/"):
        return {"options": {"num_predict": NUM_TOKENS, "temperature": 0}, "stream": streams}
    if path.startswith("/v2/"):
        return {"parameters": {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}}
    name = {"/completion": "n_predict", "/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
    return {name: NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": streams}


def streamed(server: LiveServer, path: str, body: dict[str, Any], streams: bool = True) -> str:
    """The response without ids and times, which differ between two requests."""
    response = server.client.post(path, json={"model": "tiny", **limits(path, streams), **body})
    assert response.status_code == 200, response.text
    text = re.sub(r"[0-9a-f]{32}", "ID", response.content.decode())
    text = re.sub(r'"(created|created_at)":("[^"]*"|\d+)', r'"\1":0', text)
    return re.sub(r'"(\w+_duration|\w+_m?s|\w+_per_second)":[\d.]+', r'"\1":0', text)


@pytest.mark.cases(test=3)
@pytest.mark.usefixtures("_unhurried")
@pytest.mark.parametrize("name", [*BODIES, *GENERAL])
def test_both_ways_write_the_same(steady: LiveServer, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path, body = (BODIES | GENERAL)[name]
    streamed(steady, path, body)  # the others find the prompt in the cache
    written: list[bytes] = []
    direct_write = BoundedProtocol._direct_write

    def watched(self: BoundedProtocol, cycle: Any) -> Callable[[bytes], None]:
        write = direct_write(self, cycle)
        return lambda data: (written.append(data), write(data))[1]

    monkeypatch.setattr(BoundedProtocol, "_direct_write", watched)
    direct = streamed(steady, path, body)
    assert any(written) == (name in BODIES)
    monkeypatch.setattr(BoundedProtocol, "_direct_write", lambda self, cycle: None)
    assert streamed(steady, path, body) == direct


@pytest.mark.cases(test=2)
@pytest.mark.usefixtures("_unhurried")
@pytest.mark.parametrize("name", [*WHOLE, *list(GENERAL)[1:]])
def test_a_whole_answer_is_the_same_both_ways(steady: LiveServer, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path, body = (BODIES | GENERAL)[name]
    streamed(steady, path, body, streams=False)
    added: list[Any] = []
    add = CollectedCompletion.add_directly

    def watched(self: CollectedCompletion, text: str, token_ids: Sequence[int]) -> None:
        added.append(text)
        add(self, text, token_ids)

    monkeypatch.setattr(CollectedCompletion, "add_directly", watched)
    direct = streamed(steady, path, body, streams=False)
    assert any(added) == (name in WHOLE or name == "token ids")
    monkeypatch.setattr(CollectedCompletion, "add_directly", None)
    assert streamed(steady, path, body, streams=False) == direct
