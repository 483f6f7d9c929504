"""Form of the log on standard error: text or JSON lines; a thread writes those of requests."""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
from typing import Any

from rich.console import Console
from rich.style import Style

from app.service.requests import REQUEST_LOGGER
from app.settings import Settings

MAX_QUEUED_LINES = 10_000  # lines of requests that wait to be written, some 1 KB each
# After a line, those of some further requests are collected: writing each at once would take the interpreter from the
# event loop for each request.
COLLECT_SECONDS = 0.02
CLOSE_SECONDS = 0.5  # longest wait for their writing at the end of the process
LABEL_COLUMNS = 10
_LEVEL_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}


class TextFormatter(logging.Formatter):
    """Time, level and message, after the column of a record's `label`; `console` says if there are colours."""

    def __init__(self, console: Console) -> None:
        # People at a terminal know the date.
        super().__init__(datefmt="%H:%M:%S" if console.is_terminal else None)
        self._has_styles = console.is_terminal and not console.no_color and not console.is_dumb_terminal

    def usesTime(self) -> bool:  # noqa: N802  # logging's own name
        return True

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's own name
        level = self._styled(record.levelname, _LEVEL_STYLES.get(record.levelname, ""))
        label, model = getattr(record, "label", ""), getattr(record, "model", "")
        column = f"{self._styled(label.ljust(LABEL_COLUMNS), 'bold')} " if label else ""
        return f"{self._styled(record.asctime, 'dim')} {level} {column}{f'{model}: ' if model else ''}{record.message}"

    def _styled(self, text: str, style: str) -> str:
        return Style.parse(style).render(text) if style and self._has_styles else text


class JsonFormatter(logging.Formatter):
    """One JSON object: `time` (UTC), `level`, `message`, and the record's `label`, `model`, `fields`, `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        line.update({name: value for name in ("label", "model") if (value := getattr(record, name, ""))})
        line.update(getattr(record, "fields", {}))
        if record.exc_info or record.exc_text:  # an engine's process sends the text
            line["exception"] = record.exc_text or self.formatException(record.exc_info or (None, None, None))
        return json.dumps(line)


class WritingThreadHandler(logging.Handler):
    """Handler whose thread hands records to the root logger's handlers. It never waits: without room, one is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._records: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._write, name="armature-request-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._records.qsize() < MAX_QUEUED_LINES:
            self._records.put(record)

    def close(self) -> None:
        """Write what is queued, for a limited time. `logging.shutdown`, which runs at exit, calls this."""
        self._is_closing.set()
        self._records.put(None)
        self._thread.join(CLOSE_SECONDS)
        super().close()

    def _write(self) -> None:
        while (record := self._records.get()) is not None:
            for handler in logging.getLogger().handlers:
                handler.handle(record)
            if self._records.empty():
                self._is_closing.wait(COLLECT_SECONDS)


def log_to_stderr(settings: Settings) -> None:
    """Send the log to standard error, in the level and form of the settings."""
    handler = logging.StreamHandler(sys.stderr)
    is_json = settings.log_format == "json"
    handler.setFormatter(JsonFormatter() if is_json else TextFormatter(Console(stderr=True)))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    # This process logs its events itself. uvicorn would also log malformed requests, which are not events of the
    # server.
    logging.getLogger("uvicorn.error").setLevel(logging.DEBUG if settings.log_level == "debug" else logging.ERROR)
    requests = logging.getLogger(REQUEST_LOGGER)
    requests.disabled = settings.request_log == "off"
    if not requests.disabled:
        requests.handlers, requests.propagate = [WritingThreadHandler()], False
