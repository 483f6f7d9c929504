"""Everything between the connection and the endpoints: the request gate, limits on the body, and disconnects.

`RequestGate` is the entry point of every request, and runs it in the task of its connection. Nothing else cancels a
handler after its client has left, unless it is streaming, and then only at its next event.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.access import NO_RULES, AccessControl, header
from app.api.bodies import ArrivingBody, BodyCheck, BodyMemory, ClientDisconnected
from app.api.errors import NATIVE_ERRORS, ErrorFormat, to_http_error
from app.api.routing import ARRIVED_BODY, new_id
from app.api.streaming import format_sse
from app.errors import BodyTooLarge, RequestError, ServiceStopping
from app.service.requests import CLIENT_REQUEST, ClientRequest, log_request, request_level
from app.service.requests import log as request_log
from app.tracing.request_trace import RequestSpan

DEPARTURE = "armature.departure"
DISCARD_SECONDS = 2.0  # time for discarding a refused body, so that the client can read the response


@dataclass(slots=True)
class Departure:
    """The departure of a request's client, which its connection reports: an extension of the ASGI scope."""

    has_left: bool = False
    notify: Callable[[], object] | None = None

    def leave(self) -> None:
        self.has_left = True
        if self.notify is not None:
            self.notify()


async def run_until_disconnect(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Run the application on a request whose body was read. If the client leaves, raise `ClientDisconnected` in it."""
    task, departure = asyncio.current_task(), scope.get("extensions", {}).get(DEPARTURE) or Departure()
    assert task is not None, "the server runs requests in tasks"
    departure.notify = task.cancel
    try:
        await app(scope, receive, send)
    except asyncio.CancelledError:
        if departure.has_left:
            raise ClientDisconnected from None
        raise
    finally:
        departure.notify = None
        if departure.has_left:
            task.uncancel()


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


log = logging.getLogger(__name__)

CLIENT_LEFT = 499  # status in the log of a request whose client left, as in nginx's
SLOW_SECONDS = 0.001  # a message takes microseconds unless the client must read first
_VALID_ID = re.compile(rb"[\x21-\x7e]{1,128}")


OPEN_ACCESS = AccessControl(NO_RULES, (), ())  # no keys and no limits


async def _no_check(scope: Scope) -> BodyCheck | None:
    return None


def _no_span(scope: Scope) -> RequestSpan | None:
    return None


def _no_count(scope: Scope, status: int, code: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class RequestObserver:
    """Where requests are reported.

    `count` takes a response's status and the code of its error, empty if there is none. `begin_span` returns None if
    the request is not traced.
    """

    count: Callable[[Scope, int, str], None] = _no_count
    begin_span: Callable[[Scope], RequestSpan | None] = _no_span


class RequestGate:
    """ASGI middleware around the application. Its only state is the memory of large bodies.

    `body_check` returns the check of a request's body while it arrives, or None. It is asked for large bodies only.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: AccessControl = OPEN_ACCESS,
        error_format: Callable[[str], ErrorFormat] = lambda path: NATIVE_ERRORS,
        body_check: Callable[[Scope], Awaitable[BodyCheck | None]] = _no_check,
        observer: RequestObserver = RequestObserver(),
    ) -> None:
        self._app, self._access, self._error_format, self._body_check = app, access, error_format, body_check
        self._observer = observer
        self.body_memory = BodyMemory()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, convert every exception to a response, and count, log and trace the request."""
        sender = ResponseSender(scope, send, self._error_format)
        is_logged, span = request_log.isEnabledFor(request_level(scope["method"])), self._observer.begin_span(scope)
        began, client_request = time.monotonic(), ClientRequest()
        CLIENT_REQUEST.set(client_request)
        if span is not None:
            client_request.trace, sender.traceresponse = span.trace, span.traceresponse
        try:
            await self._answer(scope, receive, sender, client_request)
        finally:
            seconds = time.monotonic() - began
            self._observer.count(scope, sender.status, sender.error or client_request.error)
            if span is not None:
                span.end(sender.request_id, sender.status, sender.error, sender.is_stream)
            if is_logged:
                log_request(scope["method"], scope["path"], sender.request_id, sender.status, seconds, client_request)

    async def _answer(
        self, scope: Scope, receive: Receive, sender: ResponseSender, client_request: ClientRequest
    ) -> None:
        try:
            client_request.account = await self._access.check(scope)
            await self._forward(scope, receive, sender)
        except ClientDisconnected:
            if not sender.has_ended:  # the end of a stream may be cancelled too: uvicorn then reports a disconnect
                sender.status, sender.error = CLIENT_LEFT, "client_disconnected"
                log.debug("request %s: the client left", sender.request_id)
            return
        except (RequestError, HTTPException) as error:
            await sender.send_error(error)
            if isinstance(error, BodyTooLarge) or (isinstance(error, HTTPException) and error.status_code == 408):
                await discard_body(receive)
        except asyncio.CancelledError:  # the server is stopping and drain_seconds are over
            await sender.send_error(ServiceStopping("The server is stopping and could not finish this request."))
        except Exception as error:  # last handler: details go to the log, not to the client
            log.exception("request %s failed", sender.request_id)
            await sender.send_error(error)
        await sender.end()

    async def _forward(self, scope: Scope, receive: Receive, sender: ResponseSender) -> None:
        if scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, sender.send)
            return
        body = scope["state"][ARRIVED_BODY] = ArrivingBody(scope, receive, self.body_memory)
        try:
            await body.read(self._body_check)
            await run_until_disconnect(self._app, scope, receive, sender.send)
        finally:
            body.release()


class ResponseSender:
    """Sender of the response to one client. It adds the request id and tracks how far the response is.

    `status` is `CLIENT_LEFT` before there is a response. `error` is the code of the error that was sent. With
    `traceresponse`, the response has this header. `is_stream` is true for events and for lines of JSON.
    """

    def __init__(self, scope: Scope, send: Send, error_format: Callable[[str], ErrorFormat]) -> None:
        offered = header(scope, b"x-request-id")
        self.request_id = offered.decode() if _VALID_ID.fullmatch(offered) else new_id()
        self._state = scope.setdefault("state", {})
        self._state["request_id"] = self.request_id
        self._path, self._send, self._error_format = scope["path"], send, error_format
        self._started = self._ended = self._is_event_stream = False
        self.status = CLIENT_LEFT
        self.error: str | None = None
        self.traceresponse = ""
        self.is_stream = False

    @property
    def has_ended(self) -> bool:
        return self._ended

    async def send(self, message: Message) -> None:
        """Forward an ASGI message; the response's start gets the headers `x-request-id` and `traceresponse`."""
        if message["type"] == "http.response.start":
            self._started, self.status = True, message["status"]
            headers = message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
            kind = next((value for name, value in headers if name == b"content-type"), b"")
            self._is_event_stream = kind.startswith(b"text/event-stream")
            if self.traceresponse:
                headers.append((b"traceresponse", self.traceresponse.encode()))
                self.is_stream = self._is_event_stream or kind.startswith(b"application/x-ndjson")
        elif not message.get("more_body", False):
            self._ended = True
        if not self._is_event_stream:
            await self._send(message)
            return
        began = time.monotonic()
        await self._send(message)
        if time.monotonic() - began > SLOW_SECONDS:
            # The client was slow, or has left. Two turns of the loop let its departure end this request before the
            # events that were collected meanwhile are written for nobody.
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def send_error(self, error: Exception) -> None:
        """Send an error if that is still possible: as a response, or as the last event of a stream.

        Call `end` afterwards.
        """
        errors = self._state.get("errors") or self._error_format(self._path)
        self.error = to_http_error(error).code
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


class AskedHeader:
    """ASGI middleware that adds a header to the responses of requests with another header.

    `value` takes what the request's header says, in lower case, when the response starts; without a value there is no
    header.
    """

    def __init__(self, app: ASGIApp, asked: bytes, name: bytes, value: Callable[[str], str]) -> None:
        self._app, self._asked, self._name, self._value = app, asked, name, value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = header(scope, self._asked).decode("latin-1").lower()

        async def adding(message: Message) -> None:
            if message["type"] == "http.response.start" and (value := self._value(asked)):
                message["headers"] = [*message.get("headers", ()), (self._name, value.encode())]
            await send(message)

        await self._app(scope, receive, adding if asked else send)
