"""Ollama's routes: lines of JSON by default, tools, formats, thinking, options, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from app.errors import StepFailed
from app.messages import Timings
from app.service.requests import ChoiceFinished, GenerationRequest, TextDelta, Usage
from app.text.tool_calls import ToolCallDelta
from fake_encoder import LIMITS
from tests.api.encoder_client import asking
from tests.api.scripted_service import CountingMetrics, ScriptedService, deltas

HELLO = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


def called(*arguments: str, reason: Any = "tool_calls") -> list[Any]:
    """A script that calls `add`, with the arguments in parts."""
    steps: list[Any] = [TextDelta(0, "", (7,), tool_calls=(ToolCallDelta(0, arguments[0], "call_1", "add"),))]
    steps += [TextDelta(0, "", (8,), tool_calls=(ToolCallDelta(0, more),)) for more in arguments[1:]]
    return [*steps, ChoiceFinished(0, reason, Usage(3, 0, len(steps)), len(steps), Timings())]


def lines(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def sent(service: ScriptedService) -> GenerationRequest:
    return service.requests[-1]


async def test_chat_streams_lines_by_default(client: httpx.AsyncClient, service: ScriptedService) -> None:
    told = lines(await client.post("/api/chat", json=HELLO))
    assert [line["message"] for line in told] == [
        {"role": "assistant", "content": "Hello"},
        {"role": "assistant", "content": " there"},
        {"role": "assistant", "content": ""},
    ]
    assert [line["done"] for line in told] == [False, False, True]
    last = told[-1]
    assert (last["done_reason"], last["prompt_eval_count"], last["eval_count"]) == ("stop", 3, 2)
    assert (last["prompt_eval_duration"], last["eval_duration"]) == (2_000_000, 4_000_000)
    assert sent(service).api == "ollama"
    assert sent(service).messages == ({"role": "user", "content": "Hi"},)
    assert sent(service).clips_max_tokens


async def test_chat_complete(client: httpx.AsyncClient) -> None:
    body = (await client.post("/api/chat", json=HELLO | {"stream": False})).json()
    assert body["message"] == {"role": "assistant", "content": "Hello there"}
    assert body["done"] is True
    assert "queue" in (await client.post("/api/chat", json=HELLO)).headers["server-timing"]


async def test_calls_have_objects_as_arguments(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.scripts = [called('{"a"', ": 1}")]
    body = HELLO | {"tools": [TOOL]}
    calls = [{"id": "call_1", "function": {"index": 0, "name": "add", "arguments": {"a": 1}}}]
    told = lines(await client.post("/api/chat", json=body))
    assert [line["message"].get("tool_calls") for line in told] == [calls, None]
    whole = (await client.post("/api/chat", json=body | {"stream": False})).json()
    assert whole["message"]["tool_calls"] == calls
    assert whole["done_reason"] == "stop"
    tools = sent(service).tools
    assert tools is not None
    assert tools.tools[0].name == "add"


async def test_a_call_cut_short_is_left_out(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.scripts = [called('{"a', reason="length")]
    told = lines(await client.post("/api/chat", json=HELLO | {"tools": [TOOL]}))
    assert len(told) == 1
    assert told[0]["done_reason"] == "length"


async def test_history_of_tools_and_thinking(client: httpx.AsyncClient, service: ScriptedService) -> None:
    history = [
        {"role": "user", "content": "1+1"},
        {
            "role": "assistant",
            "content": "",
            "thinking": "so",
            "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_name": "add"},
    ]
    response = await client.post("/api/chat", json=HELLO | {"messages": history, "stream": False})
    assert response.status_code == 200, response.text
    messages = sent(service).messages
    assert messages is not None
    assert messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert messages[1]["reasoning_content"] == "so"
    assert (messages[2]["role"], messages[2]["name"]) == ("tool", "add")


async def test_thinking_is_apart(client: httpx.AsyncClient, service: ScriptedService) -> None:
    end = ChoiceFinished(0, "stop", Usage(3, 0, 2), 2, Timings())
    service.scripts = [[TextDelta(0, "", (1,), reasoning="Hm"), TextDelta(0, "Yes", (2,)), end]]
    told = lines(await client.post("/api/chat", json=HELLO | {"think": True}))
    assert told[0]["message"] == {"role": "assistant", "content": "", "thinking": "Hm"}
    assert sent(service).template_arguments == {"enable_thinking": True, "thinking": True}
    told = lines(await client.post("/api/generate", json={"model": "demo", "prompt": "a", "think": "low"}))
    assert (told[0]["thinking"], told[1]["response"]) == ("Hm", "Yes")
    assert sent(service).template_arguments["reasoning_effort"] == "low"


async def test_options(client: httpx.AsyncClient, service: ScriptedService) -> None:
    options = {
        "num_predict": 9, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 4, "stop": ["x"],
        "repeat_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.2, "num_ctx": 4096, "num_thread": 2,
        "mirostat": 0,
    }  # fmt: skip
    assert (await client.post("/api/chat", json=HELLO | {"options": options, "keep_alive": "5m"})).status_code == 200
    params = sent(service).params
    assert (params.max_tokens, params.temperature, params.top_k, params.seed, params.stop) == (9, 0.5, 3, 4, ("x",))
    assert params.repetition_penalty == 1.2
    assert (await client.post("/api/chat", json=HELLO | {"options": {"num_predict": -1}})).status_code == 200
    assert sent(service).params.max_tokens is None


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("json", {"type": "object"}),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, None),
    ],
)
async def test_format(client: httpx.AsyncClient, service: ScriptedService, form: Any, expected: Any) -> None:
    for path, body in (("/api/chat", HELLO), ("/api/generate", {"model": "demo", "prompt": "a"})):
        assert (await client.post(path, json=body | {"format": form})).status_code == 200
        grammar = sent(service).grammar
        assert grammar is not None
        assert json.loads(grammar.text) == (expected or form)
        assert grammar.field == "format"
    assert (await client.post("/api/chat", json=HELLO | {"format": ""})).status_code == 200
    assert sent(service).grammar is None


async def test_generate_is_a_chat_or_a_raw_prompt(client: httpx.AsyncClient, service: ScriptedService) -> None:
    body = {"model": "demo", "prompt": "Once", "stream": False}
    whole = (await client.post("/api/generate", json=body | {"system": "Be kind."})).json()
    assert whole["response"] == "Hello there"
    assert [message["role"] for message in sent(service).messages or ()] == ["system", "user"]
    assert (await client.post("/api/generate", json=body | {"raw": True})).status_code == 200
    assert (sent(service).prompt, sent(service).messages, sent(service).params.max_tokens) == ("Once", None, None)
    refused = await client.post("/api/generate", json=body | {"raw": True, "system": "x"})
    assert refused.json() == {"error": "system needs a chat template: leave raw out, or put the text into the prompt."}


async def test_without_a_prompt_the_model_is_loaded(client: httpx.AsyncClient, service: ScriptedService) -> None:
    for path in ("/api/chat", "/api/generate"):
        body = (await client.post(path, json={"model": "demo", "keep_alive": 0})).json()
        assert (body["done"], body["done_reason"]) == (True, "load")
    assert service.requests == []


async def test_the_tag_latest_and_no_content_type(client: httpx.AsyncClient) -> None:
    body = json.dumps(HELLO | {"model": "demo:latest"})
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert (await client.post("/api/chat", content=body, headers=form)).status_code == 200
    browser = await client.post("/api/chat", content=body, headers=form | {"origin": "http://evil.example"})
    assert browser.status_code == 400
    assert "content-type" in browser.json()["error"]


@pytest.mark.parametrize(
    ("path", "change", "status", "text"),
    [
        ("chat", {"model": "other"}, 404, "'other' is not served here"),
        ("chat", {"messages": [{"role": "user", "content": "a", "images": [5]}]}, 400, "messages[0].images"),
        ("chat", {"options": {"num_predict": 0}}, 400, "options.num_predict must be"),
        ("chat", {"options": {"temperature": 9}}, 400, "options.temperature must be"),
        ("chat", {"temperature": 1}, 400, "temperature is not supported: use options"),
        ("chat", {"tools": [{"type": "function"}]}, 400, "tools[0].function: Field required"),
        ("chat", {"options": {"mirostat": 2}}, 400, "options.mirostat is not supported"),
        ("chat", {"format": 5}, 400, "format"),
        ("generate", {"prompt": "a", "suffix": "b"}, 400, "suffix is not supported"),
        ("generate", {"prompt": "a", "images": ["aGk="], "raw": True}, 400, "images need a chat template"),
        ("generate", {"prompt": "a", "context": [1]}, 400, "context is not supported"),
        ("embed", {"input": "a"}, 400, "generates text"),
        ("embeddings", {"prompt": "a"}, 400, "generates text"),
        ("show", {"model": "other"}, 404, "'other' is not served here"),
        ("pull", {"model": "other"}, 404, "'other' is not served here"),
        ("pull", {"model": None}, 400, "model: Field required"),
    ],
)
async def test_refusals(
    client: httpx.AsyncClient, metrics: CountingMetrics, path: str, change: Any, status: int, text: str
) -> None:
    body = (HELLO if path == "chat" else {"model": "demo"}) | change
    response = await client.post(f"/api/{path}", json=body)
    assert response.status_code == status
    assert set(response.json()) == {"error"}
    assert text in response.json()["error"]
    assert metrics.refusals == (["ollama"] if path not in ("show", "pull") else [])


async def test_a_failure_within_the_stream_is_its_last_line(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.scripts = [[*deltas("Hello")[:1], StepFailed("The step failed.")]]
    told = lines(await client.post("/api/chat", json=HELLO))
    assert told[-1] == {"error": "The step failed."}
    assert len(told) == 2


async def test_no_text_has_no_vector() -> None:
    async with asking() as (client, worker):
        for given in ("", []):
            told = await client.post("/api/embed", json={"model": "tiny", "input": given})
            assert (told.status_code, told.json()["embeddings"]) == (200, [])
        told = await client.post("/api/embeddings", json={"model": "tiny", "prompt": ""})
        assert (told.status_code, told.json()) == (200, {"embedding": []})
        assert worker.encodes == []


@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings"])
async def test_embeddings(path: str) -> None:
    body = {"model": "tiny:latest", "input" if path == "/api/embed" else "prompt": "the fox", "keep_alive": "1m"}
    async with asking() as (client, worker):
        response = await client.post(path, json=body)
        assert worker.encodes[0].normalize is (True if path == "/api/embed" else None)
        told = response.json()
        vectors = told["embeddings"] if path == "/api/embed" else [told["embedding"]]
        assert len(vectors) == 1
        assert response.headers["server-timing"] == "queue;dur=1.0, encode;dur=2.0"
        if path == "/api/embed":
            assert (told["model"], told["total_duration"], told["prompt_eval_count"]) == ("tiny", 3_000_000, 4)
        assert (await client.post(path, json=body | {"model": "other"})).status_code == 404
        assert (await client.post("/api/chat", json=HELLO | {"model": "tiny"})).status_code == 400
        assert (await client.post("/api/show", json={"model": "tiny"})).json()["capabilities"] == ["embedding"]


async def test_several_texts_and_dimensions() -> None:
    async with asking() as (client, _):
        body = {"model": "tiny", "input": ["the fox", "said"], "dimensions": 2}
        told = (await client.post("/api/embed", json=body)).json()
        assert [len(vector) for vector in told["embeddings"]] == [2, 2]
        long = {"model": "tiny", "input": "fox " * 100}
        assert (await client.post("/api/embed", json=long)).json()["prompt_eval_count"] == LIMITS.max_model_len
        assert (await client.post("/api/embed", json=long | {"truncate": False})).status_code == 400


async def test_the_model_is_described(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/api/tags")).json()["models"]
    assert [model["name"] for model in listed] == ["demo"]
    assert len(listed[0]["digest"]) == 64
    assert (await client.get("/api/ps")).json()["models"][0]["context_length"] == 512
    shown = (await client.post("/api/show", json={"name": "demo:latest"})).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["template"] == "{{ messages }}"
    assert "version" in (await client.get("/api/version")).json()


@pytest.mark.parametrize("body", [{"model": "demo"}, {"name": "demo:latest", "insecure": True}])
async def test_the_served_model_is_pulled_at_once(client: httpx.AsyncClient, body: Any) -> None:
    lines = (await client.post("/api/pull", json=body)).text.splitlines()
    assert [json.loads(line)["status"] for line in lines][::2] == ["pulling manifest", "success"]
    assert (await client.post("/api/pull", json=body | {"stream": False})).json() == {"status": "success"}


async def test_tools_of_other_types_are_left_out(client: httpx.AsyncClient, service: ScriptedService) -> None:
    tools = [{"type": "web_search"}, {"type": "function", "function": {"name": "add"}}]
    assert (await client.post("/api/chat", json=HELLO | {"tools": tools})).status_code == 200
    use = service.requests[0].tools
    assert use is not None and [tool.name for tool in use.tools] == ["add"]
