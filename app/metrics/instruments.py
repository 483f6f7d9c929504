"""Prometheus metrics: counters, histograms and gauges in one registry, rendered on request.

The worker thread reports steps; the service reports requests and tokens. Quantiles of latencies and rates of counts
over the last minute are for gauges that need no query language: one thread records, any thread reads.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, Generic, Literal, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from app.errors import NotReady, Overloaded, RequestError, ServiceStopping
from app.messages import FinishReason, Timings
from app.metrics.steps import EngineSnapshot, Phase, StepLog, StepStats

WINDOW_SECONDS = 60.0
T = TypeVar("T")
# Buckets grow by 4%. A value is reported as the middle of its bucket, an error of at most 1.97% (Masson et al.,
# "DDSketch", VLDB 2019).
GROWTH = 1.04
_LOWEST_SECONDS = 1e-5
_HIGHEST_SECONDS = 1e4
_PER_LOG = 1.0 / math.log(GROWTH)
_NUM_BUCKETS = math.ceil(math.log(_HIGHEST_SECONDS / _LOWEST_SECONDS) * _PER_LOG) + 1
Clock = Callable[[], float]
Exemplar = dict[str, str]  # trace_id and span_id in hexadecimal
Api = Literal[
    "chat", "completions", "responses", "messages", "ollama", "llama_cpp",
    "embeddings", "rerank", "classify", "tasks", "native", "oip",
]  # fmt: skip
# Why a request was not admitted: it can never be served, the queue is full, or the server does not serve at present.
Refusal = Literal["invalid", "overloaded", "unavailable"]
Outcome = FinishReason | Refusal | Literal["failed"]
# Choices end with calls of tools; their request has stopped.
OUTCOMES: tuple[Outcome, ...] = (
    *(reason for reason in get_args(FinishReason) if reason != "tool_calls"),
    *get_args(Refusal),
    "failed",
)
SUCCESSES: tuple[Outcome, ...] = ("stop", "length")
QUANTILES = (0.5, 0.9, 0.95, 0.99)
# Each bound is 1.6 times the last, and one is half a millisecond. They reach from a small encoder's step to over ten
# minutes, since a request may take `request_timeout_seconds`.
SECONDS_BUCKETS = tuple(float(f"{0.0005 * 1.6**power:.4g}") for power in range(-4, 31))
RATIO_BUCKETS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
COUNT_BUCKETS = tuple(float(2**power) for power in range(15))  # 1 to 16,384 tokens or sequences in a step
LENGTH_BUCKETS = tuple(float(2**power) for power in range(21))  # 1 to 1,048,576 tokens of a request
_PREFIX = "armature_"
Labels = dict[str, str]


class TimeSlices(Generic[T]):
    """A ring of time slices, of which the newest is being written. `empty` creates the content of a new slice."""

    def __init__(self, num_slices: int, empty: Callable[[], T], clock: Callable[[], float]) -> None:
        self._seconds = WINDOW_SECONDS / num_slices
        self._empty = empty
        self._clock = clock
        self._slices: list[tuple[int, T]] = [(-num_slices, empty()) for _ in range(num_slices)]

    def now(self) -> T:
        number = int(self._clock() / self._seconds)
        place = number % len(self._slices)
        if self._slices[place][0] != number:
            self._slices[place] = (number, self._empty())
        return self._slices[place][1]

    def recent(self) -> list[T]:
        """Return the contents of the window's slices, in no particular order."""
        oldest = int(self._clock() / self._seconds) - len(self._slices) + 1
        return [content for number, content in list(self._slices) if number >= oldest]

    def covered_seconds(self) -> float:
        """Return the seconds that `recent` covers now; the current slice is not complete yet."""
        return WINDOW_SECONDS - self._seconds + self._clock() % self._seconds


