"""The exposition: names that dashboards use, reported values, and no sample for unknown values."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, get_args

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from app.errors import (
    ContextLengthExceeded,
    ModelNotFound,
    NotReady,
    Overloaded,
    RateLimited,
    RequestError,
    ServiceStopping,
)
from app.hardware.facts import PowerMeter
from app.messages import Timings
from app.metrics.gauges import DeploymentGauges, DeploymentInfo, ServerInfo, engine_gauges, throttled_seconds
from app.metrics.instruments import SECONDS_BUCKETS, Api, Metrics, refusal_of
from app.metrics.power_monitor import PowerMonitor
from app.metrics.step_monitor import StepRecorder
from app.metrics.steps import EngineSnapshot, StateUsage, StepStats
from app.metrics.vllm_names import vllm_metrics
from app.service.served_model import ServedDecoder
from app.service.service import Service
from fake_worker import LIMITS, FakeWorker, tokenizer

ABOUT = ServerInfo("1.2", "demo", "cpu", "avx512", "bf16", "2.13.0")


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample by its name with its labels, as `name{a=1,b=2}`."""
    found: dict[str, float] = {}
    for family in parse_text(metrics.render()[0].decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> Metrics:
    return Metrics(clock)


def tell_everything(metrics: Metrics) -> None:
    metrics.gauges(lambda: engine_gauges(EngineSnapshot(), ready=True, predicted_wait_seconds=None))
    metrics.gauges(lambda: vllm_metrics(metrics, EngineSnapshot(), 0, "demo"))
    DeploymentGauges(metrics, lambda: DeploymentInfo(ABOUT, threads=2, hourly_price=0.36))
    metrics.prompt_tokens(100, 40)
    metrics.first_token(Timings(queue_seconds=0.02, prefill_seconds=0.1), 0.12)
    metrics.completion_tokens(1)
    metrics.next_token(0.03)
    metrics.completion_tokens(1)
    metrics.last_token(0.03, 1)
    metrics.request_lengths(100, 2)
    metrics.request_ended("chat", "stop", 0.15)
    metrics.request_ended("native", "failed", 0.2)
    metrics.refused("native", "overloaded")
    metrics.responded("POST", "/generate", 429, "overloaded")
    metrics.responded("POST", "/generate", 400, "invalid_request")
    metrics.responded("POST", "/generate", 200, "")
    mixed = StepStats(
        0.05, prefill_tokens=30, decode_tokens=4, num_sequences=5, num_prefill_sequences=1, num_decode_sequences=4
    )
    metrics.on_step(mixed, EngineSnapshot())
    metrics.on_step(StepStats(0.02, decode_tokens=4, num_sequences=4, num_decode_sequences=4), EngineSnapshot())


def test_what_an_encoder_does_is_shown_by_its_phase(metrics: Metrics) -> None:
    metrics.on_step(
        StepStats(0.0004, encode_tokens=50, num_sequences=3, num_encode_sequences=3, model_seconds=0.0003),
        EngineSnapshot(),
    )
    metrics.vectors_returned(3, 50, Timings(queue_seconds=0.01, encode_seconds=0.02))
    metrics.request_ended("embeddings", "stop", 0.03)
    seen = samples(metrics)
    expected = {
        "armature_step_seconds_bucket{le=0.0003125,phase=encode}": 0,
        "armature_step_seconds_bucket{le=0.0005,phase=encode}": 1,
        "armature_batch_tokens_sum{phase=encode}": 50,
        "armature_batch_sequences_sum{phase=encode}": 3,
        "armature_model_seconds_total{phase=encode}": 0.0003,
        "armature_vectors_total": 3,
        "armature_tokens_total{kind=prompt}": 50,
        "armature_queue_seconds_sum": 0.01,
        "armature_throughput_per_second{kind=vectors}": 3,
        "armature_request_seconds_sum{api=embeddings}": 0.03,
    }
    assert {name: seen.get(name) for name in expected} == pytest.approx(expected)
    assert "armature_step_seconds_count{phase=decode}" not in seen


def test_each_way_a_request_can_end_is_there_from_the_start(metrics: Metrics) -> None:
    """Prometheus sees no increase in what comes into being with it: the first failures would go unseen."""
    names = [name for name in samples(metrics) if name.startswith("armature_requests_total")]
    assert len(names) == len(get_args(Api)) * 8
    assert samples(metrics)["armature_requests_total{api=chat,outcome=failed}"] == 0


async def test_whether_requests_are_served_is_shown(metrics: Metrics) -> None:
    worker = FakeWorker()
    service = Service(worker, metrics)
    assert samples(metrics)["armature_ready"] == 0
    service.serve(ServedDecoder("demo", LIMITS, tokenizer(), None))
    worker.snapshot = EngineSnapshot(num_running=3, stepped_at=1.0)
    seen = samples(metrics)
    assert (seen["armature_ready"], seen["armature_requests_running"], service.idle) == (1, 3, True)
    await service.stop()
    assert samples(metrics)["armature_ready"] == 0


def test_everything_reported_is_shown(metrics: Metrics) -> None:
    tell_everything(metrics)
    seen = samples(metrics)
    expected = {
        "armature_requests_total{api=chat,outcome=stop}": 1,
        "armature_requests_total{api=native,outcome=overloaded}": 1,
        "armature_requests_total{api=native,outcome=invalid}": 0,
        "armature_http_requests_total{code=overloaded,method=POST,route=/generate,status=429}": 1,
        "armature_http_requests_total{code=,method=POST,route=/generate,status=200}": 1,
        "armature_request_prompt_tokens_bucket{le=64.0}": 0,
        "armature_request_prompt_tokens_bucket{le=128.0}": 1,
        "armature_request_completion_tokens_bucket{le=2.0}": 1,
        "armature_prefill_seconds_sum": 0.1,
        "armature_decode_seconds_sum": 0.03,
        "armature_tokens_total{kind=prompt}": 100,
        "armature_tokens_total{kind=cached}": 40,
        "armature_tokens_total{kind=completion}": 2,
        "armature_request_seconds_sum{api=chat}": 0.15,
        "armature_queue_seconds_sum": 0.02,
        "armature_time_to_first_token_seconds_sum": 0.12,
        "armature_inter_token_latency_seconds_count": 1,
        "armature_time_per_output_token_seconds_sum": 0.03,
        "armature_step_seconds_count{phase=prefill}": 1,
        "armature_step_seconds_sum{phase=decode}": 0.02,
        "armature_batch_tokens_sum{phase=prefill}": 30,
        "armature_batch_tokens_sum{phase=decode}": 8,
        "armature_batch_sequences_count{phase=decode}": 2,
        "armature_threads": 2,
        "armature_info{device=cpu,isa=avx512,model=demo,precision=bf16,torch=2.13.0,version=1.2}": 1,
        "armature_throughput_per_second{kind=prompt_tokens}": 100,
        "armature_throughput_per_second{kind=completion_tokens}": 2,
        "armature_throughput_per_second{kind=requests}": 2,
    }
    assert {name: seen.get(name) for name in expected} == pytest.approx(expected)
    for quantile in ("0.5", "0.9", "0.95", "0.99"):
        quantiles = {
            name: f"armature_latency_quantile_seconds{{metric={name},quantile={quantile}}}"
            for name in ("request", "queue", "ttft", "itl")
        }
        told = {name: seen[quantiles[name]] for name in quantiles}
        request = 0.15 if quantile == "0.5" else 0.2
        assert told == pytest.approx({"request": request, "queue": 0.02, "ttft": 0.12, "itl": 0.03}, rel=0.02)


def test_gauges_are_the_last_snapshot_under_our_names_and_the_gateways(metrics: Metrics) -> None:
    now = EngineSnapshot(num_running=3, num_waiting=5, kv_used_tokens=80, kv_capacity_tokens=320)
    metrics.gauges(lambda: engine_gauges(now, ready=True, predicted_wait_seconds=1.5))
    metrics.gauges(lambda: vllm_metrics(metrics, now, 0, "demo"))
    seen = samples(metrics)
    for ours, theirs, value in (
        ("armature_requests_running", "vllm:num_requests_running", 3),
        ("armature_requests_waiting", "vllm:num_requests_waiting", 5),
        ("armature_kv_cache_usage_ratio", "vllm:kv_cache_usage_perc", 0.25),
    ):
        assert (seen[ours], seen[f"{theirs}{{model_name=demo}}"]) == (value, value)
    assert seen["vllm:cache_config_info{block_size=16,num_gpu_blocks=20}"] == 1
    assert seen["armature_predicted_wait_seconds"] == 1.5
    assert not any("recurrent" in name for name in seen)


def test_recurrent_states_are_counted_where_there_are_any(metrics: Metrics) -> None:
    now = EngineSnapshot(states=StateUsage(bytes=4096, checkpoints=2, hits=3, recomputed_tokens=50))
    metrics.gauges(lambda: engine_gauges(now, ready=True, predicted_wait_seconds=None))
    seen = samples(metrics)
    found = [seen[f"armature_recurrent_state_{name}"] for name in ("bytes", "hits_total", "recomputed_tokens_total")]
    assert found == [4096, 3, 50]


def test_a_dashboard_made_for_vllm_finds_its_names(metrics: Metrics) -> None:
    """Buckets, sums and counts, by the model's name; requests of several APIs are one histogram."""
    tell_everything(metrics)
    seen = samples(metrics)
    expected = {
        "vllm:time_to_first_token_seconds_sum{model_name=demo}": 0.12,
        "vllm:inter_token_latency_seconds_count{model_name=demo}": 1,
        "vllm:time_per_output_token_seconds_sum{model_name=demo}": 0.03,
        "vllm:request_time_per_output_token_seconds_sum{model_name=demo}": 0.03,
        "vllm:e2e_request_latency_seconds_sum{model_name=demo}": 0.35,
        "vllm:e2e_request_latency_seconds_count{model_name=demo}": 2,
        "vllm:e2e_request_latency_seconds_bucket{le=+Inf,model_name=demo}": 2,
        "vllm:request_queue_time_seconds_sum{model_name=demo}": 0.02,
        "vllm:request_prefill_time_seconds_sum{model_name=demo}": 0.1,
        "vllm:request_decode_time_seconds_sum{model_name=demo}": 0.03,
        "vllm:request_prompt_tokens_bucket{le=128.0,model_name=demo}": 1,
        "vllm:request_generation_tokens_sum{model_name=demo}": 2,
        "vllm:prompt_tokens_total{model_name=demo}": 100,
        "vllm:generation_tokens_total{model_name=demo}": 2,
        "vllm:prefix_cache_queries_total{model_name=demo}": 100,
        "vllm:prefix_cache_hits_total{model_name=demo}": 40,
        "vllm:request_success_total{finished_reason=stop,model_name=demo}": 1,
        "vllm:request_success_total{finished_reason=error,model_name=demo}": 1,
        "vllm:request_success_total{finished_reason=abort,model_name=demo}": 0,
        "http_requests_total{handler=/generate,method=POST,status=4xx}": 2,
        "http_requests_total{handler=/generate,method=POST,status=2xx}": 1,
    }
    assert {name: seen.get(name) for name in expected} == pytest.approx(expected)


def test_before_the_model_is_known_only_the_engine_has_its_other_names(metrics: Metrics) -> None:
    metrics.gauges(lambda: vllm_metrics(metrics, EngineSnapshot(num_running=2), 0, ""))
    names = {name.partition("{")[0] for name in samples(metrics) if name.startswith("vllm:")}
    assert names == {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ContextLengthExceeded("long"), "invalid"),
        (ModelNotFound("who"), "invalid"),
        (Overloaded("full", 1.0), "overloaded"),
        (RateLimited("again", 1.0), "overloaded"),
        (NotReady("soon"), "unavailable"),
        (ServiceStopping("late"), "unavailable"),
    ],
)
def test_a_refusal_is_the_clients_the_loads_or_the_servers(error: RequestError, reason: str) -> None:
    assert refusal_of(error) == reason


