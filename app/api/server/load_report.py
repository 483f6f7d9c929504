"""Load reports for routers: SGLang's `GET /v1/loads`, and ORCA's header in the responses of requests that ask for it.

Both contain the capacity, so that a router divides the work of unequal servers by what each can do. The header is
Open Request Cost Aggregation's (github.com/cncf/xds, `OrcaLoadReport`); a request asks for it as vLLM's clients do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime

from app.api.openai.schemas import OPENAI_ERRORS
from app.api.routing import ApiCall, ApiRuntime, Dialect
from app.api.server.schemas import LoadsResponse, RankLoad
from app.metrics.steps import EngineSnapshot
from app.version import VERSION

ASKED, REPORTED = b"endpoint-load-metrics-format", b"endpoint-load-metrics"
Capacity = Mapping[str, Mapping[int, float]]  # tokens per second by phase and rows of a step

SGLANG = Dialect("SGLang", OPENAI_ERRORS)


@SGLANG.get("/v1/loads", "SGLang: load and capacity of the server")
async def loads(call: ApiCall) -> LoadsResponse:
    """`gen_throughput` is 0 while the capacity is unknown."""
    models, loads = call.runtime.models, []
    for rank, runtime in enumerate(runtimes_of(call.runtime)):
        service = runtime.service
        places = service.model.limits.max_running_seqs if service.ready else 0
        load = _rank_load(service.snapshot, best_rate(runtime.capacity(), "decode", "encode"), places)
        if models is not None:
            load["dp_rank"], load["model"] = rank, models.entries[rank].name
        loads.append(load)
    return {"timestamp": datetime.now(UTC).isoformat(), "version": VERSION, "dp_rank_count": len(loads), "loads": loads}


def runtimes_of(runtime: ApiRuntime) -> list[ApiRuntime]:
    """Return the runtime of each model."""
    return [runtime] if runtime.models is None else [entry.runtime for entry in runtime.models.entries]


def _rank_load(now: EngineSnapshot, tokens_per_second: float, places: int) -> RankLoad:
    return {
        "dp_rank": 0,
        "num_running_reqs": now.num_running,
        "num_waiting_reqs": now.num_waiting,
        "num_waiting_uncached_tokens": sum(now.queue),
        "num_total_reqs": now.num_running + now.num_waiting,
        "num_used_tokens": now.kv_used_tokens,
        "max_total_num_tokens": now.kv_capacity_tokens,
        "token_usage": now.kv_usage_ratio,
        "gen_throughput": tokens_per_second,
        "utilization": min(now.num_running / places, 1.0) if places else 0.0,
        "max_running_requests": places,
    }


def best_rate(capacity: Capacity, *phases: str) -> float:
    """Return the rate of the most rows in the first of these phases that the server has; 0 if it has none."""
    for phase in phases:
        if by_rows := capacity.get(phase):
            return by_rows[max(by_rows)]
    return 0.0


def utilization(capacity: Capacity, tokens_per_second: Mapping[str, float]) -> float:
    """Return the part of its capacity that the server uses: for each kind of token, its rate over the most possible.

    `tokens_per_second` has `prompt_tokens` and `completion_tokens`. The result is 0 if nothing was computed or no
    capacity is known. Requests per second over this are what the server can do of such requests.
    """
    reading, writing = best_rate(capacity, "prefill", "encode"), best_rate(capacity, "decode")
    pairs = ((tokens_per_second["prompt_tokens"], reading), (tokens_per_second["completion_tokens"], writing))
    return sum(rate / most for rate, most in pairs if most > 0)


def orca_report(runtime: ApiRuntime, form: str) -> str:
    """Return the value of the header in the form `text` or `json`; empty for any other form."""
    used = requests = 0.0  # several models share the machine: their parts add up
    states: list[EngineSnapshot] = []
    for each in runtimes_of(runtime):
        states.append(each.service.snapshot)
        rates = {kind: rate.per_second() for kind, rate in each.metrics.rates.items()}
        used += utilization(each.capacity(), rates)
        requests += rates["requests"]
    report = {"application_utilization": round(used, 6), "rps_fractional": round(requests, 6)}
    named = {
        "kv_cache_usage_perc": round(max(now.kv_usage_ratio for now in states), 6),
        "num_requests_waiting": sum(now.num_waiting for now in states),
        "num_requests_running": sum(now.num_running for now in states),
    }
    match form:
        case "text":
            pairs = report | {f"named_metrics.{name}": value for name, value in named.items()}
            return "TEXT " + ", ".join(f"{name}={value}" for name, value in pairs.items())
        case "json":
            return "JSON " + json.dumps({**report, "named_metrics": named})
        case _:
            return ""
