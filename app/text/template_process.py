"""Processes with limits, and the one that renders a chat template: kept warm, and started again after it ended.

A template may be written to take hours or all memory. No check of its source can exclude that, and a thread cannot be
ended. So the template is compiled and rendered in a small Python process (`text/sandbox.py`). It is started by exec, not
by fork, so threads and torch do not matter; its environment is empty, so it has no key; it opens no file. The server
waits for its answer with a limit, and kills it at any time.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

from app.errors import NotReady, ServiceStopping
from app.text.cancellation import WorkCancelled, stop_if_cancelled
from app.text.template_messages import MEMORY_MESSAGE, Reply, ReplyStatus, receive_reply, send_request

log = logging.getLogger(__name__)

# Compiling a template takes longer than rendering it: 30 to 80 ms of CPU for the longest ones in use.
COMPILE_FACTOR = 5
# The wait for an answer, per second of the CPU limit, and at least. A template never sleeps: only a busy machine makes
# the wait longer than its CPU time.
WALL_FACTOR = 25
MIN_WALL_SECONDS = 5.0
# Sum of a request and its copies (bytes, text, values) when the process has parsed it, per byte.
_COPIES = 4
_EXIT_SECONDS = 1.0  # longest wait for the status of a process that has closed its connection
_CLOSE_SECONDS = 0.05
KEPT_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ", "TZDIR")  # the interpreter's libraries; local time
_MAIN = "import sys; sys.path += sys.argv[2:]; from importlib import import_module as load; load(sys.argv[1]).main()"
_POLL_SECONDS = 0.02  # between two looks whether the client of a request has left


@dataclass(frozen=True, slots=True)
class ProcessKind:
    """A program in a process with limits.

    `name` is for messages. `module` has `main`, which serves requests on standard input. `packages` are what it imports
    besides the standard library. `environment` are its variables.
    """

    name: str
    module: str
    packages: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


_TEMPLATE = ProcessKind("The chat template's process", "app.text.sandbox", ("app", "jinja2", "markupsafe"))


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Limits of one request: CPU seconds, and bytes of memory in addition to the interpreter's."""

    cpu_seconds: float = 0.2
    memory_bytes: int = 64 * 2**20

    @property
    def wall_seconds(self) -> float:
        """Longest wait for an answer."""
        return max(MIN_WALL_SECONDS, WALL_FACTOR * self.cpu_seconds)


class TemplateProcess:
    """A template in a process of its own. Any thread may render; renderings happen one after the other."""

    def __init__(self, source: str, limits: TemplateLimits) -> None:
        """Start the process. `check` waits until it has compiled the template."""
        self._source, self._limits = source, limits
        self._lock = Lock()
        self._closed = False
        self.num_ended = 0  # processes that a rendering has ended
        self._child = self._start()

    def check(self) -> Reply:
        """Return the result of compiling the template: `TEXT`, or why it cannot be used."""
        with self._lock:
            return self._child.compiled()

    def render(self, variables: Mapping[str, Any]) -> Reply:
        """Return the rendered text, or why there is none.

        Raises:
            NotReady: The operating system could not start the process.
            ServiceStopping: `close` was called.
        """
        request = json.dumps(variables, ensure_ascii=False).encode("utf-8", "surrogatepass")
        if _COPIES * len(request) > self._limits.memory_bytes:
            return ReplyStatus.MEMORY, f"{len(request)} bytes of messages do not fit into the memory that it may take"
        with self._lock:
            if self._child.ended:
                self._child = self._start()
            reply = self._child.compiled()
            if reply[0] is ReplyStatus.TEXT:
                reply = self._child.ask(request)
            if self._child.ended and not self._closed:
                self.num_ended += 1
                log.warning("the chat template's process ended and is started again")
                with suppress(NotReady):  # the next request tries again
                    self._child = self._start()
        if self._closed:
            raise ServiceStopping("The server is stopping.")
        return reply

    def close(self) -> None:
        """End the process, and with it a rendering that another thread waits for. Nothing is rendered afterwards."""
        self._closed = True
        self._child.kill()
        while not self._lock.acquire(timeout=_CLOSE_SECONDS):
            self._child.kill()  # one that was started in the meantime
        self._child.end()
        self._lock.release()

    def _start(self) -> ChildProcess:
        if self._closed:
            raise ServiceStopping("The server is stopping.")
        return ChildProcess(_TEMPLATE, self._limits, {"source": self._source})


