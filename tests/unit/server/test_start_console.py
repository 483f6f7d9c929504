"""Progress of a start: log lines with a distance without a terminal, and a bar above which log lines appear with one."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from rich.console import Console

from app.metrics.load_progress import LoadProgress
from app.server import start_console
from app.server.start_console import StartConsole


def progress(done: int, phase: str = "packing weights") -> LoadProgress:
    return LoadProgress(phase, done, 100, done // 10, 10, elapsed_seconds=float(done))


def test_log_lines_come_now_and_then(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(start_console.time, "monotonic", lambda: now)
    console = StartConsole(Console(file=io.StringIO()))
    with caplog.at_level(logging.INFO):
        for done in range(0, 51, 10):
            console.show(progress(done))
            now += 4
        console.show("warming up")
        console.show(progress(50, "loading weights"))
    assert caplog.messages == [
        "packing weights, 0%, 0 of 10 linear layers",
        "packing weights, 30%, 3 of 10 linear layers, about 70 s left",
        "loading weights, 50%, 5 of 10 linear layers, about 50 s left",
    ]


def test_a_terminal_has_a_bar_and_log_lines_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    handler = logging.StreamHandler(shown)
    logging.getLogger().addHandler(handler)
    console = StartConsole(Console(file=shown, force_terminal=True, width=120))
    try:
        console.show(progress(10))
        logging.getLogger("test").warning("a line")
        console.show(progress(20, "measuring"))
        console.close()
        logging.getLogger("test").warning("after it")
    finally:
        logging.getLogger().removeHandler(handler)
    text = shown.getvalue()
    assert "packing weights" in text and "1/10 layers" in text and "measuring" in text
    assert "a line\n" in text and text.endswith("after it\n")
    assert handler.stream is shown
