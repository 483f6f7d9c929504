"""Triton's extensions about the served model: repository index and statistics. Loading and unloading are refused."""

from __future__ import annotations

from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from app.api.oip.routes import MODEL_ERRORS, MODEL_PATH, VERSION_PATH, check_origin, requested_model
from app.api.oip.schemas import OIP_ERRORS
from app.api.oip.tensors import VERSION
from app.api.routing import BODY_ERRORS, DialectRouter, RequestBody, runtime_of
from app.api.schemas import Body, parse_body
from app.errors import NotReady, UnsupportedParameter
from app.metrics.instruments import Api, DurationTotal, Metrics

REPOSITORY_PATH = "/v2/repository/models/{name:path}"


class RepositoryIndexBody(Body):
    """Body of `POST /v2/repository/index`, which may be empty. With `ready`, only models that are ready are listed."""

    API: ClassVar[Api] = "oip"

    ready: bool | None = None


class ModelControlBody(Body):
    """Body of `load` and `unload`, which are refused."""

    parameters: dict[str, Any] | None = None


class IndexedModel(TypedDict):
    """A model of the repository. `reason` says why it is not ready."""

    name: str
    version: str
    state: str
    reason: str


class DurationStatistic(TypedDict):
    """Number and total nanoseconds."""

    count: int
    ns: int


class InferenceStatistics(TypedDict):
    """Statistics of requests since the start.

    `success` and `fail` are requests by their time from arrival to end, `queue` their time until the first step.
    `compute_infer` are the engine's steps, each of which may serve many requests. There is no cache of responses, and
    the conversion of inputs and outputs is not measured apart.
    """

    success: DurationStatistic
    fail: DurationStatistic
    queue: DurationStatistic
    compute_input: DurationStatistic
    compute_infer: DurationStatistic
    compute_output: DurationStatistic
    cache_hit: DurationStatistic
    cache_miss: DurationStatistic


class ModelStatistics(TypedDict):
    """Statistics of the model. `last_inference` is the end of the last successful request in Unix milliseconds, or 0.

    `inference_count` are successful requests, `execution_count` the engine's steps.
    """

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferenceStatistics
    batch_stats: list[dict[str, Any]]
    memory_usage: list[dict[str, Any]]
    response_stats: dict[str, Any]


class StatisticsResponse(TypedDict):
    """Response of the statistics extension."""

    model_stats: list[ModelStatistics]


router = DialectRouter("Open Inference Protocol", OIP_ERRORS)


@router.post(
    "/v2/repository/index",
    summary="Open Inference Protocol: Triton's index of the models",
    response_model=list[IndexedModel],
    responses=router.failures(*BODY_ERRORS),
    openapi_extra={"requestBody": {"required": False}},
)
async def index(request: Request, unread: RequestBody[RepositoryIndexBody]) -> Response:
    """Serve `POST /v2/repository/index`: the served model; nothing until its name is known."""
    check_origin(request)
    given = await unread.read()
    body = parse_body(RepositoryIndexBody, given, unread.report_ignored) if given.strip() else RepositoryIndexBody()
    service = runtime_of(request).service
    try:
        name = service.model.name
    except NotReady:
        return JSONResponse([])
    if body.ready and not service.ready:
        return JSONResponse([])
    state, reason = ("READY", "") if service.ready else ("UNAVAILABLE", service.stage)
    return JSONResponse([{"name": name, "version": VERSION, "state": state, "reason": reason}])


@router.post(
    REPOSITORY_PATH + "/load",
    summary="Open Inference Protocol: refused, since one process serves one model",
    status_code=400,
    response_model=OIP_ERRORS.model,
    responses=router.failures(*BODY_ERRORS, 404),
)
@router.post(
    REPOSITORY_PATH + "/unload",
    summary="Open Inference Protocol: refused, since one process serves one model",
    status_code=400,
    response_model=OIP_ERRORS.model,
    responses=router.failures(*BODY_ERRORS, 404),
)
async def control(request: Request, unread: RequestBody[ModelControlBody]) -> Response:
    """Refuse to load or unload a model."""
    served = runtime_of(request).service.model
    raise UnsupportedParameter(
        f"Models are not loaded or unloaded: this process serves {served.name!r} until it ends. Start another process "
        "with `armature serve --model DIR` for another model."
    )


@router.get(
    "/v2/models/stats",
    summary="Open Inference Protocol: Triton's statistics of all models",
    response_model=StatisticsResponse,
    responses=router.failures(503),
)
async def all_statistics(request: Request) -> Response:
    """Serve `GET /v2/models/stats`."""
    runtime = runtime_of(request)
    return JSONResponse({"model_stats": [_model_statistics(runtime.service.model.name, runtime.metrics)]})


@router.get(
    MODEL_PATH + "/stats",
    summary="Open Inference Protocol: Triton's statistics of a model",
    response_model=StatisticsResponse,
    responses=MODEL_ERRORS,
)
@router.get(
    VERSION_PATH + "/stats",
    summary="Open Inference Protocol: Triton's statistics of a model version",
    response_model=StatisticsResponse,
    responses=MODEL_ERRORS,
)
async def statistics(request: Request) -> Response:
    """Serve the statistics extension for the model in the path."""
    requested_model(request)
    return await all_statistics(request)


def _model_statistics(name: str, metrics: Metrics) -> dict[str, Any]:
    nothing = _statistic(DurationTotal())
    return {
        "name": name,
        "version": VERSION,
        "last_inference": round(metrics.succeeded.ended_at * 1000),
        "inference_count": metrics.succeeded.count,
        "execution_count": metrics.num_steps,
        "inference_stats": {
            "success": _statistic(metrics.succeeded),
            "fail": _statistic(metrics.failed),
            "queue": _statistic(metrics.queued),
            "compute_input": nothing,
            "compute_infer": {"count": metrics.num_steps, "ns": round(metrics.busy_seconds * 1e9)},
            "compute_output": nothing,
            "cache_hit": nothing,
            "cache_miss": nothing,
        },
        "batch_stats": [],
        "memory_usage": [],
        "response_stats": {},
    }


def _statistic(total: DurationTotal) -> dict[str, int]:
    return {"count": total.count, "ns": round(total.seconds * 1e9)}
