"""The metrics under vLLM's names, for dashboards and gateways made for vLLM, computed at a scrape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from app.metrics.gauges import gauge_family
from app.metrics.instruments import Metrics
from app.metrics.steps import EngineSnapshot

# Paged engines count KV memory in blocks, this engine in tokens. Routers that hash a prompt by blocks need blocks of a
# useful size.
BLOCK_TOKENS = 16
# vLLM's name, and ours without the prefix.
_HISTOGRAMS: Mapping[str, str] = {
    "vllm:time_to_first_token_seconds": "time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds": "inter_token_latency_seconds",  # the same before vLLM 0.11
    "vllm:request_time_per_output_token_seconds": "time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds": "request_seconds",
    "vllm:request_queue_time_seconds": "queue_seconds",
    "vllm:request_prefill_time_seconds": "prefill_seconds",
    "vllm:request_decode_time_seconds": "decode_seconds",
    "vllm:request_prompt_tokens": "request_prompt_tokens",
    "vllm:request_generation_tokens": "request_completion_tokens",
}
# vLLM's name, and our kind of token. Each prompt token is looked up in the prefix cache.
_TOKENS: Mapping[str, str] = {
    "vllm:prompt_tokens": "prompt",
    "vllm:generation_tokens": "completion",
    "vllm:prefix_cache_queries": "prompt",
    "vllm:prefix_cache_hits": "cached",
}
_FINISHED: Mapping[str, str] = {
    "stop": "stop",
    "length": "length",
    "aborted": "abort",
    "timeout": "abort",
    "failed": "error",
}


def vllm_metrics(metrics: Metrics, now: EngineSnapshot, num_reading: int, model: str) -> Iterator[Metric]:
    """Yield the metrics; without the name of a served model, only the engine's state. `num_reading` requests wait."""
    labels = {"model_name": model}
    yield gauge_family("vllm:num_requests_running", "Same as armature_requests_running.", now.num_running, labels)
    waiting = now.num_waiting + num_reading
    yield gauge_family("vllm:num_requests_waiting", "Same as armature_requests_waiting.", waiting, labels)
    help_text = "Same as armature_kv_cache_usage_ratio, 0 to 1."
    yield gauge_family("vllm:kv_cache_usage_perc", help_text, now.kv_usage_ratio, labels)
    if now.kv_capacity_tokens:
        blocks = {"block_size": str(BLOCK_TOKENS), "num_gpu_blocks": str(now.kv_capacity_tokens // BLOCK_TOKENS)}
        yield gauge_family("vllm:cache_config_info", "Capacity of the KV memory.", 1, blocks)
    if model:
        yield from (_histogram(metrics, theirs, ours, model) for theirs, ours in _HISTOGRAMS.items())
        yield from _counters(metrics, model)
    yield http_requests(metrics)


def _histogram(metrics: Metrics, theirs: str, ours: str, model: str) -> Metric:
    """Return a histogram of ours under their name, summed over our other labels."""
    family = Metric(theirs, f"Same as armature_{ours}.", "histogram")
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    for sample in metrics.samples(ours):
        sums[sample.name.removeprefix(f"armature_{ours}"), sample.labels.get("le", "")] += sample.value
    for (suffix, bound), value in sums.items():
        family.add_sample(theirs + suffix, {"model_name": model} | ({"le": bound} if bound else {}), value)
    return family


def _counters(metrics: Metrics, model: str) -> Iterator[Metric]:
    tokens = {sample.labels["kind"]: sample.value for sample in metrics.samples("tokens")}
    for name, kind in _TOKENS.items():
        family = CounterMetricFamily(name, f'Same as armature_tokens_total{{kind="{kind}"}}.', labels=("model_name",))
        family.add_metric((model,), tokens[kind])
        yield family
    ended: defaultdict[str, float] = defaultdict(float)
    for sample in metrics.samples("requests"):
        if (reason := _FINISHED.get(sample.labels["outcome"])) is not None:
            ended[reason] += sample.value
    help_text = "Ended requests by how they ended."
    success = CounterMetricFamily("vllm:request_success", help_text, labels=("model_name", "finished_reason"))
    for reason, number in ended.items():
        success.add_metric((model, reason), number)
    yield success


def http_requests(metrics: Metrics) -> Metric:
    """Return the counter that servers made with FastAPI usually have, vLLM among them: statuses by their first digit."""
    sums: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for sample in metrics.samples("http_requests"):
        has = sample.labels
        sums[has["method"], has["route"], f"{has['status'][0]}xx"] += sample.value
    labels = ("method", "handler", "status")
    family = CounterMetricFamily(
        "http_requests", "Same as armature_http_requests_total, by status class.", labels=labels
    )
    for found, value in sums.items():
        family.add_metric(found, value)
    return family
