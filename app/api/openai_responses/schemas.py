"""Body, responses and stream events of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field, Tag
from typing_extensions import TypedDict

from app.api.errors import ErrorFormat, HttpError
from app.api.openai.parts import MessageParts, refuse_unread
from app.api.openai.schemas import MAX_NAME, MAX_TOOLS, ReasoningOptions, RequestTool, ScoredChatToken, Strict
from app.api.schemas import (
    LEAVE_OUT,
    MAX_MESSAGES,
    MAX_PARTS,
    OTHER_SAMPLERS,
    Body,
    Int64,
    KnownOrOther,
    Refusal,
    SamplingFields,
    grammars_refused,
    refused,
)
from app.errors import InvalidRequest, UnsupportedParameter
from app.metrics.instruments import Api

# Required fields of the supported items, by type. Calls and outputs of other types have `call_id` alike.
_ITEM_FIELDS: Mapping[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name"),
    "custom_tool_call": ("call_id", "name", "input"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call_output": ("call_id", "output"),
    "reasoning": (),
}
_STORED = "and this server stores nothing: send the items themselves"
_REFUSED_ITEMS: Mapping[str, str] = {
    "item_reference": f"refers to a stored item, {_STORED}",
    "compaction": f"is readable only for the server that made it, {_STORED}",
    "compaction_trigger": "asks for a summary of the conversation, which this server does not make: leave it out",
}
_CALL, _OUTPUT = "_call", "_call_output"


class InputItem(Body):
    """An item of the input: a message, a call of a tool, its output, or the model's reasoning.

    `content` has the parts of a message, or of reasoning (`reasoning_text`).
    """

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | MessageParts | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: str | MessageParts | None = None

    @property
    def kind(self) -> str:
        """The item's type; an item with a role and without a type is a message."""
        return self.type or "message"

    @property
    def is_call(self) -> bool:
        """True for a call of a tool."""
        return self.kind in ("function_call", "custom_tool_call")

    @property
    def is_output(self) -> bool:
        """True for the output of a tool."""
        return self.kind in ("function_call_output", "custom_tool_call_output")

    def check_fields(self, path: str, ignored: dict[str, None]) -> None:
        """Refuse items without what their type needs, and messages of the user's that cannot be read."""
        for name in _ITEM_FIELDS[self.kind]:
            if getattr(self, name) is None:
                raise InvalidRequest(f"{path}{name}: Field required.", field=f"{path}{name}")
        super().check_fields(path, ignored)
        if self.kind == "message" and self.role != "assistant" and isinstance(self.content, tuple):
            refuse_unread(self.content, f"{path}content")


class OtherItem(Body):
    """An item of another type: what tools of OpenAI's servers did, or a client's own record.

    Those with a `call_id` are a call (`local_shell_call`, `shell_call` …) or its output, which the model reads as JSON.
    All others are left out: what the model made of them follows in its messages.
    """

    type: str
    call_id: str | None = None

    def check_fields(self, path: str, ignored: dict[str, None]) -> None:
        """Refuse items that stand for a part of the conversation, and note those that are left out."""
        place = path.removesuffix(".")
        if self.type in _REFUSED_ITEMS:
            raise UnsupportedParameter(f"{place} {_REFUSED_ITEMS[self.type]}.", field=place)
        if not (self.is_call or self.is_output):
            self.leave_out(path, self.type, ignored)

    @property
    def is_call(self) -> bool:
        """True for a call of a tool."""
        return self.call_id is not None and self.type.endswith(_CALL)

    @property
    def is_output(self) -> bool:
        """True for the output of a tool."""
        return self.call_id is not None and self.type.endswith(_OUTPUT)

    @property
    def tool(self) -> str:
        """The name of the tool."""
        return self.type.removesuffix(_OUTPUT).removesuffix(_CALL)[:MAX_NAME]

    @property
    def detail(self) -> dict[str, Any]:
        """What the call asks for, or the output is."""
        return {name: value for name, value in (self.model_extra or {}).items() if name not in ("id", "status")}


