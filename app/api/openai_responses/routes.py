"""OpenAI's Responses API: translated to the chat body, whose translation to the service's request is the only one."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.api.openai.output import chat_logprobs
from app.api.openai.parts import MessagePart
from app.api.openai.routes import num_chat_tokens
from app.api.openai.schemas import (
    MAX_NAME,
    OPENAI_ERRORS,
    ChatBody,
    FunctionCallText,
    FunctionDefinition,
    FunctionName,
    InputTokenCount,
    JsonSchemaFormat,
    Message,
    NamedToolChoice,
    ReasoningOptions,
    ResponseFormat,
    ScoredChatToken,
    ToolCallRecord,
    ToolDefinition,
)
from app.api.openai.translate import chat_request
from app.api.openai_responses.schemas import (
    STREAM_ERRORS,
    AllowedTool,
    ClientTool,
    InputItem,
    OtherItem,
    OutputItem,
    RepeatedFields,
    ResponseEvent,
    ResponseObject,
    ResponsesBody,
    ResponsesTool,
    ResponsesUsage,
    Status,
    TextFormat,
)
from app.api.routing import ApiCall, Dialect, new_id, new_response_id, sampling_defaults
from app.api.schemas import SamplingFields, make_body
from app.api.streaming import (
    SLOT,
    Block,
    BlockDelta,
    BlockEnded,
    BlockStarted,
    CollectedCompletion,
    EventEncoding,
    Generation,
    GenerationStream,
    collected_blocks,
    divide,
    format_named_sse,
    json_string,
    write_directly,
)
from app.errors import InvalidRequest
from app.messages import SamplingParams
from app.service.requests import Accepted, ChoiceFinished, ScoredToken, TextDelta, Usage

_DIGEST = 8  # characters


def chat_body(body: ResponsesBody) -> ChatBody:
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
        "reasoning": None if body.reasoning is None else ReasoningOptions(max_tokens=body.reasoning.max_tokens),
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
        tool = self.declared
        description, parameters = tool.description, _TEXT_INPUT if self.is_custom else tool.parameters
        if self.is_custom and (grammar := (tool.format or {}).get("definition")):
            syntax = (tool.format or {}).get("syntax", "")
            description = f"{description or ''}\n\nThe input follows this {syntax} grammar:\n{grammar}".strip()
        function = FunctionDefinition(name=self.name, description=description, parameters=parameters)
        return ToolDefinition(type="function", function=function)


def offered_tools(body: ResponsesBody) -> tuple[OfferedTool, ...]:
    """Return the tools of a body and of its namespaces, without tools that are left out."""
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
        if item.kind == "reasoning":
            parts = item.content if isinstance(item.content, tuple) else ()
            thought = item.content if isinstance(item.content, str) else "".join(part.text or "" for part in parts)
            self._fields["reasoning_content"] = self._fields.get("reasoning_content", "") + thought
        else:
            self._fields["content"] = _content(item)

    def add_call(self, call: ToolCallRecord) -> None:
        self._calls.append(call)

    def take(self) -> Iterator[Message]:
        """Yield the message, if there is one, and begin the next."""
        if self._calls or "content" in self._fields:
            yield Message(role="assistant", tool_calls=tuple(self._calls) or None, **self._fields)
        self._fields, self._calls = {}, []


Json = dict[str, Any]
_ID_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
Tools = Mapping[str, OfferedTool]  # by the name that the model knows


@dataclass(slots=True)
class _Item:
    """An item of the output: one block of the answer, with its id; of a call also the tool."""

    block: Block
    tools: Tools
    id: str = field(init=False)

    def __post_init__(self) -> None:
        prefix = "ctc" if self.is_custom else _ID_PREFIXES[self.block.kind]
        self.id = f"{prefix}_{new_id()}"

    @property
    def is_custom(self) -> bool:
        tool = self.tools.get(self.block.name)
        return self.block.kind == "call" and tool is not None and tool.is_custom

    @property
    def input(self) -> str:
        """The text of a call of a tool that takes a text."""
        try:
            arguments = json.loads(self.block.text)
        except ValueError:  # the model decided what to write, or was cut
            return self.block.text
        given = arguments.get("input") if isinstance(arguments, dict) else None
        return given if isinstance(given, str) else self.block.text

    def body(self, status: Status) -> OutputItem:
        """Return the item; a call has the name that the client gave the tool."""
        block = self.block
        if block.kind == "reasoning":
            content = [self.part()] if status != "in_progress" else []
            return {"type": "reasoning", "id": self.id, "summary": [], "content": content, "status": status}
        if block.kind == "text":
            content = [self.part()] if status != "in_progress" else []
            return {"type": "message", "id": self.id, "role": "assistant", "content": content, "status": status}
        item: OutputItem = {
            "type": "custom_tool_call" if self.is_custom else "function_call",
            "id": self.id,
            "call_id": block.call_id,
            "name": block.name,
            "status": status,
        }
        tool = self.tools.get(block.name)
        if tool is not None and tool.namespace is not None:
            item["name"], item["namespace"] = tool.declared.name or "", tool.namespace
        if self.is_custom:
            item["input"] = "" if status == "in_progress" else self.input
        else:
            item["arguments"] = block.text
        return item

    def part(self) -> Json:
        if self.block.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.block.text}
        logprobs = _logprobs(self.block.logprobs)
        return {"type": "output_text", "text": self.block.text, "annotations": [], "logprobs": logprobs}

    def event(self, kind: str) -> ResponseEvent:
        event: ResponseEvent = {"type": f"response.{kind}", "item_id": self.id, "output_index": self.block.index}
        if self.block.kind != "call":
            event["content_index"] = 0
        return event


def _logprobs(tokens: Iterable[ScoredToken]) -> list[ScoredChatToken]:
    scored = chat_logprobs(tokens)
    return [] if scored is None else scored["content"]


class ResponseObjectFormat:
    """Formatter of one response. `params` are the sampling parameters as they are used."""

    def __init__(self, body: ResponsesBody, params: SamplingParams, model: str, created: int) -> None:
        self._id = new_response_id("resp_")
        self._created, self._fields = created, _request_fields(body, params, model)
        self._tools: Tools = {tool.name: tool for tool in offered_tools(body)}

    def whole(self, completion: CollectedCompletion) -> ResponseObject:
        choice = completion.choices[0]
        assert choice.finished is not None, "a complete response has finished"
        return self._finished([_Item(block, self._tools) for block in collected_blocks(choice)], choice.finished)

    async def events(self, stream: GenerationStream) -> AsyncIterator[ResponseEvent]:
        """Yield the stream's events, numbered from 0."""
        items: list[_Item] = []
        number = 0

        def next_values(text: str, token_ids: Sequence[int]) -> tuple[str, str]:
            nonlocal number
            number += 1
            items[-1].block.text += text
            return json_string(text), str(number - 1)

        async for event in divide(stream):
            for body in self._event_bodies(event, items):
                body["sequence_number"] = number
                yield body
                number += 1
            if isinstance(event, BlockDelta) and event.block.kind == "text":
                plain: dict[str, Any] = {**_delta(items[-1], BlockDelta(event.block, SLOT)), "sequence_number": SLOT}
                write_directly(stream, plain, next_values)

    def _event_bodies(self, event: Any, items: list[_Item]) -> Iterator[ResponseEvent]:
        match event:
            case Accepted():
                yield {"type": "response.created", "response": self._response("in_progress", [])}
                yield {"type": "response.in_progress", "response": self._response("in_progress", [])}
            case BlockStarted():
                items.append(_Item(event.block, self._tools))
                yield from _started(items[-1])
            case BlockDelta():
                if not items[-1].is_custom:  # its arguments are not its text, which comes at once
                    yield _delta(items[-1], event)
            case BlockEnded():
                yield from _ended(items[-1])
            case ChoiceFinished():
                response = self._finished(items, event)
                yield {"type": f"response.{response['status']}", "response": response}
            case TextDelta():
                pass

    def _finished(self, items: list[_Item], finished: ChoiceFinished) -> ResponseObject:
        is_cut = finished.reason in ("length", "timeout")
        status: Status = "incomplete" if is_cut else "completed"
        # Only the last item can be cut.
        output = [item.body("completed" if item is not items[-1] else status) for item in items]
        response = self._response(status, output, finished.usage)
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        return response

    def _response(self, status: Status, output: list[OutputItem], usage: Usage | None = None) -> ResponseObject:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": output,
            "usage": None if usage is None else _usage(usage),
            **self._fields,
        }


