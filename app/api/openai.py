"""OpenAI dialect: chat completions, completions and the list of models."""

from __future__ import annotations

import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.dependencies import Runtime, check_model, counting_refusals, read_body, request_id, runtime_of
from app.api.fold import fold, server_timing
from app.api.merge import merged
from app.api.openai_answers import ChatShape, Envelope, Shape, TextShape, chunks, whole_answer
from app.api.openai_schemas import ChatBody, CompletionBody, GenerationBody, Message
from app.api.streaming import DONE, EventStream, Pieces, encode, opened
from app.errors import InvalidRequest, UnsupportedParameter
from app.generation import GenerationRequest
from app.messages import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default
MAX_CHOICES_IN_ALL = 128  # prompts × n


async def chat_completions(request: Request) -> Response:
    """Serve `POST /v1/chat/completions`."""
    runtime = runtime_of(request)
    with counting_refusals(runtime.metrics, "chat"):
        body = await read_body(request, ChatBody)
        check_model(runtime.service, body.model)
        generation = GenerationRequest(
            params=_chat_params(body),
            api="chat",
            request_id=request_id(request),
            messages=tuple(template_message(message) for message in body.messages),
            template_arguments=body.chat_template_kwargs or {},
        )
    return await _answer(request, body, ChatShape(), runtime.service.generate(generation))


async def completions(request: Request) -> Response:
    """Serve `POST /v1/completions`; each prompt becomes a separate request to the service."""
    runtime = runtime_of(request)
    with counting_refusals(runtime.metrics, "completions"):
        body = await read_body(request, CompletionBody)
        check_model(runtime.service, body.model)
        params = _completion_params(body)
        generations = [_of_prompt(body, prompt, params, request_id(request)) for prompt in body.prompt]
    streams: list[Pieces] = [runtime.service.generate(generation) for generation in generations]
    return await _answer(request, body, TextShape(), streams[0] if len(streams) == 1 else merged(streams, params.n))


async def models(request: Request) -> Response:
    """Serve `GET /v1/models`."""
    return JSONResponse({"object": "list", "data": [_model_body(runtime_of(request))]})


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
        raise InvalidRequest("max_tokens and max_completion_tokens are the same limit: send one of them.", field="max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", field="top_logprobs")
    return body.params(max_tokens=next(iter(limits), None), logprobs=(body.top_logprobs or 0) if body.logprobs else None)


def _completion_params(body: CompletionBody) -> SamplingParams:
    if body.echo and body.logprobs is not None:
        raise UnsupportedParameter("echo cannot be combined with logprobs: a prompt's tokens are not scored.", field="echo")
    params = body.params(
        max_tokens=DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens, logprobs=body.logprobs
    )
    if len(body.prompt) * params.n > MAX_CHOICES_IN_ALL:
        raise InvalidRequest(f"The number of prompts times n may be at most {MAX_CHOICES_IN_ALL}.", field="n")
    return params


def _of_prompt(body: CompletionBody, prompt: str | tuple[int, ...], params: SamplingParams, identity: str) -> GenerationRequest:
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
    turn = {"role": role, "content": content if isinstance(content, str) else [part.model_dump() for part in content]}
    return turn if message.name is None else turn | {"name": message.name}


def _model_body(runtime: Runtime) -> dict[str, Any]:
    served = runtime.service.model
    return {
        "id": served.name,
        "object": "model",
        "created": runtime.created,
        "owned_by": "armature",
        "max_model_len": served.limits.max_model_len,
    }


# ---- responses -----------------------------------------------------------------------------------------------------


async def _answer(request: Request, body: GenerationBody, shape: Shape, pieces: Pieces) -> Response:
    name = runtime_of(request).service.model.name
    prefix = "chatcmpl" if isinstance(shape, ChatShape) else "cmpl"
    kind = shape.chunk_object if body.stream else shape.object
    envelope = Envelope(f"{prefix}-{uuid.uuid4().hex}", kind, int(time.time()), name)
    if not body.stream:
        whole = await fold(pieces)
        return JSONResponse(whole_answer(whole, shape, envelope), headers=whole.headers())
    head = await opened(pieces)
    events = encode(chunks(head, shape, envelope, body.include_usage), request.url.path, DONE)
    return EventStream(events, head, server_timing(head.timings(), "queue", "prefill"))
