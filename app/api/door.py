"""Entry point of every request, in front of the application.

It assigns the request id, checks the API key, limits the body's size, detects disconnects and has the last
exception handler. It is plain ASGI, since a middleware that runs requests in its own tasks hides disconnects.
Parsing bodies is the dialects' task.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import Collection

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.errors import error_body, error_response, refusal
from app.api.inflate import Inflate
from app.api.streaming import sse
from app.api.watch import ClientLeft, linger, run_beside_watch
from app.errors import BodyTooLarge, Overloaded, RequestError, ServiceStopping, Unauthorized

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20  # several times a context of a million tokens as text
MAX_TENSOR_BODY_BYTES = 4 * MAX_BODY_BYTES  # 100 images of 224 × 224 in FP32; binary tensors are not parsed
TENSOR_HEADER = b"inference-header-content-length"
MAX_HELD_BODIES = 8  # bodies of full size in memory at the same time; once parsed, a body takes several times its size
BODY_SECONDS = 60.0  # time limit for receiving a body
# Probes and scrapers have no keys.
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/metrics"})
_SANE_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Door:
    """ASGI middleware around the application. Its only state is the number of body bytes held in memory."""

    def __init__(self, app: ASGIApp, api_keys: Collection[str] = ()) -> None:
        self._app = app
        self._key_hashes = tuple(_hash(key.encode()) for key in api_keys)
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request and convert every exception to a response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = Answer(scope, send)
        try:
            self._check_key(scope)
            await self._pass(scope, receive, answer)
        except ClientLeft:
            log.debug("request %s: the client left", answer.request_id)
            return
        except (RequestError, HTTPException) as error:
            await answer.refuse(error)
            if isinstance(error, BodyTooLarge):
                await linger(receive)
        except asyncio.CancelledError:  # the server is stopping and drain_seconds are over
            await answer.refuse(ServiceStopping("The server is stopping and could not finish this request."))
        except Exception as error:  # last handler: details go to the log, not to the client
            log.exception("request %s failed", answer.request_id)
            await answer.refuse(error)
        await answer.end()

    def _check_key(self, scope: Scope) -> None:
        if not self._key_hashes or scope["path"] in OPEN_PATHS:
            return
        scheme, _, key = _header(scope, b"authorization").partition(b" ")
        offered = _hash(key.strip())
        # Every key is compared, in constant time, so that the duration reveals nothing about the keys.
        known = sum(hmac.compare_digest(offered, expected) for expected in self._key_hashes)
        if scheme.lower() != b"bearer" or not known:
            raise Unauthorized("This server needs an API key: send it as `Authorization: Bearer KEY`.")

    async def _pass(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        if scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, answer.send)
            return
        body = bytearray()
        try:
            await self._read(scope, receive, body)
            await run_beside_watch(self._app, scope, bytes(body), receive, answer.send)
        finally:
            self._held_bytes -= len(body)

    async def _read(self, scope: Scope, receive: Receive, body: bytearray) -> None:
        declared, limit = _header(scope, b"content-length"), _limit(scope)
        if declared.isdigit() and int(declared[:20]) > limit:
            raise _too_large(limit)
        inflate = Inflate(_header(scope, b"content-encoding").decode("latin-1"))
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while await self._read_chunk(receive, body, inflate, limit):
                    pass
        except TimeoutError as error:
            raise HTTPException(408, f"The body did not arrive within {BODY_SECONDS:g} seconds") from error

        inflate.finish()

    async def _read_chunk(self, receive: Receive, body: bytearray, inflate: Inflate, limit: int) -> bool:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk = inflate(message.get("body", b""), limit + 1 - len(body))
        if len(body) + len(chunk) > limit:
            raise _too_large(limit)
        if self._held_bytes + len(chunk) > MAX_HELD_BODIES * MAX_BODY_BYTES:
            raise Overloaded("The server holds too many large bodies already.", retry_after_seconds=1.0)
        body += chunk
        self._held_bytes += len(chunk)
        return bool(message.get("more_body", False))


class Answer:
    """Sender of the response to one client. It adds the request id and tracks how far the response is."""

    def __init__(self, scope: Scope, send: Send) -> None:
        offered = _header(scope, b"x-request-id")
        self.request_id = offered.decode() if _SANE_ID.fullmatch(offered) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = self.request_id
        self._scope, self._send = scope, send
        self._started = self._ended = self._streams = False

    async def send(self, message: Message) -> None:
        """Forward an ASGI message; the response's start gets the header `x-request-id`."""
        if message["type"] == "http.response.start":
            self._started = True
            headers = message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
            self._streams = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
        elif not message.get("more_body", False):
            self._ended = True
        await self._send(message)

    async def refuse(self, error: Exception) -> None:
        """Send an error to the client if that is still possible: as a response, or as the last event of a stream.

        Call `end` afterwards.
        """
        path = self._scope["path"]
        if not self._started:
            response = error_response(path, error)
            if isinstance(error, BodyTooLarge):
                response.headers["connection"] = "close"
            await self.send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
            await self.send({"type": "http.response.body", "body": response.body, "more_body": True})
        elif self._streams and not self._ended:
            await self.send({"type": "http.response.body", "body": sse(error_body(path, refusal(error))), "more_body": True})

    async def end(self) -> None:
        """Complete a response that was started and not finished."""
        if self._started and not self._ended:
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})


def _limit(scope: Scope) -> int:
    """Return the body size limit. Bodies with a header that says where their tensors begin may be larger."""
    has_tensors = scope["path"].startswith("/v2/") and _header(scope, TENSOR_HEADER)
    return MAX_TENSOR_BODY_BYTES if has_tensors else MAX_BODY_BYTES


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body may have at most {limit} bytes.")


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
