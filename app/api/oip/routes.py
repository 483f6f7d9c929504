"""Open Inference Protocol (KServe V2 over REST): health, metadata, and `infer` for encoders and programs."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.errors import LOADING_RETRY_SECONDS
from app.api.oip import models
from app.api.oip.models import (
    check_complete,
    check_inputs,
    config,
    metadata,
    parse_bare_body,
    requested_outputs,
    signature_of,
)
from app.api.oip.schemas import (
    OIP_ERRORS,
    InferBody,
    InferParameters,
    InferResponse,
    ModelConfiguration,
    ModelMetadata,
    ModelReadiness,
    OipError,
    ServerLiveness,
    ServerMetadata,
    ServerReadiness,
)
from app.api.oip.tensors import (
    HEADER,
    VERSION,
    InferRequest,
    InferResult,
    parse_infer_request,
    render_response,
    split_body,
)
from app.api.routing import (
    BODY_ERRORS,
    ApiRuntime,
    DialectRouter,
    RequestBody,
    Responses,
    check_model,
    count_refusals,
    request_id,
    run_beside_loop,
    runtime_of,
)
from app.api.schemas import ReportIgnored
from app.errors import InvalidRequest, ModelNotFound, RequestTimeout, WrongModelKind
from app.service.requests import InferenceRequest
from app.service.served_model import ServedDecoder, ServedEncoder, ServedModel, ServedProgram
from app.version import VERSION as SERVER_VERSION

EXTENSIONS = (
    "binary_tensor_data",
    "generate",
    "model_configuration",
    "model_repository",
    "parameters",
    "statistics",
)
MODEL_ROUTES = ("ready", "config", "stats", "infer", "generate", "generate_stream")

probes = DialectRouter("Open Inference Protocol", OIP_ERRORS, public=True)
router = DialectRouter("Open Inference Protocol", OIP_ERRORS)
# A model's name may have slashes and the first match counts: so versions precede models, and metadata is last. Decorators
# apply from the bottom up.
MODEL_PATH = "/v2/models/{name:path}"
VERSION_PATH = MODEL_PATH + "/versions/{version}"
MODEL_ERRORS = router.failures(404, 503)
NOT_READY: dict[str, Any] = {
    "description": "The model is loading, or the server is stopping.",
    "model": ModelReadiness | OipError,
}
BINARY_TENSORS: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
BINARY_RESPONSE: Responses = {200: {"content": BINARY_TENSORS}}
BINARY_REQUEST = {
    "parameters": [
        {
            "name": HEADER,
            "in": "header",
            "description": "Bytes of the JSON, if binary tensors follow it.",
            "schema": {"type": "integer", "minimum": 0},
        }
    ],
    "requestBody": {"content": BINARY_TENSORS},
}


@router.get("/v2", summary="Open Inference Protocol: server metadata", response_model=ServerMetadata)
@router.get("/v2/", summary="Open Inference Protocol: server metadata", response_model=ServerMetadata)
async def server(request: Request) -> Response:
    """Serve `GET /v2`: name, version and extensions of the server."""
    return JSONResponse({"name": "armature", "version": SERVER_VERSION, "extensions": EXTENSIONS})


@probes.get(
    "/v2/health/live",
    summary="Open Inference Protocol: liveness, as /healthz",
    response_model=ServerLiveness,
    responses={500: {"description": "The worker thread has died.", "model": ServerLiveness}},
)
async def live(request: Request) -> Response:
    """Serve `GET /v2/health/live`; 500 after the worker thread has died."""
    alive = runtime_of(request).service.alive
    return JSONResponse({"live": alive}, 200 if alive else 500)


@probes.get(
    "/v2/health/ready",
    summary="Open Inference Protocol: readiness, as /readyz",
    response_model=ServerReadiness,
    responses={503: {"description": "The server is loading or stopping.", "model": ServerReadiness}},
)
async def ready(request: Request) -> Response:
    """Serve `GET /v2/health/ready`; 503 while the model is loading.

    The specification's object has `live` here and KServe's own servers send `ready`, so the body has both.
    """
    service = runtime_of(request).service
    body = {"live": service.alive, "ready": service.ready}
    return JSONResponse(body) if service.ready else JSONResponse(body, 503, {"retry-after": str(LOADING_RETRY_SECONDS)})


@router.get(
    MODEL_PATH + "/ready",
    summary="Open Inference Protocol: readiness of a model",
    response_model=ModelReadiness,
    responses=MODEL_ERRORS | {503: NOT_READY},
)
@router.get(
    VERSION_PATH + "/ready",
    summary="Open Inference Protocol: readiness of a model version",
    response_model=ModelReadiness,
    responses=MODEL_ERRORS | {503: NOT_READY},
)
async def model_ready(request: Request) -> Response:
    """Serve the readiness of the model in the path; 503 while it is loading."""
    service, model = runtime_of(request).service, requested_model(request)
    body = {"name": model.name, "ready": service.ready}
    return JSONResponse(body) if service.ready else JSONResponse(body, 503, {"retry-after": str(LOADING_RETRY_SECONDS)})


@router.get(
    MODEL_PATH + "/config",
    summary="Open Inference Protocol: Triton configuration of a model",
    response_model=ModelConfiguration,
    responses=MODEL_ERRORS,
)
@router.get(
    VERSION_PATH + "/config",
    summary="Open Inference Protocol: Triton configuration of a model version",
    response_model=ModelConfiguration,
    responses=MODEL_ERRORS,
)
async def model_config(request: Request) -> Response:
    """Serve the model configuration extension for the model in the path."""
    return JSONResponse(config(requested_model(request)))


@router.post(
    MODEL_PATH + "/infer",
    summary="Open Inference Protocol: inference, tensors in and out",
    response_model=InferResponse,
    responses=router.failures(*BODY_ERRORS, 404, 504) | BINARY_RESPONSE,
    openapi_extra=BINARY_REQUEST,
)
@router.post(
    VERSION_PATH + "/infer",
    summary="Open Inference Protocol: inference with a model version",
    response_model=InferResponse,
    responses=router.failures(*BODY_ERRORS, 404, 504) | BINARY_RESPONSE,
    openapi_extra=BINARY_REQUEST,
)
async def infer(request: Request, unread: RequestBody[InferBody]) -> Response:
    """Serve `POST /v2/models/{name}/infer`, within the request's own timeout if it has one."""
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "oip"):
        check_origin(request)
        model = requested_model(request)
        inference = await unread.translate(
            lambda body: _parse_inference(model, *split_body(request, body), unread.report_ignored)
        )
        _check_parameters(model, inference)
    microseconds = inference.parameters.timeout
    try:
        async with asyncio.timeout(microseconds / 1e6 if microseconds else None):
            result = await _run_inference(runtime, model, inference, request_id(request))
    except TimeoutError as error:
        raise RequestTimeout(
            f"The request was not answered within its own timeout of {microseconds} microseconds."
        ) from error
    return await render_response(model.name, inference, result)