def test_what_is_not_known_is_absent(metrics: Metrics) -> None:
    Service(FakeWorker(), metrics)
    StepRecorder(metrics)
    PowerMonitor(metrics, PowerMeter(), lambda: False)
    DeploymentGauges(metrics, DeploymentInfo)
    names = " ".join(samples(metrics))
    for absent in (
        "predicted_wait_seconds",
        "latency_quantile",
        "cost",
        "quota",
        "cgroup_cpu_throttled",
        "info",
        "energy",
        "capacity",
        "roofline",
    ):
        assert absent not in names


def test_cost_is_hours_times_price_and_a_million_tokens_at_this_speed(metrics: Metrics, clock: Clock) -> None:
    DeploymentGauges(metrics, lambda: DeploymentInfo(ABOUT, hourly_price=0.36))
    cost = "llm_cost_per_million_tokens{cost_basis=allocation,model_name=demo}"
    assert cost not in samples(metrics)
    for _ in range(50):
        clock.seconds += 1
        metrics.prompt_tokens(60, 0)
        metrics.completion_tokens(40)
    seen = samples(metrics)
    assert seen["armature_cost_dollars_total"] == pytest.approx(0.36 * 50 / 3600)
    assert seen[cost] == pytest.approx(0.36 / 3600 / 100 * 1e6, rel=0.03)
    assert "armature_cost_per_million_vectors" not in seen


