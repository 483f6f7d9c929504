"""The ASGI application: middleware and the routers of the API. `process` serves it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.access import AccessControl
from app.api.errors import HANDLED_EXCEPTIONS, to_http_error
from app.api.load_report import LoadReportHeader
from app.api.middleware import RequestGate, RequestObserver
from app.api.pages.documentation import documentation_response
from app.api.pages.web_page import web_file_endpoint, web_paths
from app.api.routers import (
    ROUTERS,
    ROUTES,
    check_arriving_body,
    describe,
    error_format,
    public_operations,
    response_counter,
    span_starter,
)
from app.api.routing import ApiRuntime, RouteTable
from app.service.request_log import note_error
from app.version import VERSION


def create_app(runtime: ApiRuntime) -> FastAPI:
    """Return the ASGI application for a runtime; its lifespan starts and stops the runtime."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await runtime.lifetime.start()
        try:
            yield
        finally:
            await runtime.lifetime.stop()

    app = FastAPI(
        title="Armature",
        version=VERSION,
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=dict.fromkeys(HANDLED_EXCEPTIONS, _handle_error),
    )
    app.state.runtime = runtime
    app.add_middleware(RouteTable, routes=ROUTES)
    app.add_middleware(LoadReportHeader)
    files = web_paths() if runtime.page else {}
    public = public_operations() | {(method, path) for path in files for method in ("GET", "HEAD")}
    access = AccessControl(runtime.access_rules, runtime.api_keys, public)
    traced = {} if runtime.tracer is None else {"begin_span": span_starter(runtime.tracer)}
    observer = RequestObserver(response_counter(), **traced)
    app.add_middleware(
        RequestGate, access=access, error_format=error_format, body_check=check_arriving_body, observer=observer
    )
    if runtime.access_rules.cors_allow_origins:
        # Around the gate: a browser's preflight has no key, and its page reads refusals too.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=runtime.access_rules.cors_allow_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after", "server-timing", "traceresponse"),
        )
    for router in ROUTERS:
        app.include_router(router)
    app.openapi = cache(lambda: describe(app, needs_key=bool(runtime.api_keys)))  # type: ignore[method-assign]
    app.add_route("/openapi.json", _show_document)
    app.add_route("/docs", _show_documentation)
    for path, name in files.items():
        app.add_route(path, web_file_endpoint(name))
    return app


async def _show_document(request: Request) -> Response:
    return _rendered(request.app, "document", lambda document: JSONResponse(document))


async def _show_documentation(request: Request) -> Response:
    return _rendered(request.app, "documentation", documentation_response)


def _rendered(app: FastAPI, name: str, render: Callable[[dict[str, Any]], Response]) -> Response:
    """Return a response that was rendered once: it takes some ten milliseconds of the event loop."""
    first: Response | None = getattr(app.state, name, None)
    if first is None:
        first = render(app.openapi())
        setattr(app.state, name, first)
    return Response(first.body, headers={k: v for k, v in first.headers.items() if k != "content-length"})


async def _handle_error(request: Request, error: Exception) -> Response:
    note_error(to_http_error(error).code)
    return error_format(request.url.path).response(error)
