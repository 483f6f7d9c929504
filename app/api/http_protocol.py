"""HTTP/1 connections: uvicorn's protocol with bounds on heads, connections and unread responses, and stricter HTTP.

`BoundedProtocol` adds to uvicorn's protocol:

- a limit on the bytes and on the time of a request head, including trailers;
- bodies behind `Upgrade`, which is ignored: httptools takes what follows such a head for another protocol, and uvicorn
  parses it as the next request (RFC 9110, section 7.8, lets a server ignore the field);
- responses of unknown length to HTTP/1.0 clients end with the connection instead of being chunked;
- clients that close only their side of the connection get the response to a complete request;
- a client that does not read loses its connection, and the bytes that wait for all such clients are bounded;
- a bound on connections: the one that has been idle longest is closed for a new one, or the new one is refused;
- JSON for the errors that are found before there is a request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from app.api.errors import NATIVE_ERRORS, HttpError

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024  # the limit of h11, uvicorn's other parser
HEAD_TIMEOUT_SECONDS = 60.0
# Bytes that a client must take within the write timeout while more wait for it: half a kilobyte per second.
MIN_READ_BYTES = 16 * 1024
# Bytes that wait for all clients that do not read: four responses of the largest size.
MAX_UNREAD_BYTES = 256 * 2**20
# A client that has closed its side is asked so often whether it is still there. It sees one more interim response.
HALF_CLOSED_PROBE_SECONDS = 1.0
REPORT_SECONDS = 10.0  # between two log lines about refused connections
RETRY_SECONDS = 1
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass
class ConnectionLimits:
    """Bounds that all connections of a server share, and their state. Used on the event loop only.

    `idle` has the connections without a request, the longest idle first. `unread` has those whose client does not
    read, the longest unread first. `count_error` is told status and code of errors that no application answers.
    """

    max_connections: int = 10_000
    write_timeout_seconds: float = 30.0
    num_connections: int = 0
    count_error: Callable[[int, str], None] = lambda status, code: None
    idle: dict[BoundedProtocol, None] = field(default_factory=dict)
    unread: dict[BoundedProtocol, None] = field(default_factory=dict)
    _num_refused: int = 0
    _reported_at: float = float("-inf")

    def admit(self) -> bool:
        """Return whether a new connection may stay; an idle one is closed for it if there are too many."""
        if self.num_connections <= self.max_connections:
            return True
        self._report()
        oldest = next(iter(self.idle), None)
        if oldest is not None:
            oldest.drop()
        return oldest is not None

    def bound_unread(self) -> None:
        """Close the connections that have been unread longest while too many bytes wait."""
        while self.unread and sum(each.num_unsent for each in self.unread) > MAX_UNREAD_BYTES:
            next(iter(self.unread)).drop_slow("too many bytes wait for slow clients")

    def _report(self) -> None:
        self._num_refused += 1
        now = time.monotonic()
        if now - self._reported_at >= REPORT_SECONDS:
            log.warning(
                "%d connections are open, the limit of max_connections: %d idle or new ones were closed. Raise the "
                "limit (and the limit of open files), or find the client that opens them.",
                self.max_connections,
                self._num_refused,
            )
            self._reported_at, self._num_refused = now, 0


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `limits` are shared by all connections of a server."""

    def __init__(self, *arguments: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits
        self._unfinished_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._resuming = False  # while a second parser reads a head again, without its Upgrade
        self._half_closed = False
        self._broken_by = ""  # why nothing is read any more

    # ---- the connection ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first head; refuse the connection if there are too many."""
        super().connection_made(transport)
        self._limits.num_connections += 1
        if not self._limits.admit():
            self._send_error(503, "overloaded", "The server has too many connections.", RETRY_SECONDS)
            return
        self._limits.idle[self] = None
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers."""
        self._limits.num_connections -= 1
        self._limits.idle.pop(self, None)
        self._limits.unread.pop(self, None)
        for timer in (self._deadline, self._write_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close the connection at once."""
        self._limits.idle.pop(self, None)
        self._limits.unread.pop(self, None)
        self.transport.abort()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection open for the response if the client closed its side after a complete request.

        A client that has left looks the same until it is written to, so it is probed until the response begins.
        """
        waits = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if not waits or self.scheme == "https":  # TLS has no such half
            return None
        self._half_closed = True
        self._probe()
        return True

    def _probe(self) -> None:
        """Send an interim response, which a client that has left answers with a reset."""
        cycle = self.cycle
        if self.transport.is_closing() or cycle.response_complete or cycle.response_started:
            return
        if self.scope["http_version"] != "1.0" and not self.pipeline:  # else another response is in progress
            self.transport.write(_INTERIM)
        self._probe_timer = self.loop.call_later(HALF_CLOSED_PROBE_SECONDS, self._probe)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse the data; respond with 400 if it is not HTTP or the head is too large."""
        self._unset_keepalive_if_required()
        if self._broken_by:
            return
        self._unfinished_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("The request is not valid HTTP.")
            return
        if self._unfinished_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")
        if self._deadline is None and self in self._limits.idle and not self.transport.is_closing():
            self._deadline = self.loop.call_later(HEAD_TIMEOUT_SECONDS, self.transport.abort)

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self.scope["method"] == "CONNECT":
                    raise httptools.HttpParserError("CONNECT asks for a tunnel") from None
                data = data[upgrade.args[0] :]
                self._resume_after_upgrade()
            else:
                return

    def _resume_after_upgrade(self) -> None:
        """Continue with a parser that has read the request's framing, and no Upgrade."""
        framing = (b"content-length", b"transfer-encoding")
        fields = b"".join(name + b": " + value + b"\r\n" for name, value in self.headers if name in framing)
        version = self.scope["http_version"].encode()
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._resuming = True
        try:
            self.parser.feed_data(b"POST / HTTP/" + version + b"\r\n" + fields + b"\r\n")
        finally:
            self._resuming = False

    def on_message_begin(self) -> None:
        """Begin a request; a head that is read again is not a new one."""
        if not self._resuming:
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Collect the path."""
        if not self._resuming:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header or a trailer."""
        if not self._resuming:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Reset the count of bytes, cancel the deadline and start the request."""
        if self._resuming:
            return
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._limits.idle.pop(self, None)
        self._unfinished_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Reset the count of bytes."""
        self._unfinished_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Complete the body, unless the parser ends here only because of an Upgrade."""
        if self.parser.should_upgrade() and not self._resuming:
            return
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        if cycle.scope["http_version"] == "1.0":
            super()._start_asgi_task(cycle, partial(_serve_unchunked, app, cycle))
        else:
            super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    # ---- responses ---------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """Start the next request, or wait for one."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_reader()
        elif self.cycle.response_complete and not self.pipeline:
            if self._broken_by:
                self._send_error(400, "invalid_request", self._broken_by)
            elif self._half_closed:
                self.transport.close()
                self._watch_reader()
            else:
                self._limits.idle[self] = None

    def send_400_response(self, msg: str) -> None:
        """Answer what is not a request, once the response in progress is complete, and close the connection."""
        if self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body:
            self._broken_by = msg  # the requests before it are answered first
            return
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()
            return
        self._send_error(400, "invalid_request", msg)

    def _send_error(self, status: int, code: str, message: str, retry_after: int | None = None) -> None:
        error = HttpError(status, code, message, None, {} if retry_after is None else {"retry-after": str(retry_after)})
        body = json.dumps(NATIVE_ERRORS.body(error)).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            "x-request-id": uuid.uuid4().hex,
            **error.headers,
        }
        lines = [
            *self.server_state.default_headers,
            *((name.encode(), text.encode()) for name, text in headers.items()),
        ]
        reason = {400: b"400 Bad Request", 503: b"503 Service Unavailable"}[status]
        head = b"HTTP/1.1 " + reason + b"\r\n" + b"".join(name + b": " + value + b"\r\n" for name, value in lines)
        self._limits.count_error(status, code)
        self.transport.write(head + b"\r\n" + body)
        self.transport.close()
        self._broken_by = message
        self._watch_reader()

    # ---- slow readers ------------------------------------------------------------------------------------------------

    @property
    def num_unsent(self) -> int:
        """Bytes that wait until the client reads."""
        return int(self.transport.get_write_buffer_size())

    def pause_writing(self) -> None:
        """Start the write timeout; called if more bytes wait than the transport likes to hold."""
        super().pause_writing()
        self._limits.unread[self] = None
        self._watch_reader()
        self._limits.bound_unread()

    def resume_writing(self) -> None:
        """End the write timeout; called when the client has read nearly all."""
        super().resume_writing()
        self._limits.unread.pop(self, None)
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, also if its client has not read the last response."""
        super().timeout_keep_alive_handler()
        self._watch_reader()

    def drop_slow(self, reason: str) -> None:
        """Close the connection of a client that does not read."""
        log.info("a connection is closed: %s (%d bytes)", reason, self.num_unsent)
        self.drop()

    def _watch_reader(self) -> None:
        """Start the write timeout anew, for the bytes that wait now."""
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._write_timer = None
        if unsent := self.num_unsent:
            timeout = self._limits.write_timeout_seconds
            self._write_timer = self.loop.call_later(timeout, self._check_reader, unsent)

    def _check_reader(self, before: int) -> None:
        """Close the connection if its client took too little; nothing is written to it while it is watched."""
        if self.num_unsent > max(before - MIN_READ_BYTES, 0):
            self.drop_slow(f"its client read too little in {self._limits.write_timeout_seconds:g} s")
        else:
            self._watch_reader()


async def _serve_unchunked(
    app: ASGIApp, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    """Serve an HTTP/1.0 request, whose response of unknown length ends with the connection (RFC 9112, section 6.3)."""
    has_length = False

    async def send_unchunked(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_unchunked)


ProtocolFactory = Callable[..., asyncio.Protocol]


def protocol_factory(limits: ConnectionLimits) -> ProtocolFactory:
    """Return the class of connections that share these limits, in the form that uvicorn takes."""
    return partial(BoundedProtocol, limits=limits)
