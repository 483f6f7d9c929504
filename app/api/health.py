"""What probes, scrapers and curious people ask: alive, ready, what this is, and how it is doing."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.dependencies import runtime_of
from app.api.errors import LOADING_RETRY_SECONDS
from app.version import VERSION


async def healthz(request: Request) -> Response:
    """Fails when the worker thread has died: nothing but a restart helps then."""
    alive = runtime_of(request).service.alive
    return JSONResponse({"status": "alive" if alive else "dead"}, 200 if alive else 500)


async def readyz(request: Request) -> Response:
    service = runtime_of(request).service
    if service.ready:
        return JSONResponse({"status": "ready"})
    status = "stopping" if service.stage == "stopping" else "loading"
    body = {"status": status, "stage": service.stage}
    return JSONResponse(body, 503, headers={"retry-after": str(LOADING_RETRY_SECONDS)})


async def info(request: Request) -> Response:
    """What is known by now; while loading that is less."""
    runtime = runtime_of(request)
    snapshot = runtime.service.snapshot
    capacity: dict[str, Any] = asdict(snapshot) | {"kv_usage_ratio": snapshot.kv_usage_ratio}
    return JSONResponse({"version": VERSION, "stage": runtime.service.stage, **runtime.info(), "capacity": capacity})


async def metrics(request: Request) -> Response:
    """Answered on the event loop from counters that are already filled: a scrape never waits for a step."""
    body, content_type = runtime_of(request).metrics.render(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})
