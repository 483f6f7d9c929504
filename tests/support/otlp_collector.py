"""A collector in this process that takes spans by OTLP over HTTP and keeps them, and may refuse them."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

PATIENCE = 60.0  # seconds; a busy machine is no failure


@dataclass(frozen=True, slots=True)
class KeptSpan:
    """A span as the collector got it: ids in hexadecimal, times in Unix seconds."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    began: float
    ended: float
    status: str
    status_message: str
    attributes: dict[str, Any]
    trace_state: str

    @property
    def is_server(self) -> bool:
        return self.kind == Span.SPAN_KIND_SERVER


@dataclass
class OtlpCollector:
    """`bodies` are the decompressed requests; `status` is what it answers; `resource` has the attributes of the last sender."""

    url: str = ""
    status: int = 200
    spans: list[KeptSpan] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    resource: dict[str, Any] = field(default_factory=dict)
    scopes: set[tuple[str, str]] = field(default_factory=set)

    def take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        self.paths.append(path)
        self.headers.append(headers)
        if self.status != 200:
            return self.status
        plain = gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body
        self.bodies.append(plain)
        for group in ExportTraceServiceRequest.FromString(plain).resource_spans:
            self.resource = _values(group.resource.attributes)
            for scoped in group.scope_spans:
                self.scopes.add((scoped.scope.name, scoped.scope.version))
                self.spans.extend(map(_kept, scoped.spans))
        return 200

    def wait(self, number: int = 1) -> list[KeptSpan]:
        """Return so many server spans, in the order of their ends; the spans of their phases have come before them."""
        deadline = time.monotonic() + PATIENCE
        while len(found := self.servers) < number:
            assert time.monotonic() < deadline, f"{len(found)} of {number} spans have come"
            time.sleep(0.005)
        return found[:number]

    @property
    def servers(self) -> list[KeptSpan]:
        return [span for span in self.spans if span.is_server]

    def phases(self, span: KeptSpan) -> list[KeptSpan]:
        """Return the children of a span by their start."""
        return sorted((each for each in self.spans if each.parent_id == span.span_id), key=lambda each: each.began)

    def clear(self) -> None:
        self.spans.clear()
        self.bodies.clear()


def _kept(span: Any) -> KeptSpan:
    return KeptSpan(
        span.name,
        span.kind,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
        {0: "unset", 1: "ok", 2: "error"}[span.status.code],
        span.status.message,
        _values(span.attributes),
        span.trace_state,
    )


def _values(attributes: Sequence[Any]) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def collecting(port: int = 0) -> Iterator[OtlpCollector]:
    """Run a collector until the block ends; `url` has no path."""
    collector = OtlpCollector()
    server = ThreadingHTTPServer(("127.0.0.1", port), _handler(lambda *request: collector.take(*request)))
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(take: Callable[[str, dict[str, str], bytes], int]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status = take(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
            self.send_response(status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    return Handler
