"""Pictures at addresses of hosts that the operator allows: where an address may lead, and what it may bring."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urljoin, urlsplit

from app.errors import InvalidRequest, UnsupportedParameter
from app.service.requests import Picture
from app.settings import parse_image_host
from app.version import VERSION

MAX_FETCHED_BYTES = 16 * 2**20  # of all pictures of a request, as of a body
FETCH_SECONDS = 20.0  # for all pictures of a request
MAX_URL_CHARACTERS = 2_048
_MAX_REDIRECTS = 3
_MAX_ADDRESSES = 2  # of a host that are tried
# Requests with fetched pictures in memory: together as much as large bodies may have.
_MAX_FETCHING = 8
_PORTS = {"http": 80, "https": 443}
_HEADERS = {"accept": "image/*", "accept-encoding": "identity", "user-agent": f"armature/{VERSION}"}
_TYPES = ("image/", "application/octet-stream", "binary/octet-stream")  # stores of objects know no better
# RFC 6052: a gateway of IPv6 networks leads these to the IPv4 address in their last 32 bits.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_UNICAST = ipaddress.IPv6Network("2000::/3")


@dataclass(frozen=True, slots=True)
class _Target:
    scheme: str
    host: str
    port: int
    path: str

    def at(self, address: str) -> str:
        """Return the URL that leads to an IP address."""
        host = f"[{address}]" if ":" in address else address
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


class _Refused(Exception):
    """Why an address brings no picture, as the end of a sentence."""


class ImageFetcher:
    """Fetches pictures from `hosts`: `HOST` means its ports 80 and 443, `HOST:PORT` this one.

    The name is resolved once, and the connection goes to the address that was checked, so that a second answer of the
    name server changes nothing. Proxies of the environment are not used: they would resolve the name themselves.
    Bound to the event loop that calls it first.
    """

    def __init__(self, hosts: Collection[str] = ()) -> None:
        self._hosts = frozenset(map(parse_image_host, hosts))
        self._places = asyncio.Semaphore(_MAX_FETCHING)
        self._transport: Any = None

    @asynccontextmanager
    async def fetched(self, pictures: Sequence[Picture]) -> AsyncIterator[list[Picture]]:
        """Give the pictures with their bytes in place of addresses, which keep a place until the end of the context.

        Raises:
            UnsupportedParameter: A host is not allowed.
            InvalidRequest: An address brings no picture.
        """
        for picture in pictures:
            if picture.is_url:
                self._allowed(picture.data, picture.field)
        if not any(picture.is_url for picture in pictures):
            yield list(pictures)
            return
        async with self._places:
            yield await self._fetch_all(pictures)

    async def _fetch_all(self, pictures: Sequence[Picture]) -> list[Picture]:
        found: list[Picture] = []
        left = MAX_FETCHED_BYTES
        field = ""
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                for picture in pictures:
                    field = picture.field
                    if picture.is_url:
                        data = await self._fetch(picture.data, field, left)
                        left -= len(data)
                        picture = replace(picture, data=data, is_url=False)
                    found.append(picture)
        except TimeoutError:
            raise InvalidRequest(
                f"{field}: the pictures of this request could not be fetched within {FETCH_SECONDS:g} s.", field
            ) from None
        except _Refused as refused:
            raise InvalidRequest(f"{field}: the picture could not be fetched: {refused}.", field) from refused
        return found

    def _allowed(self, url: str | bytes, field: str) -> _Target:
        """Return where an address leads, if its host is allowed."""
        assert isinstance(url, str), "an address is a text"
        try:
            target = _parse(url)
        except _Refused as refused:
            raise InvalidRequest(f"{field}: {refused}.", field) from refused
        if not self._is_allowed(target):
            raise UnsupportedParameter(
                f"{field} is an address of {target.host_header[:100]}, from which this server fetches nothing: send the"
                " picture itself, as data:image/png;base64,… (its operator may allow hosts with --allow-image-urls).",
                field,
            )
        return target

    def _is_allowed(self, target: _Target) -> bool:
        ports = (target.port, None) if target.port in _PORTS.values() else (target.port,)
        return any((target.host, port) in self._hosts for port in ports)

    async def _fetch(self, url: str | bytes, field: str, most_bytes: int) -> bytes:
        target = self._allowed(url, field)
        for _ in range(_MAX_REDIRECTS + 1):
            answer = await self._ask(target, most_bytes)
            if isinstance(answer, bytes):
                return answer
            following = _parse(urljoin(f"{target.scheme}://{target.host_header}{target.path}", answer))
            if following.host != target.host or not self._is_allowed(following):
                raise _Refused(f"{target.host_header} leads to another host")
            if target.scheme == "https" and following.scheme == "http":
                raise _Refused(f"{target.host_header} leads from https to http")
            target = following
        raise _Refused(f"{target.host_header} leads on and on")

    async def _ask(self, target: _Target, most_bytes: int) -> bytes | str:
        """Return what an address brings, or the location to which it leads."""
        import httpx2

        if self._transport is None:
            self._transport = await asyncio.to_thread(_new_transport)
        failure: Exception | None = None
        for address in (await self._resolve(target))[:_MAX_ADDRESSES]:
            names = {"host": target.host_header, **_HEADERS}
            pinned = {"sni_hostname": target.host}
            try:
                response = await self._transport.handle_async_request(
                    httpx2.Request("GET", target.at(address), headers=names, extensions=pinned)
                )
            except httpx2.ConnectError as error:
                failure = error
                continue
            except httpx2.HTTPError as error:
                raise _Refused(f"{target.host_header} does not answer") from error
            try:
                return await _read(response, target, most_bytes)
            except httpx2.HTTPError as error:
                raise _Refused(f"{target.host_header} broke off its answer") from error
            finally:
                await response.aclose()
        raise _Refused(f"{target.host_header} cannot be reached") from failure

    async def _resolve(self, target: _Target) -> list[str]:
        """Return the addresses of a host to which a request may go: public ones, or any of a host that is allowed as one."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise _Refused(f"the name {target.host[:100]} is not known") from error
        addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
        if _is_literal(target.host):
            return addresses
        public = [address for address in addresses if is_public(address)]
        if not public:
            raise _Refused(f"{target.host[:100]} is a private address, which must be allowed as such")
        return public


