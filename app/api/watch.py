"""Runs the application beside a watch on the connection, so that a client who leaves frees what was being computed for it.

Nothing else cancels a handler that is not streaming; a streaming one would learn of it only at its next event.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LINGER_SECONDS = 2.0  # how long a refused body is read and thrown away, so that the client gets to read the refusal


class ClientLeft(Exception):
    """Nobody is there to be answered."""


async def run_beside_watch(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Runs the app on a body that has been read; cancels it and raises `ClientLeft` when the client leaves."""
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
    """A `receive` that gives the body once and then never says another word: departure is watched elsewhere."""
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
    """A client that is still sending reads our refusal only if its connection is not reset under it; nothing is kept."""
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                pass
    except TimeoutError:
        pass
