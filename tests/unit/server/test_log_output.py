"""The log as text, with colours on a terminal that wants them, and as JSON; lines of requests never make anyone wait."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from app.server import log_output
from app.server.log_output import JsonFormatter, TextFormatter, WritingThreadHandler, log_to_stderr
from app.service.requests import REQUEST_LOGGER
from app.settings import Settings


def record(message: str, level: int = logging.INFO, **others: Any) -> logging.LogRecord:
    made = logging.LogRecord("app", level, "file.py", 1, message, (), None)
    made.__dict__.update(others)
    return made


def test_text_without_a_terminal_has_date_level_and_message() -> None:
    formatter = TextFormatter(Console(file=io.StringIO()))
    assert formatter.format(record("bf16.", label="precision")).endswith(" INFO precision  bf16.")
    line = formatter.format(record("a line", logging.WARNING))
    assert line.endswith(" WARNING a line") and line.startswith("20") and "\x1b" not in line


@pytest.mark.parametrize(
    ("variable", "coloured"),
    [(("COLORTERM", "truecolor"), True), (("NO_COLOR", "1"), False), (("TERM", "dumb"), False)],
)
def test_colours_follow_the_conventions(
    variable: tuple[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(*variable)
    formatter = TextFormatter(Console(file=io.StringIO(), force_terminal=True))
    line = formatter.format(record("a line", logging.WARNING, label="speed"))
    assert ("\x1b[33mWARNING\x1b[0m" in line) is coloured
    assert ("\x1b" in line) is coloured
    assert "WARNING" in line and "a line" in line


def test_json_is_one_object_a_line() -> None:
    try:
        raise ValueError("bad\nvalue")
    except ValueError:
        failed = record("it\nfailed", logging.ERROR, exc_info=sys.exc_info())
    line = JsonFormatter().format(failed)
    read = json.loads(line)
    assert "\n" not in line and read["level"] == "error" and read["message"] == "it\nfailed"
    assert "ValueError: bad\nvalue" in read["exception"]
    assert json.loads(JsonFormatter().format(record("text", label="speed", fields={"id": "a"}))) | {"time": ""} == {
        "time": "",
        "level": "info",
        "message": "text",
        "label": "speed",
        "id": "a",
    }


@pytest.fixture
def root_log() -> Iterator[logging.Logger]:
    """The root logger and that of requests, restored afterwards."""
    root, requests = logging.getLogger(), logging.getLogger(REQUEST_LOGGER)
    handlers, level = list(root.handlers), root.level
    root.handlers = []
    yield root
    for handler in requests.handlers:
        handler.close()
    root.handlers, requests.handlers, requests.propagate, requests.disabled = handlers, [], True, False
    root.setLevel(level)


class BlockedHandler(logging.Handler):
    """A handler whose reader does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.reached = threading.Event(), threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.reached.set()
        assert self.gate.wait(60)
        self.lines.append(record.getMessage())


def test_lines_of_an_engines_process_name_its_model_and_keep_their_traceback() -> None:
    told = logging.LogRecord("app", logging.ERROR, "", 0, "a step failed", None, None)
    told.model, told.exc_text = "chat", "Traceback ...\nValueError: no"
    assert TextFormatter(Console(file=io.StringIO())).format(told).endswith("chat: a step failed\n" + told.exc_text)
    line = json.loads(JsonFormatter().format(told))
    assert (line["model"], line["exception"]) == ("chat", told.exc_text)


def test_without_a_reader_lines_of_requests_are_dropped(
    root_log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_output, "MAX_QUEUED_LINES", 2)
    blocked = BlockedHandler()
    root_log.handlers = [blocked]
    handler = WritingThreadHandler()
    handler.emit(record("being written"))
    assert blocked.reached.wait(60)
    for number in range(5):
        handler.emit(record(f"line {number}"))  # returns although nobody reads
    blocked.gate.set()
    handler.close()
    assert blocked.lines[:3] == ["being written", "line 0", "line 1"] and len(blocked.lines) == 3


def test_closing_writes_what_waits(root_log: logging.Logger) -> None:
    shown = io.StringIO()
    root_log.handlers = [logging.StreamHandler(shown)]
    handler = WritingThreadHandler()
    for number in range(100):
        handler.emit(record(f"line {number}"))
    handler.close()
    assert shown.getvalue().splitlines() == [f"line {number}" for number in range(100)]


def test_the_settings_choose_form_and_lines(root_log: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, requests = io.StringIO(), logging.getLogger(REQUEST_LOGGER)
    monkeypatch.setattr(sys, "stderr", shown)
    log_to_stderr(Settings(log_format="json", request_log="off"))
    requests.info("a request")
    root_log.info("an event")
    assert [json.loads(line)["message"] for line in shown.getvalue().splitlines()] == ["an event"]
    log_to_stderr(Settings(log_level="warning"))
    assert not requests.isEnabledFor(logging.INFO)
    log_to_stderr(Settings())
    requests.info("a request")
    requests.handlers[0].close()
    assert shown.getvalue().splitlines()[-1].endswith(" INFO a request")
