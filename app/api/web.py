"""The root path for browsers."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response


async def root(request: Request) -> Response:
    """Redirect to the documentation of the routes."""
    return RedirectResponse("docs")
