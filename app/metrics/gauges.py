"""Gauges that are computed at each scrape: the engine's state and speed, and the process with its cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from app.metrics.instruments import Metrics
from app.metrics.steps import EngineSnapshot, SpeedState, StateUsage


@dataclass(frozen=True, slots=True)
class ServerInfo:
    version: str
    model: str
    device: str
    isa: str
    precision: str
    torch: str


@dataclass(frozen=True, slots=True)
class DeploymentInfo:
    """The labels, the resources and the hourly price in dollars of the process, as far as they are known.

    `cpu_stat` is the control group's file of that name.
    """

    server: ServerInfo | None = None
    threads: int | None = None
    cpu_quota_cores: float | None = None
    cpu_stat: Path | None = None
    hourly_price: float | None = None


class DeploymentGauges:
    """Gauges of the process: its labels, resources, and cost since this object was made."""

    def __init__(self, metrics: Metrics, read: Callable[[], DeploymentInfo]) -> None:
        self._metrics, self._read, self._began = metrics, read, metrics.clock()
        metrics.gauges(self._collect)

    def _collect(self) -> Iterator[Metric]:
        now = self._read()
        yield from self._resources(now)
        if now.hourly_price is not None:
            yield from self._cost(now, now.hourly_price / 3600)
        if now.server is not None:
            yield gauge_family(
                "armature_info",
                "Version, model, device, instruction set, precision and torch version of this server.",
                1,
                asdict(now.server),
            )

    def _resources(self, place: DeploymentInfo) -> Iterator[Metric]:
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

    def _cost(self, place: DeploymentInfo, dollars_per_second: float) -> Iterator[Metric]:
        spent = dollars_per_second * (self._metrics.clock() - self._began)
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
                "model_name": place.server.model if place.server else "",
                "cost_basis": "allocation",
            }
            help_text = (
                "Dollars per million tokens, prompt and completion, idle time included, at the last minute's speed."
            )
            yield gauge_family("llm_cost_per_million_tokens", help_text, dollars_per_second / tokens * 1e6, labels)
        if vectors:
            help_text = "Dollars per million texts or rows, idle time included, at the last minute's speed."
            yield gauge_family("armature_cost_per_million_vectors", help_text, dollars_per_second / vectors * 1e6)


def engine_gauges(
    now: EngineSnapshot, ready: bool, predicted_wait_seconds: float | None, num_reading: int = 0
) -> Iterator[Metric]:
    """Yield the gauges of the engine's state. A wait of None is unknown; `num_reading` requests are tokenized."""
    num_waiting = now.num_waiting + num_reading
    yield gauge_family(
        "armature_ready",
        "1 while requests are served; 0 while loading and after the signal to stop.",
        ready,
    )
    yield gauge_family("armature_requests_running", "Requests being computed.", now.num_running)
    yield gauge_family("armature_requests_waiting", "Requests being tokenized or in the queue.", num_waiting)
    yield gauge_family("armature_kv_cache_usage_ratio", "Used KV memory over its capacity.", now.kv_usage_ratio)
    if now.states is not None:
        yield from _state_gauges(now.states)
    if predicted_wait_seconds is not None:
        yield gauge_family(
            "armature_predicted_wait_seconds",
            "Predicted wait for the first token of a request that arrives now.",
            predicted_wait_seconds,
        )


def gauges_of_engines(engines: Sequence[tuple[bool, EngineSnapshot]]) -> Iterator[Metric]:
    """Yield the gauges of each of several engines of a model: whether it serves, and its state."""
    rows: Sequence[tuple[str, str, Sequence[float]]] = (
        ("ready", "1 while this one of several engines serves, else 0.", [ready for ready, _ in engines]),
        ("requests_running", "Requests that each engine computes.", [one.num_running for _, one in engines]),
        ("requests_waiting", "Requests that wait in each engine.", [one.num_waiting for _, one in engines]),
        ("kv_cache_usage_ratio", "Each engine's used KV memory.", [one.kv_usage_ratio for _, one in engines]),
    )
    for name, help_text, values in rows:
        family = GaugeMetricFamily(f"armature_engine_{name}", help_text, labels=("engine",))
        for number, value in enumerate(values):
            family.add_metric((str(number),), value)
        yield family


def _state_gauges(states: StateUsage) -> Iterator[Metric]:
    help_text = "Bytes of recurrent states: of sequences, of finished ones and of checkpoints."
    yield gauge_family("armature_recurrent_state_bytes", help_text, states.bytes)
    help_text = "Prefixes that went on from a state that was kept."
    yield CounterMetricFamily("armature_recurrent_state_hits_total", help_text, states.hits)
    help_text = "Tokens of known prefixes that were computed again, as no state after them was kept."
    name = "armature_recurrent_state_recomputed_tokens_total"
    yield CounterMetricFamily(name, help_text, states.recomputed_tokens)


def speed_gauges(speed: SpeedState) -> Iterator[Metric]:
    help_text = "Tokens per second if all steps were of one phase, by their number of rows."
    capacity = GaugeMetricFamily("armature_capacity_tokens_per_second", help_text, labels=("phase", "rows"))
    for phase, by_rows in speed.capacity().items():
        for rows, rate in by_rows.items():
            capacity.add_metric((phase, str(rows)), rate)
    roofline = GaugeMetricFamily(
        "armature_roofline_ratio", "Measured speed over this machine's ceiling.", labels=("phase",)
    )
    for phase, ratio in speed.roofline().items():
        roofline.add_metric((phase,), ratio)
    yield from (capacity, roofline)
    if speed.spread is not None:
        yield gauge_family(
            "armature_calibration_spread_ratio",
            "Relative spread of the samples of one step when the machine was measured.",
            speed.spread,
        )
    yield gauge_family(
        "armature_speed_estimated",
        "1 while capacity and predicted wait are estimated, since the machine was not measured or too noisy; else 0.",
        speed.is_estimated,
    )


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
    family = GaugeMetricFamily(name, help, labels=tuple(labels or ()))
    family.add_metric(tuple((labels or {}).values()), value)
    return family
