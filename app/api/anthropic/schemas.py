"""Bodies, responses, stream events and errors of the Anthropic dialect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field, Tag
from typing_extensions import TypedDict

from app.api.errors import ErrorFormat, HttpError
from app.api.openai.schemas import MAX_NAME, MAX_TOOLS, RequestTool
from app.api.schemas import (
    LEAVE_OUT,
    MAX_MESSAGES,
    MAX_PARTS,
    OTHER_SAMPLERS,
    Body,
    CacheSalt,
    Int64,
    KnownOrOther,
    Refusal,
    grammars_refused,
    refused,
)
from app.errors import InvalidRequest, ThreadNotFound, UnsupportedParameter
from app.metrics.instruments import Api

# Required fields of the blocks that are a text, and of all supported blocks, by type.
_TEXT_FIELDS: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "document": ("source",),
    "search_result": ("content",),
    "compaction": ("content",),
}
_BLOCK_FIELDS: Mapping[str, tuple[str, ...]] = {
    **_TEXT_FIELDS,
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
_FUNCTION_TYPES = (None, "custom")
_MAX_TYPE = 40  # characters of a type in a sentence


class ImageSource(Body):
    """Where a picture is: in `data`, as base64, or at an address."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class OtherBlock(Body):
    """A block that is no text: a picture, or what another company's tools returned, which cannot be read."""

    type: str
    source: Annotated[ImageSource | Any, Field(union_mode="left_to_right")] = None

    def check_fields(self, path: str, ignored: dict[str, None]) -> None:
        """Note that the block is left out. Its message decides whether it may be."""
        if self.is_picture:
            super().check_fields(path, ignored)
        else:
            self.leave_out(path, self.type, ignored)

    @property
    def is_picture(self) -> bool:
        source = self.source
        is_given = isinstance(source, ImageSource) and not (source.data is None and source.url is None)
        return self.type == "image" and is_given

    @property
    def picture_url(self) -> str:
        """The data URL, or the address, of a picture. It is made at each call, and may be large."""
        assert isinstance(self.source, ImageSource), "the block is a picture"
        source = self.source
        return source.url or "" if source.data is None else f"data:{source.media_type or ''};base64,{source.data}"

    @property
    def readable(self) -> str | None:
        """None: there is no text."""
        return None

    @property
    def shown(self) -> str:
        """What tells the model of the block."""
        return f"[{self.type[:_MAX_TYPE]}: left out, because this model reads text only]"


class PlainBlock(Body):
    """A text within a document or a result of a search."""

    type: str
    text: str | None = None

    @property
    def shown(self) -> str:
        """The text; in place of another block, what tells the model of it."""
        return OtherBlock(type=self.type).shown if self.text is None else self.text


PlainBlocks = Annotated[tuple[PlainBlock, ...], Field(fail_fast=True, max_length=MAX_PARTS)]


class DocumentSource(Body):
    """Where a document is. A text is in `data`, or in `content`; other documents are files."""

    type: str
    data: str | None = None
    content: str | PlainBlocks | None = None

    @property
    def text(self) -> str | None:
        """The text of the document; None for a file."""
        if self.type == "text":
            return self.data
        return _joined(self.content) if self.type == "content" else None


class TextBlock(Body):
    """A block that is a text: a text, a document with its title and context, or a result of a search."""

    type: str
    text: str | None = None
    title: str | None = None
    context: str | None = None
    source: str | DocumentSource | None = None
    content: str | PlainBlocks | None = None

    def check_fields(self, path: str, ignored: dict[str, None]) -> None:
        """Refuse a block without what its type needs."""
        for name in _BLOCK_FIELDS[self.type]:
            if getattr(self, name) is None:
                raise InvalidRequest(f"{path}{name}: Field required.", field=f"{path}{name}")
        super().check_fields(path, ignored)

    @property
    def readable(self) -> str | None:
        """The text of the block; None if it is a file."""
        if self.type not in _TEXT_FIELDS:
            return None
        if self.type == "text":
            return self.text
        text = self.source.text if isinstance(self.source, DocumentSource) else _joined(self.content)
        source = self.source if isinstance(self.source, str) else None
        return None if text is None else "\n".join(part for part in (self.title, source, self.context, text) if part)

    @property
    def shown(self) -> str:
        """The text of the block; in place of a file, what tells the model of it."""
        text = self.readable
        return OtherBlock(type=self.type).shown if text is None else text


def _joined(content: str | tuple[PlainBlock | TextBlock | OtherBlock, ...] | None) -> str | None:
    return content if content is None or isinstance(content, str) else "\n".join(block.shown for block in content)


_Other = Annotated[OtherBlock, Tag("Other")]
AnyTextBlock = Annotated[Annotated[TextBlock, Tag("Known")] | _Other, KnownOrOther(_TEXT_FIELDS)]
TextBlocks = Annotated[tuple[AnyTextBlock, ...], Field(fail_fast=True, max_length=MAX_PARTS)]


class ContentBlock(TextBlock):
    """A block of a message: a text, the model's thinking, a call of a tool, or its result."""

    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | TextBlocks | None = None  # type: ignore[assignment]  # results of tools have documents too


