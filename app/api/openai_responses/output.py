"""Response formats of OpenAI's Responses API: the complete object, and the events of a streamed one."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from app.api.openai.content_blocks import Block, BlockDelta, BlockEnded, BlockStarted, collected_blocks, divide
from app.api.openai.responses import chat_logprobs
from app.api.openai_responses.schemas import ClientTool, ResponsesBody, ResponsesTool
from app.api.openai_responses.translate import OfferedTool, offered_tools
from app.api.routing import new_response_id
from app.api.streaming import CollectedCompletion, GenerationStream
from app.messages import SamplingParams
from app.service.requests import Accepted, ChoiceFinished, ScoredToken, TextDelta, Usage

Json = dict[str, Any]
_ID_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
Tools = Mapping[str, OfferedTool]  # by the name that the model knows


def new_id(prefix: str) -> str:
    """Return a new id such as `resp_…`."""
    return f"{prefix}_{uuid.uuid4().hex}"


@dataclass(slots=True)
class _Item:
    """An item of the output: one block of the answer, with its id; of a call also the tool."""

    block: Block
    tools: Tools
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = new_id("ctc" if self.is_custom else _ID_PREFIXES[self.block.kind])

    @property
    def is_custom(self) -> bool:
        """True for a call of a tool that takes a text."""
        tool = self.tools.get(self.block.name)
        return self.block.kind == "call" and tool is not None and tool.is_custom

    @property
    def input(self) -> str:
        """The text of such a call."""
        try:
            arguments = json.loads(self.block.text)
        except ValueError:  # the model decided what to write, or was cut
            return self.block.text
        given = arguments.get("input") if isinstance(arguments, dict) else None
        return given if isinstance(given, str) else self.block.text

    def call(self, status: str) -> Json:
        """Return the item of a call, with the name that the client gave the tool."""
        block, tool = self.block, self.tools.get(self.block.name)
        called: Json = {"call_id": block.call_id, "name": block.name}
        if tool is not None and tool.namespace is not None:
            called |= {"name": tool.declared.name, "namespace": tool.namespace}
        if self.is_custom:
            shown = "" if status == "in_progress" else self.input
            return {"type": "custom_tool_call", "id": self.id, **called, "input": shown, "status": status}
        return {"type": "function_call", "id": self.id, **called, "arguments": block.text, "status": status}

    def body(self, status: str) -> Json:
        block = self.block
        if block.kind == "call":
            return self.call(status)
        content = [self.part()] if status != "in_progress" else []
        if block.kind == "reasoning":
            return {"type": "reasoning", "id": self.id, "summary": [], "content": content, "status": status}
        return {"type": "message", "id": self.id, "role": "assistant", "content": content, "status": status}

    def part(self) -> Json:
        if self.block.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.block.text}
        logprobs = _logprobs(self.block.logprobs)
        return {"type": "output_text", "text": self.block.text, "annotations": [], "logprobs": logprobs}

    def place(self) -> Json:
        """Return the fields that say which item an event is about."""
        where = {"item_id": self.id, "output_index": self.block.index}
        return where if self.block.kind == "call" else where | {"content_index": 0}


def _logprobs(tokens: list[ScoredToken] | tuple[ScoredToken, ...]) -> list[Json]:
    content: list[Json] = (chat_logprobs(tokens) or {"content": []})["content"]
    return content


class ResponseObjectFormat:
    """Formatter of one response. `params` are the sampling parameters as they are used."""

    def __init__(self, body: ResponsesBody, params: SamplingParams, model: str, created: int) -> None:
        self._id = new_response_id("resp_")
        self._created, self._fields = created, _request_fields(body, params, model)
        self._tools: Tools = {tool.name: tool for tool in offered_tools(body)}

    def whole(self, completion: CollectedCompletion) -> Json:
        """Return the complete response."""
        choice = completion.choices[0]
        assert choice.finished is not None, "a complete response has finished"
        return self._finished([_Item(block, self._tools) for block in collected_blocks(choice)], choice.finished)

    async def events(self, stream: GenerationStream) -> AsyncIterator[Json]:
        """Yield the stream's events, numbered from 0."""
        items: list[_Item] = []
        number = 0
        async for event in divide(stream):
            for body in self._event_bodies(event, items):
                yield body | {"sequence_number": number}
                number += 1

    def _event_bodies(self, event: Any, items: list[_Item]) -> Iterator[Json]:
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

    def _finished(self, items: list[_Item], finished: ChoiceFinished) -> Json:
        is_cut = finished.reason in ("length", "timeout")
        status = "incomplete" if is_cut else "completed"
        # Only the last item can be cut.
        output = [item.body("completed" if item is not items[-1] else status) for item in items]
        return self._response(status, output, finished.usage) | {
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None
        }

    def _response(self, status: str, output: list[Json], usage: Usage | None = None) -> Json:
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


def _request_fields(body: ResponsesBody, params: SamplingParams, model: str) -> Json:
    """Return the fields that repeat the request."""
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


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


# ---- events --------------------------------------------------------------------------------------------------------

_EVENT_NAMES = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}


def _started(item: _Item) -> Iterator[Json]:
    added = {"output_index": item.block.index, "item": item.body("in_progress")}
    yield {"type": "response.output_item.added", **added}
    if item.block.kind != "call":
        yield {"type": "response.content_part.added", **item.place(), "part": item.part()}


def _delta(item: _Item, event: BlockDelta) -> Json:
    name = _EVENT_NAMES[item.block.kind]
    body = {"type": f"response.{name}.delta", **item.place(), "delta": event.text}
    return body | {"logprobs": _logprobs(event.logprobs)} if item.block.kind == "text" else body


def _ended(item: _Item) -> Iterator[Json]:
    block = item.block
    if item.is_custom:
        named = {"item_id": item.id, "output_index": block.index}
        yield {"type": "response.custom_tool_call_input.delta", **named, "delta": item.input}
        yield {"type": "response.custom_tool_call_input.done", **named, "input": item.input}
        yield {"type": "response.output_item.done", "output_index": block.index, "item": item.body("completed")}
        return
    done: Json = {"type": f"response.{_EVENT_NAMES[block.kind]}.done", **item.place()}
    if block.kind == "call":
        yield done | {"name": item.body("completed")["name"], "arguments": block.text}
    else:
        logprobs = {"logprobs": _logprobs(block.logprobs)} if block.kind == "text" else {}
        yield done | {"text": block.text, **logprobs}
        yield {"type": "response.content_part.done", **item.place(), "part": item.part()}
    yield {"type": "response.output_item.done", "output_index": block.index, "item": item.body("completed")}
