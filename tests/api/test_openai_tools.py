"""Tools, schemas and reasoning of the chat route: what reaches the service, and what comes back."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from app.messages import Timings
from app.service.requests import ChoiceFinished, TextDelta, Tool, Usage
from app.text.tool_calls import ToolCallDelta
from tests.api.scripted_service import ScriptedService, Step, events

URL = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Weather", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": {"name": "stop"}}]
WEATHER = Tool("get_weather", SCHEMA)


def calls(reason: Any = "tool_calls") -> list[Step]:
    return [
        TextDelta(0, "", (1,), reasoning="Hm."),
        TextDelta(0, "Let me see.", (2,)),
        TextDelta(0, "", (3,), tool_calls=(ToolCallDelta(0, '{"ci', "call_1", "get_weather"),)),
        TextDelta(0, "", (4,)),
        TextDelta(0, "", (5,), tool_calls=(ToolCallDelta(0, 'ty": 1}'), ToolCallDelta(1, "{}", "call_2", "stop"))),
        ChoiceFinished(0, reason, Usage(3, 0, 5), 5, Timings()),
    ]


async def test_calls_and_reasoning_are_parts_of_the_message(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.scripts = [calls()]
    (choice,) = (await client.post(URL, json=HELLO | {"tools": TOOLS})).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "Let me see.",
        "refusal": None,
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": 1}'}},
            {"id": "call_2", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
        ],
    }


async def test_calls_are_streamed(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.scripts = [calls()]
    chunks = events(await client.post(URL, json=HELLO | {"tools": TOOLS, "stream": True}))[:-1]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm."},
        {"content": "Let me see."},
        {
            "tool_calls": [
                {
                    "index": 0,
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"ci'},
                }
            ]
        },
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": 'ty": 1}'}},
                {"index": 1, "id": "call_2", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
            ]
        },
        {},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_functions_are_the_older_form(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.scripts = [calls()]
    body = HELLO | {"functions": [FUNCTION], "function_call": {"name": "get_weather"}, "include_reasoning": False}
    (choice,) = (await client.post(URL, json=body)).json()["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "get_weather", "arguments": '{"city": 1}'}
    assert "reasoning_content" not in choice["message"]
    use = service.requests[0].tools
    assert use is not None and use.forced == (WEATHER,) and not use.parallel


@pytest.mark.parametrize(
    ("fields", "forced", "parallel"),
    [
        ({}, (), True),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, (), False),
        ({"tool_choice": "required"}, ("get_weather", "stop"), True),
        ({"tool_choice": {"type": "function", "function": {"name": "stop"}}}, ("stop",), False),
    ],
)
async def test_who_chooses(
    client: httpx.AsyncClient, service: ScriptedService, fields: Any, forced: tuple[str, ...], parallel: bool
) -> None:
    assert (await client.post(URL, json=HELLO | {"tools": TOOLS} | fields)).status_code == 200
    (request,) = service.requests
    assert request.tools is not None and request.chat_options is not None
    assert [tool.name for tool in request.tools.tools] == ["get_weather", "stop"]
    assert tuple(tool.name for tool in request.tools.forced) == forced
    assert request.tools.parallel is parallel
    assert request.chat_options.tools[0] == {"type": "function", "function": FUNCTION}


async def test_none_hides_the_tools(client: httpx.AsyncClient, service: ScriptedService) -> None:
    await client.post(URL, json=HELLO | {"tools": TOOLS, "tool_choice": "none"})
    (request,) = service.requests
    assert request.tools is None and request.chat_options is not None and request.chat_options.tools == ()


async def test_an_agents_history(client: httpx.AsyncClient, service: ScriptedService) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        *HELLO["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm.", "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "ok", "cache_control": {}}]},
        {"role": "assistant", "content": None, "function_call": {"name": "g", "arguments": "{}"}},
        {"role": "function", "name": "g", "content": "fine"},
    ]
    assert (await client.post(URL, json=HELLO | {"messages": history})).status_code == 200
    (request,) = service.requests
    assert request.messages is not None
    assert request.messages[1:] == (
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "content": [{"type": "text", "text": "ok"}], "tool_call_id": "c1"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "g", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "fine", "name": "g"},
    )


@pytest.mark.parametrize(
    ("fields", "kind", "text", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}', "response_format"),
        (
            {"response_format": {"type": "json_object", "schema": {"a": 1}}},
            "json_schema",
            '{"a": 1}',
            "response_format",
        ),
        (
            {"response_format": {"type": "json_object", "value": {"a": 1}}},
            "json_schema",
            '{"a": 1}',
            "response_format",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"b": 2}, "strict": True},
                }
            },
            "json_schema",
            '{"b": 2}',
            "response_format",
        ),
        ({"guided_json": {"c": 3}}, "json_schema", '{"c": 3}', "guided_json"),
        ({"guided_json": '{"c": 3}'}, "json_schema", '{"c": 3}', "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["a", "b"]}, "choice", '["a", "b"]', "guided_choice"),
        ({"guided_grammar": "start: x"}, "grammar", "start: x", "guided_grammar"),
        ({"grammar": "root ::= x"}, "grammar", "root ::= x", "grammar"),
        ({"json_schema": {}}, "json_schema", "{}", "json_schema"),
        ({"structured_outputs": {"regex": "a"}}, "regex", "a", "structured_outputs.regex"),
        ({"structured_outputs": {"json": {}}}, "json_schema", "{}", "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}', "structured_outputs.json"),
    ],
)
@pytest.mark.parametrize("path", [URL, "/v1/completions"])
async def test_each_form_of_a_grammar(
    client: httpx.AsyncClient, service: ScriptedService, path: str, fields: Any, kind: str, text: str, field: str
) -> None:
    body = HELLO if path == URL else {"prompt": "a"}
    assert (await client.post(path, json=body | fields)).status_code == 200
    grammar = service.requests[0].grammar
    assert grammar is not None
    assert (grammar.kind, grammar.text, grammar.field) == (kind, text, field)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": TOOLS, "functions": [FUNCTION]}, "functions"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "browser"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [{"function": {"name": "x"}}]}},
            },
            "tool_choice",
        ),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
async def test_contradictions_are_refused_by_name(client: httpx.AsyncClient, fields: Any, field: str) -> None:
    response = await client.post(URL, json=HELLO | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(field)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
async def test_sounds_and_what_is_no_picture_are_refused_by_name(client: httpx.AsyncClient, kind: str) -> None:
    part = {"type": kind, kind: {"url": "data:x"}}
    body = HELLO | {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]}
    error = (await client.post(URL, json=body)).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "messages[0].content[1]")
    assert kind in error["message"] and "send" in error["message"]


async def test_sampling_fields_reach_the_service(client: httpx.AsyncClient, service: ScriptedService) -> None:
    body = HELLO | {
        "logit_bias": {"5": -100, "6": 1.5},
        "min_tokens": 3,
        "bad_words": ["x"],
        "allowed_token_ids": [5, 6],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "priority": -1,
        "truncate_prompt_tokens": -1,
        "top_k": -1,
    }
    assert (await client.post(URL, json=body)).status_code == 200
    (request,) = service.requests
    params = request.params
    assert params.logit_bias == ((5, -100.0), (6, 1.5))
    assert (params.min_tokens, params.bad_words, params.allowed_token_ids) == (3, ("x",), (5, 6))
    assert params.include_stop and not params.skip_special_tokens
    assert (params.priority, params.top_k, request.truncate_prompt_tokens) == (-1, 0, -1)


async def test_token_ids_and_usage_in_every_chunk(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = HELLO | {"return_token_ids": True}
    answer = (await client.post(URL, json=body)).json()
    assert answer["prompt_token_ids"] == [1, 2, 3]
    assert answer["choices"][0]["token_ids"] == [100, 101]
    chunks = events(await client.post(URL, json=body | {"stream": True, "stream_options": options}))[:-1]
    assert chunks[0]["prompt_token_ids"] == [1, 2, 3]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    assert [chunk["choices"][0].get("token_ids") for chunk in chunks[1:3]] == [[100], [101]]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 2, 2]


async def test_usage_in_every_chunk_is_that_of_its_choice(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.scripts = [
        [
            TextDelta(0, "a", (1, 2)),
            TextDelta(1, "b", (3,)),
            TextDelta(0, "c", (4,)),
            ChoiceFinished(1, "stop", Usage(3, 2, 5), 2, Timings()),
            ChoiceFinished(0, "stop", Usage(3, 2, 5), 3, Timings()),
        ]
    ] * 2
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["x", "y"], "n": 2, "stream": True, "stream_options": options, "return_token_ids": True}
    *chunks, last = events(await client.post("/v1/completions", json=body))[:-1]
    counts: dict[int, list[int]] = {}
    for chunk in chunks:
        assert chunk["usage"]["prompt_tokens"] == 3
        counts.setdefault(chunk["choices"][0]["index"], []).append(chunk["usage"]["completion_tokens"])
    assert counts == {0: [2, 3, 3], 1: [1, 2], 2: [2, 3, 3], 3: [1, 2]}
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (6, 10)
    assert [chunk["choices"][0]["index"] for chunk in chunks if "prompt_token_ids" in chunk] == [0, 2]


async def test_objects_are_open_on_request(client: httpx.AsyncClient, service: ScriptedService) -> None:
    for value, is_open in ((None, False), (True, False), (False, True)):
        structured = {"json": {"properties": {"a": {}}}, "disable_additional_properties": value}
        assert (await client.post(URL, json=HELLO | {"structured_outputs": structured})).status_code == 200
        source = service.requests[-1].grammar
        assert source is not None and source.is_open is is_open


async def test_the_best_of_several(client: httpx.AsyncClient, service: ScriptedService) -> None:
    from app.service.requests import ScoredToken

    service.scripts = [
        [
            step
            for choice, (text, logprob) in enumerate([("worse", -2.0), ("best", -0.5), ("worst", -3.0)])
            for step in (
                TextDelta(choice, text, (1,), (ScoredToken(1, text, text.encode(), logprob),)),
                ChoiceFinished(choice, "stop", Usage(3, 0, 3), 1, Timings()),
            )
        ]
    ]
    answer = (await client.post("/v1/completions", json={"prompt": "x", "best_of": 3, "n": 2})).json()
    assert [(one["index"], one["text"], one["logprobs"]) for one in answer["choices"]] == [
        (0, "best", None),
        (1, "worse", None),
    ]
    assert service.requests[0].params.n == 3
    refused = await client.post("/v1/completions", json={"prompt": "x", "best_of": 1, "n": 2})
    assert refused.json()["error"]["param"] == "best_of"
