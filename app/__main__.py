"""Run the command `armature` with `python -m app`.

The first process of a container ignores every signal for which it has set no handler (Linux gives PID 1 no default
action). The handler for SIGTERM is therefore set before anything else is imported. Ctrl-C ends the process without a
traceback while modules are imported: nothing is to be cleaned up then.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def run() -> int:
    signal.signal(signal.SIGTERM, _exit_on_signal)
    takes_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a background job ignores them
    if takes_interrupts:
        signal.signal(signal.SIGINT, _exit_at_once)
    from app.hardware.imports import collection_paused

    with collection_paused():
        from app.cli.main import main

    if takes_interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return main()


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # 128 + signal, as in shells; a server whose port is open handles SIGTERM itself


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)  # an exception inside an import may be caught there


if __name__ == "__main__":
    sys.exit(run())
