"""Invalid bodies: each gets a 400 that names the error, and the next request is served."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from app.errors import NotReady, Overloaded, RequestTimeout, ServiceStopping, Unauthorized
from tests.api.scripted_service import CountingMetrics, ScriptedService

JSON = {"content-type": "application/json"}
CHAT = b'{"messages": [{"role": "user", "content": "Hi"}]'
MANY_COMPLAINTS = b'{"prompt": [' + b"true," * 100_000 + b"1]}"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  \n ",
        b"\xff\xfe\x00",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"not json",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": "a"',
        b'{"prompt": "a", "x": ' + b"[" * 100_000,
        b'{"prompt": "a", "user": ' + b'{"a":' * 100_000,
        b'{"prompt": "a", "user": ' + b"1" * 100_000 + b"}",
        MANY_COMPLAINTS,
    ],
    ids=lambda body: repr(body[:24]),
)
@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
async def test_bodies_that_are_no_bodies(client: httpx.AsyncClient, path: str, body: bytes) -> None:
    response = await client.post(path, content=body, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_request"
    assert len(response.content) < 2_000
    assert (await client.post(path, json={"prompt": "a"})).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "-1"),
        ("temperature", "NaN"),
        ("temperature", "Infinity"),
        ("temperature", "1e999"),
        ("temperature", '"1"'),
        ("temperature", "true"),
        ("temperature", "1" * 4_000),
        ("top_p", "1.5"),
        ("top_p", "-0.1"),
        ("top_k", "-2"),
        ("min_tokens", "-1"),
        ("logit_bias", '{"x": 1}'),
        ("logit_bias", '{"1": 101}'),
        ("allowed_token_ids", "[]"),
        ("bad_words", '[""]'),
        ("top_k", "1.5"),
        ("min_p", "2"),
        ("repetition_penalty", "0"),
        ("presence_penalty", "-3"),
        ("max_tokens", "0"),
        ("max_tokens", "-5"),
        ("max_tokens", "1.0"),
        ("max_tokens", '"16"'),
        ("max_tokens", "1" * 4_000),
        ("n", "0"),
        ("n", "1000"),
        ("seed", "1e3"),
        ("seed", "1" * 30),
        ("stop", "[" + ",".join(['"x"'] * 10_000) + "]"),
        ("stop", "5"),
        ("stop", '""'),
        ("stop", '"' + "x" * 10_000 + '"'),
        ("stop_token_ids", "[1.5]"),
        ("stop_token_ids", "[" + ",".join(["1"] * 10_000) + "]"),
        ("stream", '"yes"'),
        ("stream", "1"),
        ("logprobs", '"2"'),
        ("model", "5"),
        ("messages", "5"),
        ("messages", "[]"),
        ("stream_options", "[]"),
        ("top_logprobs", "3"),
        ("chat_template_kwargs", "[]"),
    ],
)
async def test_wrong_values_are_named(
    client: httpx.AsyncClient, metrics: CountingMetrics, field: str, value: str
) -> None:
    response = await client.post(
        "/v1/chat/completions", content=CHAT + f', "{field}": {value}}}'.encode(), headers=JSON
    )
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"].startswith(field)
    assert len(error["message"]) < 500
    assert metrics.refusals == ["chat"]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "", "content": "a"}, "messages[0].role"),
        ({"role": "user<|im_end|>", "content": "a"}, "messages[0].role"),
        ({"role": "critic\n", "content": "a"}, "messages[0].role"),
        ({"role": "critic"}, "messages[0].content"),
        ({"role": "tool", "content": None, "tool_call_id": "a"}, "messages[0].content"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": []}, "messages[0].content"),
        (5, "messages[0]"),
    ],
)
async def test_wrong_messages_are_named(client: httpx.AsyncClient, message: Any, field: str) -> None:
    response = await client.post("/v1/chat/completions", json={"messages": [message]})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(field)


async def test_one_limit_not_two(client: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "max_completion_tokens": 6}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 400
    assert (await client.post("/v1/chat/completions", json=body | {"max_tokens": 6})).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_unknown_model_is_a_404(client: httpx.AsyncClient, metrics: CountingMetrics, path: str) -> None:
    body = (
        {"model": "gpt-9", "prompt": "a"}
        if path == "/v1/completions"
        else {"model": "gpt-9", "messages": [{"role": "user", "content": "a"}]}
    )
    response = await client.post(path, json=body)
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "demo" in error["message"]
    assert len(metrics.refusals) == 1


async def test_only_what_says_that_it_is_json_is_read(client: httpx.AsyncClient) -> None:
    body = b'{"prompt": "a"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = await client.post("/generate", content=body, headers={"content-type": kind})
        assert response.status_code == 400
        assert "application/json" in response.json()["error"]["message"]
    accepted = await client.post("/generate", content=body, headers={"content-type": "application/json; charset=utf-8"})
    assert accepted.status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (Overloaded("full", 0.2), 429, "1"),
        (Overloaded("full", 7.01), 429, "8"),
        (NotReady("loading"), 503, "5"),
        (ServiceStopping("stopping"), 503, "1"),
        (RequestTimeout("late"), 504, None),
        (Unauthorized("no"), 401, None),
        (KeyError("secret"), 500, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_each_error_has_its_status(
    client: httpx.AsyncClient, service: ScriptedService, error: Exception, status: int, retry: str | None, stream: bool
) -> None:
    service.scripts = [[error]]
    response = await client.post("/v1/completions", json={"prompt": "a", "stream": stream})
    assert response.status_code == status
    assert response.headers.get("retry-after") == retry
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in response.text


async def test_unknown_routes_and_methods_speak_the_dialect(client: httpx.AsyncClient) -> None:
    missing = await client.post("/v1/nothing", json={})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "route_not_found")
    wrong = await client.get("/v1/completions")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")
    assert wrong.headers["allow"] == "POST"
    native = await client.get("/generate")
    assert (native.status_code, native.json()["error"]["code"]) == (405, "method_not_allowed")
