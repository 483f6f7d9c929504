"""The ASGI application: middleware and the routes of the API. `process` serves it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

from starlette.datastructures import State
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.access import AccessControl
from app.api.middleware import AskedHeader, RequestGate, RequestObserver
from app.api.openapi import describe
from app.api.routers import PUBLIC, ROUTES, check_arriving_body, count_response, error_format, span_starter
from app.api.routing import ApiCall, ApiRuntime, Dialect, Route, RouteTable
from app.api.server.load_report import ASKED, REPORTED, orca_report
from app.api.server.pages import documentation_response, web_file_response, web_paths


class Application:
    """The ASGI application. A request passes the gate, the header of load reports and the routes, and no other layer.

    FastAPI's and Starlette's own layers and tasks take a fifth of the event loop's time for a short request.
    """

    def __init__(self, runtime: ApiRuntime) -> None:
        self.state = State({"runtime": runtime})
        self.openapi = cache(lambda: describe(ROUTES, needs_key=bool(runtime.api_keys)))
        self.access, self.routes = _access(runtime), _routes(self, runtime)
        self._serve, self._lifespan = _serving(self, runtime), Router(lifespan=_lifespan)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await (self._serve if scope["type"] == "http" else self._lifespan)(scope, receive, send)


def create_app(runtime: ApiRuntime) -> Application:
    return Application(runtime)


@asynccontextmanager
async def _lifespan(app: Application) -> AsyncIterator[None]:
    runtime: ApiRuntime = app.state.runtime
    await runtime.lifetime.start()
    try:
        yield
    finally:
        await runtime.lifetime.stop()


def _access(runtime: ApiRuntime) -> AccessControl:
    files = web_paths() if runtime.page else {}
    public = PUBLIC | {(method, path) for path in files for method in ("GET", "HEAD")}
    return AccessControl(runtime.access_rules, runtime.api_keys, public, runtime.limiter)


def _routes(app: Application, runtime: ApiRuntime) -> ASGIApp:
    files = web_paths() if runtime.page else {}
    routes = RouteTable([*ROUTES, *_documentation_routes(app), *_file_routes(files)])
    # The main process knows the whole load, and adds the header to what it answers for others.
    return AskedHeader(routes, ASKED, REPORTED, partial(orca_report, runtime)) if runtime.main is None else routes


def _serving(app: Application, runtime: ApiRuntime) -> ASGIApp:
    traced = {} if runtime.tracer is None else {"begin_span": span_starter(runtime.tracer)}
    observer = RequestObserver(count_response, **traced)
    gate = RequestGate(app.routes, app.access, error_format, check_arriving_body, observer)
    if not runtime.access_rules.cors_allow_origins:
        return gate
    # Around the gate: a browser's preflight has no key, and its page reads refusals too.
    return CORSMiddleware(
        gate,
        allow_origins=runtime.access_rules.cors_allow_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "retry-after", "server-timing", "traceresponse"),
    )


def _documentation_routes(app: Application) -> list[Route]:
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
