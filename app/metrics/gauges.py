"""Gauges that are computed at each scrape: current state, speed, the last minute's latencies and rates, and cost.

This module needs neither torch nor a thread: a scrape reads values that other parts have recorded.
"""

from __future__ import annotations

import re
from collections.abc import (
    Callable,
    Iterator,
    Mapping,
)
from dataclasses import (
    asdict,
    dataclass,
)
from pathlib import Path
from typing import Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.hardware.energy import EnergyAccount
from app.metrics.quantiles import (
    RecentQuantiles,
    RecentRate,
)
from app.metrics.speed_drift import SpeedDrift
from app.metrics.stats import EngineSnapshot

Clock = Callable[[], float]

QUANTILES = (0.5, 0.9, 0.99)
# Paged engines count KV memory in blocks, this engine in tokens. Routers that hash a prompt by blocks need blocks of a
# useful size.
BLOCK_TOKENS = 16
_ENERGY_SCOPE = "Counts the whole machine or its processors, other processes included; source=modelled: the declared watts while steps run."
_JOULES_PER = "Joules per {} over the last 60 seconds, idle time included."
_JOULES_ABOVE_IDLE_PER = "Joules per {} over the last 60 seconds, less what the machine takes when idle."


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The labels of `armature_info`."""

    version: str
    model: str
    device: str
    isa: str
    precision: str
    torch: str


@dataclass(frozen=True, slots=True)
class DeploymentInfo:
    """Resources of the process and their price; fields that are None are not reported.

    `cpu_stat` is the control group's file of that name. `hourly_price` is in dollars.
    """

    threads: int | None = None
    cpu_quota_cores: float | None = None
    cpu_stat: Path | None = None
    hourly_price: float | None = None


class MetricSources(Protocol):
    """The values that `Gauges` reads, implemented by `metrics.Metrics`; None means not known, or not yet."""

    server_info: ServerInfo | None
    deployment: DeploymentInfo
    read_snapshot: Callable[[], EngineSnapshot]
    predict_wait: Callable[[], float | None]
    is_ready: Callable[[], bool]
    step_age_seconds: Callable[[], float]
    drift: SpeedDrift | None
    energy: EnergyAccount | None
    recent: dict[str, RecentQuantiles]
    rates: dict[str, RecentRate]


class Gauges(Collector):
    """A Prometheus collector of the last snapshot and the last minute; unknown values are left out."""

    def __init__(self, metrics: MetricSources, clock: Clock) -> None:
        self._metrics, self._clock, self._began = metrics, clock, clock()

    def collect(self) -> Iterator[Metric]:
        """Yield all gauges that are known at this moment."""
        yield from self._state(self._metrics.read_snapshot())
        if self._metrics.drift is not None:
            yield from self._speed(self._metrics.drift)
        yield from self._last_minute()
        yield from self._deployment(self._metrics.deployment)
        if self._metrics.energy is not None:
            yield from _energy(self._metrics.energy)
        if self._metrics.server_info is not None:
            yield gauge_family(
                "armature_info",
                "Version, model, device, instruction set, precision and torch version of this server.",
                1,
                asdict(self._metrics.server_info),
            )

    def _state(self, now: EngineSnapshot) -> Iterator[Metric]:
        yield gauge_family(
            "armature_ready",
            "1 while requests are served; 0 while loading and after the signal to stop.",
            self._metrics.is_ready(),
        )
        age = self._metrics.step_age_seconds()
        yield gauge_family(
            "armature_step_age_seconds", "Seconds that the running step has taken so far; 0 if no step is running.", age
        )
        yield gauge_family("armature_requests_running", "Requests being computed.", now.num_running)
        yield gauge_family("armature_requests_waiting", "Requests in the queue.", now.num_waiting)
        yield gauge_family("armature_kv_cache_usage_ratio", "Used KV memory over its capacity.", now.kv_usage_ratio)
        wait = self._metrics.predict_wait()
        if wait is not None:
            yield gauge_family(
                "armature_predicted_wait_seconds",
                "Predicted wait for the first token of a request that arrives now.",
                wait,
            )
        # Names and meanings that inference gateways expect (Gateway API Inference Extension, model server protocol).
        yield gauge_family("vllm:num_requests_running", "Same as armature_requests_running.", now.num_running)
        yield gauge_family("vllm:num_requests_waiting", "Same as armature_requests_waiting.", now.num_waiting)
        yield gauge_family(
            "vllm:kv_cache_usage_perc", "Same as armature_kv_cache_usage_ratio, 0 to 1.", now.kv_usage_ratio
        )
        if now.kv_capacity_tokens:
            labels = {"block_size": str(BLOCK_TOKENS), "num_gpu_blocks": str(now.kv_capacity_tokens // BLOCK_TOKENS)}
            yield gauge_family("vllm:cache_config_info", "Capacity of the KV memory.", 1, labels)

    def _speed(self, drift: SpeedDrift) -> Iterator[Metric]:
        help_text = "Tokens per second if all steps were of one phase, by their number of rows."
        capacity = GaugeMetricFamily("armature_capacity_tokens_per_second", help_text, labels=("phase", "rows"))
        for phase, by_rows in drift.capacity().items():
            for rows, speed in by_rows.items():
                capacity.add_metric((phase, str(rows)), speed)
        roofline = GaugeMetricFamily(
            "armature_roofline_ratio", "Measured speed over this machine's ceiling.", labels=("phase",)
        )
        for phase, ratio in drift.roofline().items():
            roofline.add_metric((phase,), ratio)
        yield from (capacity, roofline)

    def _last_minute(self) -> Iterator[Metric]:
        latencies = GaugeMetricFamily(
            "armature_latency_quantile_seconds", "Latencies of the last 60 seconds.", labels=("metric", "quantile")
        )
        for name, recent in self._metrics.recent.items():
            for quantile, value in zip(QUANTILES, recent.read(QUANTILES) or (), strict=False):
                latencies.add_metric((name, str(quantile)), value)
        throughput = GaugeMetricFamily(
            "armature_throughput_per_second", "Rates over the last 60 seconds, by kind.", labels=("kind",)
        )
        for kind, rate in self._metrics.rates.items():
            throughput.add_metric((kind,), rate.per_second())
        yield from (latencies, throughput)

    def _deployment(self, place: DeploymentInfo) -> Iterator[Metric]:
        if place.threads is not None:
            yield gauge_family("armature_threads", "Number of compute threads.", place.threads)
        if place.cpu_quota_cores is not None:
            yield gauge_family(
                "armature_cpu_quota_cores", "Cores of the control group's CPU quota.", place.cpu_quota_cores
            )
            throttled = throttled_seconds(place.cpu_stat)
            if throttled is not None:
                yield CounterMetricFamily(
                    "process_cgroup_cpu_throttled_seconds_total",
                    "Time for which the control group's CPU quota throttled it.",
                    throttled,
                )
        if place.hourly_price is not None:
            yield from self._cost(place.hourly_price / 3600)

    def _cost(self, dollars_per_second: float) -> Iterator[Metric]:
        spent = dollars_per_second * (self._clock() - self._began)
        yield CounterMetricFamily(
            "armature_cost_dollars_total", "Dollars since the start: hours times the hourly price.", spent
        )
        rates = self._metrics.rates
        tokens = sum(rates[kind].per_second() for kind in ("prompt_tokens", "completion_tokens"))
        vectors = rates["vectors"].per_second()
        if tokens:
            # OpenCost's name and labels: `allocation` is the cost of the machine, idle or not; without `phase`, all
            # tokens count.
            labels = {
                "model_name": self._metrics.server_info.model if self._metrics.server_info else "",
                "cost_basis": "allocation",
            }
            help_text = (
                "Dollars per million tokens, prompt and completion, idle time included, at the last minute's speed."
            )
            yield gauge_family("llm_cost_per_million_tokens", help_text, dollars_per_second / tokens * 1e6, labels)
        if vectors:
            help_text = "Dollars per million texts or rows, idle time included, at the last minute's speed."
            yield gauge_family("armature_cost_per_million_vectors", help_text, dollars_per_second / vectors * 1e6)


def _energy(energy: EnergyAccount) -> Iterator[Metric]:
    """Yield energy metrics once the counter has moved: some virtual machines expose a counter that stays at 0."""
    spent, source = energy.look(), {"source": energy.source}
    if spent.joules <= 0.0:
        return
    total = CounterMetricFamily(
        "armature_energy_joules_total", f"Joules since the start. {_ENERGY_SCOPE}", labels=("source",)
    )
    total.add_metric((energy.source,), spent.joules)
    yield total
    for name, help_text, value in (
        ("power_watts", f"Mean watts over the last 60 seconds. {_ENERGY_SCOPE}", spent.watts),
        ("energy_idle_watts", "Lowest power seen over 10 seconds without a request.", spent.idle_watts),
        ("energy_joules_per_token", _JOULES_PER.format("token, prompt and completion"), spent.per_token),
        ("energy_joules_per_vector", _JOULES_PER.format("text or row"), spent.per_vector),
        ("energy_above_idle_joules_per_token", _JOULES_ABOVE_IDLE_PER.format("token"), spent.above_idle_per_token),
        (
            "energy_above_idle_joules_per_vector",
            _JOULES_ABOVE_IDLE_PER.format("text or row"),
            spent.above_idle_per_vector,
        ),
    ):
        if value is not None:
            yield gauge_family(f"armature_{name}", help_text, value, source)


def throttled_seconds(cpu_stat: Path | None) -> float | None:
    """Return the seconds that the control group was throttled, or None if they cannot be read.

    The file has `throttled_usec` (microseconds) in cgroup v2 and `throttled_time` (nanoseconds) in v1.
    """
    try:
        text = cpu_stat.read_text() if cpu_stat is not None else ""
    except OSError:
        return None
    found = re.search(r"^throttled_(usec|time) (\d+)$", text, re.MULTILINE)
    return int(found[2]) / (1e6 if found[1] == "usec" else 1e9) if found else None


def gauge_family(name: str, help: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:  # noqa: A002
    """Return a gauge family with one sample."""
    family = GaugeMetricFamily(name, help, labels=tuple(labels or ()))
    family.add_metric(tuple((labels or {}).values()), value)
    return family
