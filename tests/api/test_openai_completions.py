"""OpenAI's completions and models: four shapes of a prompt, several prompts as one answer, log-probabilities in parallel lists."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from app.errors import Overloaded, StepFailed
from app.messages import Timings
from app.service.requests import ChoiceFinished, ScoredToken, TextDelta, Usage
from tests.api.scripted_service import ScriptedService, deltas, events

URL = "/v1/completions"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("once", [("once", None)]),
        (["once", "twice"], [("once", None), ("twice", None)]),
        ([1, 2], [(None, (1, 2))]),
        ([[1, 2], [3]], [(None, (1, 2)), (None, (3,))]),
    ],
)
async def test_four_shapes_of_a_prompt(
    client: httpx.AsyncClient, service: ScriptedService, prompt: Any, expected: Any
) -> None:
    answer = (await client.post(URL, json={"prompt": prompt, "echo": True})).json()
    assert [(request.prompt, request.token_ids) for request in service.requests] == expected
    assert all(request.echo and request.params.max_tokens == 16 for request in service.requests)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["completion_tokens"] == 2 * len(expected)
    assert answer["usage"]["prompt_tokens"] == 3 * len(expected)


@pytest.mark.parametrize("prompt", [[], [[]], ["a", 1], [1, True], [1.5], None, {}, 7, [["a"]], ["a"] * 65])
async def test_no_other_shape(client: httpx.AsyncClient, service: ScriptedService, prompt: Any) -> None:
    response = await client.post(URL, json={"prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert service.requests == []


async def test_choices_of_several_prompts_are_numbered_in_order(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.scripts = [[*deltas("a"), *deltas("b", choice=1)], [*deltas("c", choice=1), *deltas("d")]]
    answer = (await client.post(URL, json={"prompt": ["x", "y"], "n": 2})).json()
    assert [choice["text"] for choice in answer["choices"]] == ["a", "b", "d", "c"]
    assert service.num_open == 0


async def test_several_prompts_stream_together(client: httpx.AsyncClient, service: ScriptedService) -> None:
    body = {"prompt": ["x", "y"], "stream": True, "stream_options": {"include_usage": True}}
    told = events(await client.post(URL, json=body))
    texts = {0: "", 1: ""}
    for chunk in told[:-2]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "Hello there", 1: "Hello there"}
    assert told[-2]["usage"]["total_tokens"] == 10
    assert told[-1] == "[DONE]"


async def test_one_refused_prompt_refuses_all(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.scripts = [deltas("a"), [Overloaded("Too many requests.", 2.2)]]
    response = await client.post(URL, json={"prompt": ["x", "y"], "stream": True})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert service.num_open == 0


async def test_a_prompt_that_fails_later_ends_the_stream(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.scripts = [deltas("a"), [*deltas("b")[:1], RuntimeError("ours")]]
    told = events(await client.post(URL, json={"prompt": ["x", "y"], "stream": True}))
    assert told[-1]["error"]["code"] == "internal_error"
    assert service.num_open == 0


async def test_an_echo_is_no_token_yet(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.scripts = [[TextDelta(0, "x"), StepFailed("A step failed.")]]
    response = await client.post(URL, json={"prompt": "x", "echo": True, "stream": True})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "step_failed")


async def test_the_number_of_choices_is_bounded(client: httpx.AsyncClient) -> None:
    response = await client.post(URL, json={"prompt": ["x"] * 64, "n": 16})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


async def test_logprobs_stand_in_parallel_lists(client: httpx.AsyncClient, service: ScriptedService) -> None:
    tokens = (ScoredToken(1, "ab", b"ab", -1.0, (ScoredToken(2, "x", b"x", -2.0),)), ScoredToken(3, "c", b"c", -3.0))
    service.scripts = [
        [
            TextDelta(0, "ab", (1,), tokens[:1]),
            TextDelta(0, "c", (3,), tokens[1:]),
            ChoiceFinished(0, "stop", Usage(1, 0, 2), 2, Timings()),
        ]
    ]
    answer = (await client.post(URL, json={"prompt": "x", "logprobs": 1})).json()
    assert answer["choices"][0]["logprobs"] == {
        "text_offset": [0, 2],
        "token_logprobs": [-1.0, -3.0],
        "tokens": ["ab", "c"],
        "top_logprobs": [{"x": -2.0}, {"c": -3.0}],  # without others, the sampled token
    }
    chunks = events(await client.post(URL, json={"prompt": "x", "logprobs": 1, "stream": True}))[:-1]
    assert chunks[1]["choices"][0]["logprobs"]["text_offset"] == [2]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"early_stopping": True}, "early_stopping"),
        ({"messages": []}, "messages"),
    ],
)
async def test_refused_by_name(client: httpx.AsyncClient, body: Any, field: str) -> None:
    error = (await client.post(URL, json={"prompt": "x"} | body)).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", field)


async def test_neutral_values_are_accepted(client: httpx.AsyncClient) -> None:
    body = {"prompt": "x", "suffix": None, "best_of": 1, "logit_bias": {}, "user": "u", "echo": False, "logprobs": None}
    assert (await client.post(URL, json=body)).status_code == 200


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["created"]) == ("demo", "model", 1_700_000_000)
    assert (await client.get("/v1/models/demo")).json() == model
    missing = await client.get("/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/classify", "/encode"])
async def test_an_encoders_routes_say_what_this_model_is(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, json={"input": "x"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "wrong_model_kind"
    assert "generates text" in response.json()["error"]["message"]
