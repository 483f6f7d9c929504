"""The web page at `/` with its scripts and styles, which come with the package and ask no other host for anything."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from app.api.routing import DialectRouter, runtime_of

WEB_DIRECTORY = Path(__file__).resolve().parent.parent.parent / "web"
PAGE = "index.html"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# What a model writes is shown in this page, so nothing that is not one of its own files may run or be loaded.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # A browser asks each time whether the file has changed, so a page never mixes files of two versions.
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}

router = DialectRouter("Server", public=True)


@dataclass(frozen=True, slots=True)
class WebFile:
    """One file of the page: its bytes, the same compressed with gzip, its type and its entity tag."""

    content: bytes
    compressed: bytes
    content_type: str
    tag: str


@cache
def read_web_file(name: str) -> WebFile:
    """Read and compress a file of the page, once."""
    content = (WEB_DIRECTORY / name).read_bytes()
    tag = f'W/"{hashlib.sha256(content).hexdigest()[:24]}"'
    return WebFile(content, gzip.compress(content, 9, mtime=0), CONTENT_TYPES[Path(name).suffix], tag)


@cache
def web_paths() -> dict[str, str]:
    """Return the file of each path at which a part of the page is served. No other path leads to a file."""
    files = (path.relative_to(WEB_DIRECTORY).as_posix() for path in WEB_DIRECTORY.rglob("*"))
    return {f"/web/{name}": name for name in sorted(files) if Path(name).suffix in CONTENT_TYPES and name != PAGE}


def web_file_response(request: Request, name: str) -> Response:
    """Return a file of the page; 304 if the browser has it, and compressed if it takes gzip."""
    file = read_web_file(name)
    headers = {**_HEADERS, "etag": file.tag}
    if file.tag in (known.strip() for known in request.headers.get("if-none-match", "").split(",")):
        return Response(status_code=304, headers=headers)
    if _takes_gzip(request.headers.get("accept-encoding", "")):
        return Response(
            file.compressed, headers={**headers, "content-encoding": "gzip", "content-type": file.content_type}
        )
    return Response(file.content, headers={**headers, "content-type": file.content_type})


def _takes_gzip(accepted: str) -> bool:
    for coding in accepted.lower().split(","):
        name, _, quality = coding.replace(" ", "").partition(";q=")
        if name in ("gzip", "*"):
            return quality.strip("0.") != "" or quality == ""
    return False


def web_file_endpoint(name: str) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """Return the endpoint of a file."""

    async def send_file(request: Request) -> Response:
        return web_file_response(request, name)

    return send_file


@router.get(
    "/",
    summary="The web page; with page=off, a redirect to the API documentation",
    response_class=HTMLResponse,
    responses={
        304: {"description": "The browser has the page already (`If-None-Match`)."},
        307: {"description": "The page is off."},
    },
)
async def root(request: Request) -> Response:
    """Return the web page, or redirect to the documentation of the routes."""
    return web_file_response(request, PAGE) if runtime_of(request).page else RedirectResponse("docs")
