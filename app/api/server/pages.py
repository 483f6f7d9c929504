"""Pages for browsers: the web page at `/` with its scripts and styles, and `/docs`, the list of operations as plain HTML.

They load nothing from another host: no script, style, font or icon.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

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


@dataclass(frozen=True, slots=True)
class WebFile:
    """One file of the page: its bytes, the same compressed with gzip, its type and its entity tag."""

    content: bytes
    compressed: bytes
    content_type: str
    tag: str


@cache
def read_web_file(name: str) -> WebFile:
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


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color-scheme: light dark }
code, pre { font: 14px/1.4 ui-monospace, monospace } pre { overflow: auto; padding: .5rem; border: 1px solid #8886 }
details { border-bottom: 1px solid #8886; padding: .3rem 0 } summary { cursor: pointer }
td, th { text-align: left; padding-right: 1rem; vertical-align: top }
"""
_STYLE_HASH = b64encode(sha256(_STYLE.encode()).digest()).decode()
_DOCUMENTATION_HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; img-src data:;"
    " form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_REFERENCE = re.compile(r'"#/components/schemas/([^"]+)"')


def documentation_response(document: Mapping[str, Any]) -> HTMLResponse:
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    tags: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            tags.setdefault(operation["tags"][0], []).append("".join(_operation(method, path, operation)))
    sections = "".join(f"<h2>{escape(tag)}</h2>{''.join(operations)}" for tag, operations in tags.items())
    schemas = "".join(_schema(name, schema) for name, schema in sorted(document["components"]["schemas"].items()))
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><link rel="icon" href="data:,">'
        f"<style>{_STYLE}</style></head><body><main><h1>{title}</h1>"
        '<p>The same as a document for programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"{sections}<h2>Schemas</h2>{schemas}</main></body></html>"
    )
    return HTMLResponse(page, headers=_DOCUMENTATION_HEADERS)


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    summary = escape(operation.get("summary", ""))
    yield f"<details><summary><code><b>{method.upper()}</b> {escape(path)}</code> {summary}</summary><table>"
    for parameter in operation.get("parameters", ()):
        text = escape(parameter.get("description", ""))
        yield f"<tr><th>{escape(parameter['name'])}</th><td>in {escape(parameter['in'])}</td><td>{text}</td></tr>"
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<tr><th>body</th><td>{escape(kind)}</td><td>{_type(content)}</td></tr>"
    for status, response in operation["responses"].items():
        kinds = "; ".join(f"{escape(kind)} {_type(content)}" for kind, content in response.get("content", {}).items())
        yield f"<tr><th>{escape(status)}</th><td>{escape(response['description'])}</td><td>{kinds}</td></tr>"
    yield "</table></details>"


def _type(content: Mapping[str, Any]) -> str:
    names = dict.fromkeys(_REFERENCE.findall(json.dumps(content.get("schema", {}))))
    return " or ".join(f'<a href="#{escape(name)}">{escape(name)}</a>' for name in names)


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    text = escape(json.dumps(schema, indent=2, ensure_ascii=False))
    return f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary><pre>{text}</pre></details>'
