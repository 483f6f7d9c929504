"""Open Inference Protocol (KServe V2 over REST): health, metadata, `infer`, and Triton's extensions.

The extensions are `generate` for decoders, the model configuration, the repository's index, and statistics.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

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
from app.api.oip.predictions import (
    best_labels,
    class_strings,
    instance_inputs,
    picture_input,
    predictions,
    split_pictures,
)
from app.api.oip.schemas import (
    OIP_ERRORS,
    DurationStatistic,
    GenerateParameters,
    IndexedModel,
    InferBody,
    InferParameters,
    InferResponse,
    InstancesBody,
    InstancesResponse,
    ModelConfiguration,
    ModelControlBody,
    ModelMetadata,
    ModelReadiness,
    ModelStatistics,
    OipError,
    OipGenerateBody,
    OipGenerateEvent,
    OipGenerateResponse,
    OipToken,
    RepositoryIndexBody,
    ServerLiveness,
    ServerMetadata,
    ServerReadiness,
    StatisticsResponse,
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
    ApiCall,
    Dialect,
    ModelState,
    Reply,
    ServedEntry,
    check_model,
    controlled_models,
    count_refusals,
    known_model,
    run_beside_loop,
    sampling_defaults,
)
from app.api.schemas import ReportIgnored, parse_body
from app.api.streaming import (
    SLOT,
    CollectedCompletion,
    EventEncoding,
    EventStreamResponse,
    Generation,
    GenerationStream,
    server_timing,
    write_directly,
)
from app.errors import InvalidRequest, ModelNotFound, NotReady, RequestTimeout, UnsupportedParameter, WrongModelKind
from app.messages import Array, SamplingParams
from app.metrics.instruments import DurationTotal, Metrics
from app.service.requests import Accepted, ChoiceFinished, GenerationRequest, InferenceRequest, ScoredToken
from app.service.served_model import ServedDecoder, ServedEncoder, ServedModel, ServedProgram, ServedTasks
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

PROBES = Dialect("Open Inference Protocol", OIP_ERRORS, public=True)
OIP = Dialect("Open Inference Protocol", OIP_ERRORS)


def _paths(operation: str) -> tuple[str, str]:
    """Return the paths of an operation. A model's name may have slashes and the first match counts: versions first."""
    return f"/v2/models/{{name:path}}/versions/{{version}}{operation}", f"/v2/models/{{name:path}}{operation}"


NOT_READY: dict[str, Any] = {
    "description": "The model is loading, or the server is stopping.",
    "model": ModelReadiness | OipError,
}
BINARY_TENSORS: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
PICTURES: dict[str, Any] = {
    f"image/{kind}": {"schema": {"type": "string", "format": "binary"}} for kind in ("jpeg", "png")
}
BINARY_REQUEST = {
    "parameters": [
        {
            "name": HEADER,
            "in": "header",
            "description": "Bytes of the JSON, if binary tensors follow it.",
            "schema": {"type": "integer", "minimum": 0},
        }
    ],
    "requestBody": {"content": {**BINARY_TENSORS, **PICTURES}},
}


# ---- the server and the model ----------------------------------------------------------------------------------------


@OIP.get(("/v2", "/v2/"), "Open Inference Protocol: server metadata")
async def server(call: ApiCall) -> ServerMetadata:
    """Return name, version and extensions of the server."""
    return {"name": "armature", "version": SERVER_VERSION, "extensions": list(EXTENSIONS)}


@PROBES.get(
    "/v2/health/live",
    "Open Inference Protocol: liveness, as /healthz",
    openapi={"responses": {500: {"description": "The worker thread has died.", "model": ServerLiveness}}},
)
async def live(call: ApiCall) -> Reply[ServerLiveness]:
    """Report liveness; 500 after the worker thread has died."""
    alive = _is_alive(call)
    return Reply({"live": alive}, 200 if alive else 500)


def _is_alive(call: ApiCall) -> bool:
    models = call.runtime.models
    return call.service.alive if models is None else models.is_healthy


