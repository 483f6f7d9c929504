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


# ---- agents --------------------------------------------------------------------------------------------------------

PATCH = {"type": "custom", "name": "patch", "description": "Edits.", "format": {
    "type": "grammar", "syntax": "lark", "definition": "start: /x+/",
}}  # fmt: skip
NAMESPACE = {
    "type": "namespace", "name": "mcp__notes__", "description": "Notes.",
    "tools": [
        {"type": "function", "name": "find", "description": "Finds.", "parameters": {"type": "object"}, "strict": False},
        {"type": "custom", "name": "write"},
        {"type": "web_search"},
    ],
}  # fmt: skip
# What a coding agent's command line sends with each request.
AGENT: dict[str, Any] = HELLO | {
    "instructions": "You edit files.", "stream": True, "store": False, "tool_choice": "auto", "truncation": "auto",
    "parallel_tool_calls": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
    "client_metadata": {"turn": "1"}, "service_tier": "auto", "text": {"verbosity": "low"},
    "reasoning": {"effort": "medium", "summary": "auto", "context": "all"}, "context_management": [{"type": "compaction"}],
    "tools": [
        TOOL | {"defer_loading": False}, PATCH, NAMESPACE, {"type": "web_search", "external_web_access": True},
        {"type": "tool_search", "execution": "client", "description": "x", "parameters": {}}, {"type": "local_shell"},
        {"type": "mcp", "server_label": "a", "server_url": "x"}, {"type": "image_generation"},
    ],
}  # fmt: skip


def calling(name: str, arguments: str) -> list[Any]:
    half = len(arguments) // 2
    return [
        TextDelta(0, "", (1,), tool_calls=(ToolCallDelta(0, arguments[:half], "call_1", name),), timings=Timings()),
        TextDelta(0, "", (2,), tool_calls=(ToolCallDelta(0, arguments[half:]),)),
        ChoiceFinished(0, "tool_calls", Usage(3, 1, 2), 2, Timings()),
    ]


async def test_an_agents_tools_become_functions(client: httpx.AsyncClient, service: ScriptedService) -> None:
    response = await client.post("/v1/responses", json=AGENT | {"stream": False})
    assert response.status_code == 200, response.text
    request = sent(service)
    assert request.tools is not None and request.chat_options is not None
    assert [tool.name for tool in request.tools.tools] == ["add", "patch", "mcp__notes__find", "mcp__notes__write"]
    patch = request.chat_options.tools[1]["function"]
    assert "lark grammar:\nstart: /x+/" in patch["description"]
    assert patch["parameters"]["required"] == ["input"]
    shown = response.json()["tools"]
    assert [tool["type"] for tool in shown] == ["function", "custom", "namespace"]
    assert [tool["name"] for tool in shown[2]["tools"]] == ["find", "write"]


async def test_a_call_of_a_namespace_has_the_clients_names(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.scripts = [calling("mcp__notes__find", '{"a": 1}')]
    told = named_events(await client.post("/v1/responses", json=AGENT))
    call = told[-1]["response"]["output"][0]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "find", "mcp__notes__")
    assert call["arguments"] == '{"a": 1}'
    added = next(event["item"] for event in told if event["type"] == "response.output_item.added")
    assert (added["name"], added["namespace"]) == ("find", "mcp__notes__")
    done = next(event for event in told if event["type"] == "response.function_call_arguments.done")
    assert (done["name"], done["arguments"]) == ("find", '{"a": 1}')


