"""Access to the API: host names, API keys and rate limits, checked before the body of a request is read."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Collection, Hashable
from dataclasses import dataclass

from starlette.types import Scope

from app.errors import InvalidRequest, Unauthorized
from app.service.rate_limit import Account, RateLimiter

# A path that answers without a key too, and then tells less.
PARTLY_PUBLIC_PATH = "/info"


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Rules of the operator.

    `requests_per_minute` and `tokens_per_minute` are for each key, or address without one; None: unlimited. Host names
    may begin with `*.`; none: any host. Origins are those of other sites' web pages; `*`: all.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    allowed_hosts: tuple[str, ...] = ()
    cors_allow_origins: tuple[str, ...] = ()


NO_RULES = AccessRules()


class AccessControl:
    """Check of each request's head.

    Args:
        rules: Host names and rates.
        api_keys: Keys that clients may send; if empty, no key is needed.
        public: Method and path of the requests that need no key, and to which no rule applies.
    """

    def __init__(self, rules: AccessRules, api_keys: Collection[str], public: Collection[tuple[str, str]]) -> None:
        self._public, self._hosts = public, tuple(name.lower() for name in rules.allowed_hosts)
        self._key_hashes = tuple(_hash(key.encode()) for key in api_keys)
        limits = rules.requests_per_minute, rules.tokens_per_minute
        self._limiter = None if limits == (None, None) else RateLimiter(*limits)

    def check(self, scope: Scope) -> Account | None:
        """Return the client's account, or None if there are no limits; note in the scope's state if it has a key.

        Raises:
            InvalidRequest: The request names no host, or another one.
            Unauthorized: The request needs a key and has none, or a wrong one.
            RateLimited: The client has used up its share.
        """
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1 or (not hosts and scope["http_version"] == "1.1"):
            raise InvalidRequest("An HTTP/1.1 request has exactly one header `Host`.")
        if (scope["method"], scope["path"]) in self._public:
            return None
        if self._hosts and not self._is_allowed(hosts[0] if hosts else b""):
            raise InvalidRequest("This server does not answer to the host name in the request's header `Host`.")
        key = self._find_key(scope) if self._key_hashes else None
        has_key = scope["state"]["has_key"] = key is not None or not self._key_hashes
        # Wrong keys count too, so that they cannot be tried without end.
        account = None if self._limiter is None else self._limiter.admit(_address(scope) if key is None else key)
        sends_key = header(scope, b"authorization") or header(scope, b"x-api-key")
        if not has_key and (scope["path"] != PARTLY_PUBLIC_PATH or sends_key):
            raise Unauthorized(
                "This server needs an API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
            )
        return account

    def _find_key(self, scope: Scope) -> bytes | None:
        """Return the hash of the request's key if it is known."""
        scheme, _, key = header(scope, b"authorization").partition(b" ")
        if scheme.lower() != b"bearer":
            key = header(scope, b"x-api-key")  # of Anthropic's clients
        offered = _hash(key.strip())
        # Every key is compared, in constant time, so that the duration reveals nothing about the keys.
        known = sum(hmac.compare_digest(offered, expected) for expected in self._key_hashes)
        return offered if known else None

    def _is_allowed(self, host: bytes) -> bool:
        name = host.decode("latin-1").lower()
        name = name.partition("]")[0] + "]" if name.startswith("[") else name.rpartition(":")[0] or name
        return any(
            name.endswith(allowed[1:]) if allowed.startswith("*.") else name == allowed or allowed == "*"
            for allowed in self._hosts
        )


def _address(scope: Scope) -> Hashable:
    """Return the client's address; of IPv6 the network of 64 bits that one client usually has."""
    address = scope["client"][0] if scope.get("client") else ""
    return ipaddress.ip_network((address, 64), strict=False) if ":" in address else address


def header(scope: Scope, name: bytes) -> bytes:
    """Return the first header of that name, or nothing."""
    return next((value for key, value in scope["headers"] if key == name), b"")


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
