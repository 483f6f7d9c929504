"""What a browser gets at the root: until there is a page, the documentation of the routes."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response


async def root(request: Request) -> Response:
    return RedirectResponse("docs")
