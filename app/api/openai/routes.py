"""OpenAI dialect: chat completions, completions and the list of models."""

from __future__ import annotations

import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.openai.responses import (
    ChatFormat,
    CompletionFormat,
    OpenAIFormat,
    ResponseMetadata,
    chunks,
    complete_response,
)
from app.api.openai.schemas import (
    OPENAI_ERRORS,
    ChatBody,
    ChatCompletion,
    ChatCompletionChunk,
    CompletionBody,
    GenerationBody,
    Message,
    ModelList,
    ModelObject,
    TextCompletion,
)
from app.api.routing import (
    BODY_ERRORS,
    ApiRuntime,
    DialectRouter,
    RequestBody,
    check_model,
    count_refusals,
    request_id,
    runtime_of,
)
from app.api.streaming import (
    DONE,
    EventStreamResponse,
    GenerationStream,
    collect,
    encode_events,
    merge_streams,
    server_timing,
    wait_for_first_token,
)
from app.errors import InvalidRequest, UnsupportedParameter
from app.messages import SamplingParams
from app.service.requests import GenerationRequest

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default
MAX_TOTAL_CHOICES = 128  # prompts × n


router = DialectRouter("OpenAI", OPENAI_ERRORS)
GENERATION_ERRORS = router.failures(*BODY_ERRORS, 404, 504)


@router.post(
    "/v1/chat/completions",
    summary="OpenAI: chat completion",
    response_model=ChatCompletion,
    responses=GENERATION_ERRORS | router.event_stream(ChatCompletionChunk),
    response_description="The completion; with `stream`, events that end with `[DONE]`.",
)
async def chat_completions(request: Request, unread: RequestBody[ChatBody]) -> Response:
    """Serve `POST /v1/chat/completions`."""
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "chat"):
        body = await unread.parse()
        check_model(runtime.service, body.model)
        generation = GenerationRequest(
            params=_chat_params(body),
            api="chat",
            request_id=request_id(request),
            messages=tuple(template_message(message) for message in body.messages),
            template_arguments=body.chat_template_kwargs or {},
        )
    return await _respond(request, body, ChatFormat(), runtime.service.generate(generation))


@router.post(
    "/v1/completions",
    summary="OpenAI: text completion",
    response_model=TextCompletion,
    responses=GENERATION_ERRORS | router.event_stream(TextCompletion),
    response_description="The completion; with `stream`, events that end with `[DONE]`.",
)
async def completions(request: Request, unread: RequestBody[CompletionBody]) -> Response:
    """Serve `POST /v1/completions`; each prompt becomes a separate request to the service."""
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "completions"):
        body = await unread.parse()
        check_model(runtime.service, body.model)
        params = _completion_params(body)
        generations = [_prompt_request(body, prompt, params, request_id(request)) for prompt in body.prompt]
    streams: list[GenerationStream] = [runtime.service.generate(generation) for generation in generations]
    return await _respond(
        request, body, CompletionFormat(), streams[0] if len(streams) == 1 else merge_streams(streams, params.n)
    )


@router.get(
    "/v1/models",
    summary="OpenAI: list of models, always one",
    response_model=ModelList,
    responses=router.failures(503),
)
async def models(request: Request) -> Response:
    """Serve `GET /v1/models`."""
    return JSONResponse({"object": "list", "data": [_model_body(runtime_of(request))]})


@router.get(
    "/v1/models/{name:path}",
    summary="OpenAI: one model",
    response_model=ModelObject,
    responses=router.failures(404, 503),
)
async def model(request: Request) -> Response:
    """Serve `GET /v1/models/{name}`."""
    runtime = runtime_of(request)
    name = request.path_params["name"]
    check_model(runtime.service, name)
    return JSONResponse(_model_body(runtime))


# ---- translation ---------------------------------------------------------------------------------------------------


def _chat_params(body: ChatBody) -> SamplingParams:
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens are the same limit: send one of them.", field="max_tokens"
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", field="top_logprobs")
    return body.params(
        max_tokens=next(iter(limits), None), logprobs=(body.top_logprobs or 0) if body.logprobs else None
    )


def _completion_params(body: CompletionBody) -> SamplingParams:
    if body.echo and body.logprobs is not None:
        raise UnsupportedParameter(
            "echo cannot be combined with logprobs: a prompt's tokens are not scored.", field="echo"
        )
    params = body.params(
        max_tokens=DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens, logprobs=body.logprobs
    )
    if len(body.prompt) * params.n > MAX_TOTAL_CHOICES:
        raise InvalidRequest(f"The number of prompts times n may be at most {MAX_TOTAL_CHOICES}.", field="n")
    return params


def _prompt_request(
    body: CompletionBody, prompt: str | tuple[int, ...], params: SamplingParams, identity: str
) -> GenerationRequest:
    text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
    return GenerationRequest(
        params=params, api="completions", request_id=identity, prompt=text, token_ids=ids, echo=bool(body.echo)
    )


def template_message(message: Message) -> dict[str, Any]:
    """Return a message in the form that chat templates expect.

    The role `developer` becomes `system`: newer OpenAI models use the former name for the latter.
    """
    role = "system" if message.role == "developer" else message.role
    content = message.content
    converted = {
        "role": role,
        "content": content if isinstance(content, str) else [part.model_dump() for part in content],
    }
    return converted if message.name is None else converted | {"name": message.name}


def _model_body(runtime: ApiRuntime) -> dict[str, Any]:
    served = runtime.service.model
    return {
        "id": served.name,
        "object": "model",
        "created": runtime.created,
        "owned_by": "armature",
        "max_model_len": served.limits.max_model_len,
    }


# ---- responses -----------------------------------------------------------------------------------------------------


async def _respond(request: Request, body: GenerationBody, format_: OpenAIFormat, stream: GenerationStream) -> Response:
    name = runtime_of(request).service.model.name
    prefix = "chatcmpl" if isinstance(format_, ChatFormat) else "cmpl"
    kind = format_.chunk_object if body.stream else format_.object
    metadata = ResponseMetadata(f"{prefix}-{uuid.uuid4().hex}", kind, int(time.time()), name)
    if not body.stream:
        completion = await collect(stream)
        return JSONResponse(complete_response(completion, format_, metadata), headers=completion.headers())
    started = await wait_for_first_token(stream)
    events = encode_events(chunks(started, format_, metadata, body.include_usage), OPENAI_ERRORS, DONE)
    return EventStreamResponse(events, started, server_timing(started.timings(), "queue", "prefill"))
