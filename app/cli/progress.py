"""Progress of a command on standard error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

from app.server.start_console import StartConsole


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
