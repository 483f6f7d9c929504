"""A client that records when each chunk of a streamed answer arrived.

`streamed` works with any server that streams; `Client` also uses the routes that only Armature has.
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

from app.bench.dialects import DIALECTS, Ask, Dialect, Usage, usage_of
from app.bench.events import Events
from app.bench.stats import MeasurementFailed
from app.bench.wire import RequestBroken, Wire
from app.bench.workload import WORDS, Deck


@dataclass(frozen=True, slots=True)
class Stream:
    """Timing of one streamed answer.

    `started` is when the request was sent. `pieces` has the arrival time of each chunk and its number of tokens.
    Times are `time.perf_counter` seconds. Tokens that arrive at the same moment form one chunk: a step with accepted
    draft tokens produces several tokens.
    """

    started: float
    pieces: tuple[tuple[float, int], ...]
    usage: Usage | None = None

    @property
    def time_to_first_token(self) -> float:
        """Seconds from sending the request to the first chunk with tokens."""
        return self.pieces[0][0] - self.started

    @property
    def num_tokens(self) -> int:
        """Number of completion tokens: the server's count if it reports usage, else the tokens seen in chunks."""
        return sum(count for _, count in self.pieces) if self.usage is None else self.usage.completion_tokens

    def gaps(self, since: float = float("-inf"), until: float = float("inf")) -> list[float]:
        """Return the seconds between consecutive chunks, for chunks that arrived within `(since, until]`."""
        times = [moment for moment, _ in self.pieces]
        return [later - earlier for earlier, later in pairwise(times) if since < later <= until]


OnPiece = Callable[[int], bool]  # receives the number of events with tokens; False aborts the request


async def streamed(wire: Wire, dialect: Dialect, ask: Ask, on_piece: OnPiece | None = None) -> Stream:
    """Send one request and return its stream, read to the end or until `on_piece` returns False.

    Raises:
        RequestBroken: No complete answer arrived, or it has no tokens.
    """
    reading = _Reading(dialect, on_piece)
    started = time.perf_counter()
    answer = await wire.post(dialect.path, dialect.body(ask), reading.take)
    answer.checked(dialect.path)
    return reading.stream(started)


class _Reading:
    """Collects the chunks of one answer while it arrives."""

    def __init__(self, dialect: Dialect, on_piece: OnPiece | None) -> None:
        self._num_tokens = dialect.num_tokens
        self._on_piece = on_piece
        self._events = Events()
        self._pieces: list[tuple[float, int]] = []
        self._usage: Usage | None = None
        self._num_events = 0
        self._left = False

    def take(self, part: bytes, moment: float) -> bool:
        for data in self._events.feed(part):
            if data != b"[DONE]" and not self._read(_event(data), moment):
                self._left = True
                return False
        return True

    def _read(self, event: dict[str, Any], moment: float) -> bool:
        num_tokens = self._num_tokens(event)
        self._usage = usage_of(event) or self._usage
        if not num_tokens:
            return True
        self._num_events += 1
        if self._pieces and self._pieces[-1][0] == moment:  # several events from one step
            self._pieces[-1] = (moment, self._pieces[-1][1] + num_tokens)
        else:
            self._pieces.append((moment, num_tokens))
        return self._on_piece is None or self._on_piece(self._num_events)

    def stream(self, started: float) -> Stream:
        if not self._pieces:
            raise RequestBroken("no tokens", "the server's answer has no tokens in it")
        return Stream(started, tuple(self._pieces), None if self._left else self._usage)


def _event(data: bytes) -> dict[str, Any]:
    """Parse the JSON object of one event."""
    try:
        event = json.loads(data)
    except ValueError as error:
        raise RequestBroken("not JSON", f"the server sent an event that is not JSON: {data[:100]!r}") from error
    if not isinstance(event, dict):
        raise RequestBroken("not JSON", f"the server sent an event that is not a JSON object: {data[:100]!r}")
    if event.get("error"):
        raise RequestBroken("ended by an error", f"the server ended the stream: {event['error']}")
    return event


class Client:
    """Client for the routes of an Armature server."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    async def ready(self) -> bool:
        """Return False while the server is loading or not yet listening."""
        try:
            return (await self.wire.get("/readyz")).status == 200
        except RequestBroken:
            return False

    async def info(self) -> dict[str, Any]:
        """Return the JSON object of `/info`."""
        return dict((await self.wire.get("/info")).checked("/info").json())

    async def counters(self) -> dict[str, float]:
        """Return every sample of `/metrics`, keyed by metric name with labels as printed."""
        lines = (await self.wire.get("/metrics")).checked("/metrics").body.decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    async def deck(self, seed: int = 0) -> Deck:
        """Return a source of prompts made of tokens of this model."""
        answer = await self.wire.post("/tokenize", {"prompt": WORDS, "add_special_tokens": False})
        return Deck(answer.checked("/tokenize").json()["token_ids"], seed)

    async def generate(self, token_ids: Sequence[int], max_tokens: int, on_piece: OnPiece | None = None) -> Stream:
        """Request one greedy answer of exactly `max_tokens` tokens, read until `on_piece` returns False.

        Raises:
            MeasurementFailed: The stream was read to its end but has another number of tokens.
        """
        went_on = True

        def noted(num_pieces: int) -> bool:
            nonlocal went_on
            went_on = on_piece is None or on_piece(num_pieces)
            return went_on

        stream = await streamed(self.wire, DIALECTS["native"], Ask(list(token_ids), max_tokens), noted)
        if went_on and stream.num_tokens != max_tokens:
            raise MeasurementFailed(f"asked for {max_tokens} tokens, the server sent {stream.num_tokens}")
        return stream


@asynccontextmanager
async def beside_each_other() -> AsyncIterator[asyncio.TaskGroup]:
    """Run tasks concurrently; the first failure cancels all and is raised without its exception group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
