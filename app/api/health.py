"""Endpoints for probes, scrapers and operators: liveness, readiness, information, metrics, the step log."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, NotRequired

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from typing_extensions import TypedDict

from app.api.errors import LOADING_RETRY_SECONDS
from app.api.routing import DialectRouter, runtime_of
from app.api.tei import model_information
from app.errors import InvalidRequest, NotReady
from app.service.service import Service
from app.version import VERSION

MAX_STEP_DIGITS = 18  # digits of a step number: more steps than any process reaches


probes = DialectRouter("Server", public=True)
router = DialectRouter("Server")


class LivenessStatus(TypedDict):
    """Response of `/healthz`: `alive` or `dead`."""

    status: str


class LoadProgressStatus(TypedDict):
    """A phase of loading: its name, linear layers done and in total, percent of the bytes, estimated seconds left."""

    phase: str
    layers_done: int
    layers_total: int
    percent: int
    remaining_seconds: float | None


class ReadinessStatus(TypedDict):
    """Response of `/readyz`: `ready`, `loading` or `stopping`; until it is ready, also the stage of loading.

    `progress` is there while the model is fetched, and while weights are loaded or packed.
    """

    status: str
    stage: NotRequired[str]
    progress: NotRequired[LoadProgressStatus]


class InfoResponse(TypedDict):
    """Response of `/info`. While the server is loading, less is known; without a key, `stage` and `model` alone.

    `model_id` and `max_input_length` are of text-embeddings-inference, as `model_type` and more are for an encoder.
    """

    stage: str
    model: NotRequired[dict[str, Any]]
    model_id: NotRequired[str]
    max_input_length: NotRequired[int]
    version: NotRequired[str]
    capacity: NotRequired[dict[str, Any]]


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
    "schema": {"type": "integer", "minimum": 0, "maximum": 10**MAX_STEP_DIGITS - 1, "default": 0},
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
    body: dict[str, Any] = {"status": status, "stage": service.stage}
    if (progress := service.load_progress) is not None:
        body["progress"] = progress.to_json()
    return JSONResponse(body, 503, headers={"retry-after": str(LOADING_RETRY_SECONDS)})


@router.get("/info", summary="Version, model, facts, plan with reasons, and capacity", response_model=InfoResponse)
async def info(request: Request) -> Response:
    """Return the version, the stage, the runtime's information and the capacity; less is known while loading.

    Where keys are set, a request without one is told what a client needs, and nothing about the machine.
    """
    runtime = runtime_of(request)
    if not request.state.has_key:
        return JSONResponse(_client_info(runtime.service))
    service, known = runtime.service, runtime.info()
    body = {"version": VERSION, "stage": service.stage, **known, "capacity": service.snapshot.to_json()}
    with suppress(NotReady):
        body |= model_information(service.model, known.get("plan", {}))
    return JSONResponse(body)


def _client_info(service: Service) -> dict[str, Any]:
    try:
        served = service.model
    except NotReady:
        return {"stage": service.stage}
    model = {"name": served.name, "kind": served.kind, "max_model_len": served.limits.max_model_len}
    return {"stage": service.stage, "model": model}


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
