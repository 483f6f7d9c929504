"""Spans as a collector gets them: names, attributes, parents, phases, sampling, failures; and collectors that do not answer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes, url_attributes

from app.messages import SamplingParams
from app.tracing.request_trace import RequestTrace
from app.tracing.spans import OtlpTracer
from app.version import VERSION
from otlp_collector import OtlpCollector, collecting

PARENT = "00-" + "ab" * 16 + "-" + "cd" * 8
ROUTE = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def _short_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@pytest.fixture
def collector() -> Iterator[OtlpCollector]:
    with collecting() as found:
        yield found


@contextmanager
def tracing(collector: OtlpCollector, ratio: float | None = None) -> Iterator[OtlpTracer]:
    tracer = OtlpTracer(f"{collector.url}/v1/traces", ratio)
    try:
        yield tracer
    finally:
        tracer.close(10)


def scope(*headers: tuple[str, str], path: str = ROUTE) -> dict[str, Any]:
    pairs = [(name.encode(), value.encode()) for name, value in headers]
    return {"method": "POST", "path": path, "http_version": "1.1", "headers": pairs, "server": ("10.0.0.1", 8000)}


def serve(trace: RequestTrace | None) -> None:
    """What the service notes of a chat with two parts."""
    assert trace is not None
    now = time.monotonic()
    trace.note_model("demo")
    trace.note_sampling(SamplingParams(max_tokens=8, temperature=0.5, top_p=0.9, stop=("the secret",)))
    trace.add_tokens(5, 2, 8)
    trace.add_times(now - 0.4, {"queue": now - 0.3, "prefill": now - 0.2, "decode": now - 0.05}, 0.25)
    trace.add_tokens(4, 0, 7)
    trace.add_times(now - 0.39, {"queue": now - 0.2, "prefill": now - 0.1, "decode": now - 0.06}, 0.35)
    trace.finish_reasons += ["stop", "length"]
    trace.attributes["gen_ai.response.id"] = "chatcmpl-1"


def test_a_request_is_one_server_span_with_its_phases_one_after_the_other(collector: OtlpCollector) -> None:
    with tracing(collector) as tracer:
        span = tracer.begin(scope(), ROUTE, "chat")
        serve(span.trace)
        span.end("request-1", 200, None, is_stream=True)
        (found,) = collector.wait()
    assert collector.paths[0] == "/v1/traces"
    assert collector.headers[0]["content-type"] == "application/x-protobuf"
    assert collector.resource.items() >= {"service.name": "armature", "service.version": VERSION}.items()
    assert collector.resource["telemetry.sdk.language"] == "python"
    assert collector.scopes == {("armature", VERSION)}
    assert (found.name, found.parent_id, found.status) == ("chat demo", "", "unset")
    assert span.traceresponse == f"00-{found.trace_id}-{found.span_id}-{span.traceresponse[-2:]}"
    assert int(span.traceresponse[-2:], 16) & 1
    latencies = {name: found.attributes.pop(name) for name in list(found.attributes) if ".latency." in name}
    assert found.attributes.pop("gen_ai.response.time_to_first_chunk") == 0.35
    assert found.attributes == {
        "http.request.method": "POST",
        "http.route": ROUTE,
        "http.response.status_code": 200,
        "url.path": ROUTE,
        "url.scheme": "http",
        "network.protocol.version": "1.1",
        "server.address": "10.0.0.1",
        "server.port": 8000,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "armature",
        "gen_ai.request.id": "request-1",
        "gen_ai.request.model": "demo",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.stream": True,
        "gen_ai.response.model": "demo",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.finish_reasons": ["stop", "length"],
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.usage.output_tokens": 15,
    }
    queue, prefill, decode = collector.phases(found)
    assert [each.name for each in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
    assert queue.ended == prefill.began and prefill.ended == decode.began
    assert all(each.trace_id == found.trace_id for each in (queue, prefill, decode))
    # The first part leaves the queue first; the other one ends its prefill last.
    seconds = {"queue": 0.1, "prefill": 0.2, "decode": 0.05}
    assert {each.name: each.ended - each.began for each in (queue, prefill, decode)} == pytest.approx(seconds, abs=1e-5)
    assert abs(found.ended - time.time()) < 60
    named = {"queue": "time_in_queue", "prefill": "time_in_model_prefill", "decode": "time_in_model_decode"}
    for name, wanted in seconds.items():
        assert latencies[f"gen_ai.latency.{named[name]}"] == pytest.approx(wanted, abs=1e-5)
    assert latencies["gen_ai.latency.time_to_first_token"] == 0.35
    assert latencies["gen_ai.latency.e2e"] == pytest.approx(found.ended - found.began, abs=1e-6)
    assert not any(b"the secret" in body for body in collector.bodies)


def test_the_names_are_those_of_the_conventions(collector: OtlpCollector) -> None:
    known = {
        value
        for module in (gen_ai_attributes, http_attributes, url_attributes, error_attributes)
        for name, value in vars(module).items()
        if name.isupper()
    }
    with tracing(collector) as tracer:
        span = tracer.begin(scope(), ROUTE, "chat")
        serve(span.trace)
        span.end("r", 500, None, is_stream=True)
        (found,) = collector.wait()
    ours = {"network.protocol.version", "server.address", "server.port", "gen_ai.request.id"}  # the last is vLLM's
    assert {name for name in found.attributes if ".latency." not in name} - ours <= known
    operations = {each.value for each in gen_ai_attributes.GenAiOperationNameValues}
    assert {"chat", "text_completion", "embeddings"} <= operations


@pytest.mark.parametrize("flag", ["01", "00"])
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_the_parent_is_taken_and_decides(flag: str, ratio: float, collector: OtlpCollector) -> None:
    with tracing(collector, ratio) as tracer:
        span = tracer.begin(
            scope(("traceparent", f"{PARENT}-{flag}"), ("tracestate", "a=1"), ("tracestate", "b=2")), ROUTE, "chat"
        )
        assert span.traceresponse.startswith("00-" + "ab" * 16) and span.traceresponse.endswith(flag)
        assert (span.trace is not None) == (flag == "01")
        span.end("r", 200, None, is_stream=False)
    assert len(collector.servers) == int(flag)
    for found in collector.servers:
        assert (found.trace_id, found.parent_id, found.trace_state) == ("ab" * 16, "cd" * 8, "a=1,b=2")


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", "nonsense")],
        [("traceparent", "00-" + "0" * 32 + "-" + "cd" * 8 + "-01")],
        [("traceparent", f"{PARENT}-01"), ("traceparent", f"{PARENT}-01")],
        [("traceparent", "ff" + PARENT[2:] + "-01")],
    ],
)
def test_an_invalid_parent_begins_a_new_trace(headers: list[tuple[str, str]], collector: OtlpCollector) -> None:
    with tracing(collector, 1.0) as tracer:
        tracer.begin(scope(*headers), ROUTE, "chat").end("r", 200, None, is_stream=False)
    (found,) = collector.servers
    assert found.parent_id == "" and found.trace_id not in ("ab" * 16, "0" * 32)


def test_a_share_of_the_requests_without_a_parent_is_sampled(collector: OtlpCollector) -> None:
    with tracing(collector, 0.1) as tracer:
        spans = [tracer.begin(scope(), ROUTE, "chat") for _ in range(1000)]
        sampled = [span for span in spans if span.trace is not None]
        for span in spans:
            span.end("r", 200, None, is_stream=False)
    assert 50 < len(sampled) < 160
    assert len(collector.servers) == len(sampled)


@pytest.mark.parametrize(
    ("sampler", "argument", "number"), [("always_off", "", 0), ("traceidratio", "1", 1), ("", "", 1)]
)
def test_without_a_ratio_the_variables_decide(
    sampler: str, argument: str, number: int, collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler or "parentbased_always_on")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.version=7")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer x")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    with tracing(collector) as tracer:
        tracer.begin(scope(), ROUTE, "chat").end("r", 200, None, is_stream=False)
    assert len(collector.servers) == number
    if number:
        wanted = {"service.name": "mine", "deployment.environment.name": "test", "service.version": "7"}
        assert collector.resource.items() >= wanted.items()
        assert collector.headers[0]["authorization"] == "Bearer x"


@pytest.mark.parametrize(
    ("status", "error", "type_", "failed"),
    [
        (200, None, None, False),
        (400, "context_length_exceeded", "context_length_exceeded", False),
        (404, None, "404", False),
        (429, "overloaded", "overloaded", True),
        (499, "client_disconnected", "client_disconnected", True),
        (500, "internal_error", "internal_error", True),
        (503, "not_ready", "not_ready", True),
        (200, "step_failed", "step_failed", True),  # the last event of a stream
    ],
)
def test_failures_set_the_status_and_mistakes_of_the_client_do_not(
    status: int, error: str | None, type_: str | None, failed: bool, collector: OtlpCollector
) -> None:
    with tracing(collector) as tracer:
        tracer.begin(scope(), ROUTE, "chat").end("r", status, error, is_stream=False)
    (found,) = collector.servers
    assert found.attributes.get("error.type") == type_
    assert (found.status, found.status_message) == (("error", type_) if failed else ("unset", ""))
    assert found.attributes["http.response.status_code"] == status
    assert found.name == "chat"


@pytest.mark.parametrize(
    ("api", "name"), [("rerank", "rerank demo"), ("embeddings", "embeddings demo"), (None, "POST /")]
)
def test_where_the_body_decides_the_api_names_the_span(api: Any, name: str, collector: OtlpCollector) -> None:
    with tracing(collector) as tracer:
        span = tracer.begin(scope(path="/"), "/", "")
        assert span.trace is not None
        if api is not None:
            span.trace.note_model("demo")
        span.trace.api = api
        span.end("r", 200, None, is_stream=False)
    assert [found.name for found in collector.servers] == [name]


def test_a_collector_that_does_not_answer_costs_one_line_and_no_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1.5")  # one second try
    with collecting() as there:
        port = int(there.url.rpartition(":")[2])
    tracer = OtlpTracer(f"http://user:password@127.0.0.1:{port}/v1/traces")
    with caplog.at_level(logging.INFO):
        for number in range(2):  # two batches
            began = time.perf_counter()
            tracer.begin(scope(), ROUTE, "chat").end("r", 200, None, is_stream=False)
            assert time.perf_counter() - began < 0.1
            drained(tracer)
            assert len(caplog.messages) == 1, number
        with collecting(port) as back:
            tracer.begin(scope(), ROUTE, "chat").end("r", 200, None, is_stream=False)
            drained(tracer)
            assert len(back.servers) == 1
            tracer.close(10)
    first, second = caplog.messages
    assert first.startswith(
        f"traces do not arrive at http://127.0.0.1:{port}/v1/traces and are dropped until they do: "
    )
    assert "password" not in first and "refused" in first
    assert second == f"traces arrive at http://127.0.0.1:{port}/v1/traces again"


def test_a_collector_that_refuses_is_named_with_its_status(
    collector: OtlpCollector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 401
    with caplog.at_level(logging.WARNING), tracing(collector) as tracer:
        for _ in range(2):
            tracer.begin(scope(), ROUTE, "chat").end("r", 200, None, is_stream=False)
            drained(tracer)
    assert len(caplog.messages) == 1 and "401" in caplog.messages[0]


def test_a_full_queue_drops_spans_and_makes_nobody_wait(
    collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    with caplog.at_level(logging.WARNING), tracing(collector) as tracer, held(collector) as release:
        for _ in range(50):
            tracer.begin(scope(), ROUTE, "chat").end("r", 200, None, is_stream=False)
        release()
    assert 1 <= len(collector.servers) < 50
    assert caplog.messages == []


def test_a_stop_waits_for_a_silent_collector_no_longer_than_it_may(
    collector: OtlpCollector, caplog: pytest.LogCaptureFixture
) -> None:
    tracer = OtlpTracer(f"{collector.url}/v1/traces")
    with caplog.at_level(logging.WARNING), held(collector):
        tracer.begin(scope(), ROUTE, "chat").end("r", 200, None, is_stream=False)
        began = time.perf_counter()
        tracer.close(0.2)
        assert time.perf_counter() - began < 2
    assert caplog.messages == ["the spans of the last requests were not sent within 0.2 s"]


@contextmanager
def held(collector: OtlpCollector) -> Iterator[Callable[[], None]]:
    """Let the collector answer only when the block ends, or calls what it gets."""
    gate, take = threading.Event(), collector.take

    def waiting(path: str, headers: dict[str, str], body: bytes) -> int:
        gate.wait(60)
        return take(path, headers, body)

    collector.take = waiting  # type: ignore[method-assign]
    try:
        yield gate.set
    finally:
        gate.set()


def drained(tracer: OtlpTracer) -> None:
    """Wait until all spans were sent or dropped."""
    tracer._provider.force_flush()
