"""Pictures in the chats of each dialect: they reach the service in order, and addresses are refused."""

from __future__ import annotations

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


@pytest.mark.parametrize("dialect", ["chat", "responses"])
async def test_an_address_is_refused(client: httpx.AsyncClient, service: ScriptedService, dialect: str) -> None:
    path, body, field = PARTS[dialect]
    changed = str(body).replace(URL, "https://example.org/a.png")
    response = await client.post(path, json={"model": "demo", **eval(changed)})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert "this server fetches nothing" in error["message"] and service.requests == []
