"""Anthropic's routes: messages, events, tools, thinking, counting, errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from app.errors import Overloaded, StepFailed
from app.messages import Timings
from app.service.requests import ChoiceFinished, GenerationRequest, TextDelta, Usage
from app.text.tool_calls import ToolCallDelta
from tests.api.scripted_service import CountingMetrics, ScriptedService, deltas

HELLO = {"model": "demo", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
END = ChoiceFinished(0, "tool_calls", Usage(3, 1, 4), 4, Timings())
THOUGHT_AND_CALL: list[Any] = [
    TextDelta(0, "", (1,), timings=Timings(cached_tokens=1), reasoning="Let me add."),
    TextDelta(0, "\n", (2,)),
    TextDelta(0, "", (3,), tool_calls=(ToolCallDelta(0, '{"a"', "call_1", "add"),)),
    TextDelta(0, "", (4,), tool_calls=(ToolCallDelta(0, ": 1}"),)),
    END,
]


def named_events(response: httpx.Response) -> list[Any]:
    """The data of each event, whose name is its type."""
    assert response.status_code == 200, response.text
    found = []
    for event in response.text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def sent(service: ScriptedService) -> GenerationRequest:
    return service.requests[-1]


async def test_a_message(client: httpx.AsyncClient, service: ScriptedService) -> None:
    body = {**HELLO, "system": "Be kind.", "temperature": 0.5, "top_k": 5, "top_p": 0.9, "stop_sequences": ["x"]}
    response = await client.post("/v1/messages", json=body)
    message = response.json()
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [{"type": "text", "text": "Hello there"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": 2,
        },
    }
    assert response.headers["request-id"] == response.headers["x-request-id"]
    request = sent(service)
    assert (request.api, request.clips_max_tokens) == ("messages", True)
    assert [message["role"] for message in request.messages or ()] == ["system", "user"]
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_k, params.stop) == (50, 0.5, 5, ("x",))
    assert request.template_arguments == {"enable_thinking": False}


async def test_events(client: httpx.AsyncClient) -> None:
    told = named_events(await client.post("/v1/messages", json=HELLO | {"stream": True}))
    assert [event["type"] for event in told] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = told[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["input_tokens"]) == ([], None, 3)
    assert told[1] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert [event["delta"] for event in told[2:4]] == [
        {"type": "text_delta", "text": "Hello"},
        {"type": "text_delta", "text": " there"},
    ]
    assert told[5]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert (start["usage"]["output_tokens"], told[5]["usage"]["output_tokens"]) == (0, 2)


async def test_thinking_and_a_call(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.scripts = [THOUGHT_AND_CALL]
    body = HELLO | {"tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    message = (await client.post("/v1/messages", json=body)).json()
    assert message["content"] == [
        {"type": "thinking", "thinking": "Let me add.", "signature": ""},
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
    ]
    assert message["stop_reason"] == "tool_use"
    assert sent(service).template_arguments == {"enable_thinking": True, "thinking_budget": 1024}
    told = named_events(await client.post("/v1/messages", json=body | {"stream": True}))
    assert [(event["type"], event["index"]) for event in told if "index" in event] == [
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
    ]
    starts = [event["content_block"] for event in told if event["type"] == "content_block_start"]
    assert starts[1] == {"type": "tool_use", "id": "call_1", "name": "add", "input": {}}
    parts = [event["delta"].get("partial_json", "") for event in told if event["type"] == "content_block_delta"]
    assert json.loads("".join(parts)) == {"a": 1}


async def test_thinking_that_nobody_wants_is_hidden(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.scripts = [[TextDelta(0, "", (1,), reasoning="Hm"), *deltas("Yes")]]
    assert (await client.post("/v1/messages", json=HELLO)).json()["content"] == [{"type": "text", "text": "Yes"}]
    service.scripts = [[TextDelta(0, "", (1,), reasoning="Hm"), ChoiceFinished(0, "length", Usage(3), 1, Timings())]]
    told = named_events(await client.post("/v1/messages", json=HELLO | {"stream": True}))
    assert [event["type"] for event in told] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert told[-2]["delta"]["stop_reason"] == "max_tokens"


async def test_an_answer_without_a_token(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.scripts = [[ChoiceFinished(0, "stop", Usage(3), 0, Timings())]]
    told = named_events(await client.post("/v1/messages", json=HELLO | {"stream": True}))
    assert told[0]["type"] == "message_start"
    assert (await client.post("/v1/messages", json=HELLO)).json()["content"] == [{"type": "text", "text": ""}]


async def test_a_stop_sequence(client: httpx.AsyncClient, service: ScriptedService) -> None:
    end = ChoiceFinished(0, "stop", Usage(3), 1, Timings(), matched_stop="###")
    service.scripts = [[TextDelta(0, "a", (1,)), end]]
    message = (await client.post("/v1/messages", json=HELLO)).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "###")


async def test_history_of_tools(client: httpx.AsyncClient, service: ScriptedService) -> None:
    history = [
        {"role": "user", "content": [{"type": "text", "text": "1+1", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "so", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Adding."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "2"}],
                    "is_error": False,
                },
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    response = await client.post("/v1/messages", json=HELLO | {"messages": history, "tools": [TOOL]})
    assert response.status_code == 200, response.text
    messages = sent(service).messages
    assert messages is not None
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user"]
    assert messages[1]["reasoning_content"] == "so"
    call = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert messages[1]["tool_calls"] == [call]
    assert messages[2]["tool_call_id"] == "t1"
    assert messages[3]["content"] == [{"type": "text", "text": "And now?"}]


async def test_the_beginning_of_an_answer_is_continued(client: httpx.AsyncClient, service: ScriptedService) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    assert (await client.post("/v1/messages", json=HELLO | {"messages": messages})).status_code == 200
    options = sent(service).chat_options
    assert options is not None
    assert options.continue_final_message


@pytest.mark.parametrize(
    ("choice", "forced", "parallel"),
    [
        ({"type": "auto"}, 0, True),
        ({"type": "any", "disable_parallel_tool_use": True}, 1, False),
        ({"type": "tool", "name": "add"}, 1, False),
    ],
)
async def test_tool_choices(
    client: httpx.AsyncClient, service: ScriptedService, choice: Any, forced: int, parallel: bool
) -> None:
    assert (await client.post("/v1/messages", json=HELLO | {"tools": [TOOL], "tool_choice": choice})).status_code == 200
    use = sent(service).tools
    assert use is not None
    assert (len(use.forced), use.parallel) == (forced, parallel)


async def test_output_format(client: httpx.AsyncClient, service: ScriptedService) -> None:
    schema = {"type": "object"}
    body = HELLO | {"output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}}
    assert (await client.post("/v1/messages", json=body)).status_code == 200
    grammar = sent(service).grammar
    assert grammar is not None
    assert json.loads(grammar.text) == schema


async def test_tokens_are_counted(client: httpx.AsyncClient) -> None:
    body = {"model": "demo", "messages": HELLO["messages"], "system": "Be kind.", "tools": [TOOL]}
    assert (await client.post("/v1/messages/count_tokens", json=body)).json() == {"input_tokens": 2}


@pytest.mark.parametrize(
    ("change", "status", "kind", "text"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"model": "claude"}, 404, "not_found_error", "'claude' is not served here"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens must be"),
        ({"messages": []}, 400, "invalid_request_error", "messages: at least one message is required"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
        ({"tools": [{"input_schema": {}}]}, 400, "invalid_request_error", "tools[0].name: Field required"),
        (
            {"thread": {"type": "continue", "previous_message_id": "msg_1"}},
            400, "invalid_request_error", "this server stores no conversations",
        ),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, 400, "invalid_request_error", "needs a name"),
        ({"mcp_servers": [{"url": "x"}]}, 400, "invalid_request_error", "mcp_servers is not supported"),
        ({"frequency_penalty": 1}, 400, "invalid_request_error", "frequency_penalty is not supported"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            400, "invalid_request_error", "messages[0].content[0] of type 'image_url' is neither a data URL nor an address",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url", "url": "x"}}]}]},
            400, "invalid_request_error", "messages[0].content[0] is of type 'document'",
        ),
        ({"system": [{"type": "image"}]}, 400, "invalid_request_error", "system[0] is of type 'image'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
            400, "invalid_request_error", "does not belong to the role user",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "2"}]}]},
            400, "invalid_request_error", "messages[0].content[0].tool_use_id: Field required",
        ),
    ],
)  # fmt: skip
async def test_refusals(
    client: httpx.AsyncClient, metrics: CountingMetrics, change: Any, status: int, kind: str, text: str
) -> None:
    response = await client.post("/v1/messages", json=HELLO | change)
    assert response.status_code == status
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert text in body["error"]["message"]
    assert metrics.refusals == ["messages"]


async def test_overload_and_failures(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.scripts = [[Overloaded("Busy.", 3)], [*deltas("Hello")[:1], StepFailed("The step failed.")]]
    busy = await client.post("/v1/messages", json=HELLO)
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "3")
    assert busy.json()["error"]["type"] == "rate_limit_error"
    told = named_events(await client.post("/v1/messages", json=HELLO | {"stream": True}))
    assert told[-1] == {"type": "error", "error": {"type": "api_error", "message": "The step failed."}}


async def test_the_key_of_anthropics_clients(build: Callable[..., Any]) -> None:
    transport = httpx.ASGITransport(build(api_keys=("secret",)))
    async with httpx.AsyncClient(transport=transport, base_url="http://armature") as client:
        known = await client.post("/v1/messages", json=HELLO, headers={"x-api-key": "secret"})
        assert known.status_code == 200
        for headers in ({}, {"x-api-key": "other"}, {"x-api-key": "secret", "authorization": "Bearer other"}):
            unknown = await client.post("/v1/messages", json=HELLO, headers=headers)
            assert (unknown.status_code, unknown.json()["error"]["type"]) == (401, "authentication_error")


async def test_fields_that_change_nothing(client: httpx.AsyncClient) -> None:
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    body = HELLO | {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "context_management": edits, "container": None,
        "mcp_servers": [], "thinking": {"type": "adaptive", "display": "omitted"}, "tools": [],
    }  # fmt: skip
    assert (await client.post("/v1/messages?beta=true", json=body)).status_code == 200


async def test_a_history_with_too_many_parts(client: httpx.AsyncClient) -> None:
    """Each result of a tool becomes a message of its own, so the limit of messages applies after the translation."""
    blocks = [{"type": "tool_result", "tool_use_id": "a", "content": "2"}] * 128
    response = await client.post("/v1/messages", json=HELLO | {"messages": [{"role": "user", "content": blocks}] * 33})
    assert response.status_code == 400
    assert "messages" in response.json()["error"]["message"]


# ---- agents --------------------------------------------------------------------------------------------------------


async def test_an_agents_request(client: httpx.AsyncClient, service: ScriptedService) -> None:
    """What coding agents and the tool runners of Anthropic's clients send."""
    body = HELLO | {
        "thread": {"type": "create"}, "betas": ["x"], "metadata": {"user_id": "u"}, "speed": "fast", "fallbacks": [],
        "context_management": {"edits": []}, "output_config": {"effort": "high"}, "thinking": {"type": "adaptive"},
        "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        "tools": [
            TOOL | {"cache_control": {"type": "ephemeral"}, "type": "custom", "eager_input_streaming": True},
            {"type": "web_search_20260209", "name": "web_search", "max_uses": 5},
            {"type": "mcp_toolset", "mcp_server_name": "a"},
        ],
    }  # fmt: skip
    response = await client.post("/v1/messages?beta=true", json=body)
    assert response.status_code == 200, response.text
    use = sent(service).tools
    assert use is not None and [tool.name for tool in use.tools] == ["add"]


