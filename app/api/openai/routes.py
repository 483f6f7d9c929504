"""OpenAI dialect: chat completions, completions and the list of models."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.openai.responses import (
    ChatFormat,
    CompletionFormat,
    OpenAIFormat,
    ResponseMetadata,
    ShownTokens,
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
    InputTokenCount,
    ModelList,
    ModelObject,
    TextCompletion,
)
from app.api.openai.translate import chat_request, completion_requests
from app.api.routing import (
    BODY_ERRORS,
    ApiRuntime,
    DialectRouter,
    RequestBody,
    check_model,
    count_refusals,
    new_response_id,
    request_id,
    runtime_of,
    sampling_defaults,
    served_names,
)
from app.api.streaming import DONE, CollectedCompletion, EventEncoding, GenerationStream, merge_streams, respond

router = DialectRouter("OpenAI", OPENAI_ERRORS)
_EVENTS = EventEncoding(OPENAI_ERRORS, last=DONE)
GENERATION_ERRORS = router.failures(*BODY_ERRORS, 404, 504)


@router.post(
    "/v1/chat/completions",
    summary="OpenAI: chat completion",
    response_model=ChatCompletion,
    responses=GENERATION_ERRORS | router.event_stream(ChatCompletionChunk, last="[DONE]"),
    response_description="The completion; with `stream`, events that end with `[DONE]`.",
)
async def chat_completions(request: Request, unread: RequestBody[ChatBody]) -> Response:
    """Serve `POST /v1/chat/completions`."""
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "chat"):
        body = await unread.parse()
        name = check_model(runtime, body.model)
        generation = replace(chat_request(body, request_id(request), sampling_defaults(runtime)), model=name)
    format_ = ChatFormat(
        body.include_reasoning is not False,
        body.functions is not None,
        _shown(body),
        body.echoed,
    )
    return await _respond(name, body, format_, runtime.service.generate(generation))


@router.post(
    "/v1/completions",
    summary="OpenAI: text completion",
    response_model=TextCompletion,
    responses=GENERATION_ERRORS | router.event_stream(TextCompletion, last="[DONE]"),
    response_description="The completion; with `stream`, events that end with `[DONE]`.",
)
async def completions(request: Request, unread: RequestBody[CompletionBody]) -> Response:
    """Serve `POST /v1/completions`; each prompt becomes a separate request to the service."""
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "completions"):
        body = await unread.parse()
        name = check_model(runtime, body.model)
        generations = completion_requests(body, request_id(request), sampling_defaults(runtime))
    streams: list[GenerationStream] = [
        runtime.service.generate(replace(generation, model=name)) for generation in generations
    ]
    each = generations[0].params.n
    stream = streams[0] if len(streams) == 1 else merge_streams(streams, each)
    echoed = body.logprobs if body.echo else None
    format_ = CompletionFormat(_shown(body), echoed)
    keep = (body.n or 1, each, body.logprobs is None) if each > (body.n or 1) else None
    return await _respond(name, body, format_, stream, keep)


@router.post(
    "/v1/chat/completions/input_tokens",
    summary="llama.cpp: number of tokens of a chat",
    response_model=InputTokenCount,
    responses=router.failures(*BODY_ERRORS, 404),
)
async def count_input_tokens(request: Request, unread: RequestBody[ChatBody]) -> Response:
    """Serve `POST /v1/chat/completions/input_tokens`."""
    runtime = runtime_of(request)
    body = await unread.parse()
    check_model(runtime, body.model)
    return JSONResponse({"input_tokens": await num_chat_tokens(request, body)})


async def num_chat_tokens(request: Request, body: ChatBody) -> int:
    """Return the number of tokens of a chat's prompt, in the body that every dialect of chats is translated to."""
    chat = chat_request(body, request_id(request), {})
    ids = await runtime_of(request).service.tokenize_chat(
        chat.messages or (), chat.template_arguments, chat.chat_options
    )
    return len(ids)


@router.get(
    "/v1/models",
    summary="OpenAI: the served model, under each of its names",
    response_model=ModelList,
    responses=router.failures(503),
)
async def models(request: Request) -> Response:
    """Serve `GET /v1/models`."""
    runtime = runtime_of(request)
    return JSONResponse({"object": "list", "data": [_model_body(runtime, name) for name in served_names(runtime)]})


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
    check_model(runtime, name, in_path=True)
    return JSONResponse(_model_body(runtime, name))


def _model_body(runtime: ApiRuntime, name: str) -> dict[str, Any]:
    served, adapter = runtime.service.model, runtime.service.adapters.find(name)
    body = {
        "id": name,
        "object": "model",
        "created": runtime.created,
        "owned_by": "armature",
        "root": served.name if adapter is None else adapter.name,
        "max_model_len": served.limits.max_model_len,
    }
    return body if adapter is None else body | {"parent": served.name}


def _shown(body: GenerationBody) -> ShownTokens:
    return ShownTokens(
        bool(body.return_token_ids),
        bool(body.return_tokens_as_token_ids),
        body.prompt_logprobs,
        frozenset({"prompt_logprobs", "return_token_ids"} & body.model_fields_set),
    )


# ---- responses -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ResponseFormat:
    """The response to a body. `best_of`: keep so many of so many choices, and drop their logprobs."""

    choices: OpenAIFormat
    metadata: ResponseMetadata
    body: GenerationBody
    best_of: tuple[int, int, bool] | None

    def whole(self, completion: CollectedCompletion) -> dict[str, Any]:
        if self.best_of is not None:
            completion.keep_best(*self.best_of)
        return complete_response(completion, self.choices, self.metadata)

    def events(self, stream: GenerationStream) -> AsyncIterator[dict[str, Any]]:
        usage = self.body.include_usage, self.body.continuous_usage
        return chunks(stream, self.choices, self.metadata, *usage, choices_each=self.body.n or 1)


async def _respond(
    name: str,
    body: GenerationBody,
    choices: OpenAIFormat,
    stream: GenerationStream,
    best_of: tuple[int, int, bool] | None = None,
) -> Response:
    kind = choices.chunk_object if body.stream else choices.object
    metadata = ResponseMetadata(new_response_id(f"{choices.id_prefix}-"), kind, int(time.time()), name)
    return await respond(stream, _ResponseFormat(choices, metadata, body, best_of), _EVENTS, streams=body.stream)
