"""Bodies of the OpenAI dialect.

Request bodies have supported fields, ignored fields, and fields that must be neutral.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from app.api.errors import ErrorFormat, HttpError
from app.api.schemas import MAX_MESSAGES, MAX_PARTS, Body, Int64, Prompts, SamplingFields

# Fields for labels, billing and storage at OpenAI, and hints about tool calls, which have no effect without tools.
IGNORED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention parallel_tool_calls".split()
)


class StreamOptions(Body):
    """The `stream_options` object."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool | None = None


class MessagePart(Body):
    """One part of a message; only text parts are supported."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"annotations": (None, [])}

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation. `name` is passed to the chat template, which may or may not use it."""

    # Fields of a response message that a client sends back as part of the history.
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "refusal": (None,),
        "audio": (None,),
        "annotations": (None, []),
        "tool_calls": (None, []),
        "function_call": (None,),
        "reasoning_content": (None, ""),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[tuple[MessagePart, ...], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]
    name: str | None = None


class GenerationBody(SamplingFields):
    """Fields common to chat completions and completions."""

    IGNORED: ClassVar[frozenset[str]] = IGNORED

    model: str | None = None
    max_tokens: Int64 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        """True if the stream ends with a chunk that has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatBody(GenerationBody):
    """Body of `POST /v1/chat/completions`. Without `max_tokens`, generation may continue to the end of the context."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "logit_bias": (None, {}),
        "response_format": (None, {"type": "text"}),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "prediction": (None,),
        "reasoning_effort": (None, "none"),
        "verbosity": (None, "medium"),
        "web_search_options": (None,),
    }

    messages: Annotated[tuple[Message, ...], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(GenerationBody):
    """Body of `POST /v1/completions`. Without `max_tokens` a completion has 16 tokens, as OpenAI's."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "best_of": (None, 1),
        "suffix": (None, ""),
        "logit_bias": (None, {}),
    }

    prompt: Prompts
    echo: bool | None = None
    logprobs: Int64 | None = None


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
    """Log-probabilities of a text completion, in parallel lists."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class AssistantMessage(TypedDict):
    """The generated message."""

    role: Literal["assistant"]
    content: str
    refusal: None


class MessageDelta(TypedDict):
    """The part of a message that a chunk adds. A choice's first chunk has the role, its last is empty."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


OpenAIFinishReason = Literal["stop", "length"]


class ChatChoice(TypedDict):
    """A choice of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: OpenAIFinishReason


class ChatChunkChoice(TypedDict):
    """A choice's part of a chunk."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: OpenAIFinishReason | None


class TextChoice(TypedDict):
    """A choice of a text completion, or its part of a chunk."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: OpenAIFinishReason | None


class GeneratedObject(TypedDict):
    """Fields common to the responses and chunks of generation."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(GeneratedObject):
    """Response of `POST /v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: OpenAIUsage


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


class ModelObject(TypedDict):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    """Response of `GET /v1/models`."""

    object: Literal["list"]
    data: list[ModelObject]