async def test_a_thread_is_begun_and_not_continued(client: httpx.AsyncClient) -> None:
    """Anthropic's clients send the whole conversation once they read this code."""
    thread = {"type": "continue", "previous_message_id": "msg_1"}
    error = (await client.post("/v1/messages", json=HELLO | {"thread": thread})).json()["error"]
    assert error["details"] == {"error_code": "thread_not_found"}
    assert "send all messages" in error["message"]


async def test_documents_are_read_and_other_blocks_of_a_history_left_out(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "The sky is green."}
    parts = {"type": "content", "content": [{"type": "text", "text": "One."}, {"type": "image"}]}
    picture = {"type": "image", "source": {"type": "base64", "data": "aGk="}}
    found = {
        "type": "search_result",
        "source": "https://a",
        "title": "A",
        "content": [{"type": "text", "text": "Found."}],
    }
    turns = [
        {"role": "user", "content": [
            {"type": "document", "title": "Sky", "context": "A poem.", "source": plain, "citations": {"enabled": True}},
            {"type": "document", "source": parts}, {"type": "text", "text": "What is it?"},
        ]},
        {"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": {"type": "error", "error_code": "x"}},
            {"type": "text", "text": "Green."}, {"type": "compaction", "content": "Earlier: hello."},
            {"type": "tool_use", "id": "t", "name": "add", "input": {}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "is_error": False, "content": [
            picture, {"type": "document", "source": {"type": "base64", "data": "x"}}, found,
            {"type": "tool_reference", "tool_name": "x"}, {"type": "text", "text": "End."},
        ]}]},
    ]  # fmt: skip
    response = await client.post("/v1/messages", json=HELLO | {"messages": turns})
    assert response.status_code == 200, response.text
    messages = sent(service).messages or ()
    texts = [[part["text"] for part in message["content"]] for message in messages]
    note = "left out, because this model reads text only]"
    assert texts == [
        ["Sky\nA poem.\nThe sky is green.", f"One.\n[image: {note}", "What is it?"],
        ["Green.", "Earlier: hello."],
        [f"[image: {note}", f"[document: {note}", "A\nhttps://a\nFound.", f"[tool_reference: {note}", "End."],
    ]
    assert [call["function"]["name"] for call in messages[1]["tool_calls"]] == ["add"]
