"""Request body of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from app.api.openai.bodies import MAX_NAME, MAX_TOOLS, MessagePart
from app.api.schemas import MAX_MESSAGES, MAX_PARTS, Body, Int64, SamplingFields
from app.errors import InvalidRequest, UnsupportedParameter

Parts = Annotated[tuple[MessagePart, ...], Field(fail_fast=True, max_length=MAX_PARTS)]
# Required fields of the supported items, by type. Other types are refused by name.
_ITEM_FIELDS: Mapping[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class InputItem(Body):
    """An item of the input: a message, a call of a function, its output, or the model's reasoning.

    `content` has the parts of a message, or of reasoning (`reasoning_text`).
    """

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"id", "status", "summary", "encrypted_content", "phase", "namespace", "caller"}
    )

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Parts | None = None

    @property
    def kind(self) -> str:
        """The item's type; an item with a role and without a type is a message."""
        return self.type or "message"

    def refuse_unknown(self, path: str = "") -> None:
        """Refuse items of other types, and items without what their type needs."""
        place = path.removesuffix(".")
        if self.kind == "item_reference":
            raise UnsupportedParameter(
                f"{place} refers to a stored item, and this server stores none: send the item itself.", field=place
            )
        if self.kind not in _ITEM_FIELDS:
            known = ", ".join(_ITEM_FIELDS)
            raise UnsupportedParameter(
                f"{place} is of type {self.kind[:40]!r}, which is not supported: send items of the types {known}.",
                field=place,
            )
        for name in _ITEM_FIELDS[self.kind]:
            if getattr(self, name) is None:
                raise InvalidRequest(f"{path}{name}: Field required.", field=f"{path}{name}")
        super().refuse_unknown(path)


class FunctionTool(Body):
    """A function that the model may call. Tools that OpenAI's servers run are refused by their type."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"defer_loading", "allowed_callers"})

    type: str
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def refuse_unknown(self, path: str = "") -> None:
        """Refuse tools that are not the client's own functions."""
        if self.type != "function":
            raise UnsupportedParameter(
                f"{path}type {self.type[:40]!r} is a tool that this server does not run: send functions.",
                field=f"{path}type",
            )
        if self.name is None:
            raise InvalidRequest(f"{path}name: Field required.", field=f"{path}name")
        super().refuse_unknown(path)


class AllowedTool(Body):
    """A function by its name."""

    type: Literal["function"] = "function"
    name: str


class ResponsesToolChoice(Body):
    """The function that must be called, or those that may be (`allowed_tools`)."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[tuple[AllowedTool, ...], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None


class TextFormat(Body):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """The `text` object; the verbosity is not followed."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: TextFormat | None = None


class ReasoningOptions(Body):
    """The `reasoning` object. The effort reaches the chat template; summaries are not made."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"summary", "generate_summary", "context", "mode"})

    effort: str | None = None


class ResponsesStreamOptions(Body):
    """The `stream_options` object."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})


class ResponsesBody(SamplingFields):
    """Body of `POST /v1/responses`, with the sampling fields of the other routes.

    Nothing is stored: `store` may be absent, null or false. Without `max_output_tokens`, generation may continue to the
    end of the context.
    """

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        "user service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options "
        "max_tool_calls request_id cache_salt timings_per_token return_progress".split()
    )
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "store": (False,),
        "background": (False,),
        "truncation": ("disabled",),
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "context_management": ([],),
        "moderation": (),
    }

    model: str | None = None
    input: str | Annotated[tuple[InputItem, ...], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Int64 | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    tools: Annotated[tuple[FunctionTool, ...], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[tuple[str, ...], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    top_logprobs: Int64 | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def includes_logprobs(self) -> bool:
        """True if the answer's tokens are returned with log-probabilities."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())
