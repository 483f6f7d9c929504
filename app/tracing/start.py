"""Whether requests are traced, and where to: the settings, or else OpenTelemetry's standard variables."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from urllib.parse import urlsplit

from app.errors import SettingsInvalid
from app.settings import Settings
from app.tracing.request_trace import Tracer

log = logging.getLogger(__name__)

SPANS_PATH = "/v1/traces"  # where OTLP over HTTP takes spans
EXPORTER = "opentelemetry.exporter.otlp.proto.http"
INSTALL = "pip install 'armature-serve[otel]'"


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