_LOADING = {"retry-after": str(LOADING_RETRY_SECONDS)}


@PROBES.get(
    "/v2/health/ready",
    "Open Inference Protocol: readiness, as /readyz",
    openapi={"responses": {503: {"description": "The server is loading or stopping.", "model": ServerReadiness}}},
)
async def ready(call: ApiCall) -> Reply[ServerReadiness]:
    """Report readiness; 503 while the model is loading.

    The specification's object has `live` here and KServe's own servers send `ready`, so the body has both.
    """
    models = call.runtime.models
    body: ServerReadiness = {
        "live": _is_alive(call),
        "ready": call.service.ready if models is None else models.ready,
    }
    return Reply(body) if body["ready"] else Reply(body, 503, _LOADING)


@OIP.get(_paths("/ready"), "Open Inference Protocol: readiness of a model", openapi={"responses": {503: NOT_READY}})
async def model_ready(call: ApiCall) -> Reply[ModelReadiness]:
    """Report the readiness of the model in the path; 503 while it is loading."""
    if (models := call.runtime.models) is not None:
        name = known_model(models, call.request.path_params["name"]).name
    else:
        name = requested_model(call).name
    body: ModelReadiness = {"name": name, "ready": call.service.ready}
    return Reply(body) if body["ready"] else Reply(body, 503, _LOADING)


@OIP.get(_paths("/config"), "Open Inference Protocol: Triton configuration of a model")
async def model_config(call: ApiCall) -> ModelConfiguration:
    """Return the configuration of the model in the path."""
    return config(requested_model(call))


@OIP.get("/v2/models/stats", "Open Inference Protocol: Triton's statistics of all models", statuses=(503,))
async def all_statistics(call: ApiCall) -> StatisticsResponse:
    """Return the statistics of the served model."""
    if (models := call.runtime.models) is not None:
        return {"model_stats": [_model_statistics(entry.name, entry.runtime.metrics) for entry in models.entries]}
    return {"model_stats": [_model_statistics(call.service.model.name, call.runtime.metrics)]}


@OIP.get(_paths("/stats"), "Open Inference Protocol: Triton's statistics of a model")
async def statistics(call: ApiCall) -> StatisticsResponse:
    """Return the statistics of the model in the path."""
    return {"model_stats": [_model_statistics(requested_model(call).name, call.runtime.metrics)]}


def _model_statistics(name: str, metrics: Metrics) -> ModelStatistics:
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


def _statistic(total: DurationTotal) -> DurationStatistic:
    return {"count": total.count, "ns": round(total.seconds * 1e9)}


def requested_model(call: ApiCall) -> ServedModel:
    """Return the served model. Raises `ModelNotFound` if the path names another model or version."""
    model, path = call.service.model, call.request.path_params
    name, version = path["name"], path.get("version", VERSION)
    if name.startswith(f"{model.name}/"):
        raise ModelNotFound(
            f"The model {model.name!r} is served here, and it has no {name.removeprefix(model.name + '/')[:100]!r}: it has "
            f"{', '.join(MODEL_ROUTES)}.",
            field="name",
        )
    check_model(call.runtime, name, in_path=True)
    if version != VERSION:
        raise ModelNotFound(f"The model {name!r} has no version {version[:40]!r}; it has {VERSION!r}.", field="version")
    return model


def content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def check_origin(request: Request) -> None:
    """Refuse a browser's cross-origin request without a JSON content type, and JSON that is said to be a bare tensor.

    The protocol's clients send no content type, so it is not required. A web page's scripts send an `Origin` header,
    and need a CORS preflight before they may send JSON.
    """
    kind = content_type(request)
    if kind == "application/json" and request.headers.get(HEADER) == "0":
        raise InvalidRequest(f"The body is a bare tensor, as {HEADER} says: send it as application/octet-stream.")
    if "origin" in request.headers and kind != "application/json" and HEADER not in request.headers:
        raise InvalidRequest("Send the body as JSON with the header `content-type: application/json`.")


