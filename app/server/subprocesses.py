"""Processes of this package that belong to the server's main one: engines, and API processes beside it.

They are started by exec, not by fork, so threads and torch do not matter. Each has one end of a channel, and ends by itself
as soon as the server's end is closed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import app
from app.server.channel import Channel

FIRST_DELAY_SECONDS, MAX_DELAY_SECONDS = 1.0, 60.0  # before one is started again; it doubles each time
STEADY_SECONDS = 60.0  # of serving, after which the next end counts as the first one
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_MAIN = "import sys; sys.path.append(sys.argv[1]); from {} import main; main()"


class RestartDelay:
    """The time before a process that has ended is started again: it doubles until the process has served for a while."""

    def __init__(self) -> None:
        self.seconds = FIRST_DELAY_SECONDS

    def take(self, served_seconds: float) -> float:
        """Return the delay after an end; the process had served for so many seconds."""
        if served_seconds > STEADY_SECONDS:
            self.seconds = FIRST_DELAY_SECONDS
        delay, self.seconds = self.seconds, min(2 * self.seconds, MAX_DELAY_SECONDS)
        return delay


def launch(module: str, name: str, descriptors: Sequence[int] = ()) -> tuple[subprocess.Popen[bytes], Channel]:
    """Start `main` of a module in a process, and return it with our end of its channel.

    It finds its end's descriptor and the others, which it inherits, with `inherited_descriptors`. `ps` shows `name`.
    Raises `OSError` if there is no memory, process or file left for it.
    """
    root = str(Path(app.__file__).parent.parent)
    with ExitStack() as opened:
        ours, theirs = (opened.enter_context(end) for end in socket.socketpair())
        channel = Channel(ours, is_engine=False)
        opened.callback(channel.close)
        passed = (theirs.fileno(), *descriptors)
        command = [sys.executable, "-P", "-c", _MAIN.format(module), root, name, *map(str, passed)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=passed)
        opened.pop_all()
    theirs.close()
    return process, channel


def inherited_descriptors() -> list[int]:
    """Return the channel's descriptor and the others, in the process that `launch` has started.

    They are moved to the lowest numbers that are free: those of a server with many clients may be above 1,023, where
    `select` takes none. Call it once.
    """
    given = [int(each) for each in sys.argv[3:]]
    moved = [os.dup(each) for each in given]
    for each in given:
        os.close(each)
    return moved


def belong_to_server() -> None:
    """Let the server alone end this process, which `launch` has started.

    Signals for a whole group of processes (Ctrl-C, a stop by systemd) are ignored: open requests are still answered then.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):
            libc = ctypes.CDLL(None)
            libc.prctl(_PR_SET_NAME, sys.argv[2].encode())  # 15 characters
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def wait_for_end(process: subprocess.Popen[bytes], timeout_seconds: float) -> int:
    """Return the status of a process, which is killed if it does not end in time."""
    try:
        return process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def describe_end(process: subprocess.Popen[bytes], timeout_seconds: float) -> str:
    """Wait for the end of a process that has closed its channel, and say how it ended."""
    status = wait_for_end(process, timeout_seconds)
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return f"has ended by {how}"
