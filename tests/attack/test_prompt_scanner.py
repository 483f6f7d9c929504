"""Prompts that are far too long: refused while they arrive, neither kept nor parsed; whatever might be fine is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api import application, bodies, middleware
from app.api.middleware import RequestGate
from app.api.prompt_scanner import PromptScanner
from app.service.prompt import tokenize_prompt
from app.service.served_model import ServedDecoder, ServingLimits
from app.settings import DEMO_DIRECTORY
from app.text.bounds import CHUNK_CHARACTERS, LeastTokens
from app.text.tokenizer import Tokenizer
from tests.api.scripted_service import Conversation, CountingMetrics, Lifetime, ScriptedService
from tests.attack.attack_server import AttackServer, attacked, post
from tests.attack.test_text_bounds import WORDS, generation

PATHS = ("prompt", "prompt[]", "messages[].content", "messages[].content[].text", "input")
LIMIT = 8


def byte_count() -> LeastTokens:
    return LeastTokens(numpy.ones(256), ascii_only=False)


def scan(body: bytes, step: int, limit: int = LIMIT, paths: tuple[str, ...] = PATHS) -> int | None:
    scanner, arrived = PromptScanner(paths, byte_count, limit), bytearray()
    for start in range(0, len(body), step):
        arrived += body[start : start + step]
        if (found := scanner.feed(arrived)) is not None:
            return found
    return None


def prompts(value: Any) -> Iterator[str]:
    """The texts that count, by a parser: at the paths, and of messages those after their role."""
    for name, field in value.items():
        if name == "prompt":
            yield from (one for one in (field if isinstance(field, list) else [field]) if isinstance(one, str))
        elif name == "input" and isinstance(field, str):
            yield field
        elif name == "messages" and isinstance(field, list):
            for message in field:
                yield from _message_texts(message) if isinstance(message, dict) else ()


def _message_texts(message: dict[str, Any]) -> Iterator[str]:
    is_users = False
    for name, field in message.items():
        if name == "role" and isinstance(field, str):
            is_users = field == "user"
        if name == "content" and is_users:
            yield from [field] if isinstance(field, str) else ()
            parts = field if isinstance(field, list) else ()
            yield from (one["text"] for one in parts if isinstance(one, dict) and isinstance(one.get("text"), str))


Text = st.text(st.sampled_from('ab"\\,[]{}: é🙂\n'), max_size=14)
Plain = st.none() | st.booleans() | st.integers() | Text
Names = st.sampled_from(["prompt", "messages", "content", "text", "role", "input", "other"])
Message = st.dictionaries(st.sampled_from(["role", "content", "text", "x"]), Plain | st.just("user"))
Parts = st.lists(st.dictionaries(st.sampled_from(["text", "type"]), Plain))
Users = st.builds(
    lambda content, late: {"content": content} | late, Text | Parts, st.just({"role": "user"})
) | st.builds(lambda content: {"role": "user", "content": content}, Text | Parts)
Bodies = st.dictionaries(Names, Plain | st.lists(Plain | Message | Users) | st.dictionaries(Names, Plain))


@given(Bodies, st.integers(1, 30), st.booleans())
def test_the_scanner_finds_what_a_parser_finds(value: dict[str, Any], step: int, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    longest = max((len(text.encode()) for text in prompts(value)), default=0)
    found = scan(body, step)
    assert (found is not None) <= (longest > LIMIT + 1)  # nothing that fits is refused
    if ascii_only is False or step > 12:  # else a character of two escapes may be divided, and is not counted
        assert (found is not None) >= (longest > LIMIT + 2)


@given(st.binary(max_size=300), st.integers(1, 20))
def test_any_bytes_can_be_scanned(data: bytes, step: int) -> None:
    scan(b'{"prompt":' + data, step)


@pytest.mark.parametrize(
    "body",
    [
        b'{"other":"%b","prompt":"x"}' % (b"a" * 1_000),
        b'{"a":{"prompt":"%b"}}' % (b"a" * 1_000),
        b'[{"prompt":"%b"}]' % (b"a" * 1_000),
        b'{"messages":[{"role":"assistant","content":"%b"}]}' % (b"a" * 1_000),
        b'{"messages":[{"role":"user","content":"x"},{"content":"%b"}]}' % (b"a" * 1_000),
        b"[" * 1_000,
        b"]}" * 1_000,
        b'{"x":[%b0],"prompt":"%b"}' % (b"0," * 5_000, b"a" * 1_000),
    ],
    ids=["another field", "deeper", "in a list", "a reply", "no role", "brackets", "closing", "many values"],
)
def test_what_is_no_prompt_is_left_to_the_parser(body: bytes) -> None:
    assert scan(body, 100) is None


def test_the_count_is_that_of_the_whole_text() -> None:
    """Whatever follows: a part never counts for more than the text in one piece."""
    tokenizer = Tokenizer(DEMO_DIRECTORY)
    count = tokenizer.new_count()
    text = WORDS * 1_000
    for start in range(0, len(text), 777):
        count.add(text[start : start + 777].encode())
        assert count.tokens <= len(tokenizer.encode(text[: start + 777], False))
    assert count.tokens == pytest.approx(tokenizer.least_tokens(text, 10**9), abs=2)


def test_a_count_of_ascii_ends_at_another_character() -> None:
    count = LeastTokens(numpy.ones(256), ascii_only=True)
    count.add(b"abc")
    assert count.tokens == 3
    count.add("é".encode())
    count.add(b"abc")
    assert count.tokens == 0


# ---- the gate --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[AttackServer]:
    with attacked() as found:
        yield found


LONG = "a" * 2_000_000
MESSAGES = {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": LONG}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"prompt": LONG}),
        ("/v1/completions", {"prompt": ["x", LONG]}),
        ("/v1/chat/completions", MESSAGES),
        ("/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}),
        ("/v1/messages", MESSAGES | {"max_tokens": 1}),
        ("/v1/responses", {"input": LONG}),
        ("/api/chat", MESSAGES),
        ("/api/generate", {"prompt": LONG}),
        ("/completion", {"prompt": LONG}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_prompt_is_refused_while_it_arrives(
    server: AttackServer, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection goes on: the next request on it is answered."""
    monkeypatch.setattr(middleware, "run_until_disconnect", _never)
    monkeypatch.setattr(application, "MAX_PROMPT_TOKENS", 10_000)
    request = post(path, json.dumps(body).encode()) + b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    answer = server.ask(request)
    assert answer.status == 400
    assert b"maximum context length" in answer.body
    assert answer.body.count(b"HTTP/1.1 200 OK") == 1


