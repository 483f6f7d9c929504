"""Pictures at addresses: only of allowed hosts, at public addresses of their names, with limits, and never elsewhere."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.errors import InvalidRequest, SettingsInvalid, UnsupportedParameter
from app.service import image_urls
from app.service.image_urls import ImageFetcher, is_public
from app.service.requests import Picture
from app.settings import load_settings, parse_image_host

FIELD = "messages[0].content[1]"
PICTURE = b"\x89PNG the bytes of a picture"
NAME = "pictures.test"
Reply = Callable[[str], bytes]  # of the path


def reply(status: str = "200 OK", content: bytes = PICTURE, kind: str = "image/png", **headers: str) -> bytes:
    given = {"content_type": kind, "content_length": str(len(content)), **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in given.items() if value)
    return f"HTTP/1.1 {status}\r\n{lines}connection: close\r\n\r\n".encode() + content


class Host:
    """A server on loopback that answers each path as it is told, and keeps the heads of requests."""

    def __init__(self, port: int, heads: list[str]) -> None:
        self.port, self.heads = port, heads

    def url(self, path: str = "/a.png", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


@asynccontextmanager
async def host(answer: Reply) -> AsyncIterator[Host]:
    heads: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        heads.append(head)
        writer.write(answer(head.split()[1]))
        if "/slow" in head:
            await reader.read()  # until the client leaves
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield Host(server.sockets[0].getsockname()[1], heads)


async def fetch(fetcher: ImageFetcher, *urls: str) -> list[Any]:
    async with fetcher.fetched([Picture(url, FIELD, is_url=True) for url in urls]) as found:
        return [(one.data, one.is_url) for one in found]


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Let each name be at the next of these addresses, as a name server with several answers may say."""
    asked: list[str] = []
    left = iter(addresses)

    async def getaddrinfo(name: str, port: int, **options: Any) -> Any:
        asked.append(name)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(left), port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    return asked


async def test_a_picture_of_an_allowed_host_is_fetched() -> None:
    async with host(lambda path: reply()) as server:
        fetcher = ImageFetcher([f"127.0.0.1:{server.port}"])
        assert await fetch(fetcher, server.url("/a.png?size=2")) == [(PICTURE, False)]
        head = server.heads[0].lower()
        assert head.startswith("get /a.png?size=2 http/1.1") and f"host: 127.0.0.1:{server.port}" in head
        assert "cookie" not in head and "accept-encoding: identity" in head
        sent = [Picture("aGk=", FIELD), Picture(server.url(), FIELD, is_url=True)]
        async with fetcher.fetched(sent) as found:
            assert [one.data for one in found] == ["aGk=", PICTURE], "others stay as they are, in their places"


