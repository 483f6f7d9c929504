"""Everything between uvicorn and the endpoints: the request gate, limits on head and body, and disconnects.

`RequestGate` is the entry point of every request. It assigns the request id, checks the API key, limits the body's
size (also decompressed), detects disconnects and has the last exception handler. It is plain ASGI, since a middleware
that runs requests in its own tasks hides disconnects. Nothing else cancels a handler whose client has left, unless it
is streaming, and then only at its next event.

`BoundedHeadProtocol` is uvicorn's HTTP protocol with a size limit and a time limit on the request head, including
trailers: the parser collects headers of any length, and uvicorn waits for them without a timeout.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import uuid
import zlib
from asyncio import TimerHandle
from collections.abc import Callable, Collection

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.api.errors import NATIVE_ERRORS, ErrorFormat, to_http_error
from app.api.streaming import format_sse
from app.errors import BodyTooLarge, InvalidRequest, Overloaded, RequestError, ServiceStopping, Unauthorized

MAX_HEAD_BYTES = 64 * 1024  # the limit of h11, uvicorn's other parser
HEAD_TIMEOUT_SECONDS = 60.0


class BoundedHeadProtocol(HttpToolsProtocol):
    """Protocol that limits the bytes since the last complete head or body chunk, and the time until the first head."""

    _unfinished_bytes = 0
    _deadline: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first head."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline."""
        self._cancel_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the data; respond with 400 if the head is too large."""
        self._unfinished_bytes += len(data)
        super().data_received(data)
        if self._unfinished_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def on_headers_complete(self) -> None:
        """Reset the count of bytes and cancel the deadline."""
        self._cancel_deadline()
        self._unfinished_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Reset the count of bytes."""
        self._unfinished_bytes = 0
        super().on_body(body)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


DISCARD_SECONDS = 2.0  # time for discarding a refused body, so that the client can read the response


class ClientDisconnected(Exception):
    """The client has disconnected; no response can be sent."""


