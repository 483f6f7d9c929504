"""Bounds that all connections of a server share: their number, and the bytes that wait for clients that do not read."""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol

log = logging.getLogger(__name__)

# Bytes that wait for all clients that do not read: four responses of the largest size.
MAX_UNREAD_BYTES = 256 * 2**20
# Connections beyond the limit, on which only probes and scrapers are answered.
RESERVED_CONNECTIONS = 8
REPORT_SECONDS = 10.0  # between two log lines about refused connections
_MAPPED = "::ffff:"  # IPv4 addresses as a socket for both protocols shows them


def client_network(client: tuple[str, int] | None) -> Hashable:
    """Return the client's address; of IPv6 the network of 64 bits that one client usually has.

    Empty for clients of UNIX sockets, which have no address.
    """
    address = client[0] if client else ""
    if address.startswith(_MAPPED):
        return address.removeprefix(_MAPPED)
    if ":" not in address:
        return address
    return ipaddress.ip_network((address.partition("%")[0], 64), strict=False)


class BoundedConnection(Protocol):
    address: Hashable

    def drop(self) -> None: ...

    def refuse(self) -> None:
        """Say that there are too many connections, and close this one."""


class ReadingConnection(Protocol):
    """A connection with a client that may not read."""

    @property
    def num_unsent(self) -> int:
        """Bytes that wait until the client reads."""

    def drop_slow(self, reason: str) -> None: ...


@dataclass
class ConnectionLimits:
    """Bounds of a server and their state. Used on the event loop only.

    `idle` has the connections without a request and the TLS handshakes, the longest idle first; `receiving` the
    connections with an incomplete request, the oldest first; `unread` the connections with a client that does not read,
    the longest unread first; `reserved` the connections beyond the limit. `count_error` is told status and code of
    errors that no application answers.
    """

    max_connections: int = 10_000
    write_timeout_seconds: float = 30.0
    num_connections: int = 0
    count_error: Callable[[int, str], None] = lambda status, code: None
    idle: dict[BoundedConnection, None] = field(default_factory=dict)
    receiving: dict[BoundedConnection, None] = field(default_factory=dict)
    reserved: dict[BoundedConnection, None] = field(default_factory=dict)
    unread: dict[ReadingConnection, None] = field(default_factory=dict)
    _per_address: Counter[Hashable] = field(default_factory=Counter)
    _num_refused: int = 0
    _reported_at: float = float("-inf")

    def enter(self, connection: BoundedConnection) -> bool:
        """Count a new connection, and close another one for it if there are too many.

        Return False if it is beyond the limit: then only probes may be answered on it.
        """
        self.num_connections += 1
        self._per_address[connection.address] += 1
        if self.num_connections <= self.max_connections:
            return True
        self._report()
        if (found := self._expendable()) is not None:
            found.drop()
            return True
        self.reserved[connection] = None
        if len(self.reserved) > RESERVED_CONNECTIONS:
            next(iter(self.reserved)).refuse()
        return False

    def leave(self, connection: BoundedConnection) -> None:
        self.num_connections -= 1
        self._per_address[connection.address] -= 1
        if not self._per_address[connection.address]:
            del self._per_address[connection.address]
        self.forget(connection)

    def forget(self, connection: BoundedConnection) -> None:
        """Let the connection be closed for no other one."""
        for connections in (self.idle, self.receiving, self.reserved):
            connections.pop(connection, None)

    def _expendable(self) -> BoundedConnection | None:
        """Return the connection to close for a new one.

        It is an idle one, or else one with a request that does not arrive, of the address with the most connections:
        nobody can close other clients' requests by opening connections.
        """
        most = max(self._per_address.values())
        largest = (each for each in self.idle if self._per_address[each.address] == most)
        if (found := next(largest, None) or next(iter(self.idle), None)) is not None:
            return found
        return next((each for each in self.receiving if self._per_address[each.address] == most), None)

    def bound_unread(self) -> None:
        """Close the connections that have been unread longest while too many bytes wait."""
        while self.unread and sum(each.num_unsent for each in self.unread) > MAX_UNREAD_BYTES:
            next(iter(self.unread)).drop_slow("too many bytes wait for slow clients")

    def _report(self) -> None:
        self._num_refused += 1
        now = time.monotonic()
        if now - self._reported_at >= REPORT_SECONDS:
            log.warning(
                "%d connections are open, the limit of max_connections: %d others were closed or refused. Raise the "
                "limit (and the limit of open files), or find the client that opens them.",
                self.max_connections,
                self._num_refused,
            )
            self._reported_at, self._num_refused = now, 0