class ChildProcess:
    """One process, from its start to its end. The owner's lock is held for everything but `kill`."""

    def __init__(self, kind: ProcessKind, limits: TemplateLimits, start: Mapping[str, Any]) -> None:
        """Start the process. `start` is its first request, to which the limits are added.

        Raises:
            NotReady: The operating system could not start the process.
        """
        self._limits = limits
        self._connection, other = socket.socketpair()
        self._connection.settimeout(limits.wall_seconds)
        command = [sys.executable or "python3", "-I", "-S", "-B", "-c", _MAIN, kind.module]
        command += import_paths(kind.packages)
        environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        environment |= kind.environment
        try:
            self._process = subprocess.Popen(
                command, stdin=other.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
            )
        except OSError as error:
            self._connection.close()
            raise NotReady(f"{kind.name} cannot be started: {error}.") from error
        finally:
            other.close()
        self.end = weakref.finalize(self, _end, self._process, self._connection)
        self._compiled: Reply | None = None
        limited = {
            "memory_bytes": limits.memory_bytes,
            "compile_seconds": COMPILE_FACTOR * limits.cpu_seconds,
            "render_seconds": limits.cpu_seconds,
        }
        self._start_request = json.dumps({**start, **limited}).encode()

    @property
    def ended(self) -> bool:
        """True if the process cannot be asked any more."""
        return not self.end.alive

    def kill(self) -> None:
        """Kill the process, from any thread. A thread that waits for its reply sees the end of the connection."""
        self._process.kill()

    def compiled(self) -> Reply:
        """Return the reply to the first request, and wait for it the first time."""
        if self._compiled is None:
            self._compiled = self.ask(self._start_request, COMPILE_FACTOR)
            if self._compiled[0] is not ReplyStatus.TEXT:
                self.end()
        return self._compiled

    def ask(self, request: bytes, factor: int = 1, can_be_cancelled: bool = False) -> Reply:
        """Return the reply to a request. If there is none within the limits, the process is ended.

        A process that needed too much memory is ended too, because what it has is fragmented.

        Raises:
            WorkCancelled: The request can be cancelled, and its client has left; the process is ended.
        """
        try:
            send_request(self._connection, request)
            if can_be_cancelled:
                self._wait()
            reply = receive_reply(self._connection)
        except (OSError, EOFError, ValueError) as error:
            return self._failure(error, factor)
        if reply[0] is ReplyStatus.MEMORY:
            self.end()
        return reply

    def _wait(self) -> None:
        """Wait for the reply, or for the end of the process. Raises `TimeoutError`."""
        until = time.monotonic() + self._limits.wall_seconds
        waiting = select.poll()
        waiting.register(self._connection, select.POLLIN)
        while not waiting.poll(1000 * _POLL_SECONDS):
            try:
                stop_if_cancelled()
            except WorkCancelled:
                self.end()
                raise
            if time.monotonic() > until:
                raise TimeoutError

    def _failure(self, error: Exception, factor: int) -> Reply:
        """End the process, and return why it did not answer."""
        if not isinstance(error, TimeoutError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_SECONDS)
        self.end()
        if self._process.returncode == -signal.SIGPROF:
            return (
                ReplyStatus.STOPPED,
                f"it takes more than {1000 * factor * self._limits.cpu_seconds:.0f} ms of CPU time",
            )
        if self._process.returncode == -signal.SIGABRT:  # code in Rust or C that gets no memory ends so
            return ReplyStatus.MEMORY, MEMORY_MESSAGE
        if isinstance(error, TimeoutError):
            return ReplyStatus.STOPPED, f"it did not answer within {self._limits.wall_seconds:.0f} s"
        return ReplyStatus.FAILED, f"its process ended with status {self._process.returncode}"


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    """End a process and wait for it, so that it leaves no zombie. It ends within milliseconds after SIGKILL."""
    process.kill()
    process.wait()
    connection.close()


def import_paths(packages: Sequence[str]) -> list[str]:
    """Return the folders that have the packages; the process reads no other part of the environment."""
    found = [find_spec(name) for name in packages]
    return list(dict.fromkeys(str(Path(spec.origin).parent.parent) for spec in found if spec and spec.origin))
