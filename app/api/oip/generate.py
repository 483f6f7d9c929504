"""Generate extension of the Open Inference Protocol: text in, text out, complete or as a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from app.api.oip.routes import MODEL_PATH, VERSION_PATH, check_origin, requested_model
from app.api.oip.schemas import OIP_ERRORS, GenerateParameters, OipGenerateBody, OipGenerateEvent, OipGenerateResponse
from app.api.oip.tensors import VERSION
from app.api.routing import (
    BODY_ERRORS,
    DialectRouter,
    RequestBody,
    UnreadBody,
    check_model,
    count_refusals,
    request_id,
    runtime_of,
    sampling_defaults,
)
from app.api.schemas import ReportIgnored, parse_body
from app.api.streaming import CollectedCompletion, EventEncoding, EventStreamResponse, GenerationStream, respond
from app.errors import InvalidRequest
from app.messages import SamplingParams
from app.service.requests import Accepted, ChoiceFinished, GenerationRequest, ScoredToken
from app.service.served_model import ServedDecoder

Json = dict[str, Any]
DEFAULT_MAX_TOKENS = 20  # the extension's default
router = DialectRouter("Open Inference Protocol", OIP_ERRORS)
_EVENTS = EventEncoding(OIP_ERRORS)
GENERATION_ERRORS = router.failures(*BODY_ERRORS, 404, 504)


@router.post(
    MODEL_PATH + "/generate",
    summary="Open Inference Protocol: generate",
    response_model=OipGenerateResponse,
    responses=GENERATION_ERRORS,
)
@router.post(
    VERSION_PATH + "/generate",
    summary="Open Inference Protocol: generate with a model version",
    response_model=OipGenerateResponse,
    responses=GENERATION_ERRORS,
)
async def generate(request: Request, unread: RequestBody[OipGenerateBody]) -> Response:
    """Serve `POST /v2/models/{name}/generate`."""
    return await _respond(request, unread, stream=False)


@router.post(
    MODEL_PATH + "/generate_stream",
    summary="Open Inference Protocol: generate, streamed",
    status_code=200,
    response_class=EventStreamResponse,
    responses=GENERATION_ERRORS | router.event_stream(OipGenerateEvent),
)
@router.post(
    VERSION_PATH + "/generate_stream",
    summary="Open Inference Protocol: generate with a model version, streamed",
    status_code=200,
    response_class=EventStreamResponse,
    responses=GENERATION_ERRORS | router.event_stream(OipGenerateEvent),
)
async def generate_stream(request: Request, unread: RequestBody[OipGenerateBody]) -> Response:
    """Serve `POST /v2/models/{name}/generate_stream`."""
    return await _respond(request, unread, stream=True)


async def _respond(request: Request, unread: UnreadBody[OipGenerateBody], stream: bool) -> Response:
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "oip"):
        check_origin(request)
        requested_model(request)
        name = check_model(runtime, request.path_params["name"], in_path=True)
        model = runtime.service.decoder
        body, parameters = await unread.translate(partial(_parse_body, stream=stream, report=unread.report_ignored))
        params = _sampling_params(parameters, sampling_defaults(runtime))
    format_ = _GenerateFormat(model, name, body.id, params, bool(parameters.get("details")))
    generation = GenerationRequest(
        params=params,
        api="oip",
        request_id=request_id(request),
        prompt=body.text_input,
        model=name,
        cache_salt=parameters.get("cache_salt"),
    )
    return await respond(runtime.service.generate(generation), format_, _EVENTS, streams=stream)


def _parse_body(body: bytes, stream: bool, report: ReportIgnored) -> tuple[OipGenerateBody, Json]:
    """Return the body and its parameters, which may be in `parameters` or at the top level."""
    if not body.strip():
        raise InvalidRequest("The body is empty: send a JSON object with text_input.")
    parsed = parse_body(OipGenerateBody, body, report)
    given: Json = {}
    for source in (parsed, parsed.parameters or GenerateParameters()):
        for name in GenerateParameters.model_fields:
            if (value := getattr(source, name)) is None:
                continue
            if name in given:
                raise InvalidRequest(
                    f"{name} is given both in parameters and at the top level: send it once.", field=name
                )
            given[name] = value
    if given.get("stream", stream) != stream:
        other = "generate_stream" if given["stream"] else "generate"
        raise InvalidRequest(f"stream does not go with this route: use {other}.", field="stream")
    return parsed, given


def _sampling_params(given: Json, defaults: Mapping[str, float]) -> SamplingParams:
    if given.get("n", 1) != 1:
        raise InvalidRequest("This route returns one text: n must be 1.", field="n")
    sampling = {name: value for name, value in given.items() if name not in ("details", "stream", "max_tokens")}
    logprobs = 0 if given.get("details") else None
    return GenerateParameters(**sampling).params(
        defaults, max_tokens=given.get("max_tokens", DEFAULT_MAX_TOKENS), logprobs=logprobs
    )


class _GenerateFormat:
    """Formatter of complete responses and stream events."""

    def __init__(
        self, model: ServedDecoder, name: str, identity: str | None, params: SamplingParams, details: bool
    ) -> None:
        self._model, self._params, self._details = model, params, details
        self._model_fields: Json = {"model_name": name, "model_version": VERSION} | (
            {} if identity is None else {"id": identity}
        )

    def whole(self, completion: CollectedCompletion) -> Json:
        choice = completion.choices[0]
        finished = choice.finished
        assert finished is not None, "a complete response has finished"
        body = self._model_fields | {"text_output": choice.text}
        if not self._details:
            return body
        usage = {"prompt_tokens": finished.usage.prompt_tokens, "completion_tokens": finished.usage.completion_tokens}
        logprobs = [self._token_body(token) for token in choice.logprobs]
        return body | {"details": {"finish_reason": self._finish_reason(finished), "logprobs": logprobs} | usage}

    async def events(self, stream: GenerationStream) -> AsyncIterator[Json]:
        """Yield the stream's events, whose texts join to the complete text.

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

    def _event_body(self, text: str, token: ScoredToken | None, reason: str | None) -> Json:
        body = self._model_fields | {"text_output": text}
        if not self._details:
            return body
        return body | {
            "details": {"finish_reason": reason, "token": None if token is None else self._token_body(token)}
        }

    def _finish_reason(self, finished: ChoiceFinished) -> str:
        """Return the finish reason as one of the extension's three.

        A timeout is reported as `length`, since it too is a limit that cut the text short.
        """
        if finished.reason != "stop":
            return "length"
        matched = finished.matched_stop
        return "stop_sequence" if isinstance(matched, str) or matched in self._params.stop_token_ids else "eos_token"

    def _token_body(self, token: ScoredToken) -> Json:
        special = not self._model.tokenizer.has_text(token.token_id)
        return {"id": token.token_id, "text": token.text, "logprob": token.logprob, "special": special}
