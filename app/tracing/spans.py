"""Spans of requests by OpenTelemetry's SDK: one server span a request, with its phases as children.

The SDK samples, reads the standard variables `OTEL_*`, and sends spans in batches from a thread of its own. While no
collector answers, spans are dropped, which is logged once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace import Tracer as SpanFactory
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from app.tracing.request_trace import RequestTrace
from app.version import VERSION

log = logging.getLogger(__name__)

PROVIDER = "armature"  # gen_ai.provider.name
MAX_PATH_CHARACTERS = 256
MAX_REASON_CHARACTERS = 300
# Statuses below 500 with which a span has failed too: the client left (nginx's number), or the server had no capacity.
FAILED_STATUSES = (499, 429)
# What a request does whose route does not say it, by the API that its body chose.
_OPERATIONS: Mapping[str, str] = {
    "chat": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
    "rerank": "rerank",
    "classify": "classify",
}
_PROPAGATOR = TraceContextTextMapPropagator()


class OtlpTracer:
    """Tracer that sends spans to a collector by OTLP over HTTP.

    `endpoint` is the URL that takes spans, with its path. `sample_ratio` is the share of sampled requests if their
    client has not decided; None: as the variables `OTEL_TRACES_SAMPLER*` say, by default all.
    """

    def __init__(self, endpoint: str, sample_ratio: float | None = None) -> None:
        self._exporter = _ReportingExporter(endpoint)
        sampler = None if sample_ratio is None else ParentBased(TraceIdRatioBased(sample_ratio))
        # Nothing is left to the interpreter's exit, which would wait for a collector that does not answer.
        self._provider = TracerProvider(sampler, _resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("armature", VERSION)

    def begin(self, scope: Mapping[str, Any], route: str, operation: str) -> OtlpSpan:
        return OtlpSpan(self._tracer, scope, route, operation)

    def close(self, seconds: float) -> None:
        """Send what is left, in at most so many seconds; nothing if the collector did not answer the last time."""
        if self._exporter.is_failing:
            self._exporter.shutdown()
        closing = threading.Thread(target=self._provider.shutdown, name="armature-traces", daemon=True)
        closing.start()
        closing.join(seconds)
        if closing.is_alive():
            log.warning("the spans of the last requests were not sent within %g s", seconds)


class OtlpSpan:
    def __init__(self, tracer: SpanFactory, scope: Mapping[str, Any], route: str, operation: str) -> None:
        self._tracer, self._scope, self._route, self._operation = tracer, scope, route, operation
        self._began, self._began_ns = time.monotonic(), time.time_ns()
        context = _remote_context(scope["headers"])
        self._span = tracer.start_span(self._name(""), context, SpanKind.SERVER, start_time=self._began_ns)
        ids = self._span.get_span_context()
        trace_id, span_id = f"{ids.trace_id:032x}", f"{ids.span_id:016x}"
        self.traceresponse = f"00-{trace_id}-{span_id}-{ids.trace_flags:02x}"
        self._trace = RequestTrace({"trace_id": trace_id, "span_id": span_id}) if self._span.is_recording() else None

    @property
    def trace(self) -> RequestTrace | None:
        return self._trace

    def end(self, request_id: str, status: int, error: str | None, is_stream: bool) -> None:
        trace, span = self._trace, self._span
        if trace is None:
            return
        seconds = time.monotonic() - self._began
        error = trace.error or error or (str(status) if status >= 400 else None)
        self._operation = self._operation or _OPERATIONS.get(trace.api or "oip", "")
        span.update_name(self._name(str(trace.attributes.get("gen_ai.request.model", ""))))
        span.set_attributes({**self._http_attributes(status), **_model_attributes(trace, seconds, is_stream)})
        span.set_attribute("gen_ai.request.id", request_id)
        if self._operation:
            span.set_attribute("gen_ai.operation.name", self._operation)
        if error is not None:
            span.set_attribute("error.type", error)
            # Other statuses below 500 are mistakes of the client, which by convention leave the status unset.
            if status >= 500 or status < 400 or status in FAILED_STATUSES:
                span.set_status(Status(StatusCode.ERROR, error))
        self._add_phases(trace)
        span.end(self._began_ns + round(1e9 * seconds))

    def _name(self, model: str) -> str:
        """Return `chat MODEL`, as the conventions for generative AI want, or the method and the route."""
        if not self._operation:
            return f"{self._scope['method']} {self._route}"
        return f"{self._operation} {model}" if model else self._operation

    def _http_attributes(self, status: int) -> dict[str, str | int]:
        scope = self._scope
        attributes: dict[str, str | int] = {
            "http.request.method": scope["method"],
            "http.route": self._route,
            "http.response.status_code": status,
            "url.path": scope["path"][:MAX_PATH_CHARACTERS],
            "url.scheme": scope.get("scheme", "http"),
            "network.protocol.version": scope["http_version"],
        }
        address, port = scope.get("server") or ("", None)
        if port is not None:
            attributes |= {"server.address": address, "server.port": port}
        return attributes

    def _add_phases(self, trace: RequestTrace) -> None:
        if trace.arrived_at is None:
            return
        inside, begin = set_span_in_context(self._span), trace.arrived_at
        for name, end in trace.phase_ends.items():
            phase = self._tracer.start_span(name, inside, start_time=self._to_unix_ns(begin))
            phase.end(self._to_unix_ns(max(begin, end)))
            begin = max(begin, end)

    def _to_unix_ns(self, at: float) -> int:
        return self._began_ns + round(1e9 * (at - self._began))


def _model_attributes(trace: RequestTrace, seconds: float, is_stream: bool) -> dict[str, Any]:
    """Return the attributes of generative AI. Those named `latency` are vLLM's, in seconds."""
    attributes: dict[str, Any] = {"gen_ai.provider.name": PROVIDER, **trace.attributes}
    if is_stream:
        attributes["gen_ai.request.stream"] = True
    if trace.finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = tuple(trace.finish_reasons)
    attributes["gen_ai.latency.e2e"] = seconds
    if trace.first_token_seconds is not None:
        attributes["gen_ai.latency.time_to_first_token"] = trace.first_token_seconds
        if is_stream:
            attributes["gen_ai.response.time_to_first_chunk"] = trace.first_token_seconds
    attributes.update(_phase_seconds(trace))
    return attributes


