"""Translation of a Responses body to the chat body, whose translation to the service's request is the only one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from app.api.openai.schemas import (
    MAX_NAME,
    ChatBody,
    FunctionCallText,
    FunctionDefinition,
    FunctionName,
    JsonSchemaFormat,
    Message,
    MessagePart,
    NamedToolChoice,
    ResponseFormat,
    ToolCallRecord,
    ToolDefinition,
)
from app.api.openai_responses.schemas import AllowedTool, ClientTool, InputItem, OtherItem, ResponsesBody, TextFormat
from app.api.schemas import SamplingFields, make_body
from app.errors import InvalidRequest

_DIGEST = 8  # characters


def chat_body(body: ResponsesBody) -> ChatBody:
    """Return the chat of a body."""
    definitions, choice = _tools(body)
    fields: dict[str, Any] = {name: getattr(body, name) for name in SamplingFields.model_fields} | {
        "messages": tuple(_messages(body)),
        "max_tokens": body.max_output_tokens,
        "tools": definitions,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "logprobs": body.includes_logprobs or None,
        "top_logprobs": body.top_logprobs,
        "chat_template_kwargs": _template_arguments(body),
    }
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _response_format(body.text.format)
    return make_body(ChatBody, **fields)


def _template_arguments(body: ResponsesBody) -> dict[str, Any]:
    """Return the template's arguments. Templates know an effort, or only whether the model thinks."""
    effort = None if body.reasoning is None else body.reasoning.effort
    wanted: dict[str, Any] = {}
    if effort == "none":
        wanted = {"enable_thinking": False}
    elif effort is not None:
        wanted = {"enable_thinking": True, "reasoning_effort": effort}
    return wanted | (body.chat_template_kwargs or {})


def _response_format(form: TextFormat) -> ResponseFormat:
    if form.type != "json_schema":
        return ResponseFormat(type=form.type)
    if form.json_schema is None:
        raise InvalidRequest("text.format of type json_schema needs a schema.", field="text.format.schema")
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=form.json_schema))


# ---- tools ---------------------------------------------------------------------------------------------------------

