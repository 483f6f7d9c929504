"""Processes with limits, in which the code of a client or of a checkpoint runs, and what both ends of one share.

Code may be written to take hours or all memory. No check of its source can exclude that, and a thread cannot be ended.
So it runs in a small Python process, started by exec, not by fork, so threads and torch do not matter. Its environment
is empty, so it has no key; it opens no file. The server waits with a limit, and kills it at any time.

A message has its length in front: a request is `length, JSON`, a reply is `status, length, UTF-8 text`.

Programs of such processes import this module, so it imports the standard library and `app.errors` alone.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from app.errors import ArmatureError, NotReady

# Compiling a template takes longer than rendering it: 30 to 80 ms of CPU for the longest ones in use.
COMPILE_FACTOR = 5
# The wait for an answer, per second of the CPU limit, and at least. A template never sleeps: only a busy machine makes
# the wait longer than its CPU time.
WALL_FACTOR = 25
MIN_WALL_SECONDS = 5.0
_EXIT_SECONDS = 1.0  # longest wait for the status of a process that has closed its connection
_KEPT_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ", "TZDIR")  # the interpreter's libraries; local time
_MAIN = "import sys; sys.path += sys.argv[2:]; from importlib import import_module as load; load(sys.argv[1]).main()"
_POLL_SECONDS = 0.02  # between two looks whether the client of a request has left

# Set where the client of this context's work has left: the event loop cannot interrupt a thread, so the work asks.
CANCELLED: ContextVar[threading.Event | None] = ContextVar("cancelled", default=None)


class WorkCancelled(Exception):
    """The result is not needed any more."""


def stop_if_cancelled() -> None:
    flag = CANCELLED.get()
    if flag is not None and flag.is_set():
        raise WorkCancelled


def is_rust_panic(kind: type[BaseException] | None) -> bool:
    """Return True if an exception of this class is a panic of a library in Rust."""
    return kind is not None and (kind.__module__, kind.__name__) == ("pyo3_runtime", "PanicException")


class ConvertRustErrors:
    """Convert plain `Exception` and panics into an error of ours; other exceptions pass.

    `make` returns the error for a message, which is `sentence` and the library's own text.
    """

    def __init__(self, make: Callable[[str], ArmatureError], sentence: str) -> None:
        self._make, self._sentence = make, sentence

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is Exception or is_rust_panic(kind):
            raise self._make(f"{self._sentence}: {error}") from error


def limit_memory(extra_bytes: int) -> None:
    """Allow this process `extra_bytes` more than it has, on Linux.

    macOS reserves hundreds of GB of addresses for each process, so only the time limit and the sandbox's bounds are
    left.
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


# More than any context: 1 Mi tokens of four characters. It ends a template that writes without end.
MAX_RENDERED_CHARACTERS = 4 * 2**20

_REQUEST_HEADER = struct.Struct("!I")
_REPLY_HEADER = struct.Struct("!BI")
_SHORT_REPLY_BYTES = 16 * 1024
_MAX_UTF8_BYTES = 4  # per character


MEMORY_MESSAGE = "it needs more memory than it may take"


class ReplyStatus(IntEnum):
    """First byte of a reply. With all but `TEXT` the text is a message."""

    TEXT = 0  # the rendered text, or a grammar's definition; empty after the start
    REFUSED = 1  # the template called `raise_exception`, or the grammar is wrong
    STOPPED = 2  # the sandbox or a limit stopped it
    FAILED = 3  # any other exception
    MEMORY = 4  # it needs more memory than it may take


Reply = tuple[ReplyStatus, str]


def send_request(connection: socket.socket, request: bytes) -> None:
    """Send a request. Raises `OSError` if the connection failed, or its timeout has passed."""
    connection.sendall(_REQUEST_HEADER.pack(len(request)) + request)


def receive_request(connection: socket.socket) -> bytearray:
    """Return the next request. Raises `EOFError` if the server has closed the connection."""
    (length,) = _REQUEST_HEADER.unpack(_receive(connection, _REQUEST_HEADER.size))
    return _receive(connection, length)


def send_reply(connection: socket.socket, reply: Reply) -> None:
    status, text = reply
    content = text.encode("utf-8", "surrogatepass")
    connection.sendall(_REPLY_HEADER.pack(status, len(content)) + content)


