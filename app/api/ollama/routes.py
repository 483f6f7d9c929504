"""Ollama dialect: chat, generate and embeddings. Chat and generate stream lines of JSON by default."""

from __future__ import annotations

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.encoders.routes import join_with_pauses, json_response, to_json_list
from app.api.ollama import models
from app.api.ollama.bodies import OllamaChatBody, OllamaEmbedBody, OllamaEmbeddingsBody, OllamaGenerateBody, Options
from app.api.ollama.models import check_name
from app.api.ollama.output import OllamaFormat
from app.api.ollama.schemas import (
    OLLAMA_ERRORS,
    OllamaChatResponse,
    OllamaEmbeddingsResponse,
    OllamaEmbedResponse,
    OllamaGenerateResponse,
)
from app.api.ollama.translate import chat_generation, prompt_generation
from app.api.routing import BODY_ERRORS, RequestBody, count_refusals, renamed_fields, request_id, runtime_of
from app.api.streaming import (
    NDJSON,
    EventStreamResponse,
    collect,
    encode_events,
    format_line,
    server_timing,
    wait_for_first_token,
)
from app.service.requests import EncodingRequest, GenerationRequest
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
GENERATION_ERRORS = router.failures(*BODY_ERRORS, 404, 504)


@router.post(
    "/api/chat",
    summary="Ollama: chat",
    response_model=OllamaChatResponse,
    responses=GENERATION_ERRORS | router.event_stream(OllamaChatResponse, NDJSON),
    response_description="Lines of JSON; with `stream` false, the whole response.",
)
async def chat(request: Request, unread: RequestBody[OllamaChatBody]) -> Response:
    """Serve `POST /api/chat`."""
    runtime = runtime_of(request)
    with renamed_fields(_FIELD_NAMES), count_refusals(runtime.metrics, "ollama"):
        body = await unread.parse(needs_type=False)
        check_name(runtime, body.model)
        decoder = runtime.service.decoder
        generation = chat_generation(runtime, body, request_id(request)) if body.messages else None
    return await _respond(request, generation, OllamaFormat(decoder.name, is_chat=True), body.stream is not False)


@router.post(
    "/api/generate",
    summary="Ollama: generate",
    response_model=OllamaGenerateResponse,
    responses=GENERATION_ERRORS | router.event_stream(OllamaGenerateResponse, NDJSON),
    response_description="Lines of JSON; with `stream` false, the whole response.",
)
async def generate(request: Request, unread: RequestBody[OllamaGenerateBody]) -> Response:
    """Serve `POST /api/generate`."""
    runtime = runtime_of(request)
    with renamed_fields(_FIELD_NAMES), count_refusals(runtime.metrics, "ollama"):
        body = await unread.parse(needs_type=False)
        check_name(runtime, body.model)
        decoder = runtime.service.decoder
        generation = prompt_generation(runtime, body, request_id(request)) if body.prompt else None
    return await _respond(request, generation, OllamaFormat(decoder.name, is_chat=False), body.stream is not False)


async def _respond(
    request: Request, generation: GenerationRequest | None, format_: OllamaFormat, streams: bool
) -> Response:
    """Return the response. Without a generation the client only wants the model loaded, which it is."""
    if generation is None:
        return JSONResponse(format_.loaded())
    stream = runtime_of(request).service.generate(generation)
    if not streams:
        completion = await collect(stream)
        return JSONResponse(format_.whole(completion.choices[0]), headers=completion.headers())
    started = await wait_for_first_token(stream)
    lines = encode_events(format_.lines(started), OLLAMA_ERRORS, encode=format_line)
    return EventStreamResponse(lines, started, server_timing(started.timings(), "queue", "prefill"), NDJSON)


@router.post(
    "/api/embed",
    summary="Ollama: embeddings of texts",
    response_model=OllamaEmbedResponse,
    responses=GENERATION_ERRORS,
)
async def embed(request: Request, unread: RequestBody[OllamaEmbedBody]) -> Response:
    """Serve `POST /api/embed`; the vectors have length 1."""
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "ollama"):
        served = runtime.service.encoder
        body = await unread.parse(needs_type=False)
        check_name(runtime, body.model)
        encoding = EncodingRequest(
            inputs=(body.input,) if isinstance(body.input, str) else body.input,
            outputs=("embedding",),
            api="ollama",
            request_id=request_id(request),
            truncate=body.truncate is not False,
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
    """Serve `POST /api/embeddings`."""
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "ollama"):
        runtime.service.encoder  # noqa: B018  # another kind of model is refused whatever the body is
        body = await unread.parse(needs_type=False)
        check_name(runtime, body.model)
        encoding = EncodingRequest(
            inputs=(body.prompt,),
            outputs=("embedding",),
            api="ollama",
            request_id=request_id(request),
            truncate=True,
            field="prompt",
        )
    encoded = await runtime.service.encode(encoding)
    return json_response(b'{"embedding":%b}' % to_json_list(to_numpy(encoded.arrays["embedding"])[0]), encoded)
