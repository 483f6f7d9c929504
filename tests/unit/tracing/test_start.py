"""Whether requests are traced: the settings, the standard variables, the extra that is missing, and no import when off."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from app.errors import SettingsInvalid
from app.settings import Settings, load_settings
from app.tracing import start
from app.tracing.start import start_tracer, with_path

BASE = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float | None]]:
    """Endpoints and ratios of the tracers that were started, without the SDK."""
    found: list[tuple[str, float | None]] = []
    spans = type(sys)("app.tracing.spans")
    spans.OtlpTracer = lambda *arguments: found.append(arguments)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "app.tracing.spans", spans)
    monkeypatch.setattr(start, "_is_installed", lambda: True)
    return found


def test_without_settings_and_variables_nothing_is_traced(opened: list[tuple[str, float | None]]) -> None:
    assert start_tracer(Settings(), {}) is None
    assert start_tracer(Settings(trace_sample_ratio=0.5), {"OTEL_TRACES_SAMPLER": "always_on"}) is None
    assert opened == []


@pytest.mark.parametrize(
    ("setting", "variables", "endpoint"),
    [
        ("http://collector:4318", {}, "http://collector:4318/v1/traces"),
        ("http://collector:4318/", {}, "http://collector:4318/v1/traces"),
        ("https://host/otlp/v1/traces", {}, "https://host/otlp/v1/traces"),
        ("http://one", {BASE: "http://other"}, "http://one/v1/traces"),
        ("", {BASE: "http://other:4318/otlp/"}, "http://other:4318/otlp/v1/traces"),
        ("", {BASE: "http://a", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b/spans"}, "http://b/spans"),
        ("http://one", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http://one/v1/traces"),
    ],
)
def test_the_endpoint_is_that_of_the_setting_or_of_the_variables(
    setting: str, variables: dict[str, str], endpoint: str, opened: list[tuple[str, float | None]]
) -> None:
    start_tracer(Settings(otlp_traces_endpoint=setting, trace_sample_ratio=0.25), variables)
    assert opened == [(endpoint, 0.25)]


@pytest.mark.parametrize(
    ("variables", "warning"),
    [
        ({BASE: "http://a", "OTEL_SDK_DISABLED": "True"}, ""),
        ({BASE: "http://a", "OTEL_TRACES_EXPORTER": "none"}, ""),
        ({BASE: "http://a", "OTEL_TRACES_EXPORTER": "zipkin"}, "the exporter zipkin is not offered"),
        ({BASE: "http://a", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "the protocol grpc is not offered"),
    ],
)
def test_variables_turn_it_off_and_never_prevent_a_start(
    variables: dict[str, str],
    warning: str,
    opened: list[tuple[str, float | None]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert start_tracer(Settings(), variables) is None
    assert opened == []
    assert len(caplog.messages) == bool(warning)
    assert warning in "".join(caplog.messages)


def test_a_missing_extra_is_one_sentence_for_the_setting_and_a_warning_for_a_variable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start, "_is_installed", lambda: False)
    sentence = (
        r"^otlp_traces_endpoint needs the extra otel, which is not installed: pip install 'armature-serve\[otel\]'\.$"
    )
    with pytest.raises(SettingsInvalid, match=sentence):
        start_tracer(Settings(otlp_traces_endpoint="http://a"), {})
    with caplog.at_level(logging.WARNING):
        assert start_tracer(Settings(), {BASE: "http://a"}) is None
    assert caplog.messages == [
        "no traces: OTEL_EXPORTER_OTLP_ENDPOINT needs the extra otel, which is not installed: pip install 'armature-serve[otel]'"
    ]


@pytest.mark.parametrize("wrong", ["collector:4318", "grpc://collector:4317", "http://", "http://a?b", "http://a b"])
def test_what_is_no_url_of_http_is_refused(wrong: str) -> None:
    with pytest.raises(SettingsInvalid, match=r"is no URL such as http://collector:4318; spans are sent over HTTP"):
        load_settings(otlp_traces_endpoint=wrong)


@pytest.mark.parametrize(("given", "ratio"), [("0.1", 0.1), ("10%", 0.1), ("0", 0.0), ("1", 1.0)])
def test_the_ratio_is_a_share(given: str, ratio: float) -> None:
    assert load_settings(trace_sample_ratio=given)[0].trace_sample_ratio == pytest.approx(ratio)
    with pytest.raises(SettingsInvalid, match="trace_sample_ratio"):
        load_settings(trace_sample_ratio="1.5")


def test_a_path_is_added_to_a_bare_host_only() -> None:
    assert with_path("") == ""
    assert with_path("http://a/custom") == "http://a/custom"


@pytest.mark.full
def test_no_module_of_the_sdk_is_imported_while_nothing_is_traced(root: Path) -> None:
    """FastAPI imports OpenTelemetry's interface by itself, which makes no spans and starts no thread."""
    script = (
        "import sys, threading\n"
        "from app.server import process\n"
        "from app.settings import Settings\n"
        "from app.tracing.start import start_tracer\n"
        "assert start_tracer(Settings(), {}) is None\n"
        "loaded = [name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))]\n"
        "assert loaded == [] and 'google.protobuf' not in sys.modules and 'app.tracing.spans' not in sys.modules, loaded\n"
        "assert threading.active_count() == 1\n"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