@pytest.mark.parametrize(
    ("allowed", "url"),
    [
        ((), "https://example.org/a.png"),
        (("example.org",), "https://example.org.evil.test/a.png"),
        (("example.org",), "https://www.example.org/a.png"),
        (("example.org",), "https://example.org:8443/a.png"),
        (("example.org:8443",), "https://example.org/a.png"),
        (("example.org",), "http://2130706433/a.png"),
        (("localhost",), "http://127.0.0.1/a.png"),
    ],
)
async def test_other_hosts_are_refused_with_the_name_of_the_flag(allowed: tuple[str, ...], url: str) -> None:
    with pytest.raises(UnsupportedParameter, match=r"fetches nothing.*--allow-image-urls") as refused:
        await fetch(ImageFetcher(allowed), url)
    assert refused.value.field == FIELD and refused.value.message.startswith(FIELD)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://user:secret@example.org/a.png", "user's name or password"),
        ("ftp://example.org/a.png", "no address of the form"),
        ("http:///a.png", "no address of the form"),
        ("http://example.org:99999/", "no address of the form"),
        ("http://[::1/a", "no address of the form"),
        ("http://exam\u2024ple.org/", "no address of the form"),
        ("http://example.org/a b", "encoded as %XX"),
        ("http://example.org/" + "a" * 3000, "2048 characters"),
    ],
)
async def test_what_is_no_address_is_refused(url: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        await fetch(ImageFetcher(["example.org"]), url)


@pytest.mark.parametrize(
    "address",
    (
        *("127.0.0.1", "10.1.2.3", "192.168.0.9", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
        *("::1", "fd00::1", "fe80::1%eth0", "::ffff:127.0.0.1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::"),
    ),
)
async def test_a_name_of_a_private_address_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_public(address)
    async with host(lambda path: reply()) as server:
        resolve_to(monkeypatch, address)
        with pytest.raises(InvalidRequest, match="is a private address"):
            await fetch(ImageFetcher([f"{NAME}:{server.port}"]), server.url(host=NAME))
        assert server.heads == []


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:4700::1111", "64:ff9b::808:808"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


async def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_urls, "is_public", lambda address: True)
    async with host(lambda path: reply()) as server:
        asked = resolve_to(monkeypatch, "127.0.0.1")
        assert await fetch(ImageFetcher([f"{NAME}:{server.port}"]), server.url(host=NAME.upper())) == [(PICTURE, False)]
        assert asked == [NAME], "it is resolved once"
        assert f"host: {NAME}:{server.port}" in server.heads[0].lower()


async def test_redirects_stay_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {
        "/here": "/a.png",
        "/on": "/on",
        "/away": "http://example.org/a.png",
        "/port": "http://127.0.0.1:1/a.png",
    }
    targets["/inside"] = "http://localhost/a.png"

    def answer(path: str) -> bytes:
        return reply("302 Found", b"", location=targets[path]) if path in targets else reply()

    async with host(answer) as server:
        fetcher = ImageFetcher([f"127.0.0.1:{server.port}", "example.org", "localhost"])
        assert await fetch(fetcher, server.url("/here")) == [(PICTURE, False)]
        for path in ("/away", "/port", "/inside"):
            with pytest.raises(InvalidRequest, match="leads to another host"):
                await fetch(fetcher, server.url(path))
        with pytest.raises(InvalidRequest, match="leads on and on"):
            await fetch(fetcher, server.url("/on"))


async def test_what_a_host_may_send_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_urls, "MAX_FETCHED_BYTES", 100)
    answers = {
        "/none": (reply("404 Not Found"), "answers with the status 404"),
        "/page": (reply(kind="text/html; charset=utf-8"), "'text/html; charset=utf-8', which is no picture"),
        "/untyped": (reply(kind=""), "'no type', which is no picture"),
        "/packed": (reply(content_encoding="gzip"), "compressed"),
        "/large": (reply(content=bytes(101)), "may have 100 bytes"),
        "/endless": (
            reply(content=bytes(2**20), content_length="", transfer_encoding="chunked"),
            "broke off its answer",
        ),
        "/cut": (reply(content_length="99"), "broke off its answer"),
        "/wrong": (b"SSH-2.0-OpenSSH\r\n\r\n", "does not answer"),
    }
    answers["/slow"] = (b"", r"within 0\.5 s")
    async with host(lambda path: answers[path][0] if path in answers else reply()) as server:
        fetcher = ImageFetcher([f"127.0.0.1:{server.port}"])
        for path, (_, reason) in answers.items():
            if path == "/slow":
                monkeypatch.setattr(image_urls, "FETCH_SECONDS", 0.5)
            with pytest.raises(InvalidRequest, match=reason) as refused:
                await fetch(fetcher, server.url(path))
            assert refused.value.field == FIELD
        monkeypatch.undo()
        monkeypatch.setattr(image_urls, "MAX_FETCHED_BYTES", 100)
        assert len(await fetch(fetcher, *[server.url()] * 3)) == 3
        with pytest.raises(InvalidRequest, match="may have 100 bytes"):
            await fetch(fetcher, *[server.url()] * 4)
    with pytest.raises(InvalidRequest, match="cannot be reached"):
        await fetch(fetcher, server.url())


@pytest.mark.parametrize(
    "text", ["http://a.example", "a.example/path", "*.a.example", "a.example:99999", "::1", "", "-a"]
)
def test_a_setting_that_names_no_host_is_refused(text: str) -> None:
    with pytest.raises(SettingsInvalid, match="allow_image_urls"):
        load_settings(allow_image_urls=(text,))


def test_hosts_of_the_setting_have_one_spelling() -> None:
    given = ("Images.Example.COM.", "[0:0::1]:8080", "10.0.0.5", "localhost:80")
    expected = [("images.example.com", None), ("::1", 8080), ("10.0.0.5", None), ("localhost", 80)]
    assert list(map(parse_image_host, given)) == expected
