"""The command on a pseudo-terminal, for tests that type and read as a user does."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.live.live_server import PATIENCE, until


class Terminal:
    """A program on a pseudo-terminal: what it shows, and what a user types."""

    def __init__(self, *words: str) -> None:
        self._end, self._theirs = pty.openpty()
        # The first terminal that the leader of a session opens becomes the one whose Ctrl-C it gets.
        opened = ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(self._theirs)]
        environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            [*opened, sys.executable, "-m", "app", *words], env=environment, start_new_session=True
        )
        self._shown = ""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def interrupt_input(self) -> None:
        """Type Ctrl-C at a prompt, once the program waits there.

        Python's readline notices a signal between its prompt and its wait only with the next key.
        """
        state = Path(f"/proc/{self.process.pid}/stat")
        if state.exists():
            until(lambda: state.read_text().rpartition(") ")[2].startswith("S"))
        self.type("\x03")

    def wait_for(self, words: str) -> str:
        """Read until the words are shown, and return what was shown up to them."""
        deadline = time.monotonic() + PATIENCE
        while words not in self._shown:
            assert time.monotonic() < deadline, (words, self._shown)
            if select.select([self._end], [], [], 0.1)[0]:
                self._shown += os.read(self._end, 4096).decode(errors="replace")
        before, _, self._shown = self._shown.partition(words)
        return before

    def status(self) -> int:
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._theirs)
        os.close(self._end)


@contextmanager
def pseudo_terminal(*words: str) -> Iterator[Terminal]:
    shown = Terminal(*words)
    try:
        yield shown
    finally:
        shown.close()
