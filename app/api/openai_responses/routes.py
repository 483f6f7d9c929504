"""OpenAI's Responses API: one route, complete or streamed."""

from __future__ import annotations

import time
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.openai.routes import num_chat_tokens
from app.api.openai.schemas import OPENAI_ERRORS, InputTokenCount
from app.api.openai.translate import chat_request
from app.api.openai_responses.output import ResponseObjectFormat
from app.api.openai_responses.schemas import STREAM_ERRORS, ResponseEvent, ResponseObject, ResponsesBody
from app.api.openai_responses.translate import chat_body
from app.api.routing import (
    BODY_ERRORS,
    DialectRouter,
    RequestBody,
    check_model,
    count_refusals,
    renamed_fields,
    request_id,
    runtime_of,
    sampling_defaults,
)
from app.api.streaming import EventEncoding, format_named_sse, respond
from app.errors import InvalidRequest

_FIELD_NAMES = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}
router = DialectRouter("OpenAI", OPENAI_ERRORS)
_EVENTS = EventEncoding(STREAM_ERRORS, format_named_sse)


@router.post(
    "/v1/responses",
    summary="OpenAI: response, without a store",
    response_model=ResponseObject,
    responses=router.failures(*BODY_ERRORS, 404, 504) | router.event_stream(ResponseEvent, named=True),
    response_description="The response; with `stream`, its events.",
)
async def responses(request: Request, unread: RequestBody[ResponsesBody]) -> Response:
    """Serve `POST /v1/responses`."""
    runtime = runtime_of(request)
    with renamed_fields(_FIELD_NAMES):
        with count_refusals(runtime.metrics, "responses"):
            body = await unread.parse()
            name = check_model(runtime, body.model)
            if body.n is not None and body.n != 1:
                raise InvalidRequest("A response has one answer: n must be 1.", field="n")
            chat = chat_request(chat_body(body), request_id(request), sampling_defaults(runtime))
        format_ = ResponseObjectFormat(body, chat.params, name, int(time.time()))
        stream = runtime.service.generate(replace(chat, api="responses", model=name))
        return await respond(stream, format_, _EVENTS, streams=body.stream)


@router.post(
    "/v1/responses/input_tokens",
    summary="OpenAI: number of tokens of a response's input",
    response_model=InputTokenCount,
    responses=router.failures(*BODY_ERRORS, 404),
)
async def count_input_tokens(request: Request, unread: RequestBody[ResponsesBody]) -> Response:
    """Serve `POST /v1/responses/input_tokens`."""
    runtime = runtime_of(request)
    with renamed_fields(_FIELD_NAMES):
        body = await unread.parse()
        check_model(runtime, body.model)
        count = await num_chat_tokens(request, chat_body(body))
    return JSONResponse({"object": "response.input_tokens", "input_tokens": count})