def is_public(address: str) -> bool:
    """Return True for an address of the internet: no loopback, private, link-local, shared, reserved or multicast one."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed in _NAT64:
            parsed = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        elif parsed not in _UNICAST or parsed.sixtofour is not None or parsed.teredo is not None:
            return False
    return parsed.is_global and not parsed.is_multicast


def _is_literal(host: str) -> bool:
    """Return True for an IP address and localhost, which say themselves where they lead."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def _parse(url: str) -> _Target:
    if len(url) > MAX_URL_CHARACTERS:
        raise _Refused(f"the address has more than {MAX_URL_CHARACTERS} characters")
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS[parts.scheme]
        host, _ = parse_image_host(f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or "")
    except (ValueError, KeyError) as error:
        raise _Refused("it is no address of the form https://HOST/PATH") from error
    if "@" in parts.netloc:
        raise _Refused("an address with a user's name or password is not fetched")
    query = f"?{parts.query}" if parts.query else ""
    path = f"{parts.path or '/'}{query}"
    if not (path.isascii() and path.isprintable()) or " " in path:
        raise _Refused("the path of the address has characters that must be encoded as %XX")
    return _Target(parts.scheme, host, port, path)


def _new_transport() -> Any:
    """Return the library's transport: unlike its client, it keeps no cookies. The import and certificates take 0.2 s."""
    import httpx2

    # A kept connection would be used for each name that leads to its address, whatever its certificate.
    limits = httpx2.Limits(max_keepalive_connections=0)
    return httpx2.AsyncHTTPTransport(verify=httpx2.create_ssl_context(), trust_env=False, limits=limits)


async def _read(response: Any, target: _Target, most_bytes: int) -> bytes | str:
    if response.is_redirect:
        return str(response.headers["location"])
    if response.status_code != 200:
        raise _Refused(f"{target.host_header} answers with the status {response.status_code}")
    kind = str(response.headers.get("content-type", "")).strip().lower()
    if not kind.startswith(_TYPES):
        raise _Refused(f"{target.host_header} sends {kind[:60] or 'no type'!r}, which is no picture")
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise _Refused(f"{target.host_header} sends it compressed")
    data = bytearray()
    async for part in response.aiter_raw():
        data += part
        if len(data) > most_bytes:
            raise _Refused(f"the pictures of a request may have {MAX_FETCHED_BYTES} bytes")
    return bytes(data)
