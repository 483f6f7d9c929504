"""Anthropic dialect: messages, complete or streamed, and their token counts; translated to OpenAI's chat body."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

from app.api.anthropic.schemas import (
    ANTHROPIC_ERRORS,
    AnthropicBlock,
    AnthropicEvent,
    AnthropicMessage,
    AnthropicResponse,
    AnthropicStop,
    AnthropicTokenCount,
    AnthropicUsage,
    ContentBlock,
    ConversationBody,
    CountTokensBody,
    MessagesBody,
    OtherBlock,
    StopReason,
    TextBlock,
)
from app.api.openai.parts import MessagePart
from app.api.openai.routes import num_chat_tokens
from app.api.openai.schemas import (
    ChatBody,
    FunctionCallText,
    FunctionDefinition,
    FunctionName,
    Message,
    NamedToolChoice,
    ToolCallRecord,
    ToolDefinition,
)
from app.api.openai.translate import chat_request
from app.api.routing import MESSAGES, ApiCall, Dialect, new_response_id, sampling_defaults
from app.api.schemas import make_body
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
    write_directly,
)
from app.errors import InvalidRequest
from app.messages import FinishReason
from app.service.requests import Accepted, ChoiceFinished, TextDelta, Usage

Blocks = tuple[ContentBlock | OtherBlock, ...]
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_body(body: ConversationBody) -> ChatBody:
    """Return the chat of a body.

    A last message of the assistant is the beginning of the answer, as in Anthropic's API. Without `thinking` the
    template is asked for an answer without it: a client that does not want thinking expects text first.
    """
    fields: dict[str, Any] = {
        "messages": tuple(_messages(body)),
        "enable_thinking": body.thinks,
        "thinking_budget": None if body.thinking is None else body.thinking.budget_tokens,
        "reasoning_effort": None if body.output_config is None else body.output_config.effort,
        "tools": _tools(body),
        "tool_choice": _tool_choice(body),
        "continue_final_message": _is_begun(body.messages[-1]) or None,
    }
    if body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    output = body.output_format or (None if body.output_config is None else body.output_config.format)
    if output is not None:
        fields["json_schema"] = output.json_schema
    if isinstance(body, MessagesBody):
        fields |= {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "cache_salt": body.cache_salt,
        }
    return make_body(ChatBody, **fields)


def _is_begun(last: AnthropicMessage) -> bool:
    if last.role != "assistant":
        return False
    return isinstance(last.content, str) or all(block.type == "text" for block in last.content)


# ---- messages ------------------------------------------------------------------------------------------------------


def _messages(body: ConversationBody) -> Iterator[Message]:
    if body.system:
        yield Message(role="system", content=_content(body.system))
    for place, message in enumerate(body.messages):
        if isinstance(message.content, str):
            yield Message(role=message.role, content=message.content)
        elif message.role == "assistant":
            yield _assistant_message(message.content, place)
        else:
            yield from _user_messages(message, place)


def _assistant_message(content: Blocks, place: int) -> Message:
    _check_types(content, ("thinking", "redacted_thinking", "tool_use"), "assistant", place)
    blocks = [block for block in content if isinstance(block, ContentBlock)]
    calls = tuple(
        ToolCallRecord(id=block.id, function=FunctionCallText(name=block.name or "", arguments=block.input))
        for block in blocks
        if block.type == "tool_use"
    )
    thinking = "".join(block.thinking or "" for block in blocks if block.type == "thinking")
    texts = _text_parts(tuple(block for block in blocks if block.readable is not None))
    return Message(
        role="assistant", content=texts or None, tool_calls=calls or None, reasoning_content=thinking or None
    )


def _user_messages(message: AnthropicMessage, place: int) -> Iterator[Message]:
    """Yield a message for each result of a tool, and for the texts between them."""
    assert not isinstance(message.content, str), "a list of blocks"
    _check_types(message.content, ("tool_result",), message.role, place)
    parts: list[MessagePart] = []
    for block in message.content:
        if isinstance(block, OtherBlock) and block.is_picture:
            parts.append(MessagePart(type="image_url", image_url=block.picture_url))
            continue
        if not isinstance(block, ContentBlock) or block.type != "tool_result":
            parts.append(MessagePart(type="text", text=block.shown))
            continue
        if parts:
            yield Message(role=message.role, content=tuple(parts))
            parts = []
        yield Message(role="tool", tool_call_id=block.tool_use_id, content=_content(block.content or ""))
    if parts or not message.content:
        yield Message(role=message.role, content=tuple(parts))


def _check_types(blocks: Blocks, types: tuple[str, ...], role: str, place: int) -> None:
    """Refuse blocks that are no text and have none of these types; what cannot be read was refused before."""
    for index, block in enumerate(blocks):
        if isinstance(block, ContentBlock) and block.readable is None and block.type not in types:
            field = f"messages[{place}].content[{index}]"
            raise InvalidRequest(f"{field} of type {block.type!r} does not belong to the role {role}.", field=field)


def _content(content: str | tuple[TextBlock | OtherBlock, ...]) -> str | tuple[MessagePart, ...]:
    return content if isinstance(content, str) else _text_parts(content)


def _text_parts(blocks: tuple[TextBlock | OtherBlock, ...]) -> tuple[MessagePart, ...]:
    return tuple(MessagePart(type="text", text=block.shown) for block in blocks)


# ---- tools ---------------------------------------------------------------------------------------------------------


def _tools(body: ConversationBody) -> tuple[ToolDefinition, ...] | None:
    if not body.tools:
        return None
    return tuple(
        ToolDefinition(
            type="function",
            function=FunctionDefinition(
                name=tool.name or "", description=tool.description, parameters=tool.input_schema
            ),
        )
        for tool in body.tools
        if tool.is_offered
    )


def _tool_choice(body: ConversationBody) -> str | NamedToolChoice | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type != "tool":
        return _TOOL_CHOICES[choice.type]
    if choice.name is None:
        raise InvalidRequest("tool_choice of type tool needs a name.", field="tool_choice.name")
    return NamedToolChoice(function=FunctionName(name=choice.name))


# Anthropic has no reason for a timeout. Like the end of the context, it is a limit that cut the text short.
_STOP_REASONS: dict[FinishReason, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "timeout": "max_tokens",
    "aborted": "end_turn",
    "tool_calls": "tool_use",
}


class MessageFormat:
    """Formatter of one message. `thinks`: the client wants blocks of thinking."""

    def __init__(self, identity: str, model: str, thinks: bool) -> None:
        self._identity, self._model, self._thinks = identity, model, thinks

    def whole(self, completion: CollectedCompletion) -> AnthropicResponse:
        choice = completion.choices[0]
        assert choice.finished is not None, "a complete response has finished"
        blocks = [_whole_block(block) for block in collected_blocks(choice, self._thinks)]
        return self._message(blocks, choice.finished.usage, _stop(choice.finished))

    async def events(self, stream: GenerationStream) -> AsyncIterator[AnthropicEvent]:
        """Yield the stream's events; the first one has the number of prompt tokens."""
        usage = Usage(0)
        async for event in divide(stream, self._thinks):
            match event:
                case Accepted():
                    usage = Usage(len(event.prompt_token_ids))
                case TextDelta():
                    cached = 0 if event.timings is None else event.timings.cached_tokens
                    usage = Usage(usage.prompt_tokens, cached)  # a client adds what is delivered
                    message = self._message([], usage, {"stop_reason": None, "stop_sequence": None})
                    yield {"type": "message_start", "message": message}
                case BlockStarted(block):
                    empty = Block(block.kind, block.index, call_id=block.call_id, name=block.name)
                    yield {"type": "content_block_start", "index": block.index, "content_block": _whole_block(empty)}
                case BlockDelta():
                    yield {"type": "content_block_delta", "index": event.block.index, "delta": _delta(event)}
                    if event.block.kind == "text":
                        delta = _delta(BlockDelta(event.block, SLOT))
                        plain = {"type": "content_block_delta", "index": event.block.index, "delta": delta}
                        write_directly(stream, plain)
                case BlockEnded():
                    yield {"type": "content_block_stop", "index": event.block.index}
                case ChoiceFinished():
                    yield {"type": "message_delta", "delta": {**_stop(event)}, "usage": _usage(event.usage)}
        yield {"type": "message_stop"}

    def _message(self, blocks: list[AnthropicBlock], usage: Usage, stop: AnthropicStop) -> AnthropicResponse:
        return {
            "id": self._identity,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "usage": _usage(usage),
            **stop,
        }


