"""Access to the API: host names, keys and rate limits, checked before a body is read, and the bounds on connections."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from starlette.types import Scope

from app.errors import InvalidRequest, StartupError, Unauthorized
from app.service.rate_limit import ClientAccount, RateLimiter

# A path that answers without a key too, and then tells less.
PARTLY_PUBLIC_PATH = "/info"


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Rules of the operator.

    Rates are for each key, or address without one; None: unlimited. Host names may begin with `*.`; none: any host.
    With `only_loopback`, only names of this machine's loopback addresses are answered, on every route. Origins are
    other sites' web pages; `*`: all.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    allowed_hosts: tuple[str, ...] = ()
    only_loopback: bool = False
    cors_allow_origins: tuple[str, ...] = ()


NO_RULES = AccessRules()
# `uri-host [":" port]` of RFC 9110, section 7.2: an IPv6 address in brackets, or a name without a user and a path.
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._~!$&'()*+;=%-]+))(?::[0-9]{0,5})?")
_MAX_HOST_BYTES = 300  # a name has 253
_KNOWN_HOSTS = 64  # headers whose check is remembered
# A file that was changed so recently may change again without another time of change.
_RECENT_SECONDS = 2.0

log = logging.getLogger(__name__)


def host_name(text: str) -> str | None:
    """Return a `Host` header or a setting in one spelling, without port and final dot; None if it names no host."""
    found = _HOST.fullmatch(text.lower()) if len(text) <= _MAX_HOST_BYTES else None
    if found is None:
        return None
    if found[2] is not None:
        return str(found[2]).removesuffix(".") or None
    try:
        return str(ipaddress.IPv6Address(found[1]))
    except ValueError:
        return None


def is_loopback_name(name: str) -> bool:
    """Return True for localhost, names below it, and loopback addresses. No web page's name is among them."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


class ApiKeys:
    """Hashes of the keys that clients may send. They follow changes of `files`; none: the keys never change.

    `read` returns all keys, for several models each with the names of the models that it may use, and raises a
    `StartupError` if a file has none.
    """

    def __init__(self, read: Callable[[], Collection[str] | Mapping[str, frozenset[str]]], *files: Path) -> None:
        self._read, self._files = read, files
        self._seen, self._is_recent, self._failure = self._signatures(), bool(files), ""
        self._models = self._read_hashes()

    def __len__(self) -> int:
        return len(self._models)

    def current(self) -> Mapping[bytes, frozenset[str] | None]:
        """Return the hashes of the present keys, with their models; None: all. Bad files leave the keys as they were."""
        if self._files:
            found = self._signatures()
            if found != self._seen or self._is_recent:
                self._seen = found
                changed = max((one[0] for one in found if one is not None), default=0)
                self._is_recent = time.time() - changed / 1e9 < _RECENT_SECONDS
                self.read()
        return self._models

    def read(self) -> None:
        """Read the keys now; log it if they have changed, or why they cannot be used."""
        try:
            now = self._read_hashes()
        except StartupError as error:
            if error.message != self._failure:
                log.error("the API keys stay as they were: %s", error.message)
            self._failure = error.message
            return
        self._failure = ""
        if now != self._models:
            added, removed = len(now.keys() - self._models.keys()), len(self._models.keys() - now.keys())
            log.warning("the API keys have changed: %d are new, %d are no longer accepted", added, removed)
        self._models = now

    def _read_hashes(self) -> dict[bytes, frozenset[str] | None]:
        keys = self._read()
        models = keys if isinstance(keys, Mapping) else dict.fromkeys(keys)
        return {_hash(key.encode()): names for key, names in models.items()}

    def _signatures(self) -> list[tuple[int, int, int] | None]:
        found: list[tuple[int, int, int] | None] = []
        for file in self._files:
            try:
                status = file.stat()
                found.append((status.st_mtime_ns, status.st_ino, status.st_size))
            except OSError:
                found.append(None)
        return found


class ClientLimiter(Protocol):
    """The accounts of clients: of this process, or of the main process."""

    async def admit(self, client: Hashable) -> ClientAccount:
        """Take one request of the client and return its account. Raises `RateLimited`."""


