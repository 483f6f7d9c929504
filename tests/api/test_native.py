"""Our own dialect: the names of the contract, token ids in and out, and the tokenizer's two halves."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from app.errors import ContextLengthExceeded
from app.messages import Timings
from app.service.requests import ChoiceFinished, ScoredToken, TextDelta, Usage
from tests.api.scripted_service import ScriptedService, deltas, events


async def test_text_in_text_and_ids_out(client: httpx.AsyncClient, service: ScriptedService) -> None:
    answer = await client.post("/generate", json={"prompt": "Once", "beam_width": 4, "add_special_tokens": False})
    assert answer.json() == {
        "text": "Hello there",
        "token_ids": [100, 101],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 2},
    }
    (request,) = service.requests
    assert (request.prompt, request.add_special_tokens, request.api) == ("Once", False, "native")
    assert (request.params.beam_width, request.params.max_tokens) == (4, None)


async def test_ids_in(client: httpx.AsyncClient, service: ScriptedService) -> None:
    await client.post("/generate", json={"token_ids": [1, 2, 3]})
    assert service.requests[0].token_ids == (1, 2, 3)


async def test_each_event_has_text_and_ids_of_its_piece(client: httpx.AsyncClient) -> None:
    told = events(await client.post("/generate", json={"prompt": "Once", "stream": True}))
    assert told == [
        {"index": 0, "text": "Hello", "token_ids": [100]},
        {"index": 0, "text": " there", "token_ids": [101]},
        {
            "index": 0,
            "text": "",
            "token_ids": [],
            "finish_reason": "stop",
            "usage": {"prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 2},
        },
    ]


async def test_more_choices_are_listed_under_the_first(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.scripts = [[*deltas("b", choice=1, reason="timeout"), *deltas("a")]]
    answer = (await client.post("/generate", json={"prompt": "Once", "n": 2})).json()
    assert answer["text"] == "a"
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [
        (0, "a", "stop"),
        (1, "b", "timeout"),
    ]


async def test_logprobs_name_ids(client: httpx.AsyncClient, service: ScriptedService) -> None:
    scored = ScoredToken(5, "Hi", b"Hi", -0.5, (ScoredToken(5, "Hi", b"Hi", -0.5),))
    service.scripts = [[TextDelta(0, "Hi", (5,), (scored,)), ChoiceFinished(0, "stop", Usage(1, 0, 1), 1, Timings())]]
    expected = [{"token_id": 5, "text": "Hi", "logprob": -0.5, "top": [{"token_id": 5, "text": "Hi", "logprob": -0.5}]}]
    body = {"prompt": "x", "logprobs": 1}
    assert (await client.post("/generate", json=body)).json()["logprobs"] == expected
    assert events(await client.post("/generate", json=body | {"stream": True}))[0]["logprobs"] == expected


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "token_ids": [1]}, "prompt"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids"),
        ({"prompt": "a", "beam_width": 99}, "beam_width"),
        ({"prompt": "a", "beam_width": 2, "n": 3}, "n"),
        ({"prompt": "a", "messages": []}, "messages"),
    ],
)
async def test_refused_in_our_own_shape(client: httpx.AsyncClient, body: Any, field: str) -> None:
    response = await client.post("/generate", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"code", "message", "field"}
    assert error["field"] == field


async def test_the_services_own_refusal_keeps_its_code(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.scripts = [[ContextLengthExceeded("513 tokens are more than 512.", field="prompt")]]
    response = await client.post("/generate", json={"prompt": "long"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_tokenize_and_back(client: httpx.AsyncClient) -> None:
    told = (await client.post("/tokenize", json={"prompt": "ab"})).json()
    ours = {"token_ids": [1, 97, 98], "num_tokens": 3}
    assert told == ours | {"tokens": [1, 97, 98], "count": 3, "max_model_len": 512, "token_strs": None}
    bare = (await client.post("/tokenize", json={"prompt": "ab", "add_special_tokens": False})).json()
    assert (await client.post("/detokenize", json={"token_ids": bare["token_ids"]})).json() == {"text": "ab"}
    for more, kept in (
        ({}, "\x01ab"),
        ({"skip_special_tokens": True}, "ab"),
        ({"skip_special_tokens": False}, "\x01ab"),
    ):
        back = await client.post("/detokenize", json={"token_ids": told["token_ids"], **more})
        assert back.json() == {"text": kept}
    chat = await client.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]})
    assert chat.json()["token_ids"] == [1]
    both = await client.post("/tokenize", json={"prompt": "a", "messages": [{"role": "user", "content": "a"}]})
    assert both.status_code == 400