# vLLM's name of the time in a phase. An encoder's step and a program's have none of their own.
_LATENCIES = {
    "queue": "gen_ai.latency.time_in_queue",
    "prefill": "gen_ai.latency.time_in_model_prefill",
    "decode": "gen_ai.latency.time_in_model_decode",
    "encode": "gen_ai.latency.time_in_model_inference",
    "infer": "gen_ai.latency.time_in_model_inference",
}


def _phase_seconds(trace: RequestTrace) -> Iterator[tuple[str, float]]:
    begin = trace.arrived_at or 0.0
    for name, end in trace.phase_ends.items():
        yield _LATENCIES[name], max(end - begin, 0.0)
        begin = max(begin, end)


def _remote_context(headers: Sequence[tuple[bytes, bytes]]) -> Context:
    """Return the context that `traceparent` and `tracestate` name; an empty one if they are absent or invalid."""
    parents = [value for name, value in headers if name == b"traceparent"]
    if len(parents) != 1:
        return Context()
    states = [value.decode("latin-1") for name, value in headers if name == b"tracestate"]
    carrier = {"traceparent": parents[0].decode("latin-1"), "tracestate": ",".join(states)}
    return _PROPAGATOR.extract(carrier, Context())


def _resource() -> Resource:
    """Return the attributes of this process. What the variables say counts before our own."""
    ours = Resource({SERVICE_NAME: "armature", SERVICE_VERSION: VERSION})
    return Resource.create().merge(ours).merge(OTELResourceDetector().detect())


class _LastReason(logging.Filter):
    """Filter that shows none of the lines that the SDK logs for each attempt of each batch, and keeps the reason."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the line; after an error that is tried again comes one that only says that it was in vain."""
        if record.levelno == logging.WARNING and isinstance(record.args, tuple) and record.args:
            self.text = str(record.args[0])
        elif not self.text:
            self.text = record.getMessage()
        return False


_REASON = _LastReason()


class _ReportingExporter(SpanExporter):
    """Exporter that logs one line when spans begin to be lost, and one when they arrive again."""

    def __init__(self, endpoint: str) -> None:
        self._exporter = OTLPSpanExporter(endpoint)
        parts = urlsplit(endpoint)
        self._shown = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()  # no password
        self.is_failing = self._is_shut = False
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(_REASON)
        # It warns of each span that does not fit into the queue.
        logging.getLogger("opentelemetry.sdk._shared_internal").setLevel(logging.ERROR)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans. Called on the SDK's thread; may take as long as `OTEL_EXPORTER_OTLP_TIMEOUT`."""
        if self._is_shut:
            return SpanExportResult.FAILURE
        _REASON.text = ""
        result = self._exporter.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self.is_failing:
            reason = _REASON.text[:MAX_REASON_CHARACTERS]
            log.warning("traces do not arrive at %s and are dropped until they do: %s", self._shown, reason)
        elif self.is_failing and not failed:
            log.info("traces arrive at %s again", self._shown)
        self.is_failing = failed
        return result

    def shutdown(self) -> None:
        """End an export that is waiting to try again, and send nothing more."""
        if not self._is_shut:
            self._is_shut = True
            self._exporter.shutdown()  # type: ignore[no-untyped-call]
