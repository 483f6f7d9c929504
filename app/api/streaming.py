"""Streams of events: the first token, encoded events, errors after the start, and collected, merged or divided streams.

A complete response is collected from the same events as a stream. With several prompts, each is a request to the
service, and their events are merged. For dialects that stream blocks (reasoning, text, tool calls), `divide` makes them
of one answer.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, Protocol, TypeVar

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from app.api.errors import ErrorFormat, to_http_error
from app.errors import RequestError
from app.messages import FinishReason, Timings
from app.service.requests import (
    Accepted,
    ChoiceFinished,
    DirectOutput,
    GenerationRequest,
    PromptToken,
    ScoredToken,
    StreamEvent,
    TextDelta,
    Usage,
    note_error,
)
from app.text.tool_calls import ToolCallDelta

SSE = "text/event-stream"
NDJSON = "application/x-ndjson"
# Makes proxies forward each event immediately.
_UNBUFFERED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
COMMENT_SECONDS = 5.0  # between signs of life of a stream whose model is loading; proxies wait for 30 s and more
DONE = b"data: [DONE]\n\n"
# In an event that `StartedStream.write_directly` takes: the place of a value that differs.
SLOT = "\ue000\ue001\ue000"
DIRECT_WRITE = "armature.direct_write"  # extension of the ASGI scope: `write` and `flow` of a `DirectOutput`
json_string = json.encoder.encode_basestring
# Created once: `json.dumps` with non-default arguments creates an encoder per call, which takes as long as encoding.
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


SlotValues = Callable[[str, Sequence[int]], tuple[str, ...]]


def json_list(numbers: Sequence[int]) -> str:
    return f"[{','.join(map(str, numbers))}]"


def text_value(text: str, token_ids: Sequence[int]) -> tuple[str, ...]:
    """Return the value of an event with its text as its only slot."""
    return (json_string(text),)


class GenerationStream(Protocol):
    """A stream of generation events. A reader that stops early must call `aclose`."""

    def __aiter__(self) -> AsyncIterator[StreamEvent]: ...
    async def aclose(self) -> None:
        """End the stream; an unfinished request is aborted."""


def format_sse(event: Mapping[str, Any]) -> bytes:
    """Return one server-sent event. JSON escapes line breaks, so a single `data:` line is enough."""
    return b"data: " + _JSON.encode(event).encode() + b"\n\n"


def format_named_sse(event: Mapping[str, Any]) -> bytes:
    """Return one server-sent event named by the `type` of its data, as Anthropic's and OpenAI's newer APIs send."""
    return b"event: " + str(event["type"]).encode() + b"\n" + format_sse(event)


def format_line(event: Mapping[str, Any]) -> bytes:
    return _JSON.encode(event).encode() + b"\n"


class StartedStream:
    """A stream after its first token. Errors before it were raised, while the status line could still be chosen."""

    def __init__(
        self,
        first_events: list[StreamEvent],
        rest: GenerationStream,
        direct: DirectOutput | None = None,
        encode: Callable[[Mapping[str, Any]], bytes] = format_sse,
    ) -> None:
        self._first_events, self._rest, self._direct, self._encode = first_events, rest, direct, encode

    def write_directly(self, event: Mapping[str, Any], values: SlotValues) -> None:
        """Write further plain tokens as events like this one, without reading the stream (`DirectOutput`).

        `event` is an event for a text, with `SLOT` in place of each value that differs. `values` returns these in JSON.
        """
        if self._direct is None or self._direct.emit is not None or self._direct.write is None:
            return
        write, constants = self._direct.write, self._encode(event).split(_JSON.encode(SLOT).encode())
        template = b"%b".join(constant.replace(b"%", b"%%") for constant in constants)
        if values is text_value:
            first, last = constants
            self._direct.emit = lambda text, token_ids: write(first + json_string(text).encode() + last)
        else:
            self._direct.emit = lambda text, token_ids: write(
                template % tuple([value.encode() for value in values(text, token_ids)])
            )

    async def __aiter__(self) -> AsyncIterator[StreamEvent]:
        for event in self._first_events:
            yield event
        async for event in self._rest:
            yield event

    async def aclose(self) -> None:
        await self._rest.aclose()

    def timings(self) -> list[Timings]:
        """Return the timings of the choices that have begun: queue and prefill, all that a header can report."""
        return [event.timings for event in self._first_events if isinstance(event, TextDelta) and event.timings]


def write_directly(stream: GenerationStream, event: Mapping[str, Any], values: SlotValues = text_value) -> None:
    """Let plain tokens pass the reader of a stream that can do so: see `StartedStream.write_directly`."""
    if isinstance(stream, StartedStream):
        stream.write_directly(event, values)


async def wait_for_first_token(
    stream: GenerationStream,
    direct: DirectOutput | None = None,
    encode: Callable[[Mapping[str, Any]], bytes] = format_sse,
) -> StartedStream:
    """Return the stream at the first event with tokens. Errors before it are raised.

    An echo of the prompt has no tokens.
    """
    first_events: list[StreamEvent] = []
    async for event in stream:
        first_events.append(event)
        if isinstance(event, ChoiceFinished) or (isinstance(event, TextDelta) and event.token_ids):
            break
    return StartedStream(first_events, stream, direct, encode)


class EventStreamResponse(StreamingResponse):
    """A response of server-sent events, or of lines of JSON, that closes its source however it ends."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        source: GenerationStream,
        headers: dict[str, str],
        media_type: str = SSE,
        direct: DirectOutput | None = None,
    ) -> None:
        unbuffered = {name.decode(): value.decode() for name, value in _UNBUFFERED}
        super().__init__(events, media_type=media_type, headers={**unbuffered, **headers})
        self._source, self._direct = source, direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._direct is not None:
            write, flow = scope.get("extensions", {}).get(DIRECT_WRITE) or (None, self._direct.flow)
            self._direct.write, self._direct.flow = write, flow
        # Not `super().__call__`, whose tasks watch for a disconnect: `RequestGate` does that.
        await self.stream_response(send)

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        finally:
            await self._source.aclose()


