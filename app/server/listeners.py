"""The sockets on which the server listens: TCP ports of several addresses, and UNIX sockets."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
import stat
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from app.api.access import client_network
from app.api.http_protocol import BoundedProtocol
from app.errors import SettingsInvalid
from app.settings import unix_path_of

log = logging.getLogger(__name__)

BACKLOG = 2048  # connections that wait while the loop is busy; uvicorn's default
MAX_PORT_TRIES = 8  # free ports of the first address that are tried on the others
UNIX_UMASK = 0o117  # the socket's file has mode 0660: its user and its group may connect
TLS_HANDSHAKE_SECONDS = 20.0
ACCEPT_RETRY_SECONDS = 1.0  # after the process had no descriptor left
_ABSENT = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)  # this machine has no such protocol or address
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True, slots=True)
class UnixSocketFile:
    """The file of a listening UNIX socket. It is removed only if nobody has replaced it."""

    path: Path
    device: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> UnixSocketFile:
        found = path.lstat()
        return cls(path, found.st_dev, found.st_ino)

    def remove(self) -> None:
        with suppress(OSError):
            if self.of(self.path) == self:
                self.path.unlink()


@dataclass(frozen=True, slots=True)
class Listeners:
    sockets: tuple[socket.socket, ...]
    files: tuple[UnixSocketFile, ...] = ()

    def urls(self, has_tls: bool = False) -> list[str]:
        return [url_of(each, has_tls) for each in self.sockets]

    def remove_files(self) -> None:
        for file in self.files:
            file.remove()

    def close(self) -> None:
        for each in self.sockets:
            each.close()
        self.remove_files()


def listen(hosts: Sequence[str], port: int) -> Listeners:
    """Open the port on each address, so that clients and probes can connect from the first moment.

    A name stands for all its addresses that this machine has. `::` serves IPv4 too, unless `0.0.0.0` is listed. With
    port 0, all addresses have the same free port. Raises `SettingsInvalid`.
    """
    for _ in range(MAX_PORT_TRIES if port == 0 else 1):
        opened: list[socket.socket] = []
        files: list[UnixSocketFile] = []
        failure: OSError | None = None
        host, chosen = "", port
        try:
            for host in hosts:
                if (path := unix_path_of(host)) is not None:
                    opened.append(_listen_unix(path))
                    files.append(UnixSocketFile.of(path))
                    continue
                opened += (
                    _listen_tcp(host, chosen, is_alone="0.0.0.0" not in hosts) if host else _listen_everywhere(chosen)
                )
                chosen = opened[-1].getsockname()[1]
        except OSError as error:
            failure = error
        if failure is None:
            return Listeners(tuple(opened), tuple(files))
        Listeners(tuple(opened), tuple(files)).close()
        if not (port == 0 and chosen and failure.errno == errno.EADDRINUSE):
            break
    what = host if unix_path_of(host) is not None else f"{host or 'all addresses'} port {chosen}"
    raise SettingsInvalid(f"Cannot listen on {what}: {failure}. Choose others with --host and --port.") from failure


def _listen_everywhere(port: int) -> list[socket.socket]:
    """Return a listening socket for all addresses of both protocols, or of IPv4 if there is no IPv6."""
    try:
        return _listen_tcp("::", port, is_alone=True)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        return _listen_tcp("0.0.0.0", port, is_alone=True)


def _listen_tcp(host: str, port: int, is_alone: bool) -> list[socket.socket]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:
        raise OSError("this is no name of a host") from error
    opened: list[socket.socket] = []
    failures: list[OSError] = []
    for family, address in dict.fromkeys((each[0], each[4]) for each in found):
        try:
            opened.append(_open_port(family, address, port, is_alone))
        except OSError as error:
            failures.append(error)
            if error.errno not in _ABSENT:
                for each in opened:
                    each.close()
                raise
        if opened and not port:
            port = opened[0].getsockname()[1]
    if not opened:
        raise failures[0]
    return opened


def _open_port(family: int, address: tuple[object, ...], port: int, is_alone: bool) -> socket.socket:
    given = (address[0], port, *address[2:])
    is_both = family == socket.AF_INET6 and address[0] == "::" and is_alone and socket.has_dualstack_ipv6()
    return socket.create_server(given, family=family, backlog=BACKLOG, dualstack_ipv6=is_both)


def _listen_unix(path: Path) -> socket.socket:
    if _is_stale(path):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(UNIX_UMASK)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


def _is_stale(path: Path) -> bool:
    """Return True for a socket at which nobody listens, False without a file. Raises `OSError`."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "this file exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)  # a server whose queue is full is one too
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return True
        except BlockingIOError:
            pass
    raise OSError(errno.EADDRINUSE, "another server listens there")


