"""The instruments: counters, histograms and gauges in a registry of their own, rendered for Prometheus on request.

Filled by listening: the worker thread tells of steps, the service of requests and tokens. A scrape only reads.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.drift import Drift
from app.measured import Snapshot, StepStats
from app.messages import FinishReason, Timings
from app.quantiles import RecentQuantiles, RecentRate

Api = Literal["chat", "completions", "embeddings", "rerank", "classify", "native", "oip"]
Outcome = FinishReason | Literal["refused", "failed"]
Phase = Literal["prefill", "decode", "encode"]
Clock = Callable[[], float]

# Each 1.6 times the last, half a millisecond among them: from what a small encoder's step takes to over ten minutes, since a request may
# take `request_timeout_seconds`.
SECONDS = tuple(float(f"{0.0005 * 1.6**power:.4g}") for power in range(-4, 31))
SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
COUNTS = tuple(float(2**power) for power in range(15))  # 1 to 16,384 tokens or sequences in a step
QUANTILES = (0.5, 0.9, 0.99)
# Paged engines count KV memory in blocks. Ours are tokens; routers that hash a prompt by blocks want a block worth hashing.
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class About:
    """The labels of `armature_info`."""

    version: str
    model: str
    device: str
    isa: str
    precision: str
    torch: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where the process runs and what that costs; what is None is not told. `cpu_stat` is the control group's file of that name."""

    threads: int | None = None
    cpu_quota_cores: float | None = None
    cpu_stat: Path | None = None
    hourly_price: float | None = None


