"""What `armature_http_requests_total` is told of each response: method, route, status and error code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from app.api.application import ROUTES
from app.errors import NotReady, Overloaded, StepFailed
from tests.api.scripted_service import Conversation, CountingMetrics, ScriptedService, deltas

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}


async def test_a_success_has_no_code(client: httpx.AsyncClient, metrics: CountingMetrics) -> None:
    assert (await client.post("/generate", json={"prompt": "a"})).status_code == 200
    assert (await client.get("/healthz")).status_code == 200
    assert metrics.responses == [("POST", "/generate", 200, ""), ("GET", "/healthz", 200, "")]


@pytest.mark.cases(test=2)
@pytest.mark.parametrize(
    ("method", "path", "told"),
    [
        ("GET", "/no/such/path", ("other", "other", 404, "route_not_found")),
        ("PUT", "/generate", ("other", "other", 405, "method_not_allowed")),
        ("GET", "/v1/models/nobody", ("GET", "/v1/models/{name}", 404, "model_not_found")),
        ("HEAD", "/healthz", ("HEAD", "/healthz", 200, "")),
        ("GET", "/docs", ("other", "other", 200, "")),
    ],
)
async def test_labels_are_of_our_routes_and_of_no_others(
    client: httpx.AsyncClient, metrics: CountingMetrics, method: str, path: str, told: tuple[Any, ...]
) -> None:
    await client.request(method, path)
    assert metrics.responses == [told]


async def test_paths_and_methods_that_clients_invent_make_no_series(
    client: httpx.AsyncClient, metrics: CountingMetrics
) -> None:
    for number in range(20):
        await client.request(f"METHOD{number}", f"/path/{number}")
        await client.request("GET", f"/v1/models/{number}")
    known = {(route.method, route.path_format) for route in ROUTES} | {("other", "other")}
    assert {told[:2] for told in metrics.responses} <= known
    assert len(set(metrics.responses)) == 2


@pytest.mark.parametrize(
    ("change", "error", "status", "code"),
    [
        ({"temperature": 9}, None, 400, "invalid_request"),
        ({"model": "nobody"}, None, 404, "model_not_found"),
        ({}, Overloaded("full", 2.0), 429, "overloaded"),
        ({}, NotReady("soon"), 503, "not_ready"),
        ({}, StepFailed("no"), 500, "step_failed"),
        ({}, ZeroDivisionError("ours"), 500, "internal_error"),
    ],
)
async def test_an_error_is_counted_with_its_code(
    client: httpx.AsyncClient,
    service: ScriptedService,
    metrics: CountingMetrics,
    change: dict[str, Any],
    error: Exception | None,
    status: int,
    code: str,
) -> None:
    service.scripts = [[error] if error is not None else deltas("a")]
    response = await client.post("/v1/chat/completions", json={**CHAT, **change})
    assert response.status_code == status
    assert metrics.responses == [("POST", "/v1/chat/completions", status, code)]


async def test_an_error_within_a_stream_is_counted_beside_its_status(
    client: httpx.AsyncClient, service: ScriptedService, metrics: CountingMetrics
) -> None:
    service.scripts = [[*deltas("a")[:1], StepFailed("no")]]
    response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert (response.status_code, "step_failed" in response.text) == (200, True)
    assert metrics.responses == [("POST", "/v1/chat/completions", 200, "step_failed")]


async def test_a_key_that_is_missing_is_counted(build: Callable[..., Any], metrics: CountingMetrics) -> None:
    transport = httpx.ASGITransport(build(api_keys=("secret",)))
    async with httpx.AsyncClient(transport=transport, base_url="http://armature") as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 401
    assert metrics.responses == [("POST", "/v1/chat/completions", 401, "unauthorized")]


async def test_a_client_that_leaves_is_counted(app: Any, service: ScriptedService, metrics: CountingMetrics) -> None:
    service.scripts = [[asyncio.Event()]]
    talk = Conversation(app, "/generate", json.dumps({"prompt": "a"}).encode())
    while not service.num_waiting:
        await asyncio.sleep(0)
    talk.release()
    await talk.over()
    assert metrics.responses == [("POST", "/generate", 499, "client_disconnected")]


@pytest.mark.parametrize(("ready", "reason"), [(True, "invalid"), (False, "unavailable")])
async def test_a_refusal_before_the_service_is_counted_with_its_reason(
    client: httpx.AsyncClient, service: ScriptedService, metrics: CountingMetrics, ready: bool, reason: str
) -> None:
    """The scripted service counts nothing: what is told here was refused before it."""
    service.ready = ready
    await client.post("/v1/chat/completions", json={**CHAT, "temperature": 9})
    assert metrics.reasons == [reason]
