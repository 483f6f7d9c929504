"""Limits that a process for a client's or a checkpoint's code sets itself before it begins."""

from __future__ import annotations

import resource
import signal
from contextlib import suppress
from pathlib import Path


def limit_memory(extra_bytes: int) -> None:
    """Allow this process `extra_bytes` more than it has, on Linux.

    macOS reserves hundreds of GB of addresses for each process, so no limit of addresses fits there. The time limit and
    the sandbox's own bounds are what is left.
    """
    pages = 0
    with suppress(OSError, ValueError, IndexError):  # /proc may be masked
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    if pages:
        limit = pages * resource.getpagesize() + extra_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with suppress(OSError):  # where memory is short, the kernel should end this process and not the server
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def give_up_rights() -> None:
    """Take from this process what code that left its sandbox could use: files, processes and core dumps.

    Signals for a whole group of processes (Ctrl-C, a stop by systemd) are ignored, because open requests are still
    answered then. The server ends this process by closing the socket.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))  # standard input, output and error
