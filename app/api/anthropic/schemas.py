"""Responses, stream events and errors of the Anthropic dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from app.api.errors import ErrorFormat, HttpError
from app.errors import ThreadNotFound

# ---- errors --------------------------------------------------------------------------------------------------------


class AnthropicErrorDetail(TypedDict):
    """What was wrong: Anthropic's kind of error, and a sentence."""

    type: str
    message: str
    details: NotRequired[dict[str, str]]


class AnthropicError(TypedDict):
    """Error body of the Anthropic dialect, and last event of a stream that fails."""

    type: Literal["error"]
    error: AnthropicErrorDetail


_ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _error_body(error: HttpError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    detail: dict[str, Any] = {"type": kind, "message": error.message}
    if error.code == ThreadNotFound.code:  # clients then send the whole conversation
        detail["details"] = {"error_code": error.code}
    return {"type": "error", "error": detail}


ANTHROPIC_ERRORS = ErrorFormat(_error_body, AnthropicError)


# ---- responses -----------------------------------------------------------------------------------------------------


class AnthropicUsage(TypedDict):
    """Tokens of a request. `input_tokens` are those that were computed, without those read from the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicBlock(TypedDict):
    """A block of the answer: `text`, `thinking` with an empty signature, or `tool_use`."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicResponse(TypedDict):
    """Response of `POST /v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnthropicBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicEvent(TypedDict):
    """Event of a streamed message.

    `message_start` has the message without content, `content_block_start` a block, `content_block_delta` more of it,
    `content_block_stop` its index, `message_delta` the stop reason and the usage; `message_stop` is the last one.
    """

    type: str
    message: NotRequired[AnthropicResponse]
    index: NotRequired[int]
    content_block: NotRequired[AnthropicBlock]
    delta: NotRequired[dict[str, Any]]
    usage: NotRequired[AnthropicUsage]


class AnthropicTokenCount(TypedDict):
    """Response of `POST /v1/messages/count_tokens`."""

    input_tokens: int