# ---- inference -------------------------------------------------------------------------------------------------------


@OIP.post(
    _paths("/infer"),
    "Open Inference Protocol: inference, tensors in and out",
    body=InferBody,
    response=InferResponse,
    statuses=(*BODY_ERRORS, 404, 504),
    operation="infer",
    openapi={"openapi_extra": BINARY_REQUEST, "responses": {200: {"content": BINARY_TENSORS}}},
)
async def infer(call: ApiCall) -> Response:
    """Run the model on tensors, within the request's own timeout if it has one."""
    with count_refusals(call.runtime.metrics, "oip"):
        check_origin(call.request)
        model = requested_model(call)
        inference = await call.translate(
            lambda body: _parse_inference(
                model, content_type(call.request), *split_body(call.request, body), call.report_ignored
            )
        )
        _check_parameters(model, inference)
    if not (microseconds := inference.parameters.timeout):
        return await render_response(model.name, inference, await _run_inference(call, model, inference))
    try:
        async with asyncio.timeout(microseconds / 1e6):
            result = await _run_inference(call, model, inference)
    except TimeoutError as error:
        raise RequestTimeout(
            f"The request was not answered within its own timeout of {microseconds} microseconds."
        ) from error
    return await render_response(model.name, inference, result)


def _parse_inference(
    model: ServedModel, kind: str, head: bytes | bytearray, tail: bytes | None, report: ReportIgnored
) -> InferRequest:
    """Return the tensors of a body of that content type."""
    if isinstance(model, ServedDecoder):
        raise WrongModelKind(
            f"{model.name!r} generates text: use /v2/models/{model.name}/generate, or serve an encoder.", field="model"
        )
    if kind.startswith("image/") and tail is None:
        return InferRequest(picture_input(model, bytes(head)))
    if head or tail is None:
        return parse_infer_request(head, tail, report)
    return InferRequest(parse_bare_body(signature_of(model), tail), parameters=InferParameters(binary_data_output=True))


def _check_parameters(model: ServedModel, inference: InferRequest) -> None:
    """Refuse parameters about texts for a program, which takes tensors only, and classes of other models."""
    if inference.classes and not isinstance(model, ServedProgram):
        name = next(iter(inference.classes))
        raise UnsupportedParameter(
            f"outputs: classification is not supported for {name[:100]!r} of this model: use /v1/classify.",
            field="outputs",
        )
    if isinstance(model, ServedProgram):
        given = inference.parameters
        for name in ("normalize", "truncate", "dimensions", "prompt_name"):
            if getattr(given, name) is not None:
                raise WrongModelKind(
                    f"parameters.{name} is about texts, and {model.name!r} is a program.", field=f"parameters.{name}"
                )


async def _run_inference(call: ApiCall, model: ServedModel, inference: InferRequest) -> InferResult:
    runtime = call.runtime
    if isinstance(model, ServedEncoder):
        with count_refusals(runtime.metrics, "oip"):
            num_bytes = sum(len(tensor.data) for tensor in inference.inputs.values())
            text_inference = await run_beside_loop(num_bytes, models.parse_text_inputs, model, inference, call.id)
        encoded = await runtime.service.encode(text_inference.request)
        usage = {"prompt_tokens": encoded.usage.prompt_tokens}
        return InferResult(models.output_tensors(model, text_inference, encoded), encoded.timings, usage)
    signature = signature_of(model)
    if isinstance(model, ServedTasks):
        with count_refusals(runtime.metrics, "oip"):
            requested_outputs(signature, inference)
            request = models.task_request(model, inference, call.id, call.report_ignored)
        result = await runtime.service.run_task(request)
        return InferResult(models.task_tensors(result), result.timings, {"prompt_tokens": result.num_tokens})
    assert isinstance(model, ServedProgram), "decoders were refused when the body was parsed"
    arrays, pictures, known = inference.inputs, dict[str, tuple[bytes, ...]](), inference.known
    if known is not None and known.model is model:
        outputs = known.outputs
    else:
        with count_refusals(runtime.metrics, "oip"):
            arrays, pictures = split_pictures(model, inference.inputs)
            check_inputs(signature.inputs, arrays, {name: len(files) for name, files in pictures.items()})
            check_complete(signature.inputs, inference.inputs)
            outputs = requested_outputs(signature, inference)
        if known is not None:
            known.model, known.outputs = model, outputs
    inferred = await runtime.service.infer(InferenceRequest(arrays, outputs, "oip", call.id, pictures))
    return InferResult(
        {name: _output(model, inference, name, inferred.arrays[name]) for name in outputs}, inferred.timings
    )


