"""Cancellation of a request when its client disconnects.

Without it, nothing cancels a handler that is not streaming, and a streaming one notices only at its next event.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LINGER_SECONDS = 2.0  # time for discarding a refused body, so that the client can read the response


class ClientLeft(Exception):
    """The client has disconnected; no response can be sent."""


async def run_beside_watch(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Run the application on a body that was read.

    If the client disconnects, cancel the application and raise `ClientDisconnected`.
    """
    serving = asyncio.ensure_future(app(scope, _replay(body), send))
    watching = asyncio.ensure_future(_departure(receive))
    watching.add_done_callback(lambda _: serving.cancel())
    try:
        await serving
    except asyncio.CancelledError:
        if watching.done():
            raise ClientLeft from None
        raise
    finally:
        watching.cancel()


def _replay(body: bytes) -> Receive:
    """Return a `receive` that gives the body once and then blocks: disconnects are detected elsewhere."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        silence: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return await silence

    return receive


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def linger(receive: Receive) -> None:
    """Read and discard the rest of a refused body for a short time.

    A client that is still sending reads the response only if its connection is not reset.
    """
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                pass
    except TimeoutError:
        pass
