"""A client that notes when each piece of an answer arrived: of any server that streams, and of what only ours can be asked."""

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
    """One streamed answer: when it was sent, and when each piece came with how many tokens (`time.perf_counter` seconds).

    What comes at once is one piece: a step that guessed well makes several tokens.
    """

    started: float
    pieces: tuple[tuple[float, int], ...]
    usage: Usage | None = None

    @property
    def time_to_first_token(self) -> float:
        return self.pieces[0][0] - self.started

    @property
    def num_tokens(self) -> int:
        """As the server counts them, or else as many as could be seen."""
        return sum(count for _, count in self.pieces) if self.usage is None else self.usage.completion_tokens

    def gaps(self, since: float = float("-inf"), until: float = float("inf")) -> list[float]:
        """Seconds from one piece to the next, for pieces that came within `(since, until]`."""
        times = [moment for moment, _ in self.pieces]
        return [later - earlier for earlier, later in pairwise(times) if since < later <= until]


OnPiece = Callable[[int], bool]  # told how many events with tokens have come; False leaves the server in the middle of its answer


async def streamed(wire: Wire, dialect: Dialect, ask: Ask, on_piece: OnPiece | None = None) -> Stream:
    """One answer to its end, or as far as `on_piece` wants it. Raises `RequestBroken`."""
    reading = _Reading(dialect, on_piece)
    started = time.perf_counter()
    answer = await wire.post(dialect.path, dialect.body(ask), reading.take)
    answer.checked(dialect.path)
    return reading.stream(started)


class _Reading:
    """An answer as it comes."""

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
        if self._pieces and self._pieces[-1][0] == moment:  # several events of one step
            self._pieces[-1] = (moment, self._pieces[-1][1] + num_tokens)
        else:
            self._pieces.append((moment, num_tokens))
        return self._on_piece is None or self._on_piece(self._num_events)

    def stream(self, started: float) -> Stream:
        if not self._pieces:
            raise RequestBroken("no tokens", "the server's answer has no tokens in it")
        return Stream(started, tuple(self._pieces), None if self._left else self._usage)


def _event(data: bytes) -> dict[str, Any]:
    """What an event carries."""
    try:
        event = json.loads(data)
    except ValueError as error:
        raise RequestBroken("not JSON", f"the server sent an event that is no JSON: {data[:100]!r}") from error
    if not isinstance(event, dict):
        raise RequestBroken("not JSON", f"the server sent an event that is no object: {data[:100]!r}")
    if event.get("error"):
        raise RequestBroken("ended by an error", f"the server ended the stream: {event['error']}")
    return event


class Client:
    """What can be asked of a server of ours."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    async def ready(self) -> bool:
        """False while the server loads, or does not listen yet."""
        try:
            return (await self.wire.get("/readyz")).status == 200
        except RequestBroken:
            return False

    async def info(self) -> dict[str, Any]:
        return dict((await self.wire.get("/info")).checked("/info").json())

    async def counters(self) -> dict[str, float]:
        """Every sample of `/metrics`, by its name with labels as they are printed."""
        lines = (await self.wire.get("/metrics")).checked("/metrics").body.decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    async def deck(self, seed: int = 0) -> Deck:
        """Prompts out of this model's own tokens."""
        answer = await self.wire.post("/tokenize", {"prompt": WORDS, "add_special_tokens": False})
        return Deck(answer.checked("/tokenize").json()["token_ids"], seed)

    async def generate(self, token_ids: Sequence[int], max_tokens: int, on_piece: OnPiece | None = None) -> Stream:
        """One greedy answer of exactly `max_tokens` tokens, or as far as `on_piece` wants it."""
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
    """Tasks of which the first failure ends all, and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
