"""Triton's repository index and statistics, refused loading, and what an unknown path below a model is told."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.encoder_client import asking
from tests.api.oip_fakes import encoder, program, serving
from tests.api.scripted_service import ScriptedService


@pytest.mark.parametrize("content", [b"", b"{}", b'{"ready": true}'])
async def test_the_index_has_the_served_model(client: httpx.AsyncClient, content: bytes) -> None:
    response = await client.post("/v2/repository/index", content=content)
    assert response.json() == [{"name": "demo", "version": "1", "state": "READY", "reason": ""}]


def test_the_document_does_not_require_a_body_of_the_index(app: Any) -> None:
    assert app.openapi()["paths"]["/v2/repository/index"]["post"]["requestBody"]["required"] is False


async def test_a_path_with_two_methods_names_both(client: httpx.AsyncClient) -> None:
    response = await client.put("/")
    assert (response.status_code, response.headers["allow"]) == (405, "GET, POST")


async def test_the_index_while_loading(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.ready, service.stage = False, "reading weights"
    assert (await client.post("/v2/repository/index")).json() == []


async def test_the_index_of_a_server_that_stops() -> None:
    async with serving(encoder()) as served:
        served.service.drain()
        (model,) = (await served.client.post("/v2/repository/index")).json()
        assert (model["state"], model["reason"]) == ("UNAVAILABLE", "stopping")
        assert (await served.client.post("/v2/repository/index", json={"ready": True})).json() == []


async def test_a_page_of_another_site_may_not_ask(client: httpx.AsyncClient) -> None:
    refused = await client.post("/v2/repository/index", headers={"origin": "http://other"})
    assert (refused.status_code, "content-type" in refused.json()["error"]) == (400, True)


@pytest.mark.parametrize("action", ["load", "unload"])
async def test_loading_is_refused_by_name(client: httpx.AsyncClient, action: str) -> None:
    response = await client.post(f"/v2/repository/models/org/name/{action}", json={"parameters": {}})
    assert response.status_code == 400
    assert "not loaded or unloaded" in response.json()["error"]
    assert "armature serve --model" in response.json()["error"]


@pytest.mark.parametrize("path", ["/v2/models/stats", "/v2/models/tiny/stats", "/v2/models/tiny/versions/1/stats"])
async def test_statistics_count_requests(path: str) -> None:
    async with asking() as (client, _):
        (before,) = (await client.get(path)).json()["model_stats"]
        assert (before["last_inference"], before["inference_count"]) == (0, 0)
        for _ in range(2):
            await client.post("/encode", json={"inputs": ["hello", "the fox"]})
        await client.post("/encode", json={"inputs": ""})
        (after,) = (await client.get(path)).json()["model_stats"]
    assert (after["name"], after["version"], after["inference_count"]) == ("tiny", "1", 2)
    assert after["last_inference"] > 1_500_000_000_000
    spent: dict[str, Any] = after["inference_stats"]
    assert spent["queue"] == {"count": 2, "ns": 2_000_000}
    assert (spent["success"]["count"], spent["fail"]["count"]) == (2, 0), "a refused body is no inference"
    assert set(spent["cache_hit"]) == {"count", "ns"}


async def test_failed_requests_are_counted_apart() -> None:
    async with asking() as (client, worker):
        worker.bad = 7
        assert (await client.post("/encode", json={"inputs": [[2, 7, 3]]})).status_code == 500
        (stats,) = (await client.get("/v2/models/stats")).json()["model_stats"]
    assert (stats["inference_stats"]["fail"]["count"], stats["inference_count"]) == (1, 0)


async def test_statistics_of_another_model_or_version() -> None:
    async with asking() as (client, _):
        other = await client.get("/v2/models/other/stats")
        assert (other.status_code, "'other' is not served here" in other.text) == (404, True)
        assert (await client.get("/v2/models/tiny/versions/2/stats")).status_code == 404


async def test_an_unknown_path_below_a_model_names_what_it_has() -> None:
    async with asking() as (client, _):
        response = await client.get("/v2/models/tiny/trace/setting")
        assert response.status_code == 404
        assert response.json()["error"].startswith("The model 'tiny' is served here, and it has no 'trace/setting'")
        assert "stats" in response.json()["error"]


async def test_extensions_are_listed(client: httpx.AsyncClient) -> None:
    assert {"model_repository", "statistics"} <= set((await client.get("/v2")).json()["extensions"])


async def test_a_program_has_no_tokenizer(app: Any) -> None:
    """Its routes are those of tensors, and the document declares the refusal."""
    async with serving(program()) as served:
        for method, path, body in (
            ("GET", "/tokenizer_info", None),
            ("POST", "/decode", {"ids": [1]}),
            ("POST", "/tokenize", {"inputs": "a"}),
        ):
            response = await served.client.request(method, path, json=body)
            assert (response.status_code, "exported program" in response.text) == (400, True), path
            assert "400" in app.openapi()["paths"][path][method.lower()]["responses"]
