"""Ollama dialect: chat, generate and embeddings. Chat and generate stream lines of JSON by default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.encoders.vectors import join_with_pauses, json_response, to_json_list
from app.api.ollama import models
from app.api.ollama.models import check_name
from app.api.ollama.output import OllamaFormat
from app.api.ollama.schemas import (
    OLLAMA_ERRORS,
    OllamaChatBody,
    OllamaChatResponse,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaEmbeddingsResponse,
    OllamaEmbedResponse,
    OllamaGenerateBody,
    OllamaGenerateResponse,
    OllamaGenerationBody,
    Options,
)
from app.api.ollama.translate import chat_generation, prompt_generation
from app.api.routing import (
    BODY_ERRORS,
    NDJSON,
    ApiRuntime,
    RequestBody,
    UnreadBody,
    count_refusals,
    renamed_fields,
    request_id,
    runtime_of,
)
from app.api.streaming import EventEncoding, format_line, respond
from app.service.requests import EncodingRequest, GenerationRequest, Truncation
from app.service.served_model import to_numpy

router = models.router
_OPTION_NAMES = {name: f"options.{name}" for name in Options.model_fields}
_FIELD_NAMES = {
    **_OPTION_NAMES,
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "json_schema": "format",
}
_LINES = EventEncoding(OLLAMA_ERRORS, format_line, media_type=NDJSON)
GENERATION_ERRORS = router.failures(*BODY_ERRORS, 404, 504)


@router.post(
    "/api/chat",
    summary="Ollama: chat",
    response_model=OllamaChatResponse,
    responses=GENERATION_ERRORS | router.line_stream(OllamaChatResponse),
    response_description="Lines of JSON; with `stream` false, the whole response.",
)
async def chat(request: Request, unread: RequestBody[OllamaChatBody]) -> Response:
    """Serve `POST /api/chat`."""
    return await _generate(request, unread, chat_generation, is_chat=True)


@router.post(
    "/api/generate",
    summary="Ollama: generate",
    response_model=OllamaGenerateResponse,
    responses=GENERATION_ERRORS | router.line_stream(OllamaGenerateResponse),
    response_description="Lines of JSON; with `stream` false, the whole response.",
)
async def generate(request: Request, unread: RequestBody[OllamaGenerateBody]) -> Response:
    """Serve `POST /api/generate`."""
    return await _generate(request, unread, prompt_generation, is_chat=False)


Translate = Callable[[ApiRuntime, Any, str], GenerationRequest | None]


async def _generate(request: Request, unread: UnreadBody[Any], translate: Translate, is_chat: bool) -> Response:
    """Return the response to a chat or a prompt.

    Without a generation the client only wants the model loaded, which it is.
    """
    runtime = runtime_of(request)
    with renamed_fields(_FIELD_NAMES), count_refusals(runtime.metrics, "ollama"):
        body: OllamaGenerationBody = await unread.parse(needs_type=False)
        name = check_name(runtime, body.model)
        runtime.service.decoder  # noqa: B018  # another kind of model is refused whatever the body is
        format_ = OllamaFormat(name, is_chat)
        generation = translate(runtime, body, request_id(request))
    if generation is None:
        return JSONResponse(format_.loaded())
    stream = runtime.service.generate(replace(generation, model=name))
    return await respond(stream, format_, _LINES, streams=body.stream is not False)


@router.post(
    "/api/embed",
    summary="Ollama: embeddings of texts",
    response_model=OllamaEmbedResponse,
    responses=GENERATION_ERRORS,
)
async def embed(request: Request, unread: RequestBody[OllamaEmbedBody]) -> Response:
    """Serve `POST /api/embed`; the vectors have length 1. Without a text there are none, as with Ollama."""
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "ollama"):
        served = runtime.service.encoder
        body = await unread.parse(needs_type=False)
        check_name(runtime, body.model)
        if not body.input:
            counts = {"total_duration": 0, "load_duration": 0, "prompt_eval_count": 0}
            return JSONResponse({"model": served.name, "embeddings": [], **counts})
        encoding = EncodingRequest(
            inputs=(body.input,) if isinstance(body.input, str) else body.input,
            outputs=("embedding",),
            api="ollama",
            request_id=request_id(request),
            truncation=Truncation(body.truncate is not False),
            normalize=True,
            dimensions=body.dimensions,
        )
    encoded = await runtime.service.encode(encoding)
    rows = (to_json_list(vector) for vector in to_numpy(encoded.arrays["embedding"]))
    timings = encoded.timings
    nanoseconds = round((timings.queue_seconds + timings.encode_seconds) * 1e9)
    tail = b'],"model":%b,"total_duration":%d,"load_duration":0,"prompt_eval_count":%d}' % (
        to_json(served.name),
        nanoseconds,
        encoded.usage.prompt_tokens,
    )
    return json_response(await join_with_pauses(b'{"embeddings":[', rows, tail), encoded)


@router.post(
    "/api/embeddings",
    summary="Ollama: embedding of a text, the older form",
    response_model=OllamaEmbeddingsResponse,
    responses=GENERATION_ERRORS,
)
async def embeddings(request: Request, unread: RequestBody[OllamaEmbeddingsBody]) -> Response:
    """Serve `POST /api/embeddings`. An empty prompt has an empty vector, as with Ollama."""
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "ollama"):
        runtime.service.encoder  # noqa: B018  # another kind of model is refused whatever the body is
        body = await unread.parse(needs_type=False)
        check_name(runtime, body.model)
        if not body.prompt:
            return JSONResponse({"embedding": []})
        encoding = EncodingRequest(
            inputs=(body.prompt,),
            outputs=("embedding",),
            api="ollama",
            request_id=request_id(request),
            truncation=Truncation(True),
            field="prompt",
        )
    encoded = await runtime.service.encode(encoding)
    return json_response(b'{"embedding":%b}' % to_json_list(to_numpy(encoded.arrays["embedding"])[0]), encoded)