AnyBlock = Annotated[Annotated[ContentBlock, Tag("Known")] | _Other, KnownOrOther(_BLOCK_FIELDS)]


class AnthropicMessage(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[tuple[AnyBlock, ...], Field(fail_fast=True, max_length=MAX_PARTS)]

    def check_fields(self, path: str, ignored: dict[str, None]) -> None:
        """Refuse blocks of the user's that cannot be read.

        Those of the assistant's messages are left out: what was said about them follows as text.
        """
        super().check_fields(path, ignored)
        if self.role != "assistant":
            refuse_unreadable(self.content, f"{path}content", _BLOCK_FIELDS, takes_pictures=True)


def refuse_unreadable(
    content: Any, path: str, types: Iterable[str] = _TEXT_FIELDS, takes_pictures: bool = False
) -> None:
    """Refuse blocks that would have to be read and cannot, by their type."""
    for index, block in enumerate(content if isinstance(content, tuple) else ()):
        if takes_pictures and isinstance(block, OtherBlock) and block.is_picture:
            continue
        if block.readable is None and (block.type in _TEXT_FIELDS or block.type not in types):
            place = f"{path}[{index}]"
            raise UnsupportedParameter(
                f"{place} is of type {block.type[:_MAX_TYPE]!r}; this server's models read text, and some of them "
                f"pictures of users, but no files: send blocks of the types {', '.join(types)}.",
                field=place,
            )


class AnthropicTool(RequestTool):
    """A tool of the client's. Tools that Anthropic's servers run, or whose form they know, are left out."""

    REQUIRED: ClassVar[str] = "name"
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None

    @property
    def is_offered(self) -> bool:
        """True for a tool with a schema of its own."""
        return self.type in _FUNCTION_TYPES


class AnthropicToolChoice(Body):
    """The tool that may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model thinks first. The budget reaches templates that know one; the limit is `max_tokens`."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Int64 | None = None


class OutputFormat(Body):
    """The form of the answer's text."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The form of the answer's text, and the effort, which reaches the chat template."""

    format: OutputFormat | None = None
    effort: Annotated[str, Field(max_length=MAX_NAME)] | None = None


class Thread(Body):
    """A conversation that the server is to hold. It is held for no one, so a thread can be begun and not continued."""

    type: str
    previous_message_id: str | None = None

    def check_fields(self, path: str, ignored: dict[str, None]) -> None:
        """Refuse a request that has new messages only, in the way on which clients send the whole conversation."""
        if self.type != "create":
            raise ThreadNotFound(
                f"{path}previous_message_id: this server stores no conversations: send all messages.",
                field=f"{path}previous_message_id",
            )
        super().check_fields(path, ignored)


class ConversationBody(Body):
    """Fields common to messages and the counting of their tokens.

    Old parts of the conversation are not removed, whatever `context_management` says.
    """

    API: ClassVar[Api] = "messages"
    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        **OTHER_SAMPLERS,
        **refused(
            LEAVE_OUT,
            container=(),
            mcp_servers=([],),
            compaction=(),
            frequency_penalty=0,
            presence_penalty=0,
            repetition_penalty=1.0,
            min_p=0,
            seed=(),
            n=1,
            logit_bias=({},),
            logprobs=False,
        ),
        **refused("use max_tokens", max_completion_tokens=()),
        **refused("use stop_sequences", stop=([], "")),
        **grammars_refused("use output_config.format"),
        **refused("use system", instructions=""),
        **refused("use tools", functions=([],)),
    }
    FOREIGN: ClassVar[Mapping[str, str]] = {
        "prompt": "send messages here, or send prompt to /v1/completions.",
        "input": "send messages here, or send input to /v1/responses.",
    }

    model: str | None = None
    messages: Annotated[tuple[AnthropicMessage, ...], Field(fail_fast=True, max_length=MAX_MESSAGES)]
    system: str | TextBlocks | None = None
    tools: Annotated[tuple[AnthropicTool, ...], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    thread: Thread | None = None

    def check_fields(self, path: str, ignored: dict[str, None]) -> None:
        """Refuse a conversation without a message, in Anthropic's words, and a system prompt that cannot be read."""
        if not self.messages:
            raise InvalidRequest("messages: at least one message is required", field="messages")
        super().check_fields(path, ignored)
        refuse_unreadable(self.system, "system")

    @property
    def thinks(self) -> bool:
        """True if the client wants thinking, and blocks that show it."""
        return self.thinking is not None and self.thinking.type != "disabled"


class CountTokensBody(ConversationBody):
    """Body of `POST /v1/messages/count_tokens`."""


class MessagesBody(ConversationBody):
    """Body of `POST /v1/messages`. `max_tokens` may reach past the end of the context."""

    max_tokens: Int64
    stop_sequences: Annotated[tuple[str, ...], Field(fail_fast=True)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    cache_salt: CacheSalt | None = None


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


class AnthropicStop(TypedDict):
    """Why a message ends; null at its beginning."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class AnthropicResponse(AnthropicStop):
    """Response of `POST /v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnthropicBlock]
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
