"""Division of one generated answer into blocks (reasoning, text, tool calls), for dialects that stream them one by one.

White space alone is no text: models write it between reasoning and calls. It is shown where the answer has nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Literal

from app.api.streaming import CollectedChoice, GenerationStream
from app.service.requests import Accepted, ChoiceFinished, ScoredToken, TextDelta
from app.text.tool_calls import ToolCallDelta

BlockKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """A block as generated so far. `text` is a call's arguments; `index` is the block's place in the answer."""

    kind: BlockKind
    index: int
    text: str = ""
    call_id: str = ""
    name: str = ""
    logprobs: list[ScoredToken] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BlockStarted:
    """A new block begins. It is the only open one."""

    block: Block


@dataclass(frozen=True, slots=True)
class BlockDelta:
    """More text of the open block; `block` has it already."""

    block: Block
    text: str
    logprobs: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockEnded:
    """The open block is complete."""

    block: Block


BlockEvent = BlockStarted | BlockDelta | BlockEnded


async def divide(
    stream: GenerationStream, shows_reasoning: bool = True
) -> AsyncIterator[Accepted | TextDelta | BlockEvent | ChoiceFinished]:
    """Yield the blocks of a stream with one choice.

    `Accepted`, one first `TextDelta` and `ChoiceFinished` pass too: their counts and times begin and end an answer.
    Every block has ended before `ChoiceFinished`.
    """
    divider = _Divider(shows_reasoning)
    is_first = True
    async for event in stream:
        if isinstance(event, TextDelta):
            if is_first:
                is_first = False
                yield event
            for part in divider.push(event):
                yield part
            continue
        if isinstance(event, ChoiceFinished):
            if is_first:
                yield TextDelta(event.choice, "", timings=event.timings)
            for part in divider.finish():
                yield part
        yield event


def collected_blocks(choice: CollectedChoice, shows_reasoning: bool = True) -> list[Block]:
    """Return the blocks of a complete answer."""
    divider = _Divider(shows_reasoning)
    calls = tuple(
        ToolCallDelta(index, call.arguments, call.id, call.name) for index, call in enumerate(choice.tool_calls)
    )
    whole = TextDelta(
        choice.index, choice.text, logprobs=tuple(choice.logprobs), reasoning=choice.reasoning, tool_calls=calls
    )
    events = [*divider.push(whole), *divider.finish()]
    return [event.block for event in events if isinstance(event, BlockStarted)]


class _Divider:
    def __init__(self, shows_reasoning: bool) -> None:
        self._shows_reasoning = shows_reasoning
        self._open: Block | None = None
        self._num_blocks = 0
        self._held = ""  # white space that may be followed by text
        self._held_logprobs: list[ScoredToken] = []

    def push(self, delta: TextDelta) -> Iterator[BlockEvent]:
        """Yield what follows from a delta. In it, reasoning precedes text, and text precedes calls."""
        if delta.reasoning and self._shows_reasoning:
            yield from self._append("reasoning", delta.reasoning)
        if delta.text:
            yield from self._push_text(delta)
        for call in delta.tool_calls:
            if call.id is not None:
                yield from self._start(Block("call", self._num_blocks, call_id=call.id, name=call.name or ""))
            if call.arguments:
                yield from self._append("call", call.arguments)

    def finish(self) -> Iterator[BlockEvent]:
        """End the open block. An answer without blocks has one of text."""
        if not self._num_blocks:
            yield from self._append("text", self._held, tuple(self._held_logprobs))
        yield from self._end()

    def _push_text(self, delta: TextDelta) -> Iterator[BlockEvent]:
        is_open = self._open is not None and self._open.kind == "text"
        if not is_open and not delta.text.strip():
            self._held += delta.text
            self._held_logprobs += delta.logprobs
            return
        text, logprobs = self._held + delta.text, (*self._held_logprobs, *delta.logprobs)
        self._held, self._held_logprobs = "", []
        yield from self._append("text", text, logprobs)

    def _append(self, kind: BlockKind, text: str, logprobs: tuple[ScoredToken, ...] = ()) -> Iterator[BlockEvent]:
        if self._open is None or self._open.kind != kind:
            yield from self._start(Block(kind, self._num_blocks))
        assert self._open is not None, "a block was started"
        if text:
            self._open.text += text
            self._open.logprobs += logprobs
            yield BlockDelta(self._open, text, logprobs)

    def _start(self, block: Block) -> Iterator[BlockEvent]:
        yield from self._end()
        self._held, self._held_logprobs = "", []
        self._open = block
        self._num_blocks += 1
        yield BlockStarted(block)

    def _end(self) -> Iterator[BlockEvent]:
        if self._open is not None:
            yield BlockEnded(self._open)
            self._open = None
