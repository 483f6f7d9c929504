"""Translation of Anthropic's bodies to OpenAI's chat body, whose translation to the service's request is the only one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from app.api.anthropic.schemas import (
    AnthropicMessage,
    ContentBlock,
    ConversationBody,
    MessagesBody,
    OtherBlock,
    TextBlock,
)
from app.api.openai.schemas import (
    ChatBody,
    FunctionCallText,
    FunctionDefinition,
    FunctionName,
    Message,
    MessagePart,
    NamedToolChoice,
    ToolCallRecord,
    ToolDefinition,
)
from app.api.schemas import make_body
from app.errors import InvalidRequest

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
