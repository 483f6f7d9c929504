"""Progress of a start on standard error: a bar on a terminal, else a log line now and then."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from threading import Event, Thread
from typing import Any

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from app.metrics.load_progress import LoadProgress

log = logging.getLogger(__name__)
FIRST_SECONDS = 1.0  # a stage that ends sooner has no log line
LOG_SECONDS = 10.0  # between two log lines of a stage
TICK_SECONDS = 0.25


class StartConsole:
    """Shows the progress of loading; after `close`, `show` begins anew.

    A thread moves the bar and logs also while a stage reports nothing, the first line after `first_seconds`.
    """

    def __init__(
        self, console: Console | None = None, has_bars: bool = True, first_seconds: float = FIRST_SECONDS
    ) -> None:
        self._first_seconds = first_seconds
        self._console = console or Console(stderr=True)
        self._has_bars = has_bars and self._console.is_terminal and not self._console.is_dumb_terminal
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._handlers: list[logging.StreamHandler[Any]] = []
        self._lines: StageLines | None = None
        self._phase = ""

    def show(self, stage: str | LoadProgress) -> None:
        """Show a stage of loading: one that is only a name, or how far it is."""
        if self._has_bars:
            self._show_bar(stage)
            return
        if self._lines is None:
            self._lines = StageLines(first_seconds=self._first_seconds)
            self._lines.start()
        self._lines.show(stage)

    def show_bytes(self, phase: str) -> Callable[[int, int], None]:
        """Return a callback for (bytes done, bytes in total) that shows each new percentage of a phase."""
        began, percent = time.monotonic(), -1

        def progress(done: int, total: int) -> None:
            nonlocal percent
            stage = LoadProgress(phase, done, total, elapsed_seconds=time.monotonic() - began)
            if stage.percent != percent:
                percent = stage.percent
                self.show(stage)

        return progress

    def close(self) -> None:
        if self._lines is not None:
            self._lines.stop()
            self._lines = None
        if self._bar is None:
            return
        self._bar.stop()
        self._bar = self._task = None
        for handler in self._handlers:
            handler.setStream(sys.stderr)
        self._handlers.clear()

    def _show_bar(self, stage: str | LoadProgress) -> None:
        if self._bar is None:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[layers]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.start()
            self._log_above()
        phase = stage.phase if isinstance(stage, LoadProgress) else stage
        if self._task is None or phase != self._phase:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._phase, self._task = phase, self._bar.add_task(phase, total=None, layers="")
        if isinstance(stage, LoadProgress):
            layers_done = f"{stage.done_layers}/{stage.num_layers} layers" if stage.num_layers else ""
            self._bar.update(self._task, completed=stage.done_bytes, total=stage.total_bytes, layers=layers_done)
        self._bar.refresh()

    def _log_above(self) -> None:
        """Let log lines appear above the bar: written directly, they would be overwritten by it."""
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
                self._handlers.append(handler)
                handler.setStream(FileProxy(self._console, sys.stderr))


class StageLines:
    """Log lines of stages: one when a stage has lasted `first_seconds`, and then one every `LOG_SECONDS`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, first_seconds: float = FIRST_SECONDS) -> None:
        self._first_seconds = first_seconds
        self._clock = clock
        self._stopped = Event()
        self._stage: tuple[str | LoadProgress, float] | None = None  # with the time at which it began
        self._logged_at: float | None = None
        self._thread = Thread(target=self._run, name="armature-progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def show(self, stage: str | LoadProgress) -> None:
        """Take the present stage. One of the same name goes on: `calibrating: int8` after `calibrating: bf16`."""
        if self._stage is None or _name(stage) != _name(self._stage[0]):
            if self._first_seconds == 0:
                self._log(stage, 0.0)
            self._logged_at = self._clock() if self._first_seconds == 0 else None
            self._stage = (stage, self._clock())
        else:
            self._stage = (stage, self._stage[1])

    def tick(self) -> None:
        if self._stage is None:
            return
        (stage, began), now = self._stage, self._clock()
        due = began + self._first_seconds if self._logged_at is None else self._logged_at + LOG_SECONDS
        if now < due:
            return
        self._logged_at = now
        self._log(stage, now - began)

    @staticmethod
    def _log(stage: str | LoadProgress, seconds: float) -> None:
        if isinstance(stage, LoadProgress):
            log.info("%s", stage.description)
        else:
            log.info("%s, for %.0f s so far", stage, seconds)

    def _run(self) -> None:
        while not self._stopped.wait(TICK_SECONDS):
            self.tick()


def _name(stage: str | LoadProgress) -> str:
    return stage.phase if isinstance(stage, LoadProgress) else stage.partition(":")[0].partition(",")[0]


@contextmanager
def command_progress(command: str) -> Iterator[StartConsole]:
    """Yield the progress of a command: a bar on a terminal, else lines that begin with the command's name."""
    lines = logging.getLogger(StartConsole.__module__)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"armature {command}: %(message)s"))
    lines.addHandler(handler)
    before = lines.level
    lines.setLevel(logging.INFO)
    try:
        with closing(StartConsole()) as console:
            yield console
    finally:
        lines.setLevel(before)
        lines.removeHandler(handler)