def url_of(listener: socket.socket, has_tls: bool = False) -> str:
    """Return the URL of a listening socket; IPv6 hosts are bracketed. One of a UNIX socket is `unix:PATH`."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if has_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class Handshake:
    """A connection whose TLS handshake is not complete. It counts as an idle connection."""

    def __init__(self, connection: socket.socket, protocol: BoundedProtocol) -> None:
        self.address: Hashable = client_network(connection.getpeername())
        self.connection, self.protocol, self._limits = connection, protocol, protocol.limits
        protocol.on_connected = self.end
        self.task: asyncio.Task[None] | None = None
        self._is_counted = False

    def begin(self, task: asyncio.Task[None]) -> None:
        """Count the connection while the task runs the handshake."""
        self.task, self._is_counted = task, True
        if self._limits.enter(self):
            self._limits.idle[self] = None

    def end(self) -> None:
        """Count the connection no longer: the handshake has failed, or the HTTP connection counts itself."""
        if self._is_counted:
            self._limits.leave(self)
        self._is_counted = False

    def drop(self) -> None:
        self._limits.forget(self)
        if self.task is not None:
            self.task.cancel()

    refuse = drop  # nothing can be said before the handshake


@dataclass
class TlsListener:
    """A TCP listener whose connections are counted before the TLS handshake, unlike with asyncio's server."""

    listener: socket.socket
    context: ssl.SSLContext
    make_protocol: Callable[[], BoundedProtocol]
    _handshakes: set[Handshake] = field(default_factory=set)

    def start(self) -> None:
        """Accept connections from now on."""
        self.listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self.listener.fileno(), self._accept)

    def close(self) -> None:
        if self.listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self.listener.fileno())
            self.listener.close()
        for handshake in tuple(self._handshakes):
            handshake.drop()

    async def wait_closed(self) -> None:
        """Return at once; uvicorn calls it."""

    def _accept(self) -> None:
        for _ in range(BACKLOG):
            try:
                connection, _ = self.listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._pause()
                return
            connection.setblocking(False)
            try:
                handshake = Handshake(connection, self.make_protocol())
            except OSError:  # the client has left already
                connection.close()
                continue
            self._handshakes.add(handshake)
            task = asyncio.get_running_loop().create_task(self._serve(handshake))
            task.add_done_callback(partial(self._end, handshake))
            handshake.begin(task)

    def _pause(self) -> None:
        """Accept nothing for a moment: the process has no descriptor left."""
        log.warning("no connection can be accepted: too many files are open")
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.listener.fileno())
        loop.call_later(ACCEPT_RETRY_SECONDS, self._resume)

    def _resume(self) -> None:
        if self.listener.fileno() >= 0:
            self.start()

    async def _serve(self, handshake: Handshake) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: handshake.protocol,
                handshake.connection,
                ssl=self.context,
                ssl_handshake_timeout=TLS_HANDSHAKE_SECONDS,
            )
        except OSError as error:  # ssl.SSLError and timeouts are OSErrors
            log.debug("a TLS handshake has failed: %s", error)
            handshake.connection.close()

    def _end(self, handshake: Handshake, task: asyncio.Task[None]) -> None:
        """Count a handshake no longer. Its task may have been cancelled before it began."""
        self._handshakes.discard(handshake)
        handshake.end()
        if task.cancelled():
            handshake.connection.close()
