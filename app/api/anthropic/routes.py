"""Anthropic dialect: messages, complete or streamed, and their token counts."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.anthropic.output import MessageFormat
from app.api.anthropic.schemas import (
    ANTHROPIC_ERRORS,
    AnthropicEvent,
    AnthropicResponse,
    AnthropicTokenCount,
    CountTokensBody,
    MessagesBody,
)
from app.api.anthropic.translate import chat_body
from app.api.openai.routes import num_chat_tokens
from app.api.openai.translate import chat_request
from app.api.routing import (
    BODY_ERRORS,
    DialectRouter,
    RequestBody,
    check_model,
    count_refusals,
    new_response_id,
    renamed_fields,
    request_id,
    runtime_of,
    sampling_defaults,
)
from app.api.streaming import EventEncoding, format_named_sse, respond

_FIELD_NAMES = {"stop": "stop_sequences", "json_schema": "output_config.format.schema"}
router = DialectRouter("Anthropic", ANTHROPIC_ERRORS)
_EVENTS = EventEncoding(ANTHROPIC_ERRORS, format_named_sse)


@router.post(
    "/v1/messages",
    summary="Anthropic: message",
    response_model=AnthropicResponse,
    responses=router.failures(*BODY_ERRORS, 404, 504) | router.event_stream(AnthropicEvent, named=True),
    response_description="The message; with `stream`, its events.",
)
async def messages(request: Request, unread: RequestBody[MessagesBody]) -> Response:
    """Serve `POST /v1/messages`."""
    runtime = runtime_of(request)
    headers = {"request-id": request_id(request)}  # Anthropic's name of x-request-id
    with renamed_fields(_FIELD_NAMES):
        with count_refusals(runtime.metrics, "messages"):
            body = await unread.parse()
            name = check_model(runtime, body.model)
            chat = chat_request(chat_body(body), request_id(request), sampling_defaults(runtime))
        format_ = MessageFormat(new_response_id("msg_"), name, body.thinks)
        stream = runtime.service.generate(replace(chat, api="messages", clips_max_tokens=True, model=name))
        return await respond(stream, format_, _EVENTS, streams=body.stream, headers=headers)


@router.post(
    "/v1/messages/count_tokens",
    summary="Anthropic: number of tokens of a message",
    response_model=AnthropicTokenCount,
    responses=router.failures(*BODY_ERRORS, 404),
)
async def count_tokens(request: Request, unread: RequestBody[CountTokensBody]) -> Response:
    """Serve `POST /v1/messages/count_tokens`."""
    runtime = runtime_of(request)
    body = await unread.parse()
    check_model(runtime, body.model)
    return JSONResponse({"input_tokens": await num_chat_tokens(request, chat_body(body))})
