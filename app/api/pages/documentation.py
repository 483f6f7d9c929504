"""The page `/docs`: all operations of the OpenAPI document as plain HTML.

It loads nothing: no script, style, font or icon from this or any other host. So it works without internet, and no other
host's code runs in a page of this server.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from hashlib import sha256
from html import escape
from typing import Any

from starlette.responses import HTMLResponse

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color-scheme: light dark }
code, pre { font: 14px/1.4 ui-monospace, monospace } pre { overflow: auto; padding: .5rem; border: 1px solid #8886 }
details { border-bottom: 1px solid #8886; padding: .3rem 0 } summary { cursor: pointer }
td, th { text-align: left; padding-right: 1rem; vertical-align: top }
"""
_STYLE_HASH = b64encode(sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; img-src data:;"
    " form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_REFERENCE = re.compile(r'"#/components/schemas/([^"]+)"')


def documentation_response(document: Mapping[str, Any]) -> HTMLResponse:
    """Return the page for an OpenAPI document."""
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
    return HTMLResponse(page, headers=_HEADERS)


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
    """Return links to the schemas that a content refers to."""
    names = dict.fromkeys(_REFERENCE.findall(json.dumps(content.get("schema", {}))))
    return " or ".join(f'<a href="#{escape(name)}">{escape(name)}</a>' for name in names)


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    text = escape(json.dumps(schema, indent=2, ensure_ascii=False))
    return f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary><pre>{text}</pre></details>'
