"""HTTP/1 connections: uvicorn's protocol with bounds on heads, connections and unread responses, and stricter HTTP.

`BoundedProtocol` adds to uvicorn's protocol:

- a limit on the bytes and on the time of a request head, including trailers;
- pipelined requests are parsed one ahead of the response in progress, and reading pauses behind them;
- a framing that is not understood ends the connection: other transfer codings than chunked, or any in HTTP/1.0;
- a target with a host (absolute form) names the request's host (RFC 9112, section 3.2.2);
- bodies behind `Upgrade`, which is ignored: httptools takes what follows such a head for another protocol, and uvicorn
  parses it as the next request (RFC 9110, section 7.8, lets a server ignore the field);
- responses of unknown length to HTTP/1.0 clients end with the connection instead of being chunked;
- clients that close only their side of the connection get the response to a complete request;
- a client that does not read loses its connection, and the bytes that wait for all such clients are bounded;
- a bound on connections: an idle one, or one with a request that does not arrive, is closed for a new one, or only
  probes are answered on the new one;
- JSON for the errors that are found before there is a request.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, cast

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from app.api.access import ConnectionLimits, client_network
from app.api.bodies import HAS_ARRIVED
from app.api.errors import NATIVE_ERRORS, HttpError
from app.api.middleware import DEPARTURE, Departure
from app.api.routing import new_id
from app.api.streaming import DIRECT_WRITE

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 32 * 1024
HEAD_TIMEOUT_SECONDS = 60.0
# Heads and chunked bodies are parsed in parts of so many bytes, so that few requests are found at once.
PART_BYTES = 4096
# Requests that are parsed while a response is in progress. There is one unless several follow a chunked body in a part.
MAX_PARSED_REQUESTS = 64
# Bytes behind them that are not parsed yet; reading pauses beyond.
MAX_UNPARSED_BYTES = 64 * 1024
MAX_JOINED_BYTES = 16 * 1024  # of parts of a response that wait to be sent together
# Bytes that a client must take within the write timeout while more wait for it: half a kilobyte per second.
MIN_READ_BYTES = 16 * 1024
# A client that has closed its side is asked so often whether it is still there. It sees one more interim response.
HALF_CLOSED_PROBE_SECONDS = 1.0
RESERVED_SECONDS = 1.0  # in which a probe sends its request, on a connection beyond the limit
RETRY_SECONDS = 1
# Paths that are answered on connections beyond the limit too.
PROBE_PATHS = frozenset(
    (b"/healthz", b"/readyz", b"/health", b"/ping", b"/metrics", b"/v2/health/live", b"/v2/health/ready")
)
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_END_OF_HEAD = b"\r\n\r\n"


def _error(status: int, message: str) -> HttpError:
    return HttpError(status, "invalid_request", message, None, {})


_NO_HTTP = _error(400, "The request is not valid HTTP.")
_TOO_LARGE = _error(431, f"The head of the request is too large: it may have {MAX_HEAD_BYTES} bytes.")
_TOO_MANY_REQUESTS = _error(400, "Too many requests were sent before their responses were read.")
_UNKNOWN_CODING = _error(400, "The only transfer coding that this server understands is chunked, once.")
_CODING_IN_HTTP_1_0 = _error(400, "HTTP/1.0 has no transfer codings.")
_TOO_MANY = HttpError(
    503, "overloaded", "The server has too many connections.", None, {"retry-after": str(RETRY_SECONDS)}
)


class _Refusal(Exception):
    """Raised from a callback of the parser: the connection ends with this response."""

    def __init__(self, error: HttpError) -> None:
        self.error = error


class _HeldFlow(FlowControl):
    """uvicorn's control of reading and writing. While `is_held`, nobody resumes reading."""

    is_held = False

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()


