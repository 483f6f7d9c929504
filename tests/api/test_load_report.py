"""Load reports for routers: SGLang's route, and ORCA's header for requests that ask for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from app.api.server.load_report import best_rate, utilization
from app.metrics.instruments import Metrics
from app.metrics.steps import EngineSnapshot
from tests.api.scripted_service import ScriptedService, events

CAPACITY = {"prefill": {64: 1000.0, 512: 4000.0}, "decode": {1: 50.0, 8: 200.0}}
BUSY = EngineSnapshot(num_running=2, num_waiting=3, kv_used_tokens=40, kv_capacity_tokens=160, queue=(7, 11, 2))
COMPLETION = {"prompt": "a", "max_tokens": 4}


class SteppingClock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def busy(app: Any, service: ScriptedService) -> Callable[[], Metrics]:
    """Make the server busy: in ten seconds 5 requests, 4,000 tokens of prompts and 500 of completions."""

    def make() -> Metrics:
        clock = SteppingClock()
        measured = Metrics(clock)
        clock.seconds = 10.0
        measured.prompt_tokens(4000, 0)
        measured.completion_tokens(500)
        for _ in range(5):
            measured.request_ended("completions", "stop", 1.0)
        service.snapshot = BUSY
        app.state.runtime = replace(app.state.runtime, metrics=measured, capacity=lambda: CAPACITY)
        return measured

    return make


async def test_sglangs_route_has_the_load_and_the_capacity(client: httpx.AsyncClient, busy: Any) -> None:
    busy()
    body = (await client.get("/v1/loads?include=core,queues")).json()
    assert body["dp_rank_count"] == 1
    assert body["loads"] == [
        {
            "dp_rank": 0,
            "num_running_reqs": 2,
            "num_waiting_reqs": 3,
            "num_waiting_uncached_tokens": 20,
            "num_total_reqs": 5,
            "num_used_tokens": 40,
            "max_total_num_tokens": 160,
            "token_usage": 0.25,
            "gen_throughput": 200.0,
            "utilization": 0.5,
            "max_running_requests": 4,
        }
    ]


async def test_while_loading_there_is_no_capacity(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.ready = False
    (load,) = (await client.get("/v1/loads")).json()["loads"]
    assert (load["gen_throughput"], load["utilization"], load["max_running_requests"]) == (0.0, 0.0, 0)


async def test_the_route_needs_a_key_where_keys_are_set(build: Callable[..., Any]) -> None:
    transport = httpx.ASGITransport(build(("secret",)))
    async with httpx.AsyncClient(transport=transport, base_url="http://armature") as client:
        assert (await client.get("/v1/loads")).status_code == 401
        assert (await client.get("/v1/loads", headers={"authorization": "Bearer secret"})).status_code == 200


# ---- ORCA's header -------------------------------------------------------------------------------------------------


async def test_a_request_that_asks_gets_the_report_as_text(client: httpx.AsyncClient, busy: Any) -> None:
    busy()
    response = await client.post("/v1/completions", json=COMPLETION, headers={"endpoint-load-metrics-format": "TEXT"})
    assert response.headers["endpoint-load-metrics"] == (
        "TEXT application_utilization=0.35, rps_fractional=0.5, named_metrics.kv_cache_usage_perc=0.25, "
        "named_metrics.num_requests_waiting=3, named_metrics.num_requests_running=2"
    )


async def test_a_stream_has_it_as_json_from_its_start(client: httpx.AsyncClient, busy: Any) -> None:
    busy()
    response = await client.post(
        "/v1/completions", json=COMPLETION | {"stream": True}, headers={"endpoint-load-metrics-format": "JSON"}
    )
    form, _, report = response.headers["endpoint-load-metrics"].partition(" ")
    assert form == "JSON"
    assert json.loads(report) == {
        "application_utilization": 0.35,
        "rps_fractional": 0.5,
        "named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3, "num_requests_running": 2},
    }
    assert events(response)[-1] == "[DONE]"


@pytest.mark.parametrize("headers", [{}, {"endpoint-load-metrics-format": "BIN"}])
async def test_no_other_request_gets_it(client: httpx.AsyncClient, busy: Any, headers: dict[str, str]) -> None:
    busy()
    response = await client.post("/v1/completions", json=COMPLETION, headers=headers)
    assert (response.status_code, "endpoint-load-metrics" in response.headers) == (200, False)


def test_requests_over_utilization_are_what_the_server_can_do() -> None:
    """Of requests with 800 and 100 tokens: 800 / 4000 + 100 / 200 seconds each, at any load."""
    for per_second in (0.1, 0.5, 1.3):
        rates = {"prompt_tokens": 800 * per_second, "completion_tokens": 100 * per_second}
        assert per_second / utilization(CAPACITY, rates) == pytest.approx(1 / 0.7)
    assert utilization({}, {"prompt_tokens": 5.0, "completion_tokens": 5.0}) == 0.0


def test_the_rate_is_that_of_the_most_rows_of_the_first_phase_there_is() -> None:
    assert best_rate(CAPACITY, "encode", "decode") == 200.0
    assert best_rate({}, "encode", "decode") == 0.0


# ---- bodies that a router has parsed -------------------------------------------------------------------------------

# What vllm-router 0.1.17 and sglang-router 0.3.2 make of a body with a prompt or messages alone.
ADDED = {
    "stream": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}
ADDED_TO_CHATS = {
    "logprobs": False,
    "continue_final_message": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "include_reasoning": True,
}


async def test_what_routers_add_to_a_body_is_accepted(client: httpx.AsyncClient) -> None:
    completion = await client.post("/v1/completions", json=COMPLETION | ADDED | {"echo": False})
    chat = {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 4}
    native = {"prompt": "a", "stream": False, "return_logprob": False, "return_hidden_states": False}
    answers = [
        completion,
        await client.post("/v1/chat/completions", json=chat | ADDED | ADDED_TO_CHATS),
        await client.post("/generate", json=native),
    ]
    assert [each.status_code for each in answers] == [200, 200, 200], [each.text for each in answers]


@pytest.mark.parametrize("field", ["no_stop_trim", "return_hidden_states", "separate_reasoning", "stream_reasoning"])
async def test_another_value_of_them_is_refused_by_name(client: httpx.AsyncClient, field: str) -> None:
    value = not (ADDED | ADDED_TO_CHATS)[field]
    response = await client.post("/v1/completions", json=COMPLETION | {field: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)