def _request_fields(body: ResponsesBody, params: SamplingParams, model: str) -> RepeatedFields:
    effort = None if body.reasoning is None else body.reasoning.effort
    form = None if body.text is None or body.text.format is None else body.text.format
    shown = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
    choice = body.tool_choice or "auto"
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": effort, "summary": None},
        "store": False,
        "temperature": params.temperature,
        "text": {"format": shown},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
        "tools": [_tool_body(tool) for tool in body.tools or () if tool.is_offered],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
    }


def _tool_body(tool: ClientTool) -> Json:
    named: Json = {"type": tool.type, "name": tool.name, "description": tool.description}
    if isinstance(tool, ResponsesTool) and tool.type == "namespace":
        return named | {"tools": [_tool_body(one) for one in tool.tools or () if one.is_offered]}
    if tool.type == "custom":
        return named | {"format": tool.format or {"type": "text"}}
    return named | {"parameters": tool.parameters, "strict": tool.strict}


def _usage(usage: Usage) -> ResponsesUsage:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


# ---- events --------------------------------------------------------------------------------------------------------

_EVENT_NAMES = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}


def _started(item: _Item) -> Iterator[ResponseEvent]:
    yield {
        "type": "response.output_item.added",
        "output_index": item.block.index,
        "item": item.body("in_progress"),
    }
    if item.block.kind != "call":
        event = item.event("content_part.added")
        event["part"] = item.part()
        yield event