async def _never(*arguments: Any) -> None:
    raise AssertionError("the body was read to its end")


async def test_nothing_of_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    service, metrics = ScriptedService(), CountingMetrics()
    runtime: Any = application.ApiRuntime(service, metrics, Lifetime(), dict, created=1)  # type: ignore[arg-type]
    gate = RequestGate(_never, body_check=application.check_arriving_body)  # type: ignore[arg-type]
    held: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def watched() -> Any:
            held.append(gate.body_memory.num_bytes)
            return await receive()

        scope["app"] = type("App", (), {"state": type("State", (), {"runtime": runtime})})
        await gate(scope, watched, send)

    monkeypatch.setattr(application, "MAX_PROMPT_TOKENS", 100_000)
    body = json.dumps({"prompt": "a" * 2_000_000}).encode()
    parts = [body[start : start + 50_000] for start in range(0, len(body), 50_000)]
    talk = Conversation(app, "/generate", parts)
    await talk.over()
    assert talk.sent[0]["status"] == 400
    assert max(held) <= bodies.MAX_BODY_BYTES
    assert len(held) == len(parts)
    assert held[-1] == gate.body_memory.num_bytes == 0
    assert metrics.refusals == ["native"]


# ---- truncation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize(
    "text", [WORDS * 4_000, "x" + "the fox " * 20_000, "z" * 100_000], ids=["words", "fox", "one word"]
)
def test_a_long_prompt_is_truncated_as_the_whole(text: str, right: bool) -> None:
    tokenizer = Tokenizer(DEMO_DIRECTORY)
    model = ServedDecoder("demo", ServingLimits(2048, 8, 8, 60.0, tokenizer.vocab_size), tokenizer, None)
    assert len(text) > CHUNK_CHARACTERS
    whole = tokenizer.encode(text)
    for most in (2046, 5):
        request = replace(generation(text), truncate_prompt_tokens=most, truncate_right=right)
        assert list(tokenize_prompt(model, request).token_ids) == (whole[:most] if right else whole[-most:])
