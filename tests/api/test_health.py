"""Endpoints for probes and scrapers, and the OpenAPI document."""

from __future__ import annotations

import httpx
import pytest

from app.hardware.step_times import StepTimes, StepTimeTable
from app.metrics.load_progress import LoadProgress
from app.metrics.steps import EngineSnapshot, StepStats
from tests.api.scripted_service import CountingMetrics, ScriptedService


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
    service.load_progress = LoadProgress("packing weights", 40, 100, 26, 65, elapsed_seconds=8.0)
    assert (await client.get("/readyz")).json()["progress"] == {
        "phase": "packing weights", "layers_done": 26, "layers_total": 65, "percent": 40, "remaining_seconds": 12.0
    }  # fmt: skip
    service.stage = "stopping"
    assert (await client.get("/readyz")).json()["status"] == "stopping"


async def test_requests_before_that_are_asked_to_come_again(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.ready, service.stage = False, "importing torch"
    for path, body in (("/generate", {"prompt": "a"}), ("/v1/completions", {"prompt": "a"}), ("/v1/embeddings", {})):
        response = await client.post(path, json=body)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "not_ready"
    assert (await client.get("/v1/models")).status_code == 503


async def test_info_says_what_is_known(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.snapshot = EngineSnapshot(num_running=2, kv_used_tokens=5, kv_capacity_tokens=10)
    told = (await client.get("/info")).json()
    assert told["plan"]["threads"]["reason"] == "because"
    assert told["capacity"]["kv_usage_ratio"] == 0.5
    assert told["version"]


def test_the_keys_of_capacity_are_promised() -> None:
    told = EngineSnapshot().to_json()
    sequences = ["rows", "context_tokens", "prompts", "queue"]
    kv = ["kv_used_tokens", "kv_capacity_tokens"]
    assert list(told) == [
        "num_running",
        "num_waiting",
        *kv,
        "stepped_at",
        *sequences,
        "tempo",
        "states",
        "kv_usage_ratio",
    ]
    assert told["tempo"] is None
    tempo = EngineSnapshot(step_times=StepTimes(StepTimeTable(((1, 0.5),), ()), 64, draft_tokens=2.0)).to_json()[
        "tempo"
    ]
    factors = ["decode_factor", "mixed_factor", "prefill_factor", "encode_factor"]
    means = ["guesses", "tokens_made"]
    assert list(tempo) == ["steps", "max_tokens", "target_seconds", *factors, *means, "oldest_first"]
    seconds = ["context_token_seconds", "pair_seconds"]
    points = ["logits_points", "encode_points"]
    assert list(tempo["steps"]) == ["decode_points", "prefill_points", *seconds, *points]
    assert (tempo["guesses"], tempo["tokens_made"]) == (2.0, 1.0)


async def test_the_scrape_negotiates(client: httpx.AsyncClient) -> None:
    response = await client.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert response.text == "application/openmetrics-text"
    assert response.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"


async def test_the_last_steps_are_reported_from_a_number_on(
    client: httpx.AsyncClient, metrics: CountingMetrics
) -> None:
    for _ in range(3):
        metrics.step_log.add(5.0, StepStats(0.25, decode_tokens=2), "descheduled")
    told = (await client.get("/info/steps")).json()
    assert told["next"] == 3 and told["dropped"] == 0 and told["clock"] > 1_700_000_000
    assert told["steps"]["cause"] == ["descheduled"] * 3
    later = (await client.get("/info/steps", params={"after": 2})).json()
    assert later["steps"] == {
        "at": [5.0],
        "seconds": [0.25],
        "phase": ["decode"],
        "tokens": [2],
        "cause": ["descheduled"],
    }
    assert (await client.get("/info/steps", params={"after": 10**17})).json()["steps"]["at"] == []


@pytest.mark.parametrize("after", ["-1", "", "x", "1.5", "１", "9" * 19, "9" * 5000])
async def test_a_step_has_a_whole_number(client: httpx.AsyncClient, after: str) -> None:
    response = await client.get("/info/steps", params={"after": after})
    assert response.status_code == 400
    assert response.json()["error"]["field"] == "after"