def _delta(item: _Item, delta: BlockDelta) -> ResponseEvent:
    event = item.event(f"{_EVENT_NAMES[item.block.kind]}.delta")
    event["delta"] = delta.text
    if item.block.kind == "text":
        event["logprobs"] = _logprobs(delta.logprobs)
    return event


def _ended(item: _Item) -> Iterator[ResponseEvent]:
    block, whole = item.block, item.body("completed")
    if item.is_custom:
        delta, done = item.event("custom_tool_call_input.delta"), item.event("custom_tool_call_input.done")
        delta["delta"] = done["input"] = item.input
        yield delta
        yield done
    else:
        done = item.event(f"{_EVENT_NAMES[block.kind]}.done")
        if block.kind == "call":
            done["name"], done["arguments"] = whole["name"], block.text
            yield done
        else:
            done["text"] = block.text
            if block.kind == "text":
                done["logprobs"] = _logprobs(block.logprobs)
            yield done
            part = item.event("content_part.done")
            part["part"] = item.part()
            yield part
    yield {"type": "response.output_item.done", "output_index": block.index, "item": whole}


# ---- routes ----------------------------------------------------------------------------------------------------------

_FIELD_NAMES = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}
RESPONSES = Dialect("OpenAI", OPENAI_ERRORS)


@RESPONSES.generates(
    ("/v1/responses", "/responses"),
    "OpenAI: response, without a store",
    operation="chat",
    prompts=("input", "input[].content", "input[].content[].text"),
    encoding=EventEncoding(STREAM_ERRORS, format_named_sse),
    field_names=_FIELD_NAMES,
    openapi={"response_description": "The response; with `stream`, its events."},
)
async def responses(call: ApiCall, body: ResponsesBody, name: str) -> Generation[ResponseObject, ResponseEvent]:
    """Generate the answer to a conversation."""
    if body.n is not None and body.n != 1:
        raise InvalidRequest("A response has one answer: n must be 1.", field="n")
    chat = chat_request(chat_body(body), sampling_defaults(call.runtime))
    return Generation([chat], ResponseObjectFormat(body, chat.params, name, int(time.time())), body.stream)


@RESPONSES.post(
    ("/v1/responses/input_tokens", "/responses/input_tokens"),
    "OpenAI: number of tokens of a response's input",
    field_names=_FIELD_NAMES,
)
async def count_input_tokens(call: ApiCall, body: ResponsesBody) -> InputTokenCount:
    """Count the tokens of a response's input."""
    return {"object": "response.input_tokens", "input_tokens": await num_chat_tokens(call, chat_body(body))}
