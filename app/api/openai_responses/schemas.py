"""Responses and stream events of OpenAI's Responses API."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from app.api.errors import ErrorFormat, HttpError


class ResponsesUsage(TypedDict):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class OutputItem(TypedDict):
    """An item of the output: `message`, `function_call`, `custom_tool_call` or `reasoning`."""

    type: Literal["message", "function_call", "custom_tool_call", "reasoning"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[dict[str, Any]]]
    summary: NotRequired[list[dict[str, Any]]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    namespace: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]


class ResponseObject(TypedDict):
    """Response of `POST /v1/responses`; it repeats the request's fields."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    output: list[OutputItem]
    usage: ResponsesUsage | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str


class ResponseEvent(TypedDict):
    """Event of a streamed response. `type` says which of the other fields there are."""

    type: str
    sequence_number: NotRequired[int]
    response: NotRequired[ResponseObject]
    item: NotRequired[OutputItem]
    item_id: NotRequired[str]
    output_index: NotRequired[int]
    content_index: NotRequired[int]
    part: NotRequired[dict[str, Any]]
    delta: NotRequired[str]
    text: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]
    logprobs: NotRequired[list[dict[str, Any]]]
    code: NotRequired[str]
    message: NotRequired[str]
    param: NotRequired[str | None]


def _error_event(error: HttpError) -> dict[str, Any]:
    return {"type": "error", "code": error.code, "message": error.message, "param": error.field}


# The last event of a stream that fails. Errors before the stream have OpenAI's usual body.
STREAM_ERRORS = ErrorFormat(_error_event, ResponseEvent)