AnyItem = Annotated[Annotated[InputItem, Tag("Known")] | Annotated[OtherItem, Tag("Other")], KnownOrOther(_ITEM_FIELDS)]


class ClientTool(RequestTool):
    """A function of the client's, a tool that takes a text (`custom`), or a `namespace` of these.

    Tools that OpenAI's servers run, and those whose form they know, are left out.
    """

    REQUIRED: ClassVar[str] = "name"
    type: str
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Strict | None = None
    format: dict[str, Any] | None = None

    @property
    def is_offered(self) -> bool:
        """True for a tool that the model may call."""
        return self.type in ("function", "custom")


class ResponsesTool(ClientTool):
    """A tool, or a `namespace`: the tools of an MCP server of the client's, under its name."""

    tools: Annotated[tuple[ClientTool, ...], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None

    @property
    def is_offered(self) -> bool:
        """True for a tool that the model may call, or a namespace of these."""
        return self.type == "namespace" or super().is_offered


class AllowedTool(Body):
    """A tool by its name, or a namespace."""

    type: str | None = None
    name: str | None = None
    namespace: str | None = None


class ResponsesToolChoice(AllowedTool):
    """The tool that must be called, or those that may be (`allowed_tools`)."""

    type: Literal["function", "custom", "allowed_tools"]
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[tuple[AllowedTool, ...], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None


class TextFormat(Body):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: Strict | None = None


class TextOptions(Body):
    """The `text` object; the verbosity is not followed."""

    format: TextFormat | None = None


class ResponsesBody(SamplingFields):
    """Body of `POST /v1/responses`, with the sampling fields of the other routes.

    Nothing is stored: `store` may be absent, null or false. Without `max_output_tokens`, generation may continue to the
    end of the context. A conversation that is too long for the context is refused, also with the `truncation` auto.
    """

    API: ClassVar[Api] = "responses"
    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        **OTHER_SAMPLERS,
        **refused(
            LEAVE_OUT,
            store=False,
            background=False,
            previous_response_id=(),
            conversation=(),
            prompt=(),
            moderation=(),
            logprobs=False,
        ),
        **refused("use max_output_tokens", max_tokens=(), max_completion_tokens=(), n_predict=()),
        **grammars_refused("use text.format"),
        **refused("use tools", functions=([],)),
        **refused("use instructions", system=""),
    }
    FOREIGN: ClassVar[Mapping[str, str]] = {
        "messages": "send input here, or send messages to /v1/chat/completions.",
    }

    model: str | None = None
    input: str | Annotated[tuple[AnyItem, ...], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Int64 | None = None
    stream: bool | None = None
    tools: Annotated[tuple[ResponsesTool, ...], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
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


class ResponsesUsage(TypedDict):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


Status = Literal["in_progress", "completed", "incomplete"]


class OutputItem(TypedDict):
    """An item of the output: `message`, `function_call`, `custom_tool_call` or `reasoning`."""

    type: Literal["message", "function_call", "custom_tool_call", "reasoning"]
    id: str
    status: Status
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[dict[str, Any]]]
    summary: NotRequired[list[dict[str, Any]]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    namespace: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]


class RepeatedFields(TypedDict):
    """Fields of a response that repeat the request."""

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


class ResponseObject(RepeatedFields):
    """Response of `POST /v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    error: None
    incomplete_details: dict[str, str] | None
    output: list[OutputItem]
    usage: ResponsesUsage | None


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
    logprobs: NotRequired[list[ScoredChatToken]]
    code: NotRequired[str]
    message: NotRequired[str]
    param: NotRequired[str | None]


def _error_event(error: HttpError) -> dict[str, Any]:
    return {"type": "error", "code": error.code, "message": error.message, "param": error.field}


# The last event of a stream that fails. Errors before the stream have OpenAI's usual body.
STREAM_ERRORS = ErrorFormat(_error_event, ResponseEvent)
