"""Progress of a start on standard error: a bar on a terminal, else a log line now and then."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from app.metrics.load_progress import LoadProgress

log = logging.getLogger(__name__)

LOG_SECONDS = 10.0  # between two log lines of a phase


class StartConsole:
    """Shows the progress of loading. One thread calls `show` and `close`; after `close`, `show` begins anew."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._handlers: list[logging.StreamHandler[Any]] = []
        self._phase, self._logged_at = "", 0.0

    def show(self, stage: str | LoadProgress) -> None:
        """Show a stage of loading; one that is only a name ends the bar."""
        if not isinstance(stage, LoadProgress):
            self.close()
        elif self._console.is_terminal:
            self._show_bar(stage)
        else:
            self._log(stage)

    def close(self) -> None:
        """Remove the bar."""
        self._phase = ""
        if self._bar is None:
            return
        self._bar.stop()
        self._bar = self._task = None
        for handler in self._handlers:
            handler.setStream(sys.stderr)
        self._handlers.clear()

    def _log(self, stage: LoadProgress) -> None:
        now = time.monotonic()
        if stage.phase != self._phase or now - self._logged_at >= LOG_SECONDS:
            self._phase, self._logged_at = stage.phase, now
            log.info("%s", stage.description)

    def _show_bar(self, stage: LoadProgress) -> None:
        if self._bar is None:
            layers = TextColumn("{task.fields[layers]}")
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                layers,
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.start()
            self._log_above()
        if self._task is None or stage.phase != self._phase:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._phase = stage.phase
            self._task = self._bar.add_task(stage.phase, total=None, layers="")
        layers_done = f"{stage.done_layers}/{stage.num_layers} layers" if stage.num_layers else ""
        self._bar.update(self._task, completed=stage.done_bytes, total=stage.total_bytes, layers=layers_done)
        self._bar.refresh()

    def _log_above(self) -> None:
        """Let log lines appear above the bar: written directly, they would be overwritten by it."""
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
                self._handlers.append(handler)
                handler.setStream(FileProxy(self._console, sys.stderr))
