"""Why a pod's process ended, where Kubernetes looks for it: the termination message, one line in a file that the kubelet makes.

Nothing is written where there is no such file, which is everywhere but in a pod.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from app.errors import ArmatureError

FILE = Path("/dev/termination-log")  # where a pod's `terminationMessagePath` says nothing else
MOST_BYTES = 4096  # that Kubernetes reads of it


class ReasonLeft:
    """Whatever exception passes through leaves its reason there; a stop or an exit is none."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, Exception):
            leave(error.message if isinstance(error, ArmatureError) else named(error))


def leave(reason: str) -> None:
    line = one_line(reason).encode(errors="replace")[:MOST_BYTES].decode(errors="ignore")
    with suppress(OSError):  # never made by us: there is none, or it is not ours to write
        descriptor = os.open(FILE, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(line)


def named(error: BaseException) -> str:
    """What is no sentence of ours: `OSError: [Errno 5] Input/output error`."""
    return f"{type(error).__name__}: {one_line(str(error))}".removesuffix(": ")


def one_line(text: str) -> str:
    return " ".join(text.split())
