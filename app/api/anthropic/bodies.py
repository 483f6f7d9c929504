"""Request bodies of the Anthropic dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from app.api.openai.bodies import MAX_NAME, MAX_TOOLS
from app.api.schemas import MAX_MESSAGES, MAX_PARTS, Body, Int64
from app.errors import InvalidRequest, UnsupportedParameter

# Required fields of the supported blocks, by type. Other types are refused by name.
_BLOCK_FIELDS: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
_FUNCTION_TYPES = (None, "custom")


class TextBlock(Body):
    """A block of text."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"cache_control", "citations"})

    type: str
    text: str | None = None

    def refuse_unknown(self, path: str = "") -> None:
        """Refuse blocks that are no text, by their type."""
        _check_block(self, {"text": ("text",)}, path)
        super().refuse_unknown(path)


TextBlocks = Annotated[tuple[TextBlock, ...], Field(fail_fast=True, max_length=MAX_PARTS)]


class ContentBlock(Body):
    """A block of a message: text, the model's thinking, a call of a tool, or its result."""

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "citations", "signature", "data", "caller", "toolset_name", "is_error"}
    )

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | TextBlocks | None = None

    def refuse_unknown(self, path: str = "") -> None:
        """Refuse blocks of other types, and blocks without what their type needs."""
        _check_block(self, _BLOCK_FIELDS, path)
        super().refuse_unknown(path)


def _check_block(block: TextBlock | ContentBlock, fields: Mapping[str, tuple[str, ...]], path: str) -> None:
    place = path.removesuffix(".")
    if block.type not in fields:
        raise UnsupportedParameter(
            f"{place} is of type {block.type[:40]!r}; this server's models read text, and neither images nor "
            f"documents: send blocks of the types {', '.join(fields)}.",
            field=place,
        )
    for name in fields[block.type]:
        if getattr(block, name) is None:
            raise InvalidRequest(f"{path}{name}: Field required.", field=f"{path}{name}")


class AnthropicMessage(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[tuple[ContentBlock, ...], Field(fail_fast=True, max_length=MAX_PARTS)]


class AnthropicTool(Body):
    """A tool of the client's. Tools that Anthropic's servers run are refused by their type."""

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "strict", "input_examples", "eager_input_streaming", "defer_loading", "allowed_callers"}
    )

    type: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None

    def refuse_unknown(self, path: str = "") -> None:
        """Refuse tools that are not the client's own."""
        if self.type not in _FUNCTION_TYPES:
            raise UnsupportedParameter(
                f"{path}type {str(self.type)[:40]!r} is a tool that this server does not run: "
                "send tools with a name and an input_schema.",
                field=f"{path}type",
            )
        super().refuse_unknown(path)


class AnthropicToolChoice(Body):
    """The tool that may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model thinks first. A budget is no limit here: `max_tokens` is."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"budget_tokens", "display"})

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(Body):
    """The form of the answer's text."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The form of the answer's text; the effort is not followed."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"effort"})

    format: OutputFormat | None = None


class ConversationBody(Body):
    """Fields common to messages and the counting of their tokens.

    Old parts of the conversation are not removed, whatever `context_management` says.
    """

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        "metadata service_tier cache_control inference_geo speed betas diagnostics user_profile_id workspace_id "
        "context_management".split()
    )
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (),
        "mcp_servers": ([],),
    }

    model: str | None = None
    messages: Annotated[tuple[AnthropicMessage, ...], Field(fail_fast=True, max_length=MAX_MESSAGES)]
    system: str | TextBlocks | None = None
    tools: Annotated[tuple[AnthropicTool, ...], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    def refuse_unknown(self, path: str = "") -> None:
        """Refuse a conversation without a message, in Anthropic's words."""
        if not self.messages:
            raise InvalidRequest("messages: at least one message is required", field="messages")
        super().refuse_unknown(path)

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
