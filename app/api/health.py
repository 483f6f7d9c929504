"""Endpoints for browsers, probes, scrapers and operators: liveness, readiness, information, metrics, the step log."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import (
    JSONResponse,
    RedirectResponse,
    Response,
)

from app.api.dependencies import runtime_of
from app.api.errors import LOADING_RETRY_SECONDS
from app.errors import InvalidRequest
from app.version import VERSION

MAX_STEP_DIGITS = 18  # digits of a step number: more steps than any process reaches


async def healthz(request: Request) -> Response:
    """Report liveness; 500 after the worker thread has died, when only a restart helps."""
    alive = runtime_of(request).service.alive
    return JSONResponse({"status": "alive" if alive else "dead"}, 200 if alive else 500)


async def readyz(request: Request) -> Response:
    """Report readiness; 503 with the loading stage until the model is ready."""
    service = runtime_of(request).service
    if service.ready:
        return JSONResponse({"status": "ready"})
    status = "stopping" if service.stage == "stopping" else "loading"
    body = {"status": status, "stage": service.stage}
    return JSONResponse(body, 503, headers={"retry-after": str(LOADING_RETRY_SECONDS)})


async def info(request: Request) -> Response:
    """Return the version, the stage, the runtime's information and the capacity; less is known while loading."""
    runtime = runtime_of(request)
    capacity = runtime.service.snapshot.to_json()
    return JSONResponse({"version": VERSION, "stage": runtime.service.stage, **runtime.info(), "capacity": capacity})


async def steps(request: Request) -> Response:
    """Return the engine's last steps after the step number given as `after`."""
    after = _parse_step_number(request.query_params.get("after", "0"))
    return JSONResponse({"clock": time.time(), **runtime_of(request).metrics.step_log.since(after)})


def _parse_step_number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_STEP_DIGITS):
        raise InvalidRequest(
            "after must be a step number, 0 or more: the `next` of the previous response.", field="after"
        )
    return int(text)


async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus format.

    The counters are already filled, so a scrape on the event loop never waits for a step.
    """
    body, content_type = runtime_of(request).metrics.render(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


async def root(request: Request) -> Response:
    """Redirect to the documentation of the routes."""
    return RedirectResponse("docs")