class RecentQuantiles:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._slices = TimeSlices(12, lambda: [0] * _NUM_BUCKETS, clock)

    def record(self, seconds: float, count: int = 1) -> None:
        """Add a latency that was seen `count` times; it is clipped to 10 microseconds to 10,000 seconds."""
        clipped = min(max(seconds, _LOWEST_SECONDS), _HIGHEST_SECONDS)
        self.add(math.ceil(math.log(clipped / _LOWEST_SECONDS) * _PER_LOG), count)

    def add(self, bucket: int, count: int) -> None:
        self._slices.now()[bucket] += count

    def read(self, quantiles: Sequence[float]) -> list[float] | None:
        """Return for each rising share the smallest value that it does not exceed; None without values."""
        counts = [sum(column) for column in zip(*self._slices.recent(), strict=True)]
        total = sum(counts)
        if not total:
            return None
        values: list[float] = []
        seen, bucket = 0, -1
        for quantile in quantiles:
            rank = max(math.ceil(quantile * total), 1)
            while seen < rank:
                bucket += 1
                seen += counts[bucket]
            values.append(_middle(bucket))
        return values


def _middle(bucket: int) -> float:
    """Return the value with the same relative error to both ends of the bucket."""
    return _LOWEST_SECONDS * GROWTH**bucket * 2 / (1 + GROWTH) if bucket else _LOWEST_SECONDS


class RecentRate:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._slices = TimeSlices(60, lambda: [0], clock)
        self._clock = clock
        self._began = clock()

    def record(self, amount: int = 1) -> None:
        self._slices.now()[0] += amount

    def per_second(self) -> float:
        age = max(self._clock() - self._began, 1.0)
        return sum(content[0] for content in self._slices.recent()) / min(age, self._slices.covered_seconds())


def refusal_of(error: RequestError) -> Refusal:
    if isinstance(error, Overloaded):
        return "overloaded"
    return "unavailable" if isinstance(error, NotReady | ServiceStopping) else "invalid"


@dataclass(slots=True)
class DurationTotal:
    """Number and total seconds of something, and when the last one ended in Unix seconds; 0 if there was none."""

    count: int = 0
    seconds: float = 0.0
    ended_at: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds
        self.ended_at = time.time()


class _Histogram(Histogram):
    """prometheus_client's histogram, which finds a value's bucket at once; a value may be observed many times."""

    def observe(self, amount: float, exemplar: Exemplar | None = None) -> None:
        if exemplar:
            super().observe(amount, exemplar)
        else:
            self.observe_many(amount, 1)

    def observe_many(self, amount: float, count: int) -> None:
        """Observe the same value `count` times, without an exemplar."""
        self._sum.inc(amount * count)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(count)


