"""uvicorn's HTTP protocol with a size limit and a time limit on the request head.

The size limit includes trailers. The parser collects headers of any length, and uvicorn waits for them without a
timeout. With many connections that is unbounded memory and an unbounded number of sockets.
"""

from __future__ import annotations

import asyncio
from asyncio import TimerHandle

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024  # the limit of h11, uvicorn's other parser
HEAD_SECONDS = 60.0


class BoundedHead(HttpToolsProtocol):
    """Protocol that limits the bytes since the last complete head or body chunk, and the time until the first head."""

    _unfinished_bytes = 0
    _deadline: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first head."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEAD_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline."""
        self._forget_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the data; respond with 400 if the head is too large."""
        self._unfinished_bytes += len(data)
        super().data_received(data)
        if self._unfinished_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def on_headers_complete(self) -> None:
        """Reset the count of bytes and cancel the deadline."""
        self._forget_deadline()
        self._unfinished_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Reset the count of bytes."""
        self._unfinished_bytes = 0
        super().on_body(body)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
