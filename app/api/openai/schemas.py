"""Responses and errors of the OpenAI dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from app.api.errors import ErrorFormat, HttpError

# ---- errors --------------------------------------------------------------------------------------------------------


class OpenAIErrorDetail(TypedDict):
    """What was wrong: a sentence, OpenAI's kind of error, the field at fault, if any, and a stable code."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(TypedDict):
    """Error body of the OpenAI dialect."""

    error: OpenAIErrorDetail


def _error_body(error: HttpError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.field, "code": error.code}}


_ERROR_TYPES: Mapping[int, str] = {401: "authentication_error", 429: "rate_limit_error"}
OPENAI_ERRORS = ErrorFormat(_error_body, OpenAIError)


# ---- responses -----------------------------------------------------------------------------------------------------


class CachedTokens(TypedDict):
    """Prompt tokens that were read from the prefix cache."""

    cached_tokens: int


class OpenAIUsage(TypedDict):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class OpenAITokenLogprob(TypedDict):
    """A token with its log-probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ScoredChatToken(OpenAITokenLogprob):
    """A sampled token and the most likely ones at its position."""

    top_logprobs: list[OpenAITokenLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat completion."""

    content: list[ScoredChatToken]
    refusal: None


class TextLogprobs(TypedDict):
    """Log-probabilities of a text completion, in parallel lists. A prompt's first token has null in their places."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(TypedDict):
    """Score of a token at a place of the prompt. The most likely token has rank 1."""

    logprob: float
    rank: int
    decoded_token: str


# One entry for each token of the prompt: null for the first, then token ids with their scores.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class FunctionCall(TypedDict):
    """A function to call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class ToolCallBody(TypedDict):
    """A tool call of a message."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionCallDelta(TypedDict):
    """More of a function call. The first part has the name."""

    name: NotRequired[str]
    arguments: str


class ToolCallDeltaBody(TypedDict):
    """More of the tool call at `index`. The first part has the id and the type."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCallDelta


class AssistantMessage(TypedDict):
    """The generated message. `content` is null if there are only calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallBody]]
    function_call: NotRequired[FunctionCall]


class MessageDelta(TypedDict):
    """The part of a message that a chunk adds. A choice's first chunk has the role, its last is empty."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDeltaBody]]
    function_call: NotRequired[FunctionCallDelta]


OpenAIFinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class ChatChoice(TypedDict):
    """A choice of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: OpenAIFinishReason
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class ChatChunkChoice(TypedDict):
    """A choice's part of a chunk."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: OpenAIFinishReason | None
    token_ids: NotRequired[list[int]]


class TextChoice(TypedDict):
    """A choice of a text completion, or its part of a chunk."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: OpenAIFinishReason | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class GeneratedObject(TypedDict):
    """Fields common to the responses and chunks of generation."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    prompt_token_ids: NotRequired[list[int]]


class ChatCompletion(GeneratedObject):
    """Response of `POST /v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: OpenAIUsage
    prompt_logprobs: NotRequired[PromptLogprobs]


class ChatCompletionChunk(GeneratedObject):
    """Event of a streamed chat completion. With `stream_options.include_usage`, the last one has the usage."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[OpenAIUsage | None]


class TextCompletion(GeneratedObject):
    """Response of `POST /v1/completions`, and event of a streamed one."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: NotRequired[OpenAIUsage | None]


class InputTokenCount(TypedDict):
    """Response of the routes that count a prompt's tokens."""

    object: NotRequired[Literal["response.input_tokens"]]
    input_tokens: int


class ModelObject(TypedDict):
    """The served model. `root` is its first name, of which `id` may be an alias."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(TypedDict):
    """Response of `GET /v1/models`."""

    object: Literal["list"]
    data: list[ModelObject]