class Metrics:
    """All metrics of one process, in one registry.

    The counters and histograms of requests and steps are declared here; other objects declare theirs with `counter`,
    `histogram` and `gauges`; `instruments` has the first two by name. Methods run on the event loop, except `on_step`,
    which runs on the worker thread. An exemplar has the ids of the span of a sampled request. `succeeded`, `failed` and
    `queued` are totals of requests since the start, and `num_steps` and `busy_seconds` of steps.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # omit the `_created` series
        self.clock = clock
        self.busy_seconds = 0.0
        self.num_tokens = self.num_vectors = self.num_steps = 0
        self.succeeded, self.failed, self.queued = DurationTotal(), DurationTotal(), DurationTotal()
        self.step_log = StepLog()
        self.recent = {name: RecentQuantiles(clock) for name in ("request", "queue", "ttft", "itl")}
        self.rates = {kind: RecentRate(clock) for kind in ("requests", "prompt_tokens", "completion_tokens", "vectors")}
        self._registry = CollectorRegistry(auto_describe=False)
        self.instruments: dict[str, Any] = {}
        self._gauges: list[_ComputedGauges] = []
        self._declare()
        ProcessCollector(registry=self._registry)
        self.gauges(self._last_minute)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the exposition and its content type; OpenMetrics if the `Accept` header requests it."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterable[Metric]:
        return self._registry.collect()

    # ---- declaring metrics -----------------------------------------------------------------------------------------

    def counter(self, name: str, help: str, *labels: str) -> Counter:  # noqa: A002 (name used by prometheus_client)
        """Declare a counter; its name gets the prefix `armature_` and the suffix `_total`."""
        made: Counter | None = self.instruments.get(name)
        if made is None:
            made = self.instruments[name] = Counter(name, help, labels, namespace="armature", registry=self._registry)
        return made

    def histogram(self, name: str, help: str, buckets: tuple[float, ...], *labels: str) -> _Histogram:  # noqa: A002
        """Declare a histogram; its name gets the prefix `armature_`."""
        made: _Histogram | None = self.instruments.get(name)
        if made is None:
            made = _Histogram(name, help, labels, namespace="armature", buckets=buckets, registry=self._registry)
            self.instruments[name] = made
        return made

    def gauges(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Add gauges that `collect` computes at each scrape; it leaves out unknown values."""
        self._gauges.append(_ComputedGauges(collect))
        self._registry.register(self._gauges[-1])

    def forget_gauges(self) -> None:
        """Remove the gauges that other objects added: those objects end, and new ones will count on with the rest."""
        for gauges in self._gauges[1:]:
            self._registry.unregister(gauges)
        del self._gauges[1:]

    def samples(self, name: str) -> list[Sample]:
        return [sample for family in self.instruments[name].collect() for sample in family.samples]

    # ---- from the worker thread ------------------------------------------------------------------------------------

    def on_step(self, stats: StepStats, snapshot: EngineSnapshot) -> None:
        """Record a step: one to two microseconds per number, since it runs between two steps."""
        if stats.draft_tokens:
            self._speculation.labels("drafted").inc(stats.draft_tokens)
            self._speculation.labels("accepted").inc(stats.accepted_tokens)
        step_seconds, model_seconds = self._of_step(stats.phase)
        step_seconds.observe(stats.seconds)
        self.busy_seconds += stats.seconds
        self.num_steps += 1
        model_seconds.inc(stats.model_seconds)
        shares: tuple[tuple[Phase, int, int], ...] = (
            ("prefill", stats.prefill_tokens, stats.num_prefill_sequences),
            ("decode", stats.decode_tokens, stats.num_decode_sequences),
            ("encode", stats.encode_tokens, stats.num_encode_sequences),
        )
        for name, tokens, sequences in shares:
            if tokens:
                batch_tokens, batch_sequences = self._of_share(name)
                batch_tokens.observe(tokens)
                batch_sequences.observe(sequences)

    # ---- from the event loop ---------------------------------------------------------------------------------------

    def refused(self, api: Api, reason: Refusal) -> None:
        self._of_request(api, reason).inc()

    def responded(self, method: str, route: str, status: int, code: str) -> None:
        """Count a response; see `armature_http_requests_total` in docs/contract.md.

        `route` has the names of parameters, never what clients send. `status` is 499 if the client left before the
        response began. `code` is that of the error that was sent, also within a stream; empty if there was none.
        """
        self._of_response(method, route, str(status), code).inc()

    def fields_ignored(self, api: Api, number: int) -> None:
        self._ignored_fields.labels(api).inc(number)

    def first_token(self, timings: Timings, seconds: float, exemplar: Exemplar | None = None) -> None:
        self._queue_seconds.observe(timings.queue_seconds, exemplar)
        self.queued.add(timings.queue_seconds)
        self._prefill_seconds.observe(timings.prefill_seconds, exemplar)
        self._ttft_seconds.observe(seconds, exemplar)
        self.recent["queue"].record(timings.queue_seconds)
        self.recent["ttft"].record(seconds)

    def vectors_returned(
        self, num_vectors: int, num_tokens: int, timings: Timings, exemplar: Exemplar | None = None
    ) -> None:
        """Record a request's vectors, scores or program rows; its input tokens count as prompt tokens."""
        self._queue_seconds.observe(timings.queue_seconds, exemplar)
        self.queued.add(timings.queue_seconds)
        self.recent["queue"].record(timings.queue_seconds)
        self.prompt_tokens(num_tokens, 0)
        self._vectors.inc(num_vectors)
        self.num_vectors += num_vectors
        self.rates["vectors"].record(num_vectors)

    def picture_read(self, is_known: bool, seconds: float) -> None:
        """Record a picture of a prompt, on the thread that reads them. `is_known`: its vectors were kept."""
        self._pictures.labels("cached" if is_known else "encoded").inc()
        if not is_known:
            self._picture_seconds.observe(seconds)

    def speech_recognized(self, audio_seconds: float, seconds: float) -> None:
        """Record a sound of so many seconds, whose request took `seconds`."""
        self._audio_seconds.inc(audio_seconds)
        self._real_time_factor.observe(seconds / max(audio_seconds, 1e-3))

    def wait_measured(self, predicted_seconds: float, seconds: float) -> None:
        """Record the error of a wait for the first token, or for all vectors, predicted when the request was sent."""
        self._wait_error.observe(abs(predicted_seconds - seconds) / max(seconds, 1e-9))

    def next_token(self, seconds: float, exemplar: Exemplar | None = None) -> None:
        self._itl_seconds.observe(seconds, exemplar)
        self.recent["itl"].record(seconds)

    def next_tokens(self, num_tokens: int, gaps: Mapping[float, int]) -> None:
        """Record further tokens of several choices: `gaps` maps seconds since the previous one to a number of choices."""
        self.completion_tokens(num_tokens)
        counts = self.recent["itl"]
        for seconds, count in gaps.items():
            if seconds:
                self._itl_seconds.observe_many(seconds, count)
                counts.record(seconds, count)

    def last_token(self, seconds: float, num_tokens: int, exemplar: Exemplar | None = None) -> None:
        """Record the end of a choice with further tokens: `num_tokens` after the first, in `seconds` together."""
        self._decode_seconds.observe(seconds, exemplar)
        self._tpot_seconds.observe(seconds / num_tokens, exemplar)

    def prompt_tokens(self, num_tokens: int, num_cached: int) -> None:
        """Count the tokens of a prompt, cached ones included, as a request's usage does."""
        self._of_token("prompt").inc(num_tokens)
        self._of_token("cached").inc(num_cached)
        self.rates["prompt_tokens"].record(num_tokens)
        self.num_tokens += num_tokens

    def completion_tokens(self, num_tokens: int) -> None:
        self._of_token("completion").inc(num_tokens)
        self.rates["completion_tokens"].record(num_tokens)
        self.num_tokens += num_tokens

    def request_lengths(self, num_prompt_tokens: int, num_completion_tokens: int) -> None:
        """Record the tokens of an admitted request, over all its choices or texts; those that it does not have are 0."""
        if num_prompt_tokens:
            self._prompt_lengths.observe(num_prompt_tokens)
        if num_completion_tokens:
            self._completion_lengths.observe(num_completion_tokens)

    def request_ended(self, api: Api, outcome: Outcome, seconds: float, exemplar: Exemplar | None = None) -> None:
        """Count a request and its seconds; once for each admitted request."""
        self._of_request(api, outcome).inc()
        self._of_api(api).observe(seconds, exemplar)
        (self.succeeded if outcome in SUCCESSES else self.failed).add(seconds)
        self.recent["request"].record(seconds)
        self.rates["requests"].record()

    def _declare(self) -> None:
        self._requests = self.counter("requests", "Requests by API and outcome.", "api", "outcome")
        # Create all series now: Prometheus sees no increase for a series that first appears with a value of 1.
        for api, outcome in product(get_args(Api), OUTCOMES):
            self._requests.labels(api, outcome)
        self._ignored_fields = self.counter(
            "ignored_fields", "Fields of requests that have no effect here and were ignored.", "api"
        )
        for api in get_args(Api):
            self._ignored_fields.labels(api)
        self._http_requests = self.counter(
            "http_requests", "HTTP requests by their route, status and error code.", "method", "route", "status", "code"
        )
        self._tokens = self.counter(
            "tokens", "Tokens by kind; cached tokens are also counted as prompt tokens.", "kind"
        )
        for kind in ("prompt", "cached", "completion"):
            self._tokens.labels(kind)
        self._vectors = self.counter("vectors", "Texts or rows for which a vector or scores were returned.")
        self._pictures = self.counter(
            "pictures", "Pictures in prompts: encoded, or cached from an earlier one.", "kind"
        )
        for kind in ("encoded", "cached"):
            self._pictures.labels(kind)
        picture_help = "Time in which a picture was decoded and its vectors were made."
        self._picture_seconds = self.histogram("picture_seconds", picture_help, SECONDS_BUCKETS)
        self._audio_seconds = self.counter("audio_seconds", "Seconds of sounds whose speech was recognized.")
        self._real_time_factor = self.histogram(
            "audio_real_time_factor", "Time of a request over the duration of its sound.", RATIO_BUCKETS
        )
        draft_help = "Draft tokens computed (drafted), and those that equal the model's sampled tokens (accepted)."
        self._speculation = self.counter("speculation_tokens", draft_help, "kind")
        for kind in ("drafted", "accepted"):
            self._speculation.labels(kind)
        self._request_seconds = self.histogram(
            "request_seconds", "Time from a request's arrival to its end.", SECONDS_BUCKETS, "api"
        )
        self._queue_seconds = self.histogram(
            "queue_seconds", "Time from a request's arrival to its first step.", SECONDS_BUCKETS
        )
        prefill_help = "Time from a choice's first step to its first token."
        self._prefill_seconds = self.histogram("prefill_seconds", prefill_help, SECONDS_BUCKETS)
        decode_help = "Time from a choice's first token to its last, if there is more than one."
        self._decode_seconds = self.histogram("decode_seconds", decode_help, SECONDS_BUCKETS)
        self._ttft_seconds = self.histogram(
            "time_to_first_token_seconds", "Time from a request's arrival to its first token.", SECONDS_BUCKETS
        )
        self._itl_seconds = self.histogram(
            "inter_token_latency_seconds",
            "Time between a choice's tokens; the tokens of one step count once.",
            SECONDS_BUCKETS,
        )
        tpot_help = "Mean time per token of a choice, after the first."
        self._tpot_seconds = self.histogram("time_per_output_token_seconds", tpot_help, SECONDS_BUCKETS)
        prompt_help = "Tokens of a request's prompt, or of all its texts; cached ones included."
        self._prompt_lengths = self.histogram("request_prompt_tokens", prompt_help, LENGTH_BUCKETS)
        completion_help = "Tokens that a request generated, over all its choices."
        self._completion_lengths = self.histogram("request_completion_tokens", completion_help, LENGTH_BUCKETS)
        error_help = "Absolute error of the predicted wait for the first token, over the wait."
        self._wait_error = self.histogram("predicted_wait_error_ratio", error_help, RATIO_BUCKETS)
        self._step_seconds = self.histogram("step_seconds", "Time of an engine step.", SECONDS_BUCKETS, "phase")
        self._model_seconds = self.counter(
            "model_seconds", "Time of engine steps spent in the model's forward pass.", "phase"
        )
        self._batch_tokens = self.histogram("batch_tokens", "Tokens in a step.", COUNT_BUCKETS, "phase")
        self._batch_sequences = self.histogram("batch_sequences", "Sequences in a step.", COUNT_BUCKETS, "phase")
        # Cached on first use: a label that is never used has no series.
        self._of_step = cache(lambda phase: (self._step_seconds.labels(phase), self._model_seconds.labels(phase)))
        self._of_request = cache(self._requests.labels)
        self._of_response = cache(self._http_requests.labels)
        self._of_token = cache(self._tokens.labels)
        self._of_api = cache(self._request_seconds.labels)
        self._of_share = cache(lambda phase: (self._batch_tokens.labels(phase), self._batch_sequences.labels(phase)))

    def _last_minute(self) -> Iterator[Metric]:
        latencies = GaugeMetricFamily(
            "armature_latency_quantile_seconds", "Latencies of the last 60 seconds.", labels=("metric", "quantile")
        )
        for name, recent in self.recent.items():
            for quantile, value in zip(QUANTILES, recent.read(QUANTILES) or (), strict=False):
                latencies.add_metric((name, str(quantile)), value)
        throughput = GaugeMetricFamily(
            "armature_throughput_per_second", "Rates over the last 60 seconds, by kind.", labels=("kind",)
        )
        for kind, rate in self.rates.items():
            throughput.add_metric((kind,), rate.per_second())
        yield from (latencies, throughput)


class _ComputedGauges(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


@dataclass(frozen=True, slots=True)
class MetricSamples:
    """Samples by metric name, without the buckets of histograms."""

    by_name: dict[str, list[tuple[Labels, float]]]

    def value(self, name: str, **labels: str) -> float | None:
        """Return the sum of the series with these labels, None without one. Our prefix may be left out of the name."""
        series = self.by_name.get(f"{_PREFIX}{name}") or self.by_name.get(name, [])
        found = [value for has, value in series if labels.items() <= has.items() and not math.isnan(value)]
        return sum(found) if found else None


def parse_samples(text: str) -> MetricSamples:
    found: dict[str, list[tuple[Labels, float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return MetricSamples(found)
