"""The ASGI application: middleware and the routers of the API. `process` serves it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from app.api.errors import HANDLED_EXCEPTIONS
from app.api.middleware import RequestGate
from app.api.routers import ROUTERS, ROUTES, describe, error_format, public_paths
from app.api.routing import ApiRuntime, RouteTable
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
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=dict.fromkeys(HANDLED_EXCEPTIONS, _handle_error),
    )
    app.state.runtime = runtime
    app.add_middleware(RouteTable, routes=ROUTES)
    app.add_middleware(RequestGate, api_keys=runtime.api_keys, public_paths=public_paths(), error_format=error_format)
    for router in ROUTERS:
        app.include_router(router)
    app.openapi = cache(lambda: describe(app, needs_key=bool(runtime.api_keys)))  # type: ignore[method-assign]
    return app


async def _handle_error(request: Request, error: Exception) -> Response:
    return error_format(request.url.path).response(error)