def test_a_million_vectors_cost_what_the_machine_does_while_they_are_made(metrics: Metrics, clock: Clock) -> None:
    DeploymentGauges(metrics, lambda: DeploymentInfo(ABOUT, hourly_price=0.72))
    for _ in range(50):
        clock.seconds += 1
        metrics.vectors_returned(20, 400, Timings(queue_seconds=0.01, encode_seconds=0.02))
    seen = samples(metrics)
    assert seen["armature_cost_per_million_vectors"] == pytest.approx(0.72 / 3600 / 20 * 1e6, rel=0.03)
    cost = seen["llm_cost_per_million_tokens{cost_basis=allocation,model_name=demo}"]
    assert cost == pytest.approx(0.72 / 3600 / 400 * 1e6, rel=0.03)


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("usage_usec 9\nnr_throttled 3\nthrottled_usec 1500000\n", 1.5),
        ("nr_periods 1\nnr_throttled 0\nthrottled_time 2500000000\n", 2.5),
        ("usage_usec 9\n", None),
        ("", None),
    ],
)
def test_throttled_time_of_both_kinds_of_control_group(text: str, seconds: float | None, tmp_path: Path) -> None:
    (tmp_path / "cpu.stat").write_text(text)
    assert throttled_seconds(tmp_path / "cpu.stat") == seconds
    metrics = Metrics()
    DeploymentGauges(metrics, lambda: DeploymentInfo(cpu_quota_cores=1.5, cpu_stat=tmp_path / "cpu.stat"))
    assert samples(metrics).get("process_cgroup_cpu_throttled_seconds_total") == seconds


