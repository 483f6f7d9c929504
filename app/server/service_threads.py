"""CPUs of the threads that do not compute: the event loop, tokenizing, logging and power readings.

A thread inherits the mask of the thread that starts it. So the mask is set once, when the compute threads have theirs:
threads that the bound ones start later run there too.
"""

from __future__ import annotations

import logging
import os
import threading

log = logging.getLogger(__name__)


def bind_service_threads(cpu_ids: tuple[int, ...]) -> None:
    """Restrict all threads of this process that Python started, except the calling one, to these CPUs; empty: none.

    The compute threads are not Python's. Without the mask the server works as well, so a refusal is only logged.
    """
    if not cpu_ids:
        return
    here = threading.get_native_id()
    for thread in threading.enumerate():
        if thread.native_id is not None and thread.native_id != here:
            try:
                os.sched_setaffinity(thread.native_id, cpu_ids)
            except ProcessLookupError:
                continue  # it has ended meanwhile
            except (AttributeError, OSError, ValueError) as error:
                log.warning("threads that do not compute cannot be bound to CPUs %s: %s", list(cpu_ids), error)
                return