@pytest.mark.parametrize(
    ("tool", "arguments", "text"),
    [
        ("patch", '{"input": "*** \\"x\\"\\n"}', '*** "x"\n'),
        ("mcp__notes__write", '{"input": ""}', ""),
        ("patch", '{"other": 1}', '{"other": 1}'),
        ("patch", '{"input": 5}', '{"input": 5}'),
        ("patch", "[1]", "[1]"),
        ("patch", '{"input": "cut', '{"input": "cut'),
    ],
)
async def test_a_custom_call_has_its_text(
    client: httpx.AsyncClient, service: ScriptedService, tool: str, arguments: str, text: str
) -> None:
    service.scripts = [calling(tool, arguments)]
    whole = (await client.post("/v1/responses", json=AGENT | {"stream": False})).json()["output"][0]
    assert (whole["type"], whole["call_id"], whole["input"]) == ("custom_tool_call", "call_1", text)
    assert "arguments" not in whole
    told = named_events(await client.post("/v1/responses", json=AGENT))
    assert kinds(told)[2:] == [
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert (told[2]["item"]["input"], told[3]["delta"], told[4]["input"]) == ("", text, text)
    assert told[5]["item"] == told[-1]["response"]["output"][0]
    assert (told[5]["item"]["name"], told[5]["item"].get("namespace")) == (
        ("patch", None) if tool == "patch" else ("write", "mcp__notes__")
    )


async def test_the_next_turn_of_an_agent(client: httpx.AsyncClient, service: ScriptedService) -> None:
    picture = {"type": "computer_screenshot", "image_url": "data:image/png;base64,aGk="}
    items: list[Any] = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "mcp_list_tools", "id": "l", "server_label": "a", "tools": []},
        {"type": "function_call", "call_id": "1", "name": "find", "namespace": "mcp__notes__", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "***", "status": "completed"},
        {"type": "local_shell_call", "call_id": "3", "action": {"type": "exec", "command": ["ls"]}, "status": "completed"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image", "image_url": "data:x"}]},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "Done."},
        {"type": "local_shell_call_output", "call_id": "3", "output": "a.txt"},
        {"type": "computer_call_output", "call_id": "4", "output": picture},
        {"type": "ghost_snapshot", "ghost_commit": {"id": "x"}},
        {"type": "something_new", "output": {"a": 1}, "content": 5, "name": []},
        {"role": "user", "content": "Go on."},
    ]  # fmt: skip
    response = await client.post("/v1/responses", json=AGENT | {"input": items, "stream": False})
    assert response.status_code == 200, response.text
    messages = sent(service).messages or ()
    assert [message["role"] for message in messages] == ["system", "user", "assistant", *["tool"] * 4, "user"]
    called = [(call["function"]["name"], call["function"]["arguments"]) for call in messages[2]["tool_calls"]]
    assert called == [
        ("mcp__notes__find", "{}"),
        ("patch", {"input": "***"}),
        ("local_shell", {"action": {"type": "exec", "command": ["ls"]}}),
    ]
    results = [message["content"] for message in messages[3:7]]
    assert results[0] == [{"type": "text", "text": "[input_image: left out, because this model reads text only]"}]
    assert results[1:3] == ["Done.", "a.txt"]
    assert json.loads(results[3]) == {"type": "computer_screenshot", "image_url": "[left out]"}
    assert [message.get("name") for message in messages[3:6]] == ["mcp__notes__find", "patch", "local_shell"]


@pytest.mark.parametrize(
    ("choice", "offered", "forced"),
    [
        ({"type": "function", "name": "find", "namespace": "mcp__notes__"}, 4, ["mcp__notes__find"]),
        ({"type": "custom", "name": "patch"}, 4, ["patch"]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "mcp__notes__"}]},
            2, ["mcp__notes__find", "mcp__notes__write"],
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}, {"type": "custom", "name": "patch"}]},
            1, [],
        ),
    ],
)  # fmt: skip
async def test_choices_between_an_agents_tools(
    client: httpx.AsyncClient, service: ScriptedService, choice: Any, offered: int, forced: list[str]
) -> None:
    response = await client.post("/v1/responses", json=AGENT | {"stream": False, "tool_choice": choice})
    assert response.status_code == 200, response.text
    use = sent(service).tools
    assert use is not None
    assert (len(use.tools), [tool.name for tool in use.forced]) == (offered, forced)
    assert response.json()["tool_choice"] == choice


async def test_a_long_name_of_a_namespace_is_cut_and_found_again(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    tools = [{"type": "function", "name": "n" * 100 + str(number)} for number in range(2)]
    body = HELLO | {"tools": [{"type": "namespace", "name": "s" * 100, "description": "", "tools": tools}]}
    await client.post("/v1/responses", json=body)
    use = sent(service).tools
    assert use is not None
    names = [tool.name for tool in use.tools]
    assert len(set(names)) == 2 and {len(name) for name in names} == {128}
    service.scripts = [calling(names[1], "{}")]
    call = (await client.post("/v1/responses", json=body)).json()["output"][0]
    assert (call["name"], call["namespace"]) == ("n" * 100 + "1", "s" * 100)
