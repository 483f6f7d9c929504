"""A real uvicorn on loopback around a scripted service, raw sockets to it, and the time that its event loop is held."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from app.api.access import ConnectionLimits
from app.api.application import create_app
from app.api.routing import ApiRuntime
from app.server.listeners import listen
from app.server.process import PunctualServer, server_config, tls_context
from app.settings import Settings
from tests.api.scripted_service import CountingMetrics, Lifetime, ScriptedService

PATIENCE = 60.0  # seconds; a busy machine is no failure
JSON = b"content-type: application/json\r\n"


@dataclass
class AttackServer:
    """The server in a thread. `longest_hold` is the most CPU time of its loop's thread that one callback took, in seconds."""

    port: int
    service: ScriptedService
    server: Any
    longest_hold: float = 0.0

    @contextlib.contextmanager
    def connect(self, **options: Any) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as connection:
            for name, value in options.items():
                connection.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
            yield connection

    def ask(self, request: bytes) -> Answer:
        """Send a request that closes its connection, and read to the end."""
        with self.connect() as connection:
            connection.sendall(request)
            return Answer.of(read_all(connection))

    @staticmethod
    def release(gate: asyncio.Event) -> None:
        """Open a gate of a script as soon as it is waited at."""
        until(lambda: gate._loop is not None)  # type: ignore[attr-defined]
        gate._loop.call_soon_threadsafe(gate.set)  # type: ignore[attr-defined]

    @property
    def limits(self) -> ConnectionLimits:
        limits: ConnectionLimits = self.server.config.http_protocol_class.keywords["limits"]
        return limits

    @property
    def num_connections(self) -> int:
        return len(self.server.server_state.connections)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    interim: tuple[int, ...] = ()

    @classmethod
    def of(cls, data: bytes) -> Answer:
        interim = []
        while True:
            head, _, rest = data.partition(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").split("\r\n")
            status = int(first.split()[1])
            if status >= 200:
                headers = dict(line.lower().split(": ", 1) for line in lines)
                return cls(status, headers, rest, tuple(interim))
            interim.append(status)
            data = rest

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def read_all(connection: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while received := connection.recv(65536):
            data += received
    return data


def post(path: str, body: bytes, *lines: bytes, version: str = "1.1") -> bytes:
    head = f"POST {path} HTTP/{version}\r\nhost: x\r\ncontent-length: {len(body)}\r\n".encode()
    return head + JSON + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


def get(path: str, *lines: bytes, version: str = "1.1", method: str = "GET") -> bytes:
    return (
        f"{method} {path} HTTP/{version}\r\nhost: x\r\n".encode() + b"".join(line + b"\r\n" for line in lines) + b"\r\n"
    )


def until(condition: Callable[[], bool]) -> None:
    """Waits for what must become true, looking often."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "what had to come did not"
        time.sleep(0.005)


@contextlib.contextmanager
def attacked(
    service: Any = None,
    runtime: dict[str, Any] | None = None,
    measured: bool = False,
    send_buffer: int = 0,
    **settings: Any,
) -> Iterator[AttackServer]:
    """A server with these settings. With `measured`, it runs on asyncio's loop, whose callbacks are timed.

    With `send_buffer`, the kernel keeps about so many bytes for a client that does not read.
    """
    given = Settings(port=0, **{"drain_seconds": 0, **settings})
    service = service or ScriptedService()
    api = ApiRuntime(service, CountingMetrics(), Lifetime(), created=1, **{"info": dict, **(runtime or {})})  # type: ignore[arg-type]
    listeners = listen(given.host, given.port)
    config = server_config(create_app(api), given)
    config.loop = "asyncio" if measured else config.loop
    server = PunctualServer(config, 0.0, tls_context(given))
    server.listeners = listeners
    if send_buffer:
        listeners.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    name = listeners.sockets[0].getsockname()
    found = AttackServer(name[1] if isinstance(name, tuple) else 0, service, server)
    thread = threading.Thread(target=server.run, kwargs={"sockets": list(listeners.sockets)})
    with _timed_callbacks(found, thread) if measured else contextlib.nullcontext():
        thread.start()
        until(lambda: server.started)
        try:
            yield found
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive()


@contextlib.contextmanager
def _timed_callbacks(found: AttackServer, thread: threading.Thread) -> Iterator[None]:
    run = asyncio.events.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        if threading.get_ident() != thread.ident:
            run(handle)
            return
        began = time.thread_time()
        run(handle)
        found.longest_hold = max(found.longest_hold, time.thread_time() - began)

    asyncio.events.Handle._run = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        asyncio.events.Handle._run = run  # type: ignore[method-assign]