class Metrics:
    """Told what happens, from the event loop but for `on_step`, which is the worker thread's; `render` from any thread.

    `about`, `place` and `drift` are set when they are known; `predict_wait` answers None while the speeds are not measured yet.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # else each series has a second one
        self.about: About | None = None
        self.place = Place()
        self.read_snapshot: Callable[[], Snapshot] = Snapshot
        self.predict_wait: Callable[[], float | None] = lambda: None
        self.drift: Drift | None = None
        self.recent = {name: RecentQuantiles(clock) for name in ("request", "queue", "ttft", "itl")}
        self.rates = {kind: RecentRate(clock) for kind in ("requests", "prompt_tokens", "completion_tokens", "vectors")}
        self._registry = CollectorRegistry(auto_describe=False)
        self._declare()
        ProcessCollector(registry=self._registry)
        self._registry.register(_Gauges(self, clock))

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type; OpenMetrics where the `Accept` header asks for it."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    # ---- from the worker thread ------------------------------------------------------------------------------------

    def on_step(self, stats: StepStats, snapshot: Snapshot) -> None:
        """A step with any prefill in it counts as prefill: that is what its time went to."""
        if self.drift is not None:
            self.drift.observe(stats)
        if stats.drafted_tokens:
            self._speculation.labels("drafted").inc(stats.drafted_tokens)
            self._speculation.labels("accepted").inc(stats.accepted_tokens)
        phase: Phase = "encode" if stats.encode_tokens else "prefill" if stats.prefill_tokens else "decode"
        self._step_seconds.labels(phase).observe(stats.seconds)
        self._model_seconds.labels(phase).inc(stats.model_seconds)
        shares = (
            ("prefill", stats.prefill_tokens, stats.num_prefill_sequences),
            ("decode", stats.decode_tokens, stats.num_decode_sequences),
            ("encode", stats.encode_tokens, stats.num_encode_sequences),
        )
        for name, tokens, sequences in shares:
            if tokens:
                self._batch_tokens.labels(name).observe(tokens)
                self._batch_sequences.labels(name).observe(sequences)

    # ---- from the event loop ---------------------------------------------------------------------------------------

    def refused(self, api: Api) -> None:
        """A request that was refused before it had a place."""
        self._requests.labels(api, "refused").inc()

    def first_token(self, timings: Timings, seconds: float) -> None:
        """A choice's first token, so long after its request arrived."""
        self._queue_seconds.observe(timings.queue_seconds)
        self._ttft_seconds.observe(seconds)
        self.recent["queue"].record(timings.queue_seconds)
        self.recent["ttft"].record(seconds)

    def encoded(self, num_vectors: int, num_tokens: int, timings: Timings) -> None:
        """A request's vectors are there, or its scores, or a program's rows; tokens read count as those of prompts do."""
        self._queue_seconds.observe(timings.queue_seconds)
        self.recent["queue"].record(timings.queue_seconds)
        self.prompt(num_tokens, 0)
        self._vectors.inc(num_vectors)
        self.rates["vectors"].record(num_vectors)

    def waited(self, predicted_seconds: float, seconds: float) -> None:
        """For its first token, or all its vectors, a request waited so long, and this was predicted when it was sent to the engine."""
        self._wait_error.observe(abs(predicted_seconds - seconds) / max(seconds, 1e-9))

    def next_token(self, seconds: float) -> None:
        """A further token of a choice, so long after the one before."""
        self._itl_seconds.observe(seconds)
        self.recent["itl"].record(seconds)

    def last_token(self, seconds_per_token: float) -> None:
        """A choice has ended; the mean of its tokens after the first."""
        self._tpot_seconds.observe(seconds_per_token)

    def prompt(self, num_tokens: int, num_cached: int) -> None:
        """A prompt has been read, so much of it from the cache; it counts as a whole, as it does in a request's usage."""
        self._tokens.labels("prompt").inc(num_tokens)
        self._tokens.labels("cached").inc(num_cached)
        self.rates["prompt_tokens"].record(num_tokens)

    def completion(self, num_tokens: int) -> None:
        self._tokens.labels("completion").inc(num_tokens)
        self.rates["completion_tokens"].record(num_tokens)

    def request_ended(self, api: Api, outcome: Outcome, seconds: float) -> None:
        """Once for each request that had a place."""
        self._requests.labels(api, outcome).inc()
        self._request_seconds.labels(api).observe(seconds)
        self.recent["request"].record(seconds)
        self.rates["requests"].record()

    def _declare(self) -> None:
        self._requests = self._counter("requests", "Requests by how they ended.", "api", "outcome")
        self._tokens = self._counter("tokens", "Tokens; cached ones are prompt tokens too.", "kind")
        for kind in ("prompt", "cached", "completion"):
            self._tokens.labels(kind)
        self._vectors = self._counter("vectors", "Texts, or rows, of which an answer was given: a vector or scores.")
        guesses = "Tokens guessed and computed beside the decodes, and those of them that the model picked too."
        self._speculation = self._counter("speculation_tokens", guesses, "kind")
        for kind in ("drafted", "accepted"):
            self._speculation.labels(kind)
        self._request_seconds = self._histogram("request_seconds", "From a request's arrival to its end.", SECONDS, "api")
        self._queue_seconds = self._histogram("queue_seconds", "From a request's arrival to its first step.", SECONDS)
        self._ttft_seconds = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self._itl_seconds = self._histogram(
            "inter_token_latency_seconds", "Between a choice's tokens; those that one step made count once.", SECONDS
        )
        tpot = "Mean time of a choice's tokens after the first."
        self._tpot_seconds = self._histogram("time_per_output_token_seconds", tpot, SECONDS)
        error = "How far off the predicted wait for the first token was, over the wait."
        self._wait_error = self._histogram("predicted_wait_error_ratio", error, SHARES)
        self._step_seconds = self._histogram("step_seconds", "Time of an engine step.", SECONDS, "phase")
        self._model_seconds = self._counter("model_seconds", "Time of engine steps spent in the model itself.", "phase")
        self._batch_tokens = self._histogram("batch_tokens", "Tokens of a step.", COUNTS, "phase")
        self._batch_sequences = self._histogram("batch_sequences", "Sequences of a step.", COUNTS, "phase")

    def _counter(self, name: str, help: str, *labels: str) -> Counter:  # noqa: A002 (Prometheus' word)
        return Counter(name, help, labels, namespace="armature", registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...], *labels: str) -> Histogram:  # noqa: A002
        return Histogram(name, help, labels, namespace="armature", buckets=buckets, registry=self._registry)