def _output(model: ServedProgram, inference: InferRequest, name: str, array: Array) -> Array:
    count = inference.classes.get(name)
    return array if count is None else class_strings(array, count, model.description.labels.get(name, ()))


# ---- version 1 and TorchServe ----------------------------------------------------------------------------------------


@OIP.post(
    ("/v1/models/{name:path}:predict",),
    "KServe: inference in version 1 of its protocol",
    body=InstancesBody,
    response=InstancesResponse,
    statuses=(*BODY_ERRORS, 404, 504),
    operation="infer",
)
async def predict(call: ApiCall) -> Response:
    """Run a program on instances, each a value or a value of each input."""
    return await _predict(call, is_torchserve=False)


@OIP.post(
    ("/predictions/{name:path}",),
    "TorchServe: inference",
    body=InstancesBody,
    response=dict[str, Any],
    statuses=(*BODY_ERRORS, 404, 504),
    operation="infer",
    openapi={"openapi_extra": {"requestBody": {"content": PICTURES}}},
)
async def torchserve_predictions(call: ApiCall) -> Response:
    """Run a program on a picture, or on instances. With labels, the five best of a picture are returned."""
    return await _predict(call, is_torchserve=True)


async def _predict(call: ApiCall, is_torchserve: bool) -> Response:
    with count_refusals(call.runtime.metrics, "oip"):
        check_origin(call.request)
        model, kind = requested_model(call), content_type(call.request)
        if not isinstance(model, ServedProgram):
            raise WrongModelKind(f"{model.name!r} is no exported program: use /v2/models/{model.name}.", field="model")
        if is_torchserve and kind != "application/json":
            inputs = await call.translate(lambda body: picture_input(model, bytes(body)))
        else:
            inputs = await call.translate(
                lambda body: instance_inputs(model, parse_body(InstancesBody, body, call.report_ignored).instances)
            )
    inference = InferRequest(inputs, parameters=InferParameters(binary_data_output=True))
    result = await _run_inference(call, model, inference)
    size = sum(len(array.data) for array in result.arrays.values())
    if is_torchserve and kind != "application/json":
        content = await run_beside_loop(size, best_labels, model, result.arrays)
    else:
        content = await run_beside_loop(size, predictions, result.arrays)
    return Response(content, media_type="application/json", headers=server_timing([result.timings], "queue", "encode"))


@OIP.get(_paths(""), "Open Inference Protocol: metadata of a model and its tensors")
async def model_metadata(call: ApiCall) -> ModelMetadata:
    """Return name, platform and tensors of the model in the path."""
    return metadata(requested_model(call))


# ---- generation ------------------------------------------------------------------------------------------------------

DEFAULT_MAX_TOKENS = 20  # the extension's default


async def _parse_generation(call: ApiCall) -> OipGenerateBody:
    """Parse the body, after the checks of the origin, the model in the path and its kind."""
    check_origin(call.request)
    requested_model(call)
    call.service.decoder  # noqa: B018  # another kind of model is refused whatever the body is
    return await call.translate(lambda body: _parse_body(body, call.report_ignored))


def _parse_body(body: bytes | bytearray, report: ReportIgnored) -> OipGenerateBody:
    if not body.strip():
        raise InvalidRequest("The body is empty: send a JSON object with text_input.")
    return parse_body(OipGenerateBody, body, report)


