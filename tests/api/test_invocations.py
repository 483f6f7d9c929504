"""SageMaker's route serves each kind of body as the route of this kind does."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from fake_encoder import CONFIG
from tests.api.encoder_client import asking
from tests.api.scripted_service import ScriptedService, events

PATH = "/invocations"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"prompt": {}}}}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": '"prompt": "input":'}], "tools": [TOOL]}
CHANGING = ("id", "created")


def lasting(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return {name: value for name, value in answer.json().items() if name not in CHANGING}


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "x"})])
async def test_texts(client: httpx.AsyncClient, service: ScriptedService, path: str, body: dict[str, Any]) -> None:
    assert lasting(await client.post(PATH, json=body)) == lasting(await client.post(path, json=body))
    mine, other = service.requests
    assert (mine.api, mine.prompt, mine.messages) == (other.api, other.prompt, other.messages)
    streamed = events(await client.post(PATH, json=body | {"stream": True}))
    assert streamed[-1] == "[DONE]" and streamed[0]["object"].startswith(("chat.completion", "text_completion"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "the fox"}),
        ("/v1/rerank", {"query": "the fox", "documents": ["said", "the fox"]}),
        ("/v1/score", {"queries": "the fox", "documents": ["said", "the fox"]}),
        ("/v1/score", {"text_1": "the fox", "text_2": "said"}),
        ("/v1/score", {"data_1": "the fox", "data_2": "said"}),
    ],
)
async def test_vectors_and_scores(path: str, body: dict[str, Any]) -> None:
    async with asking(CONFIG) as (client, _):
        assert lasting(await client.post(PATH, json=body)) == lasting(await client.post(path, json=body))


@pytest.mark.parametrize(
    ("body", "field"),
    [({}, "messages"), ({"inputs": "x"}, "messages"), ({"messages": []}, "messages"), ({"prompt": 5}, "prompt")],
)
async def test_refusals_have_openais_form(client: httpx.AsyncClient, body: dict[str, Any], field: str) -> None:
    answer = await client.post(PATH, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
