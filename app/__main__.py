"""`python -m app` is the command `armature`.

A container's first process does not hear of signals that it has asked nothing for; so it asks before it imports anything.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType


def run() -> int:
    signal.signal(signal.SIGTERM, _end)
    from app.cli import main

    return main()


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # as shells count; a server that has opened its port ends otherwise


if __name__ == "__main__":
    sys.exit(run())
