"""Endpoints for browsers, probes, scrapers and operators: liveness, readiness, information, metrics, the step log."""

from __future__ import annotations

import time
from typing import Any, NotRequired

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from typing_extensions import TypedDict

from app.api.errors import LOADING_RETRY_SECONDS
from app.api.routing import DialectRouter, runtime_of
from app.errors import InvalidRequest
from app.version import VERSION

MAX_STEP_DIGITS = 18  # digits of a step number: more steps than any process reaches


probes = DialectRouter("Server", public=True)
router = DialectRouter("Server")


class LivenessStatus(TypedDict):
    """Response of `/healthz`: `alive` or `dead`."""

    status: str


class ReadinessStatus(TypedDict):
    """Response of `/readyz`: `ready`, `loading` or `stopping`; until it is ready, also the stage of loading."""

    status: str
    stage: NotRequired[str]


class InfoResponse(TypedDict):
    """Response of `/info`. While the server is loading, less is known."""

    version: str
    stage: str
    capacity: dict[str, Any]


class StepLogColumns(TypedDict):
    """Steps as columns: start in Unix seconds, duration, phase, tokens, and the cause if the step was slow."""

    at: list[float]
    seconds: list[float]
    phase: list[str]
    tokens: list[int]
    cause: list[str]


class StepsResponse(TypedDict):
    """Response of `/info/steps`. `next` is the number to request next; `dropped` steps were overwritten."""

    clock: float
    next: int
    dropped: int
    steps: StepLogColumns


AFTER = {
    "name": "after",
    "in": "query",
    "description": "Number of the first step: the `next` of the previous response.",
    "schema": {"type": "integer", "minimum": 0, "default": 0},
}
METRICS_TYPES = {name: {"schema": {"type": "string"}} for name in ("text/plain", "application/openmetrics-text")}


@probes.get(
    "/healthz",
    summary="Liveness: 200 while the worker thread is alive, else 500",
    response_model=LivenessStatus,
    responses={500: {"description": "The worker thread has died.", "model": LivenessStatus}},
)
async def healthz(request: Request) -> Response:
    """Report liveness; 500 after the worker thread has died, when only a restart helps."""
    alive = runtime_of(request).service.alive
    return JSONResponse({"status": "alive" if alive else "dead"}, 200 if alive else 500)


@probes.get(
    "/readyz",
    summary="Readiness: 503 with the loading stage until the server is ready",
    response_model=ReadinessStatus,
    responses={503: {"description": "The server is loading or stopping.", "model": ReadinessStatus}},
)
async def readyz(request: Request) -> Response:
    """Report readiness; 503 with the loading stage until the model is ready."""
    service = runtime_of(request).service
    if service.ready:
        return JSONResponse({"status": "ready"})
    status = "stopping" if service.stage == "stopping" else "loading"
    body = {"status": status, "stage": service.stage}
    return JSONResponse(body, 503, headers={"retry-after": str(LOADING_RETRY_SECONDS)})


@router.get("/info", summary="Version, model, facts, plan with reasons, and capacity", response_model=InfoResponse)
async def info(request: Request) -> Response:
    """Return the version, the stage, the runtime's information and the capacity; less is known while loading."""
    runtime = runtime_of(request)
    capacity = runtime.service.snapshot.to_json()
    return JSONResponse({"version": VERSION, "stage": runtime.service.stage, **runtime.info(), "capacity": capacity})


@router.get(
    "/info/steps",
    summary="The last engine steps: time, duration, and the cause of slow ones",
    response_model=StepsResponse,
    responses=router.failures(400),
    openapi_extra={"parameters": [AFTER]},
)
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


@probes.get(
    "/metrics",
    summary="Prometheus text; OpenMetrics on request",
    response_class=PlainTextResponse,
    responses={200: {"content": METRICS_TYPES}},
)
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus format.

    The counters are already filled, so a scrape on the event loop never waits for a step.
    """
    body, content_type = runtime_of(request).metrics.render(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


@router.get("/", summary="Redirect to the API documentation", status_code=307, response_class=RedirectResponse)
async def root(request: Request) -> Response:
    """Redirect to the documentation of the routes."""
    return RedirectResponse("docs")
