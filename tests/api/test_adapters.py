"""Adapters in the API: every dialect chooses by its model name, lists of models, and vLLM's routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from app.errors import InvalidRequest
from app.messages import Command
from app.service.adapters import Adapters, AdapterStore
from tests.api.scripted_service import ScriptedService

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": CHAT | {"max_tokens": 5},
    "/api/chat": CHAT | {"stream": False},
    "/api/generate": {"prompt": "Hi", "stream": False},
    "/completion": {"prompt": "Hi"},
    "/generate": {"prompt": "Hi"},
    "/invocations": CHAT,
}
WITHOUT_NAME = ("/generate",)  # answers that have no model's name


@pytest.fixture
def commands(service: ScriptedService) -> list[Command]:
    """What the worker is told. The service has the adapter `law`, and a place for another."""
    put: list[Command] = []

    def read(path: str, slot: int) -> None:
        if path != "poems":
            raise InvalidRequest("It is elsewhere.", field="lora_path")

    service.adapters = Adapters(AdapterStore([("law", "/law")], 2, read), put.append)
    return put


@pytest.mark.parametrize("path", BODIES)
async def test_every_dialect_chooses_an_adapter_by_the_name_of_the_model(
    path: str, service: ScriptedService, client: httpx.AsyncClient, commands: list[Command]
) -> None:
    for name in ("law", "demo"):
        answer = await client.post(path, json=BODIES[path] | {"model": name})
        assert answer.status_code == 200, answer.text
        assert service.requests[-1].model == name
        if path not in WITHOUT_NAME:
            assert answer.json()["model"] == name


async def test_the_open_inference_protocol_has_the_name_in_the_path(
    service: ScriptedService, client: httpx.AsyncClient, commands: list[Command]
) -> None:
    answer = await client.post("/v2/models/law/generate", json={"text_input": "Hi"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model_name"] == "law"
    assert service.requests[-1].model == "law"


async def test_other_names_are_refused_and_the_served_ones_named(
    client: httpx.AsyncClient, commands: list[Command]
) -> None:
    answer = await client.post("/v1/completions", json={"prompt": "Hi", "model": "poetry"})
    assert answer.status_code == 404
    assert "'demo', 'law' is" in answer.json()["error"]["message"]


async def test_lists_of_models_have_adapters_with_their_parent(
    client: httpx.AsyncClient, commands: list[Command]
) -> None:
    listed = (await client.get("/v1/models")).json()["data"]
    assert [(one["id"], one["root"], one.get("parent")) for one in listed] == [
        ("demo", "demo", None),
        ("law", "law", "demo"),
    ]
    assert (await client.get("/v1/models/law")).json()["parent"] == "demo"
    assert [one["name"] for one in (await client.get("/api/tags")).json()["models"]] == ["demo", "law"]


async def test_adapters_are_loaded_and_unloaded(client: httpx.AsyncClient, commands: list[Command]) -> None:
    body = {"lora_name": "poetry", "lora_path": "poems"}
    answer = await client.post("/v1/load_lora_adapter", json=body)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'poetry' added successfully.")
    again = await client.post("/v1/load_lora_adapter", json=body)
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    answer = await client.post("/v1/unload_lora_adapter", json={"lora_name": "poetry", "lora_int_id": 1})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'poetry' removed successfully.")
    assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "poetry"})).status_code == 404
    assert len(commands) == 2


async def test_a_refused_path_is_named(client: httpx.AsyncClient, commands: list[Command]) -> None:
    body = {"lora_name": "poetry", "lora_path": "/etc"}
    answer = await client.post("/v1/load_lora_adapter", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_path")
    assert commands == []


async def test_without_a_directory_nothing_is_loaded(client: httpx.AsyncClient) -> None:
    body = {"lora_name": "poetry", "lora_path": "poems"}
    answer = await client.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 400
    assert "lora_root" in answer.json()["error"]["message"]
