"""What an installation says: a line at the end of each phase, and at most five seconds apart one on what runs.

On a terminal the latter line is rewritten in place. Only the standard library is needed, because this runs before
anything is installed.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

SECONDS_BETWEEN_LINES = 5.0  # of a log; a terminal's line changes ten times as often
KEPT_LINES = 40  # of a program's output, printed if it fails

# What a line of pip, uv, ninja or make says about its progress.
_DETAILS = (
    (re.compile(r"\[(\d+)/(\d+)\] "), r"\1 of \2 files"),
    (re.compile(r"\[ *(\d+%)\] "), r"\1"),
    (re.compile(r"(?:Collecting|Requirement already satisfied:) ([\w.\-]+)"), r"\1"),
    (re.compile(r" *(?:Downloading|Using cached) (?:\S*/)?([\w.]+-[\w.+!]+?)-\S+ \(([^)]+)\)"), r"downloading \1, \2"),
    (re.compile(r" *Downloading ([\w.\-]+) \(([^)]+)\)"), r"downloading \1, \2"),
    (re.compile(r"Installing collected packages: .*"), "unpacking"),
    (re.compile(r"(?:Prepared|Resolved|Installed) \d+ packages?"), r"\g<0>"),
)
_BYTES = re.compile(r"Progress (\d+) of (\d+)")


class Failed(Exception):
    """A phase cannot be finished. The message says why, for people."""


@dataclass(eq=False, slots=True)
class Phase:
    """One phase. `result` is added to its last line, `detail` to the lines while it runs."""

    name: str
    began: float = field(default_factory=time.monotonic)
    detail: str = ""
    result: str = ""

    def hear(self, line: str) -> None:
        """Take the detail from a program's line of output, if it has one."""
        if loaded := _BYTES.match(line):
            percent = 100 * int(loaded[1]) // max(1, int(loaded[2]))
            self.detail = f"{self.detail.partition(': ')[0]}: {percent}%"
            return
        for pattern, words in _DETAILS:
            if found := pattern.match(line):
                self.detail = found.expand(words)
                return


class Progress:
    """The phases of one installation. They may run at the same time, in threads."""

    def __init__(self, phases: int, out: TextIO | None = None, interval: float = SECONDS_BETWEEN_LINES) -> None:
        self._out = out or sys.stdout
        self._phases, self._ended = phases, 0
        self._rewrites = self._out.isatty() and os.environ.get("TERM") != "dumb"
        self._interval = interval / 10 if self._rewrites else interval
        self._running: list[Phase] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._lock, self._over, self._stopped = threading.RLock(), threading.Event(), False
        self._spoke = self._began = time.monotonic()

    def __enter__(self) -> Progress:
        threading.Thread(target=self._tick, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the programs that still run: there are some only after a failure or Ctrl-C."""
        self._over.set()
        with self._lock:
            self._stopped = True
            left = [each for each in self._processes if each.poll() is None]
        for process in left:
            process.terminate()
        for process in left:
            process.wait()
        self._clear()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Run a phase, and print its line when it has succeeded."""
        phase = Phase(name)
        with self._lock:
            self._running.append(phase)
        try:
            yield phase
        except BaseException:
            with self._lock:
                self._running.remove(phase)
            raise
        with self._lock:
            self._running.remove(phase)
            self._ended += 1
            result = f", {phase.result}" if phase.result else ""
            number = f"[{self._ended}/{self._phases}]"
            self.say(f"{number} {phase.name}: {time.monotonic() - phase.began:.0f} s{result}")

    def say(self, line: str) -> None:
        with self._lock:
            self._clear()
            print(line, file=self._out, flush=True)
            self._spoke = time.monotonic()

    def run(
        self, phase: Phase, command: Sequence[str | Path], environment: Mapping[str, str] | None = None
    ) -> list[str]:
        """Run a program, and return the last lines of its output, which are also in the message of `Failed`."""
        everything = {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
        with self._lock:
            if self._stopped:
                raise Failed("interrupted")
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
                errors="replace", env=everything,
            )  # fmt: skip
            self._processes.append(process)
        lines: deque[str] = deque(maxlen=KEPT_LINES)
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                phase.hear(line)
                if not _BYTES.match(line):
                    lines.append(line.rstrip())
        if status := process.wait():
            said = "\n".join(lines)
            raise Failed(
                f"{said}\n{phase.name}: {Path(command[0]).name} ended with status {status}; see its output above."
            )
        return list(lines)

    def _tick(self) -> None:
        while not self._over.wait(self._interval):
            with self._lock:
                if self._running and (self._rewrites or time.monotonic() - self._spoke >= 0.9 * self._interval):
                    self._show()

    def _show(self) -> None:
        parts = [f"{each.name} ({each.detail})" if each.detail else each.name for each in self._running]
        line = f"      {time.monotonic() - self._began:.0f} s: {'; '.join(parts)}"
        if not self._rewrites:
            self.say(line)
            return
        width = os.get_terminal_size(self._out.fileno()).columns
        print(f"\r\x1b[K{line[: width - 1]}", end="", file=self._out, flush=True)

    def _clear(self) -> None:
        if self._rewrites:
            print("\r\x1b[K", end="", file=self._out, flush=True)
