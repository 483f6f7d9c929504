"""Translation of a Responses body to the chat body, whose translation to the service's request is the only one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from app.api.openai.bodies import (
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
from app.api.openai_responses.bodies import InputItem, ResponsesBody, TextFormat
from app.api.schemas import SamplingFields, make_body
from app.errors import InvalidRequest


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


def _tools(body: ResponsesBody) -> tuple[tuple[ToolDefinition, ...], str | NamedToolChoice | None]:
    """Return the tools that may be called, and the choice between them."""
    tools, choice = body.tools or (), body.tool_choice
    named: str | NamedToolChoice | None = None
    if choice is None or isinstance(choice, str):
        named = choice
    elif choice.type == "function":
        if choice.name is None:
            raise InvalidRequest("tool_choice of type function needs a name.", field="tool_choice.name")
        named = NamedToolChoice(function=FunctionName(name=choice.name))
    else:
        allowed = {tool.name for tool in choice.tools or ()}
        tools, named = tuple(tool for tool in tools if tool.name in allowed), choice.mode
    definitions = tuple(
        ToolDefinition(
            type="function",
            function=FunctionDefinition(
                name=tool.name or "", description=tool.description, parameters=tool.parameters, strict=tool.strict
            ),
        )
        for tool in tools
    )
    return definitions, named


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
        if item.kind in ("reasoning", "function_call") or item.role == "assistant":
            if answer.is_complete_before(item):
                yield from answer.take()
            answer.add(item)
            if item.kind == "function_call":
                names[item.call_id or ""] = item.name or ""
            continue
        yield from answer.take()
        if item.kind == "function_call_output":
            output = item.output or ""
            yield Message(role="tool", tool_call_id=item.call_id, name=names.get(item.call_id or ""), content=output)
        else:
            yield Message(role=item.role or "user", content=_content(item))
    yield from answer.take()


def _content(item: InputItem) -> str | tuple[MessagePart, ...]:
    if item.content is None or isinstance(item.content, str):
        return item.content or ""
    return item.content


class _Answer:
    """Consecutive items of the model: they are one message of a chat, with reasoning, content and calls."""

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._calls: list[ToolCallRecord] = []

    def is_complete_before(self, item: InputItem) -> bool:
        """Return True if the item belongs to the next answer: reasoning and content precede calls."""
        return item.kind != "function_call" and bool(self._calls or "content" in self._fields)

    def add(self, item: InputItem) -> None:
        """Add an item of the model."""
        if item.kind == "reasoning":
            parts = item.content if isinstance(item.content, tuple) else ()
            thought = item.content if isinstance(item.content, str) else "".join(part.text or "" for part in parts)
            self._fields["reasoning_content"] = self._fields.get("reasoning_content", "") + thought
        elif item.kind == "function_call":
            function = FunctionCallText(name=item.name or "", arguments=item.arguments)
            self._calls.append(ToolCallRecord(id=item.call_id, function=function))
        else:
            self._fields["content"] = _content(item)

    def take(self) -> Iterator[Message]:
        """Yield the message, if there is one, and begin the next."""
        if self._calls or "content" in self._fields:
            yield Message(role="assistant", tool_calls=tuple(self._calls) or None, **self._fields)
        self._fields, self._calls = {}, []