class JoinedWrites:
    """The transport for responses. It sends the parts that are written in one turn of the event loop together.

    uvloop calls the kernel for each write: a stream begins with a head and two events, and ends with three parts.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self.parts: list[bytes] = []
        self._num_bytes = 0
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes > MAX_JOINED_BYTES:
            self.flush()
            self._transport.write(data)
            return
        if not self.parts:
            self._loop.call_soon(self.flush)
        self.parts.append(data)

    def flush(self) -> None:
        self._num_bytes = 0
        if self.parts:
            self._transport.write(b"".join(self.parts))
            self.parts.clear()

    def close(self) -> None:
        self.flush()
        self._transport.close()


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `limits` are shared by all connections of a server."""

    def __init__(self, *arguments: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.address: Hashable = ""
        self.on_connected: Callable[[], None] | None = None  # called once the connection counts itself
        self.limits = limits
        self._running: RequestResponseCycle | None = None  # `cycle` is that of the last request that was parsed
        self._departure = Departure()  # of the client of that request
        self._unparsed, self._num_parsed = b"", 0  # received bytes, and how many of them are parsed
        self._unfinished_bytes = 0  # of the head or trailer that is being parsed
        self._most_of_body = 0  # bytes of the body to parse at once; 0 in a head
        self._length, self._has_coding = 0, False  # the framing that the present head has
        self._is_reserved = False
        self._deadline: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._resuming = False  # while a second parser reads a head again, without its Upgrade
        self._half_closed = False
        self._broken_by: HttpError | None = None  # why nothing is read any more

    # ---- the connection ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: _HeldFlow = _HeldFlow(transport)
        self._output = JoinedWrites(transport, self.loop)
        self.address = client_network(self.client)
        if self.on_connected is not None:
            self.on_connected()
        if self.limits.enter(self):
            self.limits.idle[self] = None
            self._deadline = self.loop.call_later(HEAD_TIMEOUT_SECONDS, transport.abort)
        else:
            self._is_reserved = True
            self._deadline = self.loop.call_later(RESERVED_SECONDS, self.refuse)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.leave(self)
        self.limits.unread.pop(self, None)
        self._unparsed = b""
        self._output.parts.clear()
        for timer in (self._deadline, self._write_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
            self._departure.leave()

    def drop(self) -> None:
        """Close the connection at once; say why if it is within a request."""
        is_within_request = self in self.limits.receiving
        self.limits.forget(self)
        self.limits.unread.pop(self, None)
        if is_within_request and not self.cycle.response_started:
            self.refuse()
        else:
            self.transport.abort()

    def refuse(self) -> None:
        self.limits.forget(self)
        if not self.transport.is_closing():
            self._send_error(_TOO_MANY)

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
        running = self._running
        if self.transport.is_closing() or running is None or (running.response_started and not self.pipeline):
            return
        if not running.response_started and running.scope["http_version"] != "1.0":
            self.transport.write(_INTERIM)
        self._probe_timer = self.loop.call_later(HALF_CLOSED_PROBE_SECONDS, self._probe)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse the data; respond with an error if it is not HTTP or a head is too large."""
        self._unset_keepalive_if_required()
        if self._broken_by is not None:
            return
        self._unparsed = self._unparsed[self._num_parsed :] + data if self._unparsed else data
        self._num_parsed = 0
        self._parse()
        if self._deadline is None and self in self.limits.idle and not self.transport.is_closing():
            self._deadline = self.loop.call_later(HEAD_TIMEOUT_SECONDS, self.transport.abort)

    def _parse(self) -> None:
        try:
            while self._num_parsed < len(self._unparsed) and not self.pipeline and self._broken_by is None:
                self._feed(self._next_part())
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._break(cause.error if isinstance(cause, _Refusal) else _NO_HTTP)
        except _Refusal as refusal:
            self._break(refusal.error)
        num_unparsed = len(self._unparsed) - self._num_parsed
        if not num_unparsed or self._broken_by is not None:
            self._unparsed, self._num_parsed, num_unparsed = b"", 0, 0
        was_held, self.flow.is_held = self.flow.is_held, num_unparsed > MAX_UNPARSED_BYTES
        if self.flow.is_held:
            self.flow.pause_reading()
        elif was_held:
            self.flow.resume_reading()

    def _next_part(self) -> bytes | memoryview:
        """Return the bytes to parse next: at most one head, or the rest of a body."""
        data, start = self._unparsed, self._num_parsed
        if self._most_of_body:
            end = start + self._most_of_body
        elif (room := MAX_HEAD_BYTES - self._unfinished_bytes) > 0:
            most = start + min(room, PART_BYTES)
            found = data.find(_END_OF_HEAD, start, most)
            end = most if found < 0 else found + len(_END_OF_HEAD)
        else:
            raise _Refusal(_TOO_LARGE)
        end = min(end, len(data))
        self._num_parsed = end
        self._unfinished_bytes += end - start
        return data if end - start == len(data) else memoryview(data)[start:end]

    def _feed(self, part: bytes | memoryview) -> None:
        while part:
            try:
                self.parser.feed_data(part)
            except httptools.HttpParserUpgrade as upgrade:
                if self.scope["method"] == "CONNECT":
                    raise httptools.HttpParserError("CONNECT asks for a tunnel") from None
                part = part[upgrade.args[0] :]
                self._resume_after_upgrade()
            else:
                break
        if self._most_of_body and self._unfinished_bytes > MAX_HEAD_BYTES:  # of trailers, or between chunks
            raise _Refusal(_TOO_LARGE)

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
        if self._resuming:
            return
        if len(self.pipeline) >= MAX_PARSED_REQUESTS:
            raise _Refusal(_TOO_MANY_REQUESTS)
        self._length, self._has_coding = 0, False
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._resuming:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header or a trailer; note the framing of the body."""
        if self._resuming:
            return
        super().on_header(name, value)
        name = self.headers[-1][0]
        if name == b"content-length":
            self._length = int(value)
        elif name == b"transfer-encoding":
            if self._has_coding or value.strip().lower() != b"chunked":
                raise _Refusal(_UNKNOWN_CODING)
            self._has_coding = True

    def on_headers_complete(self) -> None:
        """Reset the count of bytes, cancel the deadline and start the request."""
        if self._resuming:
            return
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self.limits.idle.pop(self, None)
        self._unfinished_bytes = 0
        if self._has_coding and self.parser.get_http_version() != "1.1":
            raise _Refusal(_CODING_IN_HTTP_1_0)
        if self._is_reserved and self.url.partition(b"?")[0] not in PROBE_PATHS:
            raise _Refusal(_TOO_MANY)
        if not self.url.startswith((b"/", b"*")):
            self._use_host_of_target()
        super().on_headers_complete()
        self._most_of_body = PART_BYTES if self._has_coding else self._length
        if self._most_of_body:
            self.limits.receiving[self] = None
        if self._is_reserved:
            self.cycle.keep_alive = False

    def _use_host_of_target(self) -> None:
        """Replace the request's host by its target's, `http://host/path` (RFC 9112, section 3.2.2)."""
        _, separator, rest = self.url.partition(b"://")
        authority = rest.partition(b"/")[0].partition(b"?")[0] if separator else b""
        names = [index for index, (name, _) in enumerate(self.headers) if name == b"host"]
        if len(names) == 1:  # several are refused, and none in HTTP/1.1
            self.headers[names[0]] = (b"host", authority)
        elif not names and self.parser.get_http_version() == "1.0":
            self.headers.append((b"host", authority))

    def on_body(self, body: bytes) -> None:
        self._unfinished_bytes = 0
        if not self._has_coding:
            self._most_of_body -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Complete the body, unless the parser ends here only because of an Upgrade."""
        if self.parser.should_upgrade() and not self._resuming:
            return
        self._most_of_body = self._unfinished_bytes = 0
        self.limits.receiving.pop(self, None)
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._running = cycle
        cycle.transport = cast(asyncio.Transport, self._output)
        self._departure = Departure()
        extensions: dict[str, Any] = {DEPARTURE: self._departure, HAS_ARRIVED: lambda: not cycle.more_body}
        cycle.scope["extensions"] = extensions
        if cycle.scope["http_version"] == "1.0":
            super()._start_asgi_task(cycle, partial(_serve_unchunked, app, cycle))
        else:
            extensions[DIRECT_WRITE] = self._direct_write(cycle), self.flow
            super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    # ---- responses ---------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        self._output.flush()
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_reader()
            return
        if self._unparsed:
            self._parse()
        if self.cycle.response_complete and not self.pipeline:
            if self._broken_by is not None:
                self._send_error(self._broken_by)
            elif self._half_closed:
                self.transport.close()
                self._watch_reader()
            else:
                self.limits.idle[self] = None

    def _break(self, error: HttpError) -> None:
        """Answer what is not a request, once the response in progress is complete, and close the connection."""
        self.limits.receiving.pop(self, None)
        if self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body:
            self._broken_by = error  # the requests before it are answered first
            return
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self._broken_by = error
            self._output.close()
            return
        self._send_error(error)

    def _send_error(self, error: HttpError) -> None:
        body = json.dumps(NATIVE_ERRORS.body(error)).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            "x-request-id": new_id(),
            **error.headers,
        }
        lines = [
            *self.server_state.default_headers,
            *((name.encode(), text.encode()) for name, text in headers.items()),
        ]
        head = STATUS_LINE[error.status] + b"".join(name + b": " + value + b"\r\n" for name, value in lines)
        self.limits.count_error(error.status, error.code)
        self.transport.write(head + b"\r\n" + body)
        self.transport.close()
        self._broken_by = error
        self._watch_reader()

    # ---- slow readers ------------------------------------------------------------------------------------------------

    @property
    def num_unsent(self) -> int:
        return int(self.transport.get_write_buffer_size())

    def pause_writing(self) -> None:
        """Start the write timeout; called if more bytes wait than the transport likes to hold."""
        super().pause_writing()
        self.limits.unread[self] = None
        self._watch_reader()
        self.limits.bound_unread()

    def resume_writing(self) -> None:
        """End the write timeout; called when the client has read nearly all."""
        super().resume_writing()
        self.limits.unread.pop(self, None)
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, also if its client has not read the last response."""
        super().timeout_keep_alive_handler()
        self._watch_reader()

    def _direct_write(self, cycle: RequestResponseCycle) -> Callable[[bytes], None]:
        """Return a function that writes part of a response that has begun and has no length."""
        write_to_socket, waiting, flush = self.transport.write, self._output.parts, self._output.flush

        def write(data: bytes) -> None:
            if not (cycle.disconnected or cycle.response_complete):
                assert cycle.chunked_encoding, "a stream has no length"
                if waiting:
                    flush()
                write_to_socket(b"%x\r\n%b\r\n" % (len(data), data))

        return write

    def drop_slow(self, reason: str) -> None:
        log.info("a connection is closed: %s (%d bytes)", reason, self.num_unsent)
        self.drop()

    def _watch_reader(self) -> None:
        """Start the write timeout anew, for the bytes that wait now."""
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._write_timer = None
        if unsent := self.num_unsent:
            timeout = self.limits.write_timeout_seconds
            self._write_timer = self.loop.call_later(timeout, self._check_reader, unsent)

    def _check_reader(self, before: int) -> None:
        """Close the connection if its client took too little; nothing is written to it while it is watched."""
        if self.num_unsent > max(before - MIN_READ_BYTES, 0):
            self.drop_slow(f"its client read too little in {self.limits.write_timeout_seconds:g} s")
        else:
            self._watch_reader()


async def _serve_unchunked(
    app: ASGIApp, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    """Serve an HTTP/1.0 request: a response of unknown length ends with the connection (RFC 9112, section 6.3)."""
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


ProtocolFactory = Callable[..., BoundedProtocol]


def protocol_factory(limits: ConnectionLimits) -> ProtocolFactory:
    return partial(BoundedProtocol, limits=limits)
