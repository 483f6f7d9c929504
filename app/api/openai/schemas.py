"""Request bodies of the OpenAI dialect: supported fields, ignored fields, and fields that must be neutral."""

from __future__ import annotations

from collections.abc import Mapping
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
)

from pydantic import Field

from app.api.schemas import (
    MAX_MESSAGES,
    MAX_PARTS,
    Body,
    Int64,
    Prompts,
    SamplingFields,
)

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