def serve_requests(connection: socket.socket, cpu_seconds: float, answer: Callable[[Any], Reply]) -> None:
    """Answer requests until the server closes the connection. The kernel ends the process if one takes longer."""
    while True:
        signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            request = receive_request(connection)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        send_reply(connection, answer(request))


def receive_reply(connection: socket.socket) -> Reply:
    """Return the next reply.

    Raises `EOFError` at the end of the process, `OSError` if the connection failed or its timeout has passed,
    `ValueError` for anything but a reply.
    """
    # Nothing follows a reply, so one call returns all of a short one.
    received = connection.recv(_SHORT_REPLY_BYTES)
    if len(received) < _REPLY_HEADER.size:
        received += _receive(connection, _REPLY_HEADER.size - len(received)) if received else b""
    if not received:
        raise EOFError
    status, length = _REPLY_HEADER.unpack_from(received)
    if length > _MAX_UTF8_BYTES * MAX_RENDERED_CHARACTERS:
        raise ValueError("the reply is longer than any text that the sandbox renders")
    content = received[_REPLY_HEADER.size :]
    if len(content) > length:
        raise ValueError("the reply is longer than its header says")
    content += _receive(connection, length - len(content))
    return ReplyStatus(status), content.decode("utf-8", "surrogatepass")


def _receive(connection: socket.socket, length: int) -> bytearray:
    content = bytearray(length)
    rest = memoryview(content)
    while rest:
        received = connection.recv_into(rest)
        if not received:
            raise EOFError
        rest = rest[received:]
    return content


@dataclass(frozen=True, slots=True)
class ProcessKind:
    """A program in a process with limits.

    `module` has `main`, which serves requests on standard input. `packages` are its imports besides the standard
    library.
    """

    name: str
    module: str
    packages: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        """The command with its arguments: the only folders with packages that the process reads."""
        found = [find_spec(name) for name in self.packages]
        folders = dict.fromkeys(str(Path(spec.origin).parent.parent) for spec in found if spec and spec.origin)
        return [sys.executable or "python3", "-I", "-S", "-B", "-c", _MAIN, self.module, *folders]

    @property
    def variables(self) -> dict[str, str]:
        return {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ} | dict(self.environment)


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Limits of one request: CPU seconds, and bytes of memory in addition to the interpreter's."""

    cpu_seconds: float = 0.2
    memory_bytes: int = 64 * 2**20

    @property
    def wall_seconds(self) -> float:
        return max(MIN_WALL_SECONDS, WALL_FACTOR * self.cpu_seconds)


class ChildProcess:
    """One process, from its start to its end. The owner's lock is held for everything but `kill`."""

    def __init__(self, kind: ProcessKind, limits: TemplateLimits, start: Mapping[str, Any]) -> None:
        """Start the process. `start` is its first request, to which the limits are added. Raises `NotReady`."""
        self._limits = limits
        self._connection, other = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                kind.command,
                stdin=other.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=kind.variables,
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
        """Return the reply to a request. If there is none within the limits, times `factor`, the process is ended.

        A process that needed too much memory is ended too, because what it has is fragmented. Raises `WorkCancelled` if
        the client has left; the process is ended.
        """
        wall_seconds = factor * self._limits.wall_seconds
        try:
            self._connection.settimeout(wall_seconds)
            send_request(self._connection, request)
            if can_be_cancelled:
                self._wait(wall_seconds)
            reply = receive_reply(self._connection)
        except (OSError, EOFError, ValueError) as error:
            return self._failure(error, factor)
        if reply[0] is ReplyStatus.MEMORY:
            self.end()
        return reply

    def _wait(self, seconds: float) -> None:
        """Wait for the reply, or for the end of the process. Raises `TimeoutError`."""
        until = time.monotonic() + seconds
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
            return ReplyStatus.STOPPED, f"it did not answer within {factor * self._limits.wall_seconds:.0f} s"
        return ReplyStatus.FAILED, f"its process ended with status {self._process.returncode}"


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    """End a process and wait for it, so that it leaves no zombie. It ends within milliseconds after SIGKILL."""
    process.kill()
    process.wait()
    connection.close()