async def encode_events(events: AsyncIterator[Any], encoding: EventEncoding) -> AsyncIterator[bytes]:
    """Yield the events as bytes. An error after the first event is sent as the last event."""
    try:
        async for event in events:
            yield encoding.encode(event)
    except RequestError as error:
        note_error(error.code)
        yield encoding.encode(encoding.errors.body(to_http_error(error)))
        return
    if encoding.last:
        yield encoding.last


PHASES = ("queue", "prefill", "decode")


@dataclass(slots=True)
class CollectedCall:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class CollectedChoice:
    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[ScoredToken] = field(default_factory=list)
    finished: ChoiceFinished | None = None
    reasoning: str = ""
    tool_calls: list[CollectedCall] = field(default_factory=list)
    prompt: tuple[PromptToken, ...] = ()

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, delta: TextDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.reasoning += delta.reasoning
        self.prompt = delta.prompt or self.prompt
        for call in delta.tool_calls:
            if call.id is not None:
                self.tool_calls.append(CollectedCall(call.id, call.name or ""))
            self.tool_calls[-1].arguments += call.arguments

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the tokens, if it was requested."""
        values = [token.logprob for token in self.logprobs]
        return sum(values) / len(values) if values else -math.inf

    @property
    def reason(self) -> FinishReason:
        """Finish reason; valid only after the choice has finished."""
        assert self.finished is not None, "every choice of a complete response has finished"
        return self.finished.reason


@dataclass(slots=True)
class CollectedCompletion:
    by_index: dict[int, CollectedChoice] = field(default_factory=dict)
    usage: Usage = field(default_factory=lambda: Usage(0))
    prompt_token_ids: list[tuple[int, ...]] = field(default_factory=list)  # of each prompt

    def keep_best(self, count: int, group: int, drop_logprobs: bool) -> None:
        """Keep the `count` choices of each `group` with the most likely tokens on average."""
        kept: list[CollectedChoice] = []
        choices = self.choices
        for first in range(0, len(choices), group):
            ranked = sorted(choices[first : first + group], key=lambda choice: -choice.mean_logprob)
            kept += ranked[:count]
        for index, choice in enumerate(kept):
            choice.index = index
            if drop_logprobs:
                choice.logprobs = []
        self.by_index = {choice.index: choice for choice in kept}

    def add(self, event: StreamEvent) -> None:
        if isinstance(event, Accepted):
            self.prompt_token_ids.append(event.prompt_token_ids)
            return
        choice = self._choice(event.choice)
        if isinstance(event, TextDelta):
            choice.add(event)
        else:
            choice.finished = event
            self.usage = event.usage

    def add_directly(self, text: str, token_ids: Sequence[int]) -> None:
        choice = self._choice(0)
        choice.texts.append(text)
        choice.token_ids += token_ids

    def _choice(self, index: int) -> CollectedChoice:
        if (choice := self.by_index.get(index)) is None:
            choice = self.by_index[index] = CollectedChoice(index)
        return choice

    @property
    def choices(self) -> list[CollectedChoice]:
        return [self.by_index[index] for index in sorted(self.by_index)]

    def headers(self) -> dict[str, str]:
        return server_timing(choice.finished.timings for choice in self.choices if choice.finished)


async def collect(stream: GenerationStream, direct: DirectOutput | None = None) -> CollectedCompletion:
    """Read the stream to its end; plain tokens may come by `direct`. Exceptions of the stream are raised."""
    completion = CollectedCompletion()
    if direct is not None:
        direct.emit = completion.add_directly
    async for event in stream:
        completion.add(event)
    return completion


WholeT_co = TypeVar("WholeT_co", covariant=True)
EventT_co = TypeVar("EventT_co", covariant=True)


class GenerationFormat(Protocol[WholeT_co, EventT_co]):
    def whole(self, completion: CollectedCompletion) -> WholeT_co: ...

    def events(self, stream: GenerationStream) -> AsyncIterator[EventT_co]: ...


@dataclass(frozen=True, slots=True)
class Generation(Generic[WholeT_co, EventT_co]):
    """What a body was translated to: a request of the service for each prompt, and the form of the response.

    With `streams`, the client gets events. The types are of the complete response and of an event.
    """

    requests: Sequence[GenerationRequest]
    form: GenerationFormat[WholeT_co, EventT_co]
    streams: bool | None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EventEncoding:
    """How a dialect writes events as bytes, with `last` after them, and an error that ends them."""

    errors: ErrorFormat
    encode: Callable[[Mapping[str, Any]], bytes] = format_sse
    last: bytes = b""
    media_type: str = SSE


class EarlyStream:
    """The response of a streamed request whose model is still loading.

    Comments with the stage, or white space between lines of JSON, keep proxies from closing the connection. The first
    one is sent after some seconds, so that most errors still have their status; later ones end the stream.
    """

    def __init__(self, encoding: EventEncoding, send: Send) -> None:
        self._encoding, self._send = encoding, send
        self.has_begun = False

    @asynccontextmanager
    async def waiting(self, stage: Callable[[], str]) -> AsyncIterator[None]:
        """Send comments in the block."""
        commenting = asyncio.create_task(self._comment(stage))
        try:
            yield
        finally:
            commenting.cancel()
            await asyncio.wait({commenting})

    async def _comment(self, stage: Callable[[], str]) -> None:
        while True:
            await asyncio.sleep(COMMENT_SECONDS)
            if not self.has_begun:
                self.has_begun = True
                headers = [(b"content-type", self._encoding.media_type.encode()), *_UNBUFFERED]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            is_sse = self._encoding.media_type == SSE
            await self._write(f": {' '.join(stage().split())}\n\n".encode() if is_sse else b" ")

    async def _write(self, content: bytes) -> None:
        await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def send(self, message: Message) -> None:
        """Forward a message of the response, whose start was sent already."""
        if not self.has_begun or message["type"] != "http.response.start":
            await self._send(message)

    async def fail(self, error: RequestError) -> None:
        note_error(error.code)
        await self._write(self._encoding.encode(self._encoding.errors.body(to_http_error(error))))


async def respond(
    stream: GenerationStream,
    generation: Generation[Any, Any],
    encoding: EventEncoding,
    direct: DirectOutput | None = None,
) -> Response:
    """Return the response to a generation: its events if the client wants a stream, else one JSON body.

    Errors before the first token are raised, so that the status can tell of them.
    """
    headers = generation.headers
    if not generation.streams:
        completion = await collect(stream, direct)
        return JSONResponse(generation.form.whole(completion), headers={**completion.headers(), **headers})
    started = await wait_for_first_token(stream, direct, encoding.encode)
    events = encode_events(generation.form.events(started), encoding)
    timing = server_timing(started.timings(), "queue", "prefill")
    return EventStreamResponse(events, started, {**timing, **headers}, encoding.media_type, direct)


def server_timing(timings: Iterable[Timings], *phases: str) -> dict[str, str]:
    """Return a `Server-Timing` header with the longest time of each phase over all choices, in milliseconds.

    A stream sends its headers at the first token, so it can report `queue` and `prefill` only; HTTP has no place for
    the rest after the body.
    """
    each = list(timings)
    if not each:
        return {}
    seconds = {phase: max(getattr(timing, f"{phase}_seconds") for timing in each) for phase in phases or PHASES}
    return {"server-timing": ", ".join(f"{phase};dur={longest * 1000:.1f}" for phase, longest in seconds.items())}


async def merge_streams(streams: Sequence[GenerationStream], choices_each: int) -> AsyncGenerator[StreamEvent, None]:
    """Yield the events of all streams as one request.

    Choice c of stream s becomes choice s · choices_each + c, and usage is summed. The streams are admitted one after
    the other, so a refusal of any of them is raised before the first token.
    """
    queue: asyncio.Queue[tuple[int, StreamEvent | asyncio.Task[None]]] = asyncio.Queue()
    tasks: list[asyncio.Task[None]] = []
    usages: dict[int, Usage] = {}

    async def pump(number: int, stream: GenerationStream) -> None:
        async for event in stream:
            queue.put_nowait((number, event))

    try:
        for stream in streams:
            yield await anext(aiter(stream))
        for number, stream in enumerate(streams):
            task = asyncio.create_task(pump(number, stream))
            task.add_done_callback(lambda ended, number=number: queue.put_nowait((number, ended)))  # type: ignore[misc]
            tasks.append(task)
        num_running = len(tasks)
        while num_running:
            number, item = await queue.get()
            if isinstance(item, asyncio.Task):
                item.result()  # raises the stream's exception, if any
                num_running -= 1
            else:
                yield _renumber(item, number, choices_each, usages)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


def _renumber(event: StreamEvent, number: int, choices_each: int, usages: dict[int, Usage]) -> StreamEvent:
    if isinstance(event, Accepted):
        return event
    choice = number * choices_each + event.choice
    if not isinstance(event, ChoiceFinished):
        return replace(event, choice=choice)
    usages[number] = event.usage
    total = Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages.values()),
        cached_tokens=sum(usage.cached_tokens for usage in usages.values()),
        completion_tokens=sum(usage.completion_tokens for usage in usages.values()),
    )
    return replace(event, choice=choice, usage=total)


# ---- blocks ----------------------------------------------------------------------------------------------------------
# White space alone is no text: models write it between reasoning and calls. It is shown where the answer has nothing else.

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
