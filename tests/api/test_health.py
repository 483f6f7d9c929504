"""What probes and scrapers get, and the document of the routes."""

from __future__ import annotations

from typing import Any

import httpx

from app.main import URLS
from app.measured import Snapshot
from tests.api.scripted import ScriptedService


async def test_alive_while_the_worker_lives(client: httpx.AsyncClient, service: ScriptedService) -> None:
    assert (await client.get("/healthz")).status_code == 200
    service.alive = False
    assert (await client.get("/healthz")).status_code == 500


async def test_ready_names_the_stage_until_it_is(client: httpx.AsyncClient, service: ScriptedService) -> None:
    assert (await client.get("/readyz")).json() == {"status": "ready"}
    service.ready, service.stage = False, "loading weights 40%"
    response = await client.get("/readyz")
    assert response.status_code == 503
    assert response.json() == {"status": "loading", "stage": "loading weights 40%"}
    service.stage = "stopping"
    assert (await client.get("/readyz")).json()["status"] == "stopping"


async def test_requests_before_that_are_told_to_come_again(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.ready, service.stage = False, "importing torch"
    for path, body in (("/generate", {"prompt": "a"}), ("/v1/completions", {"prompt": "a"}), ("/v1/embeddings", {})):
        response = await client.post(path, json=body)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "not_ready"
    assert (await client.get("/v1/models")).status_code == 503


async def test_info_says_what_is_known(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.snapshot = Snapshot(num_running=2, kv_used_tokens=5, kv_capacity_tokens=10)
    told = (await client.get("/info")).json()
    assert told["plan"]["threads"]["reason"] == "because"
    assert told["capacity"]["kv_usage_ratio"] == 0.5
    assert told["version"]


async def test_the_scrape_negotiates(client: httpx.AsyncClient) -> None:
    response = await client.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert response.text == "application/openmetrics-text"
    assert response.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"


async def test_the_root_leads_to_the_documentation(client: httpx.AsyncClient) -> None:
    response = await client.get("/")
    assert response.is_redirect
    assert (await client.get(response.headers["location"])).status_code == 200


async def test_the_document_has_every_url_and_what_it_takes(client: httpx.AsyncClient) -> None:
    document: dict[str, Any] = (await client.get("/openapi.json")).json()
    for url in URLS:
        path = url.path.replace(":path", "")
        operation = document["paths"][path][url.method.lower()]
        assert operation["summary"] == url.summary
        if url.body is not None:
            reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            assert "properties" in document["components"]["schemas"][reference.rpartition("/")[2]]
    text = str(document)
    for reference in {part.split("'")[0] for part in text.split("#/components/schemas/")[1:]}:
        assert reference in document["components"]["schemas"]