async def run_until_disconnect(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Run the application on a body that was read.

    If the client disconnects, cancel the application and raise `ClientDisconnected`.
    """
    serving = asyncio.ensure_future(app(scope, _replay_body(body), send))
    watching = asyncio.ensure_future(_wait_for_disconnect(receive))
    watching.add_done_callback(lambda _: serving.cancel())
    try:
        await serving
    except asyncio.CancelledError:
        if watching.done():
            raise ClientDisconnected from None
        raise
    finally:
        watching.cancel()


def _replay_body(body: bytes) -> Receive:
    """Return a `receive` that gives the body once and then blocks: disconnects are detected elsewhere."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        silence: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return await silence

    return receive


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def discard_body(receive: Receive) -> None:
    """Read and discard the rest of a refused body for a short time.

    A client that is still sending reads the response only if its connection is not reset.
    """
    try:
        async with asyncio.timeout(DISCARD_SECONDS):
            while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                pass
    except TimeoutError:
        pass


GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # zlib looks at the first bytes; HTTP's `deflate` is zlib's format


class BodyDecoder:
    """Decoder of one body, chunk by chunk.

    Raises `InvalidRequest` for an unknown encoding and for data that does not match it.
    """

    def __init__(self, encoding: str) -> None:
        known = encoding.strip().lower()
        if known not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise InvalidRequest(
                f"The content-encoding {encoding[:40]!r} is not supported: send gzip, deflate or none."
            )
        self._decompressor = zlib.decompressobj(GZIP_OR_ZLIB) if known not in ("", "identity") else None

    def __call__(self, chunk: bytes, max_bytes: int) -> bytes:
        """Return the decompressed chunk, at most its first `max_bytes`."""
        if self._decompressor is None:
            return chunk
        try:
            plain = self._decompressor.decompress(chunk, max_bytes)
        except zlib.error as error:
            raise InvalidRequest("The body does not match its content-encoding header.") from error
        if self._decompressor.unused_data:
            raise InvalidRequest("The compressed body has data after its end.")
        return plain

    def finish(self) -> None:
        """Raise `InvalidRequest` if the compressed data is incomplete."""
        if self._decompressor is not None and not self._decompressor.eof:
            raise InvalidRequest("The compressed body ends too early.")


log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20  # several times a context of a million tokens as text
MAX_TENSOR_BODY_BYTES = 4 * MAX_BODY_BYTES  # 100 images of 224 × 224 in FP32; binary tensors are not parsed
TENSOR_HEADER = b"inference-header-content-length"
MAX_HELD_BODIES = 8  # bodies of full size in memory at the same time; once parsed, a body takes several times its size
BODY_TIMEOUT_SECONDS = 60.0  # time limit for receiving a body
_VALID_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestGate:
    """ASGI middleware around the application. Its only state is the number of body bytes held in memory.

    Args:
        app: The application.
        api_keys: Keys that clients may send; if empty, no key is needed.
        public_paths: Paths that never need a key.
        error_format: The error format of a path.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Collection[str] = (),
        public_paths: Collection[str] = (),
        error_format: Callable[[str], ErrorFormat] = lambda path: NATIVE_ERRORS,
    ) -> None:
        self._app, self._public_paths, self._error_format = app, public_paths, error_format
        self._key_hashes = tuple(_hash(key.encode()) for key in api_keys)
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request and convert every exception to a response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sender = ResponseSender(scope, send, self._error_format)
        try:
            self._check_key(scope)
            await self._forward(scope, receive, sender)
        except ClientDisconnected:
            log.debug("request %s: the client left", sender.request_id)
            return
        except (RequestError, HTTPException) as error:
            await sender.send_error(error)
            if isinstance(error, BodyTooLarge):
                await discard_body(receive)
        except asyncio.CancelledError:  # the server is stopping and drain_seconds are over
            await sender.send_error(ServiceStopping("The server is stopping and could not finish this request."))
        except Exception as error:  # last handler: details go to the log, not to the client
            log.exception("request %s failed", sender.request_id)
            await sender.send_error(error)
        await sender.end()

    def _check_key(self, scope: Scope) -> None:
        if not self._key_hashes or scope["path"] in self._public_paths:
            return
        scheme, _, key = _header(scope, b"authorization").partition(b" ")
        offered = _hash(key.strip())
        # Every key is compared, in constant time, so that the duration reveals nothing about the keys.
        known = sum(hmac.compare_digest(offered, expected) for expected in self._key_hashes)
        if scheme.lower() != b"bearer" or not known:
            raise Unauthorized("This server needs an API key: send it as `Authorization: Bearer KEY`.")

    async def _forward(self, scope: Scope, receive: Receive, sender: ResponseSender) -> None:
        if scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, sender.send)
            return
        body = bytearray()
        try:
            await self._read_body(scope, receive, body)
            await run_until_disconnect(self._app, scope, bytes(body), receive, sender.send)
        finally:
            self._held_bytes -= len(body)

    async def _read_body(self, scope: Scope, receive: Receive, body: bytearray) -> None:
        declared, limit = _header(scope, b"content-length"), _body_limit(scope)
        if declared.isdigit() and int(declared[:20]) > limit:
            raise _too_large(limit)
        inflate = BodyDecoder(_header(scope, b"content-encoding").decode("latin-1"))
        try:
            async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
                while await self._read_chunk(receive, body, inflate, limit):
                    pass
        except TimeoutError as error:
            raise HTTPException(408, f"The body did not arrive within {BODY_TIMEOUT_SECONDS:g} seconds") from error

        inflate.finish()

    async def _read_chunk(self, receive: Receive, body: bytearray, inflate: BodyDecoder, limit: int) -> bool:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk = inflate(message.get("body", b""), limit + 1 - len(body))
        if len(body) + len(chunk) > limit:
            raise _too_large(limit)
        if self._held_bytes + len(chunk) > MAX_HELD_BODIES * MAX_BODY_BYTES:
            raise Overloaded("The server holds too many large bodies already.", retry_after_seconds=1.0)
        body += chunk
        self._held_bytes += len(chunk)
        return bool(message.get("more_body", False))


class ResponseSender:
    """Sender of the response to one client. It adds the request id and tracks how far the response is."""

    def __init__(self, scope: Scope, send: Send, error_format: Callable[[str], ErrorFormat]) -> None:
        offered = _header(scope, b"x-request-id")
        self.request_id = offered.decode() if _VALID_ID.fullmatch(offered) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = self.request_id
        self._path, self._send, self._error_format = scope["path"], send, error_format
        self._started = self._ended = self._is_event_stream = False

    async def send(self, message: Message) -> None:
        """Forward an ASGI message; the response's start gets the header `x-request-id`."""
        if message["type"] == "http.response.start":
            self._started = True
            headers = message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
            self._is_event_stream = any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
            )
        elif not message.get("more_body", False):
            self._ended = True
        await self._send(message)

    async def send_error(self, error: Exception) -> None:
        """Send an error to the client if that is still possible: as a response, or as the last event of a stream.

        Call `end` afterwards.
        """
        errors = self._error_format(self._path)
        if not self._started:
            response = errors.response(error)
            if isinstance(error, BodyTooLarge):
                response.headers["connection"] = "close"
            await self.send(
                {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
            )
            await self.send({"type": "http.response.body", "body": response.body, "more_body": True})
        elif self._is_event_stream and not self._ended:
            await self.send(
                {
                    "type": "http.response.body",
                    "body": format_sse(errors.body(to_http_error(error))),
                    "more_body": True,
                }
            )

    async def end(self) -> None:
        """Complete a response that was started and not finished."""
        if self._started and not self._ended:
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})


def _body_limit(scope: Scope) -> int:
    """Return the body size limit. Bodies with a header that says where their tensors begin may be larger."""
    has_tensors = scope["path"].startswith("/v2/") and _header(scope, TENSOR_HEADER)
    return MAX_TENSOR_BODY_BYTES if has_tensors else MAX_BODY_BYTES


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body may have at most {limit} bytes.")


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
