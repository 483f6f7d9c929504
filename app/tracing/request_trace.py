"""Whether requests are traced, and what the spans of a sampled one say; OpenTelemetry is only imported to trace.

Names are OpenTelemetry's semantic conventions for generative AI, and vLLM's `gen_ai.latency.*`. Prompts, completions,
stop strings and headers are never among them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol
from urllib.parse import urlsplit

from app.errors import SettingsInvalid
from app.messages import SamplingParams
from app.metrics.instruments import Api, Exemplar
from app.settings import Settings

Value = str | bool | int | float
# Attribute of each sampling parameter, and the value that says nothing: it is left out.
_SAMPLING: tuple[tuple[str, str, Value | None], ...] = (
    ("max_tokens", "gen_ai.request.max_tokens", None),
    ("temperature", "gen_ai.request.temperature", None),
    ("top_p", "gen_ai.request.top_p", None),
    ("top_k", "gen_ai.request.top_k", 0),
    ("presence_penalty", "gen_ai.request.presence_penalty", 0.0),
    ("frequency_penalty", "gen_ai.request.frequency_penalty", 0.0),
    ("seed", "gen_ai.request.seed", None),
    ("n", "gen_ai.request.choice.count", 1),
)
log = logging.getLogger(__name__)
SPANS_PATH = "/v1/traces"  # where OTLP over HTTP takes spans
EXPORTER = "opentelemetry.exporter.otlp.proto.http"
INSTALL = "pip install 'armature-serve[otel]'"


@dataclass(slots=True)
class RequestTrace:
    """What is known of a sampled HTTP request, which may be several requests of the service.

    `exemplar` has the ids of its span. `error` is the code of what failed first. Times are of `time.monotonic`: of
    several parts, the queue ends with the first that leaves it, and the other phases with the last.
    """

    exemplar: Exemplar
    api: Api | None = None
    attributes: dict[str, Value] = field(default_factory=dict)
    finish_reasons: list[str] = field(default_factory=list)
    arrived_at: float | None = None
    phase_ends: dict[str, float] = field(default_factory=dict)
    first_token_seconds: float | None = None
    error: str | None = None

    def note_model(self, name: str) -> None:
        self.attributes["gen_ai.request.model"] = self.attributes["gen_ai.response.model"] = name

    def note_sampling(self, params: SamplingParams) -> None:
        for name, attribute, silent in _SAMPLING:
            value = getattr(params, name)
            if value is not None and value != silent:
                self.attributes[attribute] = value

    def add_tokens(self, prompt: int, cached: int, completion: int) -> None:
        for name, number in (
            ("gen_ai.usage.input_tokens", prompt),
            ("gen_ai.usage.cache_read.input_tokens", cached),
            ("gen_ai.usage.output_tokens", completion),
        ):
            self.attributes[name] = int(self.attributes.get(name, 0)) + number

    def add_times(
        self, arrived_at: float, phase_ends: Mapping[str, float], first_token_seconds: float | None = None
    ) -> None:
        """Add the times of one part; `first_token_seconds` count from its arrival, and the longest counts."""
        self.arrived_at = arrived_at if self.arrived_at is None else min(self.arrived_at, arrived_at)
        for name, end in phase_ends.items():
            latest = min if name == "queue" else max
            self.phase_ends[name] = latest(self.phase_ends.get(name, end), end)
        if first_token_seconds is not None:
            self.first_token_seconds = max(self.first_token_seconds or 0.0, first_token_seconds)


class RequestSpan(Protocol):
    """The server span of one request. `traceresponse` is the value of that header."""

    traceresponse: str

    @property
    def trace(self) -> RequestTrace | None:
        """What the span will say; None if the request is not sampled."""

    def end(self, request_id: str, status: int, error: str | None, is_stream: bool) -> None:
        """End the span. `error` is the code of the error that the client got, if it got one."""


class Tracer(Protocol):
    """Where the spans of requests are made and sent."""

    def begin(self, scope: Mapping[str, Any], route: str, operation: str) -> RequestSpan:
        """Begin the span of a request; `route` is its path's template, `operation` empty if the body decides."""

    def close(self, seconds: float) -> None:
        """Send what is left, in at most so many seconds."""


def start_tracer(settings: Settings, environ: Mapping[str, str]) -> Tracer | None:
    """Return the tracer, or None if requests are not traced. OpenTelemetry's SDK is imported only if they are.

    A variable alone never prevents a start. Raises `SettingsInvalid` if the setting is given, and the extra `otel` is
    not installed.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    endpoint = with_path(settings.otlp_traces_endpoint) or _endpoint_of(environ)
    if not endpoint:
        return None
    if not _is_installed():
        missing = "needs the extra otel, which is not installed"
        if settings.otlp_traces_endpoint:
            raise SettingsInvalid(f"otlp_traces_endpoint {missing}: {INSTALL}.")
        log.warning("no traces: OTEL_EXPORTER_OTLP_ENDPOINT %s: %s", missing, INSTALL)
        return None
    from app.tracing.spans import OtlpTracer

    return OtlpTracer(endpoint, settings.trace_sample_ratio)


def with_path(url: str) -> str:
    """Return the URL of a collector with the path that takes spans, if it has none."""
    return url.rstrip("/") + SPANS_PATH if url and urlsplit(url).path in ("", "/") else url


def _endpoint_of(environ: Mapping[str, str]) -> str:
    endpoint = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    if not endpoint and (base := environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")):
        endpoint = base.rstrip("/") + SPANS_PATH
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() or "otlp"
    if not endpoint or exporter == "none":
        return ""
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((environ[name] for name in names if environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf" or exporter != "otlp":
        asked = f"protocol {protocol}" if exporter == "otlp" else f"exporter {exporter}"
        log.warning("no traces: the %s is not offered; set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf", asked)
        return ""
    return endpoint


def _is_installed() -> bool:
    try:
        return find_spec(EXPORTER) is not None and find_spec("opentelemetry.sdk.trace") is not None
    except ModuleNotFoundError:
        return False
