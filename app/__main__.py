"""Run the command `armature` with `python -m app`.

The first process of a container ignores every signal for which it has set no handler (Linux gives PID 1 no default
action). The handler for SIGTERM is therefore set before anything else is imported.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType


def run() -> int:
    """Run the command line and return its exit status."""
    signal.signal(signal.SIGTERM, _exit_on_signal)
    from app.hardware.imports import collection_paused

    with collection_paused():
        from app.cli.main import main

    return main()


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # 128 + signal, as in shells; a server whose port is open handles SIGTERM itself


if __name__ == "__main__":
    sys.exit(run())