_TEXT_INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_SEPARATOR = "__"  # between a namespace and a name, as in the names of MCP's tools elsewhere


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool as the model sees it, a function under one `name`, and as the client declared it."""

    name: str
    declared: ClientTool
    namespace: str | None = None

    @property
    def is_custom(self) -> bool:
        """True if the tool takes a text, which the model gives as the argument `input`."""
        return self.declared.type == "custom"

    def definition(self) -> ToolDefinition:
        """Return the function."""
        tool = self.declared
        description, parameters = tool.description, _TEXT_INPUT if self.is_custom else tool.parameters
        if self.is_custom and (grammar := (tool.format or {}).get("definition")):
            syntax = (tool.format or {}).get("syntax", "")
            description = f"{description or ''}\n\nThe input follows this {syntax} grammar:\n{grammar}".strip()
        function = FunctionDefinition(name=self.name, description=description, parameters=parameters)
        return ToolDefinition(type="function", function=function)


def offered_tools(body: ResponsesBody) -> tuple[OfferedTool, ...]:
    """Return the tools of a body, with those of its namespaces, and without those that are left out."""
    found: list[OfferedTool] = []
    for tool in body.tools or ():
        if tool.type == "namespace":
            found += [
                OfferedTool(function_name(one.name or "", tool.name), one, tool.name)
                for one in tool.tools or ()
                if one.is_offered
            ]
        elif tool.is_offered:
            found.append(OfferedTool(tool.name or "", tool))
    return tuple(found)


def function_name(name: str, namespace: str | None) -> str:
    """Return the one name of a tool of a namespace; one that is too long ends in a digest."""
    if not namespace:
        return name
    joined = f"{namespace.removesuffix(_SEPARATOR)}{_SEPARATOR}{name}"
    if len(joined) <= MAX_NAME:
        return joined
    digest = hashlib.sha256(joined.encode("utf-8", "replace")).hexdigest()[:_DIGEST]
    return f"{joined[: MAX_NAME - _DIGEST - 1]}_{digest}"


def _tools(body: ResponsesBody) -> tuple[tuple[ToolDefinition, ...], str | NamedToolChoice | None]:
    """Return the tools that may be called, and the choice between them."""
    tools, choice = offered_tools(body), body.tool_choice
    named: str | NamedToolChoice | None = None
    if choice is None or isinstance(choice, str):
        named = choice
    elif choice.type == "allowed_tools":
        tools = tuple(tool for tool in tools if any(_names(each, tool) for each in choice.tools or ()))
        named = choice.mode
    else:
        if choice.name is None:
            raise InvalidRequest(f"tool_choice of type {choice.type} needs a name.", field="tool_choice.name")
        name = next((tool.name for tool in tools if _names(choice, tool)), choice.name)
        named = NamedToolChoice(function=FunctionName(name=name))
    return tuple(tool.definition() for tool in tools), named


def _names(chosen: AllowedTool, tool: OfferedTool) -> bool:
    """Return True if a choice names the tool, or its namespace."""
    if chosen.type == "namespace":
        return chosen.name == tool.namespace
    if chosen.namespace is not None and chosen.namespace != tool.namespace:
        return False
    return chosen.name in (tool.name, tool.declared.name)


# ---- messages ------------------------------------------------------------------------------------------------------


def _messages(body: ResponsesBody) -> Iterator[Message]:
    if body.instructions:
        yield Message(role="system", content=body.instructions)
    if isinstance(body.input, str):
        yield Message(role="user", content=body.input)
        return
    answer = _Answer()
    names: dict[str, str] = {}
    for item in body.input:
        if item.is_output:
            yield from answer.take()
            name = names.get(item.call_id or "")
            yield Message(role="tool", tool_call_id=item.call_id, name=name, content=_output(item))
        elif item.is_call:
            call = _call(item)
            names[item.call_id or ""] = call.called.name
            answer.add_call(call)
        elif isinstance(item, InputItem) and (item.kind == "reasoning" or item.role == "assistant"):
            if answer.is_complete:
                yield from answer.take()
            answer.add(item)
        elif isinstance(item, InputItem):
            yield from answer.take()
            yield Message(role=item.role or "user", content=_content(item))
    yield from answer.take()


def _content(item: InputItem) -> str | tuple[MessagePart, ...]:
    if item.content is None or isinstance(item.content, str):
        return item.content or ""
    return item.content


def _call(item: InputItem | OtherItem) -> ToolCallRecord:
    if isinstance(item, OtherItem):
        function = FunctionCallText(name=item.tool, arguments=_readable(item.detail))
    elif item.kind == "custom_tool_call":
        name = function_name(item.name or "", item.namespace)
        function = FunctionCallText(name=name, arguments={"input": item.input})
    else:
        function = FunctionCallText(name=function_name(item.name or "", item.namespace), arguments=item.arguments)
    return ToolCallRecord(id=item.call_id, function=function)


def _output(item: InputItem | OtherItem) -> str | tuple[MessagePart, ...]:
    if isinstance(item, InputItem):
        return item.output or ""
    output = item.detail.get("output", item.detail)
    return output if isinstance(output, str) else json.dumps(_readable(output), ensure_ascii=False)


def _readable(value: Any) -> Any:
    """Return a JSON value without the bytes of pictures and files, which the model cannot read."""
    if isinstance(value, dict):
        return {name: _readable(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_readable(one) for one in value]
    return "[left out]" if isinstance(value, str) and value.startswith("data:") else value


class _Answer:
    """Consecutive items of the model: they are one message of a chat, with reasoning, content and calls."""

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._calls: list[ToolCallRecord] = []

    @property
    def is_complete(self) -> bool:
        """True if reasoning and content belong to the next answer: they precede calls."""
        return bool(self._calls or "content" in self._fields)

    def add(self, item: InputItem) -> None:
        """Add reasoning or a message of the model."""
        if item.kind == "reasoning":
            parts = item.content if isinstance(item.content, tuple) else ()
            thought = item.content if isinstance(item.content, str) else "".join(part.text or "" for part in parts)
            self._fields["reasoning_content"] = self._fields.get("reasoning_content", "") + thought
        else:
            self._fields["content"] = _content(item)

    def add_call(self, call: ToolCallRecord) -> None:
        """Add a call of a tool."""
        self._calls.append(call)

    def take(self) -> Iterator[Message]:
        """Yield the message, if there is one, and begin the next."""
        if self._calls or "content" in self._fields:
            yield Message(role="assistant", tool_calls=tuple(self._calls) or None, **self._fields)
        self._fields, self._calls = {}, []