def _usage(usage: Usage) -> AnthropicUsage:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _stop(finished: ChoiceFinished) -> AnthropicStop:
    matched = finished.matched_stop if finished.reason == "stop" else None
    if isinstance(matched, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": _STOP_REASONS[finished.reason], "stop_sequence": None}


def _whole_block(block: Block) -> AnthropicBlock:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": parse_arguments(block.text)}


def _delta(event: BlockDelta) -> dict[str, Any]:
    if event.block.kind == "text":
        return {"type": "text_delta", "text": event.text}
    if event.block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": event.text}
    return {"type": "input_json_delta", "partial_json": event.text}


def parse_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; none if a limit has cut their text short."""
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


# ---- routes ----------------------------------------------------------------------------------------------------------

ANTHROPIC = Dialect("Anthropic", ANTHROPIC_ERRORS)


@ANTHROPIC.generates(
    "/v1/messages",
    "Anthropic: message",
    operation="chat",
    prompts=MESSAGES,
    encoding=EventEncoding(ANTHROPIC_ERRORS, format_named_sse),
    field_names={"stop": "stop_sequences", "json_schema": "output_config.format.schema"},
    openapi={"response_description": "The message; with `stream`, its events."},
)
async def messages(call: ApiCall, body: MessagesBody, name: str) -> Generation[AnthropicResponse, AnthropicEvent]:
    """Generate the answer to a conversation."""
    chat = chat_request(chat_body(body), sampling_defaults(call.runtime))
    form = MessageFormat(new_response_id("msg_"), name, body.thinks)
    headers = {"request-id": call.id}  # Anthropic's name of x-request-id
    return Generation([replace(chat, clips_max_tokens=True)], form, body.stream, headers)


@ANTHROPIC.post("/v1/messages/count_tokens", "Anthropic: number of tokens of a message")
async def count_tokens(call: ApiCall, body: CountTokensBody) -> AnthropicTokenCount:
    """Count the tokens of a conversation."""
    return {"input_tokens": await num_chat_tokens(call, chat_body(body))}
