"""Lookup of endpoints by exact path, before the application's router.

A router matches patterns one after the other, and FastAPI resolves dependencies that these endpoints do not
have: together half of the event loop's time for a short text. Paths with parameters, the documentation and
unknown paths still go to the application.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]


class Directory:
    """ASGI application that serves `endpoints`, given by method and path, and passes all other requests to `app`.

    Exceptions of the endpoints are left to the enclosing `RequestGate`.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[tuple[str, str], Endpoint]) -> None:
        self._app, self._endpoints = app, endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the endpoint of the exact path, or the wrapped application."""
        endpoint = self._endpoints.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        response = await endpoint(Request(scope, receive))
        await response(scope, receive, send)
