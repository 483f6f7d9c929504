"""Anthropic's response formats: the complete message, and the events of a streamed one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from app.api.openai.content_blocks import Block, BlockDelta, BlockEnded, BlockStarted, collected_blocks, divide
from app.api.streaming import CollectedCompletion, GenerationStream
from app.messages import FinishReason
from app.service.requests import Accepted, ChoiceFinished, TextDelta, Usage

Json = dict[str, Any]
# Anthropic has no reason for a timeout. Like the end of the context, it is a limit that cut the text short.
_STOP_REASONS: dict[FinishReason, str] = {
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

    def whole(self, completion: CollectedCompletion) -> Json:
        """Return the complete message."""
        choice = completion.choices[0]
        assert choice.finished is not None, "a complete response has finished"
        blocks = [_whole_block(block) for block in collected_blocks(choice, self._thinks)]
        return self._message(blocks, choice.finished.usage) | _stop(choice.finished)

    async def events(self, stream: GenerationStream) -> AsyncIterator[Json]:
        """Yield the stream's events; the first one has the number of prompt tokens."""
        usage = Usage(0)
        async for event in divide(stream, self._thinks):
            match event:
                case Accepted():
                    usage = Usage(len(event.prompt_token_ids))
                case TextDelta():
                    cached = 0 if event.timings is None else event.timings.cached_tokens
                    yield self._started(Usage(usage.prompt_tokens, cached))  # a client adds what is delivered
                case BlockStarted():
                    yield {"type": "content_block_start", "index": event.block.index} | _empty_block(event.block)
                case BlockDelta():
                    yield {"type": "content_block_delta", "index": event.block.index, "delta": _delta(event)}
                case BlockEnded():
                    yield {"type": "content_block_stop", "index": event.block.index}
                case ChoiceFinished():
                    yield {"type": "message_delta", "delta": _stop(event), "usage": _usage(event.usage)}
        yield {"type": "message_stop"}

    def _started(self, usage: Usage) -> Json:
        message = self._message([], usage) | {"stop_reason": None, "stop_sequence": None}
        return {"type": "message_start", "message": message}

    def _message(self, blocks: list[Json], usage: Usage) -> Json:
        return {
            "id": self._identity,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "usage": _usage(usage),
        }


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _stop(finished: ChoiceFinished) -> Json:
    matched = finished.matched_stop if finished.reason == "stop" else None
    if isinstance(matched, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": _STOP_REASONS[finished.reason], "stop_sequence": None}


def _whole_block(block: Block) -> Json:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": parse_arguments(block.text)}


def _empty_block(block: Block) -> Json:
    empty = Block(block.kind, block.index, call_id=block.call_id, name=block.name)
    return {"content_block": _whole_block(empty)}


def _delta(event: BlockDelta) -> Json:
    if event.block.kind == "text":
        return {"type": "text_delta", "text": event.text}
    if event.block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": event.text}
    return {"type": "input_json_delta", "partial_json": event.text}


def parse_arguments(text: str) -> Json:
    """Return the arguments of a call; none if a limit has cut their text short."""
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}