@router.get(
    MODEL_PATH,
    summary="Open Inference Protocol: metadata of a model and its tensors",
    response_model=ModelMetadata,
    responses=MODEL_ERRORS,
)
@router.get(
    VERSION_PATH,
    summary="Open Inference Protocol: metadata of a model version",
    response_model=ModelMetadata,
    responses=MODEL_ERRORS,
)
async def model_metadata(request: Request) -> Response:
    """Serve the name, platform and tensors of the model in the path."""
    return JSONResponse(metadata(requested_model(request)))


def requested_model(request: Request) -> ServedModel:
    """Return the served model. Raises `ModelNotFound` if the path names another model or version."""
    runtime = runtime_of(request)
    model = runtime.service.model
    name, version = request.path_params["name"], request.path_params.get("version", VERSION)
    if name.startswith(f"{model.name}/"):
        raise ModelNotFound(
            f"The model {model.name!r} is served here, and it has no {name.removeprefix(model.name + '/')[:100]!r}: it has "
            f"{', '.join(MODEL_ROUTES)}.",
            field="name",
        )
    check_model(runtime, name, in_path=True)
    if version != VERSION:
        raise ModelNotFound(f"The model {name!r} has no version {version[:40]!r}; it has {VERSION!r}.", field="version")
    return model


def check_origin(request: Request) -> None:
    """Refuse a browser's cross-origin request without a JSON content type, and JSON that is said to be a bare tensor.

    The protocol's clients send no content type, so it is not required. A web page's scripts send an `Origin`
    header, and need a CORS preflight before they may send JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" and request.headers.get(HEADER) == "0":
        raise InvalidRequest(f"The body is a bare tensor, as {HEADER} says: send it as application/octet-stream.")
    if "origin" in request.headers and kind != "application/json" and HEADER not in request.headers:
        raise InvalidRequest("Send the body as JSON with the header `content-type: application/json`.")


def _parse_inference(model: ServedModel, head: bytes, tail: bytes | None, report: ReportIgnored) -> InferRequest:
    if isinstance(model, ServedDecoder):
        raise WrongModelKind(
            f"{model.name!r} generates text: use /v2/models/{model.name}/generate, or serve an encoder.", field="model"
        )
    if head or tail is None:
        return parse_infer_request(head, tail, report)
    return InferRequest(parse_bare_body(signature_of(model), tail), parameters=InferParameters(binary_data_output=True))


def _check_parameters(model: ServedModel, inference: InferRequest) -> None:
    """Refuse parameters about texts for a program, which takes tensors only."""
    if isinstance(model, ServedProgram):
        given = inference.parameters
        for name in ("normalize", "truncate", "dimensions", "prompt_name"):
            if getattr(given, name) is not None:
                raise WrongModelKind(
                    f"parameters.{name} is about texts, and {model.name!r} is a program.", field=f"parameters.{name}"
                )


def _num_bytes(inference: InferRequest) -> int:
    return sum(len(tensor.data) for tensor in inference.inputs.values())


async def _run_inference(
    runtime: ApiRuntime, model: ServedModel, inference: InferRequest, identity: str
) -> InferResult:
    if isinstance(model, ServedEncoder):
        with count_refusals(runtime.metrics, "oip"):
            text_inference = await run_beside_loop(
                _num_bytes(inference), models.parse_text_inputs, model, inference, identity
            )
        encoded = await runtime.service.encode(text_inference.request)
        usage = {"prompt_tokens": encoded.usage.prompt_tokens}
        return InferResult(models.output_tensors(model, text_inference, encoded), encoded.timings, usage)
    signature = signature_of(model)
    with count_refusals(runtime.metrics, "oip"):
        check_inputs(signature.inputs, inference.inputs)
        check_complete(signature.inputs, inference.inputs)
        outputs = requested_outputs(signature, inference)
    inferred = await runtime.service.infer(InferenceRequest(inference.inputs, outputs, "oip", identity))
    return InferResult({name: inferred.arrays[name] for name in outputs}, inferred.timings)
