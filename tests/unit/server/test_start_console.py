"""Progress of a start: log lines with a distance without a terminal, and a bar above which log lines appear with one."""

from __future__ import annotations

import io
import logging
import sys
import threading

import pytest
from rich.console import Console

from app.metrics.load_progress import LoadProgress
from app.server.start_console import StageLines, StartConsole


def progress(done: int, phase: str = "packing weights") -> LoadProgress:
    return LoadProgress(phase, done, 100, done // 10, 10, elapsed_seconds=float(done))


def test_log_lines_come_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    lines = StageLines(lambda: now)
    with caplog.at_level(logging.INFO):
        lines.tick()
        lines.show("importing torch")
        now += 0.9
        lines.tick()  # too soon
        for second in range(25):
            lines.show("calibrating: bf16" if second < 12 else "calibrating: int8")
            now += 1.0
            lines.tick()
        for done in range(0, 51, 10):
            lines.show(progress(done))
            now += 4
            lines.tick()
    assert caplog.messages == [
        "calibrating: bf16, for 1 s so far",
        "calibrating: bf16, for 11 s so far",
        "calibrating: int8, for 21 s so far",
        "packing weights, 0%, 0 of 10 linear layers",
        "packing weights, 30%, 3 of 10 linear layers, about 70 s left",
    ]


def test_a_stage_that_reports_nothing_has_lines_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread writes them."""
    written = threading.Event()
    monkeypatch.setattr(logging.getLogger("app.server.start_console"), "filters", [lambda line: not written.set()])
    monkeypatch.setattr("app.server.start_console.TICK_SECONDS", 0.001)
    console = StartConsole(Console(file=io.StringIO()), first_seconds=0.001)
    with caplog.at_level(logging.INFO):
        console.show("importing torch")
        assert written.wait(60)
        console.close()
    assert caplog.messages == ["importing torch, for 0 s so far"]


def test_a_terminal_has_a_bar_and_log_lines_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    handler = logging.StreamHandler(shown)
    logging.getLogger().addHandler(handler)
    console = StartConsole(Console(file=shown, force_terminal=True, width=120))
    try:
        console.show("importing torch")
        console.show(progress(10))
        logging.getLogger("test").warning("a line")
        console.show(progress(20, "measuring"))
        console.close()
        logging.getLogger("test").warning("after it")
    finally:
        logging.getLogger().removeHandler(handler)
    text = shown.getvalue()
    assert "importing torch" in text
    assert "packing weights" in text and "1/10 layers" in text and "measuring" in text
    assert "a line\n" in text and text.endswith("after it\n")
    assert handler.stream is shown


def test_bytes_are_shown_by_percent() -> None:
    shown: list[int] = []
    console = StartConsole(Console(file=io.StringIO()))
    console.show = lambda stage: shown.append(stage.percent)  # type: ignore[method-assign, assignment, union-attr, return-value]
    report = console.show_bytes("packing weights")
    for done in range(0, 1001, 5):
        report(done, 1000)
    assert shown == list(range(101))


def test_json_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    console = StartConsole(Console(file=shown, force_terminal=True), has_bars=False)
    console.show(progress(10))
    console.close()
    assert shown.getvalue() == ""