class _Gauges(Collector):
    """What is worked out when somebody looks: from the last snapshot and the rings of the last minute."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._metrics, self._clock, self._began = metrics, clock, clock()

    def collect(self) -> Iterator[Metric]:
        yield from self._state(self._metrics.read_snapshot())
        if self._metrics.drift is not None:
            yield from self._speed(self._metrics.drift)
        yield from self._last_minute()
        yield from self._place(self._metrics.place)
        if self._metrics.about is not None:
            yield _gauge("armature_info", "What serves.", 1, asdict(self._metrics.about))

    def _state(self, now: Snapshot) -> Iterator[Metric]:
        yield _gauge("armature_requests_running", "Requests being computed.", now.num_running)
        yield _gauge("armature_requests_waiting", "Requests in the queue.", now.num_waiting)
        yield _gauge("armature_kv_cache_usage_ratio", "Used KV memory over its capacity.", now.kv_usage_ratio)
        wait = self._metrics.predict_wait()
        if wait is not None:
            yield _gauge("armature_predicted_wait_seconds", "What a request arriving now would wait for its first token.", wait)
        # Names and meanings that inference gateways look for (Gateway API Inference Extension, model server protocol).
        yield _gauge("vllm:num_requests_running", "As armature_requests_running.", now.num_running)
        yield _gauge("vllm:num_requests_waiting", "As armature_requests_waiting.", now.num_waiting)
        yield _gauge("vllm:kv_cache_usage_perc", "As armature_kv_cache_usage_ratio, 0 to 1.", now.kv_usage_ratio)
        if now.kv_capacity_tokens:
            labels = {"block_size": str(BLOCK_TOKENS), "num_gpu_blocks": str(now.kv_capacity_tokens // BLOCK_TOKENS)}
            yield _gauge("vllm:cache_config_info", "Capacity of the KV memory.", 1, labels)

    def _speed(self, drift: Drift) -> Iterator[Metric]:
        told = "Tokens a second that steps of one kind alone would make, by how many rows they have."
        capacity = GaugeMetricFamily("armature_capacity_tokens_per_second", told, labels=("phase", "rows"))
        for phase, by_rows in drift.capacity().items():
            for rows, speed in by_rows.items():
                capacity.add_metric((phase, str(rows)), speed)
        roofline = GaugeMetricFamily("armature_roofline_ratio", "Measured over this machine's ceiling.", labels=("phase",))
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
        throughput = GaugeMetricFamily("armature_throughput_per_second", "Over the last 60 seconds.", labels=("kind",))
        for kind, rate in self._metrics.rates.items():
            throughput.add_metric((kind,), rate.per_second())
        yield from (latencies, throughput)

    def _place(self, place: Place) -> Iterator[Metric]:
        if place.threads is not None:
            yield _gauge("armature_threads", "Threads that compute.", place.threads)
        if place.cpu_quota_cores is not None:
            yield _gauge("armature_cpu_quota_cores", "Cores of the control group's CPU quota.", place.cpu_quota_cores)
            throttled = throttled_seconds(place.cpu_stat)
            if throttled is not None:
                yield CounterMetricFamily(
                    "process_cgroup_cpu_throttled_seconds_total", "Time the control group was kept off the CPU.", throttled
                )
        if place.hourly_price is not None:
            yield from self._cost(place.hourly_price / 3600)

    def _cost(self, dollars_per_second: float) -> Iterator[Metric]:
        spent = dollars_per_second * (self._clock() - self._began)
        yield CounterMetricFamily("armature_cost_dollars_total", "Hours since the start times their price.", spent)
        tokens = sum(self._metrics.rates[kind].per_second() for kind in ("prompt_tokens", "completion_tokens"))
        if tokens:
            model = {"model_name": self._metrics.about.model} if self._metrics.about else {}
            price = dollars_per_second / tokens * 1e6
            yield _gauge(
                "llm_cost_per_million_tokens", "Dollars, prompt and completion alike, at the last minute's speed.", price, model
            )


def throttled_seconds(cpu_stat: Path | None) -> float | None:
    """Microseconds as `throttled_usec` in cgroup v2, nanoseconds as `throttled_time` in v1; None where neither can be read."""
    try:
        text = cpu_stat.read_text() if cpu_stat is not None else ""
    except OSError:
        return None
    found = re.search(r"^throttled_(usec|time) (\d+)$", text, re.MULTILINE)
    return int(found[2]) / (1e6 if found[1] == "usec" else 1e9) if found else None


def _gauge(name: str, help: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:  # noqa: A002
    family = GaugeMetricFamily(name, help, labels=tuple(labels or ()))
    family.add_metric(tuple((labels or {}).values()), value)
    return family
