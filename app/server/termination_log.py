"""The Kubernetes termination message: one line on why the process ended, in a file that the kubelet creates."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from app.errors import ArmatureError

FILE = Path("/dev/termination-log")  # the default of a pod's `terminationMessagePath`
MAX_BYTES = 4096  # Kubernetes reads no more


class TerminationMessage:
    """Writes the message of any exception that passes through; `SystemExit` and `KeyboardInterrupt` are ignored."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            write_reason(error.message if isinstance(error, ArmatureError) else describe_exception(error))


def write_reason(reason: str) -> None:
    """Write a reason to the termination log, as one line of at most `MAX_BYTES`."""
    message = one_line(reason).encode(errors="replace")[:MAX_BYTES].decode(errors="ignore")
    with suppress(OSError):  # the file is never created here: it may be absent or not writable
        descriptor = os.open(FILE, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(message)


def describe_exception(error: BaseException) -> str:
    """Return an exception with its class, such as `OSError: [Errno 5] Input/output error`."""
    return f"{type(error).__name__}: {one_line(str(error))}".removesuffix(": ")


def one_line(text: str) -> str:
    return " ".join(text.split())
