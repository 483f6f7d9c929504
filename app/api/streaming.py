"""Answers that are sent while they grow: server-sent events, the wait for the first of them, and how a failure ends them.

Knows no dialect; what an event looks like is the dialects' business.
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
# Made once: `json.dumps` with anything but its defaults makes one at each call, which costs an event as much as writing it.
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class Pieces(Protocol):
    """A stream of pieces that must be closed by whoever stops reading it."""

    def __aiter__(self) -> AsyncIterator[Piece]: ...
    async def aclose(self) -> None: ...


def sse(event: dict[str, Any]) -> bytes:
    """One server-sent event; JSON escapes line breaks, so one `data:` line holds it."""
    return b"data: " + _JSON.encode(event).encode() + b"\n\n"


class Opened:
    """A stream whose head has been read: what fails before the first token has been raised, with a status line still to choose."""

    def __init__(self, head: list[Piece], rest: Pieces) -> None:
        self._head, self._rest = head, rest

    async def __aiter__(self) -> AsyncIterator[Piece]:
        for piece in self._head:
            yield piece
        async for piece in self._rest:
            yield piece

    async def aclose(self) -> None:
        await self._rest.aclose()

    def timings(self) -> list[Timings]:
        """Queue and prefill of what has begun: all that a header can say before the rest is known."""
        return [piece.timings for piece in self._head if isinstance(piece, TextDelta) and piece.timings]


async def opened(pieces: Pieces) -> Opened:
    """Waits for the first piece that tells of tokens (an echo of the prompt has none). Raises what went wrong before it."""
    head: list[Piece] = []
    async for piece in pieces:
        head.append(piece)
        if isinstance(piece, ChoiceFinished) or (isinstance(piece, TextDelta) and piece.token_ids):
            break
    return Opened(head, pieces)


class EventStream(StreamingResponse):
    """A response of server-sent events that closes its source however it ends."""

    def __init__(self, events: AsyncIterator[bytes], source: Pieces, headers: dict[str, str]) -> None:
        # no-cache and x-accel-buffering: proxies pass each event on as it comes.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **headers}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._source = source

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        finally:
            await self._source.aclose()


async def encode(events: AsyncIterator[dict[str, Any]], path: str, last: bytes = b"") -> AsyncIterator[bytes]:
    """Events as bytes, then `last`. A failure after the first one is told as the last event, in the dialect of `path`."""
    try:
        async for event in events:
            yield sse(event)
    except RequestError as error:
        yield sse(error_body(path, refusal(error)))
        return
    if last:
        yield last
