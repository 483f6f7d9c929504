"""`armature top`: figures from scripted metrics, rates between two readings, and what is no server of ours."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console

from app.cli.clients import top
from app.cli.clients.connection import ServerConnection, ServerRefused
from app.cli.clients.top import CAUSES, LiveFigures, draw_line, format_seconds, open_figures, render, show_figures
from app.cli.main import main
from app.metrics.instruments import parse_samples
from app.metrics.steps import Cause
from scripted_http import ScriptedServer, running

METRICS = """\
# HELP armature_tokens_total Tokens.
armature_tokens_total{kind="prompt"} 100
armature_tokens_total{kind="completion"} %d
armature_requests_total{api="chat",outcome="stop"} 3
armature_requests_total{api="chat",outcome="length"} 1
armature_throughput_per_second{kind="completion_tokens"} 12.5
armature_latency_quantile_seconds{metric="ttft",quantile="0.5"} 0.02
armature_latency_quantile_seconds{metric="ttft",quantile="0.95"} 1
armature_latency_quantile_seconds{metric="ttft",quantile="0.99"} 2
armature_latency_quantile_seconds{metric="itl",quantile="0.5"} NaN
armature_step_seconds_bucket{le="0.1"} 7
armature_requests_running 2
armature_requests_waiting 1
armature_kv_cache_usage_ratio 0.25
armature_power_watts{source="rapl"} 45
armature_energy_joules_per_token{source="rapl"} 0.5
armature_cost_dollars_total 0.5
llm_cost_per_million_tokens{model_name="a\\"b"} 1.5
process_resident_memory_bytes 2147483648
"""
STEPS = {"at": [0.0, 60.0, 61.0], "seconds": [0.01, 0.2, 0.1], "phase": ["decode"] * 3, "tokens": [1, 8, 9]}
INFO: dict[str, Any] = {
    "stage": "ready",
    "version": "9.9",
    "model": {"name": "fox", "kind": "decoder"},
    "plan": {"device": {"value": "cpu"}, "precision": {"value": "int8"}},
    "capacity": {"kv_capacity_tokens": 4096},
}


def serving(**others: Any) -> ScriptedServer:
    steps = {"next": 3, "dropped": 0, "clock": 0.0, "steps": {**STEPS, "cause": ["", "prefill", "descheduled"]}}
    answers = {"/readyz": (200, {"status": "ready"}), "/info": (200, INFO), "/info/steps": (200, steps)}
    return ScriptedServer({**answers, "/metrics": (200, METRICS % 50), **others})


def test_one_picture_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with running(serving()) as script:
        for flags in ([], ["--once"]):
            assert main(["top", "--url", script.url, *flags]) == 0
            shown = capsys.readouterr().out
            assert "\x1b" not in shown
            lines = [re.sub(" +", " ", line).strip() for line in shown.splitlines()]
            assert lines[0] == f"fox, a decoder on cpu in int8 · Armature 9.9 · {script.url}"
            assert lines[2:12] == [
                "tokens a second 12.5 prompts –",  # of the last minute, by the server
                "first token, p50 20 ms p95 1 s, p99 2 s",
                "gap between tokens, p50 – p95 –, p99 –",
                "context memory in use 25% of 4,096 tokens",
                "requests 2 running 1 waiting",
                "requests a second –",
                "memory of the process 2.0 GiB",
                "power 45 W 0.5 J a token",
                "dollars since the start 0.5 1.5 per million tokens",
                "",
            ]
            assert [line.split(" ", 1)[1] for line in lines[14:]] == [
                "100 ms decode 9 other programs took the cores",
                "200 ms decode 8 a prompt was read in the same step",
            ]


def test_rates_are_those_between_two_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([10.0, 12.0, 13.0])
    monkeypatch.setattr(top.time, "monotonic", lambda: next(moments))
    with running(serving()) as script:
        figures = open_figures(ServerConnection(script.url))
        figures.read()
        script.answers["/metrics"] = (200, METRICS % 80)
        written = figures.read()[0]
        assert (written.value, written.points) == ("15", (12.5, 15.0))
        script.answers["/metrics"] = (200, METRICS % 5)  # the server was started again
        assert figures.read()[0].value == "12.5"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("encoder", ["texts a second", "time of a request, p50", "waiting before it, p50", "requests"]),
        ("program", ["rows a second", "time of a request, p50", "waiting before it, p50", "requests"]),
    ],
)
def test_other_models_have_other_figures(kind: str, names: list[str]) -> None:
    info = {**INFO, "model": {"name": "fox", "kind": kind}}
    with running(serving(**{"/info": (200, info)})) as script:
        assert [figure.name for figure in open_figures(ServerConnection(script.url)).read()][:4] == names


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"/info/steps": (401, {})}, "This server needs an API key. Give it as --api-key KEY"),
        ({"/info/steps": (404, {})}, "is no Armature: it has no /info/steps."),
        ({"/info": (200, {"stage": "importing torch"})}, "is not ready: importing torch."),
        ({"/metrics": (500, "")}, "answered with status 500."),
    ],
)
def test_a_server_that_says_nothing(others: Any, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with running(serving(**others)) as script:
        assert main(["top", "--url", script.url, "--once"]) == 1
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""


def test_a_server_that_is_away_for_a_while(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal the last figures stay, with the reason, until it is back."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    with running(serving()) as script:
        figures = open_figures(ServerConnection(script.url))
        actions = iter([lambda: script.answers.update({"/metrics": (503, {"error": "The server stops."})}), _interrupt])
        monkeypatch.setattr(time, "sleep", lambda seconds: next(actions)())
        assert show_figures(figures, 1.0, once=False) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("\x1b[?1049h")
    assert "The server stops." in shown
    assert shown.rpartition("The server stops.")[2].count("2.0 GiB") == 1
    assert shown.endswith("\x1b[?25h\x1b[?1049l"), "the cursor and the text before are back"


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_the_causes_are_those_of_the_server_and_of_the_page(root: Path) -> None:
    page = (root / "app" / "web" / "now.js").read_text().partition("const CAUSES = {")[2].partition("};")[0]
    assert dict(re.findall(r'(\w+): "([^"]+)"', page)) == CAUSES
    assert set(get_args(Cause)) == set(CAUSES)


@pytest.mark.parametrize(
    ("points", "line"), [((), ""), ((1.0,), ""), ((0.0, 0.0), ""), ((0.0, 1.0, 4.0, 8.0), "▁▂▅█"), ((2.0, -1.0), "█▁")]
)
def test_a_line(points: tuple[float, ...], line: str) -> None:
    assert draw_line(points) == line


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.0000123, "12.3 µs"), (0.0123, "12.3 ms"), (1.5, "1.5 s"), (119, "119 s"), (600, "10 min")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text


def test_samples() -> None:
    samples = parse_samples(METRICS % 1)
    assert samples.value("requests_total") == 4
    assert samples.value("requests_total", outcome="stop") == 3
    assert samples.value("latency_quantile_seconds", metric="itl") is None
    assert samples.value("nothing") is None
    assert samples.value("step_seconds_bucket") is None


def test_a_server_is_required() -> None:
    with pytest.raises(ServerRefused):
        LiveFigures(ServerConnection("http://127.0.0.1:1"), INFO).read()


@pytest.mark.parametrize("columns", [36, 44, 58, 70, 140])
def test_no_value_is_cut_in_a_narrow_terminal(columns: int) -> None:
    with running(serving()) as script:
        figures = open_figures(ServerConnection(script.url, None))
        read = figures.read()
    console = Console(width=columns, record=True, file=io.StringIO())
    console.print(render(figures, read))
    shown = console.export_text()
    assert "…" not in shown and all(len(line) <= columns for line in shown.splitlines())
    words = " ".join(shown.split())
    for text in (
        script.url,
        "gap between tokens, p50",
        "25%",
        "of 4,096 tokens",
        "1.5 per million tokens",
        "2 running",
    ):
        assert text in words
