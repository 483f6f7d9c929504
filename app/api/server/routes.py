"""Routes for probes, scrapers and operators: liveness, readiness, information, metrics, the step log; and the page."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, Literal

from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response

from app.api.encoders.routes import model_information
from app.api.errors import LOADING_RETRY_SECONDS
from app.api.routing import ApiCall, Dialect, Models, Reply
from app.api.server.pages import PAGE, web_file_response
from app.api.server.schemas import InfoResponse, LivenessStatus, ModelStatus, ReadinessStatus, StepsResponse
from app.errors import InvalidRequest, NotReady
from app.service.service import Service
from app.version import VERSION

MAX_STEP_DIGITS = 18  # digits of a step number: more steps than any process reaches
PROBES = Dialect("Server", public=True)
SERVER = Dialect("Server")
AFTER = {
    "name": "after",
    "in": "query",
    "description": "Number of the first step: the `next` of the previous response.",
    "schema": {"type": "integer", "minimum": 0, "maximum": 10**MAX_STEP_DIGITS - 1, "default": 0},
}
METRICS_TYPES = {name: {"schema": {"type": "string"}} for name in ("text/plain", "application/openmetrics-text")}


@PROBES.get(
    "/healthz",
    "Liveness: 200 while the worker thread is alive, else 500",
    openapi={"responses": {500: {"description": "The worker thread has died.", "model": LivenessStatus}}},
)
async def healthz(call: ApiCall) -> Reply[LivenessStatus]:
    """Report liveness; 500 after the worker thread has died, when only a restart helps. Name what is not ready."""
    models, service = call.runtime.models, call.service
    alive = service.alive if models is None else models.is_healthy
    body: LivenessStatus = {"status": "alive" if alive else "dead"}
    if models is None and alive and not service.ready:
        body["stage"] = service.stage
    return Reply(body, 200 if alive else 500)


@PROBES.get(
    "/readyz",
    "Readiness: 503 with the loading stage until the server is ready",
    openapi={"responses": {503: {"description": "The server is loading or stopping.", "model": ReadinessStatus}}},
)
async def readyz(call: ApiCall) -> Reply[ReadinessStatus]:
    """Report readiness; 503 with the loading stage until the model is ready."""
    service, models = call.service, call.runtime.models
    if models is not None:
        return _ready_models(models)
    if service.ready:
        return Reply({"status": "ready"})
    body: ReadinessStatus = {
        "status": "stopping" if service.stage == "stopping" else "loading",
        "stage": service.stage,
    }
    if (progress := service.load_progress) is not None:
        body["progress"] = progress.to_json()  # type: ignore[typeddict-item]
    return Reply(body, 503, {"retry-after": str(LOADING_RETRY_SECONDS)})


def _ready_models(models: Models) -> Reply[ReadinessStatus]:
    """Report readiness of several models: ready once those of the start are ready or have failed, and one serves."""
    states: dict[str, ModelStatus] = {}
    for entry in models.entries:
        # An engine that has ended is started again while its model stays loaded.
        state = "loading" if entry.state == "ready" and not entry.runtime.service.ready else entry.state
        states[entry.name] = {"state": state}
        if state in ("loading", "failed"):
            states[entry.name]["stage"] = entry.stage
    if models.ready:
        return Reply({"status": "ready", "models": states})
    loading = next((entry.stage for entry in models.entries if entry.state == "loading"), "stopping")
    status: Literal["loading", "stopping"] = "stopping" if loading == "stopping" else "loading"
    body: ReadinessStatus = {"status": status, "stage": loading, "models": states}
    return Reply(body, 503, {"retry-after": str(LOADING_RETRY_SECONDS)})


@SERVER.get("/info", "Version, model, facts, plan with reasons, and capacity")
async def info(call: ApiCall) -> InfoResponse:
    """Return the version, the stage, the runtime's information and the capacity; less is known while loading.

    Where keys are set, a request without one is told what a client needs, and nothing about the machine.
    """
    service, models = call.service, call.runtime.models
    if not call.request.state.has_key:
        return _client_info(service)
    known = call.runtime.info()
    body: Any = {"version": VERSION, "stage": service.stage, **known, "capacity": service.snapshot.to_json()}
    if models is not None:
        body["models"] = [
            {"name": entry.name, "names": entry.names, "kind": entry.kind, "state": entry.state, "stage": entry.stage}
            for entry in models.entries
        ]
    with suppress(NotReady):
        body |= model_information(service.model, known.get("plan", {}))
    info: InfoResponse = body
    return info


def _client_info(service: Service) -> InfoResponse:
    try:
        served = service.model
    except NotReady:
        return {"stage": service.stage}
    model = {"name": served.name, "kind": served.kind, "max_model_len": served.limits.max_model_len}
    return {"stage": service.stage, "model": model}


@SERVER.get(
    "/info/steps",
    "The last engine steps: time, duration, and the cause of slow ones",
    statuses=(400,),
    openapi={"openapi_extra": {"parameters": [AFTER]}},
)
async def steps(call: ApiCall) -> StepsResponse:
    """Return the engine's last steps after the step number given as `after`."""
    text = call.request.query_params.get("after", "0")
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_STEP_DIGITS):
        raise InvalidRequest(
            "after must be a step number, 0 or more: the `next` of the previous response.", field="after"
        )
    return {"clock": time.time(), **call.runtime.metrics.step_log.since(int(text))}  # type: ignore[typeddict-item]


@PROBES.get(
    "/metrics",
    "Prometheus text; OpenMetrics on request",
    openapi={"response_class": PlainTextResponse, "responses": {200: {"content": METRICS_TYPES}}},
)
async def metrics(call: ApiCall) -> Response:
    """Return the metrics in Prometheus format.

    The counters are already filled, so a scrape on the event loop never waits for a step.
    """
    await call.request.app.state.runtime.collect_metrics()
    accept, models = call.request.headers.get("accept", ""), call.runtime.models
    if models is None or "model" in call.request.query_params:  # of one model, without the label
        body, content_type = call.runtime.metrics.render(accept)
    else:
        body, content_type = models.render_metrics(accept)
    return Response(body, headers={"content-type": content_type})


@PROBES.get(
    "/",
    "The web page; with page=off, a redirect to the API documentation",
    openapi={
        "response_class": HTMLResponse,
        "responses": {
            304: {"description": "The browser has the page already (`If-None-Match`)."},
            307: {"description": "The page is off."},
        },
    },
)
async def root(call: ApiCall) -> Response:
    """Return the web page, or redirect to the documentation of the routes."""
    return web_file_response(call.request, PAGE) if call.runtime.page else RedirectResponse("docs")
