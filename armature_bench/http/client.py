"""A client that records when each chunk of a streamed answer arrived, and a parser of server-sent events.

`stream_request` works with any server that streams; `ArmatureClient` also uses the routes that only Armature has.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from armature_bench.console import MeasurementFailed
from armature_bench.http.dialects import GENERATE_DIALECTS, GenerateDialect, StreamRequest, TokenUsage, parse_usage
from armature_bench.http.wire import HttpClient, HttpRequestFailed
from armature_bench.http.workload import FREQUENT_WORDS, TokenPrompts


@dataclass(frozen=True, slots=True)
class StreamTiming:
    """Timing of one streamed answer.

    `started` is when the request was sent. `chunks` has the arrival time of each chunk and its number of tokens. Times
    are `time.perf_counter` seconds. Tokens that arrive at the same moment form one chunk: a step with accepted draft
    tokens produces several tokens.
    """

    started: float
    chunks: tuple[tuple[float, int], ...]
    usage: TokenUsage | None = None

    @property
    def time_to_first_token(self) -> float:
        """Seconds from sending the request to the first chunk with tokens."""
        return self.chunks[0][0] - self.started

    @property
    def num_tokens(self) -> int:
        """Number of completion tokens: the server's count if it reports usage, else the tokens seen in chunks."""
        return sum(count for _, count in self.chunks) if self.usage is None else self.usage.completion_tokens

    def gaps(self, since: float = float("-inf"), until: float = float("inf")) -> list[float]:
        """Return the seconds between consecutive chunks, for chunks that arrived within `(since, until]`."""
        times = [moment for moment, _ in self.chunks]
        return [later - earlier for earlier, later in pairwise(times) if since < later <= until]


OnChunk = Callable[[int], bool]  # receives the number of tokens so far; False aborts the request


async def stream_request(
    wire: HttpClient, dialect: GenerateDialect, ask: StreamRequest, on_chunk: OnChunk | None = None
) -> StreamTiming:
    """Send one request and return its stream, read to the end or until `on_chunk` returns False.

    Raises `HttpRequestFailed` if no complete answer arrived, or it has no tokens.
    """
    reading = _StreamReader(dialect, on_chunk)
    started = time.perf_counter()
    answer = await wire.post(dialect.path, dialect.body(ask), reading.take)
    answer.raise_for_status(dialect.path)
    return reading.stream(started)


class _StreamReader:
    def __init__(self, dialect: GenerateDialect, on_chunk: OnChunk | None) -> None:
        self._num_tokens = dialect.num_tokens
        self._on_chunk = on_chunk
        self._events = SseParser()
        self._chunks: list[tuple[float, int]] = []
        self._usage: TokenUsage | None = None
        self._num_seen = 0  # tokens
        self._left = False

    def take(self, part: bytes, moment: float) -> bool:
        for data in self._events.feed(part):
            if data != b"[DONE]" and not self._read(_parse_event(data), moment):
                self._left = True
                return False
        return True

    def _read(self, event: dict[str, Any], moment: float) -> bool:
        num_tokens = self._num_tokens(event)
        self._usage = parse_usage(event) or self._usage
        if not num_tokens:
            return True
        self._num_seen += num_tokens
        if self._chunks and self._chunks[-1][0] == moment:  # several events from one step
            self._chunks[-1] = (moment, self._chunks[-1][1] + num_tokens)
        else:
            self._chunks.append((moment, num_tokens))
        return self._on_chunk is None or self._on_chunk(self._num_seen)

    def stream(self, started: float) -> StreamTiming:
        if not self._chunks:
            raise HttpRequestFailed("no tokens", "the server's answer has no tokens in it")
        return StreamTiming(started, tuple(self._chunks), None if self._left else self._usage)


def _parse_event(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise HttpRequestFailed("not JSON", f"the server sent an event that is not JSON: {data[:100]!r}") from error
    if not isinstance(event, dict):
        raise HttpRequestFailed("not JSON", f"the server sent an event that is not a JSON object: {data[:100]!r}")
    if event.get("error"):
        raise HttpRequestFailed("ended by an error", f"the server ended the stream: {event['error']}")
    return event


class ArmatureClient:
    def __init__(self, wire: HttpClient) -> None:
        self.wire = wire

    async def ready(self) -> bool:
        """Return False while the server is loading or not yet listening."""
        try:
            return (await self.wire.get("/readyz")).status == 200
        except HttpRequestFailed:
            return False

    async def info(self) -> dict[str, Any]:
        return dict((await self.wire.get("/info")).raise_for_status("/info").json())

    async def counters(self) -> dict[str, float]:
        """Return every sample of `/metrics`, keyed by metric name with labels as printed."""
        lines = (await self.wire.get("/metrics")).raise_for_status("/metrics").body.decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    async def token_prompts(self, seed: int = 0) -> TokenPrompts:
        answer = await self.wire.post("/tokenize", {"prompt": FREQUENT_WORDS, "add_special_tokens": False})
        return TokenPrompts(answer.raise_for_status("/tokenize").json()["token_ids"], seed)

    async def generate(
        self, token_ids: Sequence[int], max_tokens: int, on_chunk: OnChunk | None = None
    ) -> StreamTiming:
        """Request one greedy answer of exactly `max_tokens` tokens, read until `on_chunk` returns False.

        Raises `MeasurementFailed` if the stream was read to its end but has another number of tokens.
        """
        went_on = True

        def noted(num_tokens: int) -> bool:
            nonlocal went_on
            went_on = on_chunk is None or on_chunk(num_tokens)
            return went_on

        stream = await stream_request(
            self.wire, GENERATE_DIALECTS["native"], StreamRequest(list(token_ids), max_tokens), noted
        )
        if went_on and stream.num_tokens != max_tokens:
            raise MeasurementFailed(f"asked for {max_tokens} tokens, the server sent {stream.num_tokens}")
        return stream

    async def ask_about(self, picture: str, question: str, max_tokens: int) -> StreamTiming:
        """Ask a question about a picture, a data URL, and return the greedy answer's stream."""
        ask = StreamRequest(question, max_tokens, picture=picture)
        return await stream_request(self.wire, GENERATE_DIALECTS["openai"], ask)


@asynccontextmanager
async def concurrent_tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """Run tasks concurrently; the first failure cancels all and is raised without its exception group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


class SseParser:
    """Parser of server-sent events. Keeps incomplete lines and events until their rest arrives."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []

    def feed(self, part: bytes) -> list[bytes]:
        """Return the data of every event that `part` completes. Comments and fields other than `data` are ignored."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        events = []
        for line in lines:
            text = line.removesuffix(b"\r")
            if text.startswith(b"data:"):
                self._lines.append(text[5:].removeprefix(b" "))
            elif not text and self._lines:
                events.append(b"\n".join(self._lines))
                self._lines.clear()
        return events
