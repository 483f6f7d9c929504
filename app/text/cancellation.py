"""Cancellation of work on a thread of a pool, which the event loop cannot interrupt.

The loop sets the flag of the work's context. The work asks for it between steps that are short.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar

CANCELLED: ContextVar[threading.Event | None] = ContextVar("cancelled", default=None)


class WorkCancelled(Exception):
    """The result is not needed any more."""


def stop_if_cancelled() -> None:
    """Raise `WorkCancelled` if the flag of this context is set."""
    flag = CANCELLED.get()
    if flag is not None and flag.is_set():
        raise WorkCancelled
