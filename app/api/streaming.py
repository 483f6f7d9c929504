"""Server-sent events: waiting for the first token, the event stream, and errors after its start.

The format of an event is left to the dialects.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Protocol

from starlette.responses import StreamingResponse
from starlette.types import Send

from app.api.errors import error_body, refusal
from app.errors import RequestError
from app.generation import ChoiceFinished, Piece, TextDelta
from app.messages import Timings

DONE = b"data: [DONE]\n\n"
# Created once: `json.dumps` with non-default arguments creates an encoder per call, which takes as long as encoding.
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class Pieces(Protocol):
    """A stream of generation events. A reader that stops early must call `aclose`."""

    def __aiter__(self) -> AsyncIterator[Piece]: ...
    async def aclose(self) -> None:
        """End the stream; an unfinished request is aborted."""


def sse(event: dict[str, Any]) -> bytes:
    """Return one server-sent event. JSON escapes line breaks, so a single `data:` line is enough."""
    return b"data: " + _JSON.encode(event).encode() + b"\n\n"


class Opened:
    """A stream whose events up to the first token were read.

    Errors before the first token were raised, while the status line could still be chosen.
    """

    def __init__(self, head: list[Piece], rest: Pieces) -> None:
        self._head, self._rest = head, rest

    async def __aiter__(self) -> AsyncIterator[Piece]:
        for piece in self._head:
            yield piece
        async for piece in self._rest:
            yield piece

    async def aclose(self) -> None:
        """End the underlying stream."""
        await self._rest.aclose()

    def timings(self) -> list[Timings]:
        """Return the timings of the choices that have begun: queue and prefill, all that a header can report."""
        return [piece.timings for piece in self._head if isinstance(piece, TextDelta) and piece.timings]


async def opened(pieces: Pieces) -> Opened:
    """Wait for the first event with tokens and return the stream. Errors before it are raised.

    An echo of the prompt has no tokens.
    """
    head: list[Piece] = []
    async for piece in pieces:
        head.append(piece)
        if isinstance(piece, ChoiceFinished) or (isinstance(piece, TextDelta) and piece.token_ids):
            break
    return Opened(head, pieces)


class EventStream(StreamingResponse):
    """A response of server-sent events that closes its source however it ends."""

    def __init__(self, events: AsyncIterator[bytes], source: Pieces, headers: dict[str, str]) -> None:
        # no-cache and x-accel-buffering make proxies forward each event immediately.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **headers}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._source = source

    async def stream_response(self, send: Send) -> None:
        """Send the events, then close the source."""
        try:
            await super().stream_response(send)
        finally:
            await self._source.aclose()


async def encode(events: AsyncIterator[dict[str, Any]], path: str, last: bytes = b"") -> AsyncIterator[bytes]:
    """Yield the events as bytes, then `last`.

    An error after the first event is sent as the last event, in the dialect of `path`.
    """
    try:
        async for event in events:
            yield sse(event)
    except RequestError as error:
        yield sse(error_body(path, refusal(error)))
        return
    if last:
        yield last
