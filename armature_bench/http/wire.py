"""A small HTTP/1.1 client for measurements.

It shares the processor with the server, so receiving a chunk costs one parser call and no task switch. Arrival times
are taken when bytes arrive, before they are parsed.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from httptools import HttpParserCallbackError, HttpParserError, HttpResponseParser

from armature_bench.console import MeasurementFailed

CONNECT_SECONDS = 5.0
# A long prompt on a small machine may take minutes. The client must not time out before the server.
ANSWER_SECONDS = 600.0
BodySink = Callable[[bytes, float], bool]  # receives part of a body and its arrival time; False aborts the request


def event_loop() -> asyncio.Runner:
    """Return a runner with uvloop if it is installed: the client then needs half the processor time."""
    with suppress(ModuleNotFoundError):
        import uvloop

        return asyncio.Runner(loop_factory=uvloop.new_event_loop)
    return asyncio.Runner()


class HttpRequestFailed(MeasurementFailed):
    """Raised when no complete answer arrived. `kind` groups similar failures."""

    def __init__(self, kind: str, message: str = "", retry_after: float = 0.0) -> None:
        super().__init__(message or kind)
        self.kind = kind
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """An HTTP response. `body` is empty if a sink received it. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def raise_for_status(self, path: str) -> HttpResponse:
        """Return this response. Raises `HttpRequestFailed` with the Retry-After seconds for another status than 200."""
        if self.status == 200:
            return self
        text = self.body.decode(errors="replace")[:300]
        after = self.headers.get("retry-after", "")
        seconds = float(after) if after.isdecimal() else 0.0
        raise HttpRequestFailed(f"status {self.status}", f"{path} answered {self.status}: {text}", seconds)

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class HttpBody:
    """A request body. `headers` describe it, one header per line."""

    content: bytes
    headers: str = "Content-Type: application/json\r\n"


class HttpClient:
    """Connections to one server: its address, and the pool of idle connections."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._unix_path = url.removeprefix("unix:") if url.startswith("unix:") else None
        parts = urlsplit("http://localhost" if self._unix_path else url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise MeasurementFailed(f"{url!r} is not a server address")
        self.url = url
        self._host, self._tls = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f"Host: {parts.netloc}\r\nAccept-Encoding: identity\r\nUser-Agent: armature-bench\r\n{key}"
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> HttpResponse:
        return await self.exchange("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any], sink: BodySink | None = None) -> HttpResponse:
        """Send `body` as JSON; `sink` receives the response body as it arrives."""
        return await self.exchange("POST", path, HttpBody(json.dumps(body, ensure_ascii=False).encode()), sink)

    async def exchange(
        self, method: str, path: str, body: HttpBody | None, sink: BodySink | None = None
    ) -> HttpResponse:
        """Return the response, whatever its status. Raises `HttpRequestFailed` if no complete one arrived."""
        what = "" if body is None else f"{body.headers}Content-Length: {len(body.content)}\r\n"
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{what}\r\n".encode()
        request = head if body is None else head + body.content
        while True:
            connection, used = await self._connection()
            answer = None
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    answer = await connection.send(request, sink)
            except TimeoutError as error:
                raise HttpRequestFailed("timeout", f"{path} did not end within {ANSWER_SECONDS:g} s") from error
            except HttpRequestFailed:
                if used and connection.silent:  # the server closed the idle connection and did not receive the request
                    continue
                raise
            finally:
                if answer is None:  # failed or cancelled: the connection cannot be reused
                    connection.abort()
            if connection.reusable:
                self._idle.append(connection)
            return answer

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    async def _connection(self) -> tuple[_Connection, bool]:
        """Return a connection, and True if it was used before."""
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection, True
        tls = ssl.create_default_context() if self._tls else None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                loop = asyncio.get_running_loop()
                if self._unix_path:
                    _, connection = await loop.create_unix_connection(_Connection, self._unix_path)
                else:
                    _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=tls)
        except (OSError, TimeoutError) as error:
            raise HttpRequestFailed("no connection", f"{self.url} cannot be reached: {error or 'timeout'}") from error
        return connection, False


class _Connection(asyncio.Protocol):
    """One connection with one request at a time. `silent` is True until the first byte of the response arrives."""

    def __init__(self) -> None:
        self.reusable = True
        self.silent = True
        self._moment = 0.0
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[HttpResponse] | None = None

    async def send(self, request: bytes, sink: BodySink | None) -> HttpResponse:
        assert self._transport is not None, "create_connection has connected it"
        self._answer = asyncio.get_running_loop().create_future()
        self._parser, self._sink = HttpResponseParser(self), sink
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self.silent, self._whole_head = True, False
        if self._transport.is_closing():
            self._fail(HttpRequestFailed("broken off", "the server closed the connection"))
        self._transport.write(request)
        return await self._answer

    def abort(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            return self.abort()
        self._moment, self.silent = time.perf_counter(), False
        try:
            self._parser.feed_data(data)
        except HttpParserCallbackError as error:
            self._fail(error.__context__ or error)
        except HttpParserError as error:
            self._fail(HttpRequestFailed("not HTTP", f"the response is not valid HTTP/1.1: {error}"))
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._answer is None or self._answer.done():
            return
        unbounded = not {"content-length", "transfer-encoding"} & self._headers.keys()
        if self._whole_head and unbounded and exc is None:  # a body without a length ends when the connection closes
            self.on_message_complete()
        else:
            self._fail(
                HttpRequestFailed(
                    "broken off", f"the server closed the connection {'before' if self.silent else 'in'} its answer"
                )
            )

    # ---- called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._whole_head = True
        if self._parser.get_status_code() != 200:
            self._sink = None

    def on_body(self, body: bytes) -> None:
        if self._answer is None or self._answer.done():
            return
        if self._sink is None:
            self._body.append(body)
        elif not self._sink(body, self._moment):
            self.abort()
            self.on_message_complete()

    def on_message_complete(self) -> None:
        assert self._answer is not None, "a request was sent"
        self.reusable = self.reusable and self._parser.should_keep_alive()
        if not self._answer.done():
            self._answer.set_result(HttpResponse(self._parser.get_status_code(), self._headers, b"".join(self._body)))

    def _fail(self, error: BaseException) -> None:
        self.abort()
        assert self._answer is not None, "a request was sent"
        with suppress(asyncio.InvalidStateError):
            self._answer.set_exception(error)