def _generation(
    call: ApiCall, body: OipGenerateBody, name: str, streams: bool
) -> Generation[OipGenerateResponse, OipGenerateEvent]:
    given = _parameters(body)
    if given.get("stream", streams) != streams:
        other = "generate_stream" if given["stream"] else "generate"
        raise InvalidRequest(f"stream does not go with this route: use {other}.", field="stream")
    params = _sampling_params(given, sampling_defaults(call.runtime))
    request = GenerationRequest(
        params=params,
        api=call.route.api,
        request_id=call.id,
        prompt=body.text_input,
        cache_salt=given.get("cache_salt"),
    )
    form = _GenerateFormat(call.service.decoder, name, body.id, params, bool(given.get("details")))
    return Generation([request], form, streams)


def _parameters(body: OipGenerateBody) -> dict[str, Any]:
    """Return the parameters of a body, which may be in `parameters` or at the top level."""
    given: dict[str, Any] = {}
    for source in (body, body.parameters or GenerateParameters()):
        for name in GenerateParameters.model_fields:
            if (value := getattr(source, name)) is None:
                continue
            if name in given:
                raise InvalidRequest(
                    f"{name} is given both in parameters and at the top level: send it once.", field=name
                )
            given[name] = value
    return given


def _sampling_params(given: dict[str, Any], defaults: Mapping[str, float]) -> SamplingParams:
    if given.get("n", 1) != 1:
        raise InvalidRequest("This route returns one text: n must be 1.", field="n")
    sampling = {name: value for name, value in given.items() if name not in ("details", "stream", "max_tokens")}
    logprobs = 0 if given.get("details") else None
    return GenerateParameters(**sampling).params(
        defaults, max_tokens=given.get("max_tokens", DEFAULT_MAX_TOKENS), logprobs=logprobs
    )


GeneratedT = TypeVar("GeneratedT", OipGenerateResponse, OipGenerateEvent)


class _GenerateFormat:
    def __init__(
        self, model: ServedDecoder, name: str, identity: str | None, params: SamplingParams, details: bool
    ) -> None:
        self._model, self._params, self._details = model, params, details
        self._name, self._id = name, identity

    def _with_id(self, body: GeneratedT) -> GeneratedT:
        if self._id is not None:
            body["id"] = self._id
        return body

    def whole(self, completion: CollectedCompletion) -> OipGenerateResponse:
        choice = completion.choices[0]
        finished = choice.finished
        assert finished is not None, "a complete response has finished"
        body: OipGenerateResponse = {
            "model_name": self._name,
            "model_version": VERSION,
            "text_output": choice.text,
        }
        if self._details:
            body["details"] = {
                "finish_reason": self._finish_reason(finished),
                "logprobs": [self._token_body(token) for token in choice.logprobs],
                "prompt_tokens": finished.usage.prompt_tokens,
                "completion_tokens": finished.usage.completion_tokens,
            }
        return self._with_id(body)

    async def events(self, stream: GenerationStream) -> AsyncIterator[OipGenerateEvent]:
        """Yield the stream's events; their texts join to the complete text.

        With details there is one event per token, and a last one with the finish reason.
        """
        sent = False
        async for event in stream:
            if isinstance(event, Accepted):
                continue
            if isinstance(event, ChoiceFinished):
                if self._details or not sent:
                    yield self._event_body("", None, self._finish_reason(event))
                continue
            for token in event.logprobs[:-1]:
                yield self._event_body("", token, None)
            yield self._event_body(event.text, event.logprobs[-1] if event.logprobs else None, None)
            sent = True
            if not self._details:
                write_directly(stream, self._event_body(SLOT, None, None))

    def _event_body(self, text: str, token: ScoredToken | None, reason: str | None) -> OipGenerateEvent:
        body: OipGenerateEvent = {"model_name": self._name, "model_version": VERSION, "text_output": text}
        if self._details:
            body["details"] = {
                "finish_reason": reason,
                "token": None if token is None else self._token_body(token),
            }
        return self._with_id(body)

    def _finish_reason(self, finished: ChoiceFinished) -> str:
        """Return the finish reason as one of the extension's three. A timeout too is a limit: `length`."""
        if finished.reason != "stop":
            return "length"
        matched = finished.matched_stop
        return "stop_sequence" if isinstance(matched, str) or matched in self._params.stop_token_ids else "eos_token"

    def _token_body(self, token: ScoredToken) -> OipToken:
        special = not self._model.tokenizer.has_text(token.token_id)
        return {"id": token.token_id, "text": token.text, "logprob": token.logprob, "special": special}


