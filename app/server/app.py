"""The ASGI application: middleware and the routes of the API. `process` serves it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from app.api.access import AccessControl
from app.api.middleware import RequestGate, RequestObserver
from app.api.openapi import describe
from app.api.routers import PUBLIC, ROUTES, check_arriving_body, count_response, error_format, span_starter
from app.api.routing import ApiCall, ApiRuntime, Dialect, Route, RouteTable
from app.api.server.load_report import LoadReportHeader
from app.api.server.pages import documentation_response, web_file_response, web_paths
from app.version import VERSION


def create_app(runtime: ApiRuntime) -> FastAPI:
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
    )
    app.state.runtime = runtime
    app.openapi = cache(lambda: describe(ROUTES, needs_key=bool(runtime.api_keys)))  # type: ignore[method-assign]
    files = web_paths() if runtime.page else {}
    app.add_middleware(RouteTable, routes=[*ROUTES, *_documentation_routes(app), *_file_routes(files)])
    app.add_middleware(LoadReportHeader)
    public = PUBLIC | {(method, path) for path in files for method in ("GET", "HEAD")}
    access = AccessControl(runtime.access_rules, runtime.api_keys, public)
    traced = {} if runtime.tracer is None else {"begin_span": span_starter(runtime.tracer)}
    observer = RequestObserver(count_response, **traced)
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
    return app


def _documentation_routes(app: FastAPI) -> list[Route]:
    """Return the routes of the document and of its page, rendered once: that takes ten milliseconds of the event loop."""
    pages = Dialect("Server")
    renderers: dict[str, Callable[[dict[str, Any]], Response]] = {
        "/openapi.json": JSONResponse,
        "/docs": documentation_response,
    }
    for path, render in renderers.items():
        rendered = cache(lambda render=render: render(app.openapi()))

        async def send(call: ApiCall, rendered: Callable[[], Response] = rendered) -> Response:
            return rendered()

        pages.get(path, "")(send)
    return pages.routes


def _file_routes(files: dict[str, str]) -> list[Route]:
    pages = Dialect("Server", public=True)
    for path, name in files.items():

        async def send(call: ApiCall, name: str = name) -> Response:
            return web_file_response(call.request, name)

        pages.get(path, "")(send)
    return pages.routes