class AccessControl:
    """Check of each request's head.

    If there is no key at the start, none is needed. `public` has method and path of requests that need no key and
    follow no rule.
    """

    def __init__(
        self,
        rules: AccessRules,
        api_keys: ApiKeys | Collection[str],
        public: Collection[tuple[str, str]],
        limiter: ClientLimiter | None = None,
    ) -> None:
        self._public, self._only_loopback = public, rules.only_loopback
        self._hosts = tuple(_pattern(name) for name in rules.allowed_hosts)
        self._keys = api_keys if isinstance(api_keys, ApiKeys) else ApiKeys(lambda: api_keys)
        self._needs_key = len(self._keys) > 0
        self._is_allowed = lru_cache(_KNOWN_HOSTS)(self._allows)
        limits = rules.requests_per_minute, rules.tokens_per_minute
        self.limiter: ClientLimiter | None = None
        if limits != (None, None):
            self.limiter = limiter or RateLimiter(*limits)

    async def check(self, scope: Scope) -> ClientAccount | None:
        """Return the client's account, or None if there are no limits.

        Note in the scope's state if it has a key, and the models that the key may use.

        Raises:
            InvalidRequest: The request names no host, or another one.
            Unauthorized: The request needs a key and has none, or a wrong one.
            RateLimited: The client has used up its share.
        """
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1 or (not hosts and scope["http_version"] == "1.1"):
            raise InvalidRequest("An HTTP/1.1 request has exactly one header `Host`.")
        host = hosts[0] if hosts else None
        if self._only_loopback and scope.get("client") and not self._is_allowed(host):
            raise InvalidRequest(
                "This server answers only to names of this machine, such as localhost, in the request's header `Host`, so "
                "that no web page reaches it under another name. Its operator can list names with --allowed-hosts."
            )
        if (scope["method"], scope["path"]) in self._public:
            return None
        if self._hosts and scope.get("client") and not self._is_allowed(host):
            raise InvalidRequest("This server does not answer to the host name in the request's header `Host`.")
        key, models = self._find_key(scope) if self._needs_key else (None, None)
        if models is not None:
            scope["state"]["models"] = models
        has_key = scope["state"]["has_key"] = key is not None or not self._needs_key
        # Wrong keys count too, so that they cannot be tried without end.
        account = (
            None
            if self.limiter is None
            else await self.limiter.admit(client_network(scope.get("client")) if key is None else key)
        )
        sends_key = header(scope, b"authorization") or header(scope, b"x-api-key")
        if not has_key and (scope["path"] != PARTLY_PUBLIC_PATH or sends_key):
            raise Unauthorized(
                "This server needs an API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
            )
        return account

    def _find_key(self, scope: Scope) -> tuple[bytes | None, frozenset[str] | None]:
        """Return the hash of the request's key, None without one, and the models that it may use, None: all."""
        scheme, _, key = header(scope, b"authorization").partition(b" ")
        if scheme.lower() != b"bearer":
            key = header(scope, b"x-api-key")  # of Anthropic's clients
        offered, models = _hash(key.strip()), self._keys.current()
        # Every key is compared, in constant time, so that the duration reveals nothing about the keys.
        known = sum(hmac.compare_digest(offered, expected) for expected in models)
        return (offered, models[offered]) if known else (None, None)

    def _allows(self, host: bytes | None) -> bool:
        if host is None:
            return self._only_loopback  # an HTTP/1.0 request without a host, which browsers do not send
        name = host_name(host.decode("latin-1"))
        if name is None:
            return False
        if self._only_loopback:
            return is_loopback_name(name)
        return any(
            allowed == "*" or (name.endswith(allowed[1:]) if allowed.startswith("*.") else name == allowed)
            for allowed in self._hosts
        )


def _pattern(allowed: str) -> str:
    """Return a name of `allowed_hosts` in the spelling of `host_name`; `*` and a beginning of `*.` stay patterns."""
    text = allowed.lower()
    if text == "*" or text.startswith("*."):
        return text.removesuffix(".")
    if text.count(":") > 1 and not text.startswith("["):
        text = f"[{text}]"
    return host_name(text) or text


def header(scope: Scope, name: bytes) -> bytes:
    for key, value in scope["headers"]:
        if key == name:
            found: bytes = value
            return found
    return b""


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


# ---- connections ------------------------------------------------------------------------------------------------------


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
