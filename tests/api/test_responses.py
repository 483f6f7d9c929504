"""OpenAI's Responses API: the object, its events, input items, tools, schemas, and what a stateless server refuses."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from app.errors import StepFailed
from app.messages import Timings
from app.service.requests import ChoiceFinished, GenerationRequest, ScoredToken, TextDelta, Usage
from app.text.tool_calls import ToolCallDelta
from tests.api.scripted_service import CountingMetrics, ScriptedService, deltas
from tests.api.test_anthropic import THOUGHT_AND_CALL, named_events

HELLO = {"model": "demo", "input": "Hi"}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}


def sent(service: ScriptedService) -> GenerationRequest:
    return service.requests[-1]


def kinds(told: list[Any]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in told]


async def test_a_response(client: httpx.AsyncClient, service: ScriptedService) -> None:
    body = HELLO | {"instructions": "Be kind.", "max_output_tokens": 20, "metadata": {"a": "b"}, "temperature": 0.5}
    response = (await client.post("/v1/responses", json=body)).json()
    assert response["id"].startswith("resp_")
    item = response["output"][0]
    assert item.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": "Hello there", "annotations": [], "logprobs": []}
    assert response["output"] == [{"type": "message", "role": "assistant", "status": "completed", "content": [part]}]
    assert (response["status"], response["incomplete_details"], response["store"]) == ("completed", None, False)
    assert (response["instructions"], response["max_output_tokens"]) == ("Be kind.", 20)
    assert (response["metadata"], response["temperature"]) == ({"a": "b"}, 0.5)
    assert response["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 5,
    }
    request = sent(service)
    assert (request.api, request.params.max_tokens) == ("responses", 20)
    assert [message["role"] for message in request.messages or ()] == ["system", "user"]


async def test_events(client: httpx.AsyncClient) -> None:
    told = named_events(await client.post("/v1/responses", json=HELLO | {"stream": True}))
    assert kinds(told) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert len({event["response"]["id"] for event in told if "response" in event}) == 1
    item_id = told[2]["item"]["id"]
    assert {event["item_id"] for event in told if "item_id" in event} == {item_id}
    assert told[2]["item"]["content"] == []
    assert [event["delta"] for event in told[4:6]] == ["Hello", " there"]
    assert told[6]["text"] == told[7]["part"]["text"] == "Hello there"
    assert told[8]["item"] == told[-1]["response"]["output"][0]
    assert told[-1]["response"]["usage"]["total_tokens"] == 5


async def test_reasoning_and_a_call(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.scripts = [THOUGHT_AND_CALL]
    body = HELLO | {"tools": [TOOL], "reasoning": {"effort": "high", "summary": "auto"}}
    whole = (await client.post("/v1/responses", json=body)).json()
    reasoning, call = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me add."}]
    assert (call["type"], call["call_id"], call["name"]) == ("function_call", "call_1", "add")
    assert json.loads(call["arguments"]) == {"a": 1}
    assert whole["tools"] == [TOOL | {"description": None}]
    assert sent(service).template_arguments == {"enable_thinking": True, "reasoning_effort": "high"}
    told = named_events(await client.post("/v1/responses", json=body | {"stream": True}))
    assert kinds(told)[2:] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done", "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert told[-3]["arguments"] == call["arguments"]
    assert [item["type"] for item in told[-1]["response"]["output"]] == ["reasoning", "function_call"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_limit_makes_it_incomplete(client: httpx.AsyncClient, service: ScriptedService, stream: bool) -> None:
    service.scripts = [deltas("Hello", reason="length")]
    answer = await client.post("/v1/responses", json=HELLO | {"stream": stream})
    response = answer.json() if not stream else named_events(answer)[-1]["response"]
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    if stream:
        assert kinds(named_events(answer))[-1] == "incomplete"


async def test_logprobs(client: httpx.AsyncClient, service: ScriptedService) -> None:
    scored = ScoredToken(5, "Hi", b"Hi", -0.5, (ScoredToken(5, "Hi", b"Hi", -0.5),))
    end = ChoiceFinished(0, "stop", Usage(1, 0, 1), 1, Timings())
    service.scripts = [[TextDelta(0, "Hi", (5,), (scored,)), end]]
    body = HELLO | {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    token = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}
    expected = [token | {"top_logprobs": [token]}]
    whole = (await client.post("/v1/responses", json=body)).json()
    assert whole["output"][0]["content"][0]["logprobs"] == expected
    assert sent(service).params.logprobs == 1
    told = named_events(await client.post("/v1/responses", json=body | {"stream": True}))
    assert told[4]["logprobs"] == told[5]["logprobs"] == expected


async def test_items_of_an_agents_history(client: httpx.AsyncClient, service: ScriptedService) -> None:
    answer = {
        "type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
        "content": [{"type": "output_text", "text": "Adding.", "annotations": [], "logprobs": []}],
    }  # fmt: skip
    items: list[Any] = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "1+1"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        answer,
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a":1}', "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "0"}]},
        {"type": "message", "role": "assistant", "content": "Two."},
        {"type": "message", "role": "user", "content": "Thanks."},
    ]  # fmt: skip
    response = await client.post("/v1/responses", json=HELLO | {"input": items})
    assert response.status_code == 200, response.text
    messages = sent(service).messages
    assert messages is not None
    roles = ["system", "user", "assistant", "tool", "tool", "assistant", "user"]
    assert [message["role"] for message in messages] == roles
    assert messages[2]["content"] == [{"type": "text", "text": "Adding."}]
    assert messages[2]["reasoning_content"] == "so"
    assert [call["id"] for call in messages[2]["tool_calls"]] == ["c1", "c2"]
    assert (messages[3]["tool_call_id"], messages[3]["name"], messages[3]["content"]) == ("c1", "add", "2")


async def test_schemas(client: httpx.AsyncClient, service: ScriptedService) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    response = await client.post("/v1/responses", json=HELLO | {"text": {"format": form, "verbosity": "low"}})
    assert response.json()["text"] == {"format": form}
    grammar = sent(service).grammar
    assert grammar is not None
    assert json.loads(grammar.text) == schema


@pytest.mark.parametrize(
    ("choice", "tools", "forced"),
    [
        ("required", 2, 2),
        ({"type": "function", "name": "add"}, 2, 1),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}, 1, 0),
    ],
)
async def test_tool_choices(
    client: httpx.AsyncClient, service: ScriptedService, choice: Any, tools: int, forced: int
) -> None:
    body = HELLO | {"tools": [TOOL, TOOL | {"name": "subtract"}], "tool_choice": choice}
    response = await client.post("/v1/responses", json=body)
    assert response.json()["tool_choice"] == choice
    use = sent(service).tools
    assert use is not None
    assert (len(use.tools), len(use.forced)) == (tools, forced)


async def test_fields_that_change_nothing(client: httpx.AsyncClient) -> None:
    body = HELLO | {
        "store": False, "background": False, "truncation": "disabled", "previous_response_id": None, "user": "u",
        "service_tier": "auto", "prompt_cache_key": "k", "stream_options": {"include_obfuscation": False},
        "include": ["reasoning.encrypted_content"], "parallel_tool_calls": True, "top_k": 5, "seed": 1,
    }  # fmt: skip
    assert (await client.post("/responses", json=body)).status_code == 200


@pytest.mark.parametrize(
    ("change", "field", "text"),
    [
        ({"store": True}, "store", "store is not supported: leave it out, or send False"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_id is not supported"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"background": True}, "background", "not supported"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "this server stores nothing"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0]", "readable only for the server"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input", "at least 1 item"),
        ({"input": [{"type": "function_call_output", "output": "2"}]}, "input[0].call_id", "Field required"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "Field required"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "Input should be"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "needs a schema"),
        ({"n": 2}, "n", "n must be 1"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
            "'input_image'",
        ),
    ],
)
async def test_refusals(
    client: httpx.AsyncClient, metrics: CountingMetrics, change: Any, field: str, text: str
) -> None:
    response = await client.post("/v1/responses", json=HELLO | change)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (field, "invalid_request_error")
    assert text in error["message"]
    assert metrics.refusals == ["responses"]


async def test_a_failure_within_the_stream(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.scripts = [[*deltas("Hello")[:1], StepFailed("The step failed.")]]
    told = named_events(await client.post("/v1/responses", json=HELLO | {"stream": True}))
    assert told[-1] == {"type": "error", "code": "step_failed", "message": "The step failed.", "param": None}


async def test_white_space_around_calls_is_no_message(client: httpx.AsyncClient, service: ScriptedService) -> None:
    end = ChoiceFinished(0, "tool_calls", Usage(3, 0, 3), 3, Timings())
    calls = (ToolCallDelta(0, "{}", "call_1", "add"),)
    service.scripts = [
        [TextDelta(0, "\n", (1,)), TextDelta(0, "", (2,), tool_calls=calls), TextDelta(0, "\n", (3,)), end]
    ]
    output = (await client.post("/v1/responses", json=HELLO | {"tools": [TOOL]})).json()["output"]
    assert [item["type"] for item in output] == ["function_call"]
    told = named_events(await client.post("/v1/responses", json=HELLO | {"tools": [TOOL], "stream": True}))
    assert [item["type"] for item in told[-1]["response"]["output"]] == ["function_call"]
    service.scripts = [deltas("\n", " ")]
    output = (await client.post("/v1/responses", json=HELLO)).json()["output"]
    assert output[0]["content"][0]["text"] == "\n "


@pytest.mark.parametrize("path", ["/v1/responses/input_tokens", "/responses/input_tokens"])
async def test_input_tokens_are_counted(client: httpx.AsyncClient, path: str) -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
    counted = await client.post(path, json={"input": "Hello", "tools": [tool]})
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": 2}
    assert (await client.post(path, json={"input": 5})).json()["error"]["param"] == "input"