def test_a_control_group_that_went_away_is_absent(tmp_path: Path) -> None:
    assert throttled_seconds(tmp_path / "cpu.stat") is None
    assert throttled_seconds(None) is None


def test_buckets_separate_half_a_millisecond_from_less_and_reach_to_ten_minutes() -> None:
    assert SECONDS_BUCKETS[0] < 0.0001 < 0.0005 == SECONDS_BUCKETS[4]
    assert SECONDS_BUCKETS[-1] >= 600
    assert all(1.59 < high / low < 1.61 for low, high in itertools.pairwise(SECONDS_BUCKETS))


@pytest.mark.parametrize(
    "accept, content_type",
    [
        ("", "text/plain; version=0.0.4"),
        ("*/*", "text/plain; version=0.0.4"),
        (
            "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5",
            "application/openmetrics-text; version=1.0.0",
        ),
    ],
)
def test_the_format_is_what_was_asked_for(accept: str, content_type: str, metrics: Metrics) -> None:
    tell_everything(metrics)
    body, told = metrics.render(accept)
    assert told.startswith(content_type)
    parse: Any = parse_openmetrics if "openmetrics" in told else parse_text
    names = {family.name for family in parse(body.decode())}
    assert {"armature_requests", "vllm:num_requests_waiting", "armature_step_seconds", "armature_cost_dollars"} <= names
    assert (b"# EOF" in body) == ("openmetrics" in told)


def test_no_label_is_made_from_what_clients_send_and_all_names_are_ours(metrics: Metrics) -> None:
    tell_everything(metrics)
    for name in samples(metrics):
        assert name.startswith(
            ("armature_", "vllm:", "process_", "llm_cost_per_million_tokens", "http_requests_total")
        ), name


def test_a_scrape_has_a_bounded_number_of_series(metrics: Metrics) -> None:
    tell_everything(metrics)
    for api in ("chat", "completions", "native", "oip"):
        for outcome in ("stop", "length", "aborted", "timeout"):
            metrics.request_ended(api, outcome, 0.1)  # type: ignore[arg-type]
    series = [line for line in metrics.render()[0].decode().splitlines() if not line.startswith("#")]
    assert 500 < len(series) < 1_600  # about 10 us of one core each
