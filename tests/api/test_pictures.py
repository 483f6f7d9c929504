"""Pictures in the bodies of each dialect: they reach the service in order, with their places."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from app.service.requests import Picture
from tests.api.scripted_service import ScriptedService

URL = "data:image/png;base64,aGk="
PARTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL, "detail": "low"}}]}
            ]
        },
        "messages[0].content[0]",
    ),
    "responses": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL, "detail": "auto"}]}]},
        "input[0].content[0]",
    ),
    "anthropic": (
        "/v1/messages",
        {
            "max_tokens": 5,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
                    ],
                }
            ],
        },
        "messages[0].content[0]",
    ),
    "ollama": ("/api/chat", {"messages": [{"role": "user", "content": "", "images": ["aGk="]}]}, ""),
}


@pytest.mark.parametrize("dialect", PARTS)
async def test_a_picture_reaches_the_service(client: httpx.AsyncClient, service: ScriptedService, dialect: str) -> None:
    path, body, _ = PARTS[dialect]
    response = await client.post(path, json={"model": "demo", **body})
    assert response.status_code == 200, response.text
    (request,) = service.requests
    assert request.pictures == (Picture("aGk=", "messages[0].content[0]"),)
    assert request.messages is not None and request.messages[-1]["content"][0] == {"type": "image"}


ADDRESS = "https://example.org/a.png"


@pytest.mark.parametrize("dialect", ["chat", "responses", "anthropic"])
async def test_an_address_reaches_the_service(
    client: httpx.AsyncClient, service: ScriptedService, dialect: str
) -> None:
    path, body, _ = PARTS[dialect]
    if dialect == "anthropic":
        block = {"type": "image", "source": {"type": "url", "url": ADDRESS}}
        body = {**body, "messages": [{"role": "user", "content": [block]}]}
    else:
        body = json.loads(json.dumps(body).replace(URL, ADDRESS))
    response = await client.post(path, json={"model": "demo", **body})
    assert response.status_code == 200, response.text
    assert service.requests[0].pictures == (Picture(ADDRESS, "messages[0].content[0]", is_url=True),)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "data:image/png,aGk=", "aGk=", ""])
@pytest.mark.parametrize("dialect", ["chat", "responses"])
async def test_what_is_neither_is_refused(
    client: httpx.AsyncClient, service: ScriptedService, dialect: str, url: str
) -> None:
    path, body, field = PARTS[dialect]
    response = await client.post(path, json={"model": "demo", **json.loads(json.dumps(body).replace(URL, url))})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert "neither a data URL nor an address" in error["message"] and service.requests == []


PROMPTS: dict[str, tuple[dict[str, Any], str, tuple[Picture, ...]]] = {
    "multimodal_data": (
        {"prompt": {"prompt_string": "<__media__> and <__media__>?", "multimodal_data": ["aGk=", "aG8="]}},
        "<__media__> and <__media__>?",
        (Picture("aGk=", "prompt.multimodal_data[0]"), Picture("aG8=", "prompt.multimodal_data[1]")),
    ),
    "image_data": (
        {
            "prompt": "[img-12] is not [img-7].",
            "image_data": [{"data": "aGk=", "id": 7}, {"data": "aG8=", "id": 12}],
        },
        "<__media__> is not <__media__>.",
        (Picture("aG8=", "image_data[1]"), Picture("aGk=", "image_data[0]")),
    ),
    "no pictures": ({"prompt": {"prompt_string": "a", "multimodal_data": []}}, "a", ()),
}


@pytest.mark.parametrize("form", PROMPTS)
async def test_pictures_of_llama_cpp_prompts(client: httpx.AsyncClient, service: ScriptedService, form: str) -> None:
    body, prompt, pictures = PROMPTS[form]
    response = await client.post("/completion", json=body)
    assert response.status_code == 200, response.text
    assert (service.requests[0].prompt, service.requests[0].pictures) == (prompt, pictures)


async def test_code_has_no_pictures(client: httpx.AsyncClient) -> None:
    body = {"input_prefix": "a", "input_suffix": "b", "image_data": [{"data": "aGk=", "id": 1}]}
    error = (await client.post("/infill", json=body)).json()["error"]
    assert error["code"] == 400 and "image_data" in error["message"]
