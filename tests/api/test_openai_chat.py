"""OpenAI's chat completions: what reaches the service, and the exact shape of what comes back."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from app.errors import StepFailed
from app.messages import Timings
from app.service.requests import ChoiceFinished, ScoredToken, TextDelta, Usage
from tests.api.scripted_service import ScriptedService, deltas, events

URL = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}


async def test_a_whole_answer_is_the_fold_of_the_stream(client: httpx.AsyncClient) -> None:
    answer = (await client.post(URL, json=HELLO)).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello there", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


async def test_a_stream_begins_with_the_role_and_ends_with_done(client: httpx.AsyncClient) -> None:
    told = events(await client.post(URL, json=HELLO | {"stream": True}))
    assert told[-1] == "[DONE]"
    chunks = told[:-1]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": " there"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]


async def test_usage_is_one_more_chunk_without_choices(client: httpx.AsyncClient) -> None:
    body = HELLO | {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(await client.post(URL, json=body))[:-1]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 4
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 2


async def test_everything_asked_for_reaches_the_service(client: httpx.AsyncClient, service: ScriptedService) -> None:
    body = HELLO | {
        "messages": [
            {"role": "developer", "content": "Be kind."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
                "name": "Ada",
            },
            {"role": "assistant", "content": "three", "refusal": None, "tool_calls": None},
        ],
        "max_completion_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "stop": "END",
        "stop_token_ids": [5],
        "seed": 42,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
        "ignore_eos": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    service.scripts = [[*deltas("a"), *deltas("b", choice=1)]]
    assert (await client.post(URL, json=body, headers={"x-request-id": "mine"})).status_code == 200
    (request,) = service.requests
    assert request.api == "chat"
    assert request.request_id == "mine"
    assert request.messages == (
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "Ada"},
        {"role": "assistant", "content": "three"},
    )
    assert request.template_arguments == {"enable_thinking": False}
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (7, 0, 0.5, 4, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.1)
    assert (params.stop, params.stop_token_ids, params.seed, params.n) == (("END",), (5,), 42, 2)
    assert (params.logprobs, params.ignore_eos) == (3, True)


async def test_without_a_limit_a_chat_may_fill_the_context(client: httpx.AsyncClient, service: ScriptedService) -> None:
    await client.post(URL, json=HELLO)
    assert service.requests[0].params.max_tokens is None


async def test_what_asks_for_nothing_is_accepted(client: httpx.AsyncClient) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "functions": None,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "n": 1,
        "stop": None,
        "stream_options": None,
        "max_tokens": None,
        "top_logprobs": None,
        "reasoning_effort": "low",
        "verbosity": "low",
        "prediction": {"type": "content", "content": "x"},
        "top_k": -1,
        "min_tokens": 0,
        "skip_special_tokens": True,
        "length_penalty": 1.0,
        "guided_json": None,
        "prompt_logprobs": None,
        "best_of": None,
        "no_such_field": None,
    }
    assert (await client.post(URL, json=HELLO | neutral)).status_code == 200


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "x", "a": 1}}, {"reasoning_effort": "x", "a": 1}),
        ({"reasoning_effort": None}, {}),
    ],
)  # fmt: skip
async def test_the_effort_of_reasoning_is_a_variable_of_the_template(
    client: httpx.AsyncClient, service: ScriptedService, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert (await client.post(URL, json=HELLO | given)).status_code == 200
    assert service.requests[-1].template_arguments == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("modalities", ["text", "audio"]),
        ("beam_width", 2),
        ("system", "Be kind."),
        ("max_new_tokens", 5),
        ("chat_template", "{{ messages }}"),
    ],
)
async def test_what_we_do_not_do_is_refused_by_name(client: httpx.AsyncClient, field: str, value: Any) -> None:
    response = await client.post(URL, json=HELLO | {field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "unsupported_parameter"
    assert error["param"] == field
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"


async def test_a_refused_field_inside_a_message_is_named_with_its_place(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "images": ["aGk="]}]
    error = (await client.post(URL, json=HELLO | {"messages": messages})).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "messages[1].images")


@pytest.mark.parametrize("name", ["prefix", "partial", "continue_final_message"])
async def test_an_answer_may_continue_the_last_message(
    client: httpx.AsyncClient, service: ScriptedService, name: str
) -> None:
    last = {"role": "assistant", "content": "b"} | ({name: True} if name != "continue_final_message" else {})
    body = HELLO | {"messages": [{"role": "user", "content": "a"}, last]}
    await client.post(URL, json=body | ({} if name in last else {name: True}))
    options = service.requests[0].chat_options
    assert options is not None and options.continue_final_message


async def test_minus_one_is_no_limit(client: httpx.AsyncClient, service: ScriptedService) -> None:
    for fields in ({"max_tokens": -1}, {"max_completion_tokens": -1}, {"max_tokens": -1, "max_completion_tokens": -1}):
        assert (await client.post(URL, json=HELLO | fields)).status_code == 200
        assert service.requests[-1].params.max_tokens is None
    assert (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": -1})).status_code == 200
    assert service.requests[-1].params.max_tokens is None
    assert (await client.post(URL, json=HELLO | {"max_tokens": -2})).status_code == 400


async def test_logprobs_in_the_stream_and_in_the_answer(client: httpx.AsyncClient, service: ScriptedService) -> None:
    scored = ScoredToken(5, "Hi", b"Hi", -0.5, (ScoredToken(6, "Yo", b"Yo", float("-inf")),))
    usage = Usage(3, 0, 1)
    service.scripts = [[TextDelta(0, "Hi", (5,), (scored,)), ChoiceFinished(0, "length", usage, 1, Timings())]]
    expected = [
        {
            "token": "Hi",
            "logprob": -0.5,
            "bytes": [72, 105],
            "top_logprobs": [{"token": "Yo", "logprob": -9999.0, "bytes": [89, 111]}],
        }
    ]
    body = HELLO | {"logprobs": True, "top_logprobs": 1}
    answer = (await client.post(URL, json=body)).json()
    assert answer["choices"][0]["logprobs"]["content"] == expected
    assert answer["choices"][0]["finish_reason"] == "length"
    chunks = events(await client.post(URL, json=body | {"stream": True}))
    assert chunks[1]["choices"][0]["logprobs"]["content"] == expected


async def test_tokens_without_text_make_no_chunk(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.scripts = [deltas("a", "")]
    chunks = events(await client.post(URL, json=HELLO | {"stream": True}))[:-1]
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "a", None]


async def test_several_choices_are_distinguished(client: httpx.AsyncClient, service: ScriptedService) -> None:
    first, second = deltas("a", "b"), deltas("c", "d", choice=1, reason="length")
    service.scripts = [[piece for pair in zip(first, second, strict=True) for piece in pair]]
    answer = (await client.post(URL, json=HELLO | {"n": 2})).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["ab", "cd"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length"]
    chunks = events(await client.post(URL, json=HELLO | {"n": 2, "stream": True}))[:-1]
    roles = [chunk["choices"][0]["index"] for chunk in chunks if "role" in chunk["choices"][0]["delta"]]
    assert roles == [0, 1]


async def test_a_failure_before_the_first_token_has_its_status(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.scripts = [[StepFailed("A step failed.")]]
    response = await client.post(URL, json=HELLO | {"stream": True})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "step_failed"


async def test_a_failure_after_it_is_the_last_event(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.scripts = [[*deltas("a")[:1], StepFailed("A step failed.")]]
    told = events(await client.post(URL, json=HELLO | {"stream": True}))
    assert told[-1]["error"] == {
        "message": "A step failed.",
        "type": "server_error",
        "param": None,
        "code": "step_failed",
    }
    assert "[DONE]" not in told
    assert service.num_open == 0


async def test_an_unforeseen_failure_after_it_reports_nothing(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.scripts = [[*deltas("a")[:1], ZeroDivisionError("secret")]]
    response = await client.post(URL, json=HELLO | {"stream": True})
    assert events(response)[-1]["error"]["code"] == "internal_error"
    assert "secret" not in response.text


async def test_phases_are_reported_in_a_header(client: httpx.AsyncClient) -> None:
    whole = await client.post(URL, json=HELLO)
    assert whole.headers["server-timing"] == "queue;dur=1.0, prefill;dur=2.0, decode;dur=4.0"
    stream = await client.post(URL, json=HELLO | {"stream": True})
    assert stream.headers["server-timing"] == "queue;dur=1.0, prefill;dur=2.0"


@pytest.mark.parametrize(("path", "body"), [(URL, HELLO), ("/v1/completions", {"prompt": "a"})])
async def test_stream_options_need_a_stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    for stream in ({}, {"stream": False}):
        answer = await client.post(path, json=body | stream | {"stream_options": {"include_usage": True}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")