def _find_decoder_name(call: ApiCall, body: OipGenerateBody) -> str:
    return check_model(call.runtime, call.request.path_params["name"], in_path=True)


_GENERATION: dict[str, Any] = {
    "operation": "text_completion",
    "encoding": EventEncoding(OIP_ERRORS),
    "find_model": _find_decoder_name,
    "parse": _parse_generation,
}


@OIP.generates(_paths("/generate"), "Open Inference Protocol: generate", event=None, **_GENERATION)
async def generate(
    call: ApiCall, body: OipGenerateBody, name: str
) -> Generation[OipGenerateResponse, OipGenerateEvent]:
    """Generate from a text."""
    return _generation(call, body, name, streams=False)


@OIP.generates(
    _paths("/generate_stream"),
    "Open Inference Protocol: generate, streamed",
    response=None,
    openapi={"status_code": 200, "response_class": EventStreamResponse},
    **_GENERATION,
)
async def generate_stream(
    call: ApiCall, body: OipGenerateBody, name: str
) -> Generation[OipGenerateResponse, OipGenerateEvent]:
    """Generate from a text, as a stream."""
    return _generation(call, body, name, streams=True)


# ---- Triton's repository ---------------------------------------------------------------------------------------------


@OIP.post(
    "/v2/repository/index",
    "Open Inference Protocol: Triton's index of the models",
    body=RepositoryIndexBody,
    loads=False,
    openapi={"openapi_extra": {"requestBody": {"required": False}}},
)
async def index(call: ApiCall) -> list[IndexedModel]:
    """List the served models; a single one only when its name is known."""
    check_origin(call.request)
    given = await call.read()
    body = parse_body(RepositoryIndexBody, given, call.report_ignored) if given.strip() else RepositoryIndexBody()
    if (models := call.runtime.models) is not None:
        return [_indexed(entry) for entry in models.entries if not body.ready or entry.state == "ready"]
    service = call.service
    try:
        name = service.model.name
    except NotReady:
        return []
    if body.ready and not service.ready:
        return []
    state, reason = ("READY", "") if service.ready else ("UNAVAILABLE", service.stage)
    return [{"name": name, "version": VERSION, "state": state, "reason": reason}]


def _indexed(entry: ServedEntry) -> IndexedModel:
    states: Mapping[ModelState, str] = {"ready": "READY", "loading": "LOADING", "unloading": "UNLOADING"}
    state = states.get(entry.state, "UNAVAILABLE")
    return {"name": entry.name, "version": VERSION, "state": state, "reason": "" if state == "READY" else entry.stage}


@OIP.post(
    ("/v2/repository/models/{name:path}/load", "/v2/repository/models/{name:path}/unload"),
    "Open Inference Protocol: load or unload one of the configured models",
    body=ModelControlBody,
    loads=False,
)
async def control(call: ApiCall) -> Response:
    """Load a model, or unload it once its open requests have ended, and answer when that is done."""
    check_origin(call.request)
    given = await call.read()
    body = parse_body(ModelControlBody, given, call.report_ignored) if given.strip() else ModelControlBody()
    models = controlled_models(call)
    for name in body.parameters or {}:
        if name != "unload_dependents":  # a model's files and configuration are the operator's
            raise UnsupportedParameter(f"parameters.{name[:100]} is not supported.", field="parameters")
    entry = known_model(models, call.request.path_params["name"])
    await (models.load(entry) if call.request.url.path.endswith("/load") else models.unload(entry))
    return Response(status_code=200)
