"""Generation requests to one server in one dialect, and the timing of each streamed answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass

from app.bench import loops
from app.bench.client import Stream, streamed
from app.bench.dialects import Ask, Dialect
from app.bench.loops import Bounds, Stretch
from app.bench.wire import Wire
from app.bench.workload import Deck, Lengths, TextDeck

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Wanted:
    """Parameters of every request: distributions of prompt and completion lengths in tokens."""

    prompt_tokens: Lengths
    max_tokens: Lengths
    ignore_eos: bool = True
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Answered:
    """One answered request.

    `intended` is when the request should have been sent (`time.perf_counter` seconds); latency starts there.
    `client` is the index of its client.
    """

    intended: float
    client: int
    asked_tokens: int
    stream: Stream


Run = Stretch[Answered]


class Traffic:
    """Generation requests to one server in one dialect.

    Lengths are drawn in the order of requests, so every server receives the same lengths.
    """

    def __init__(self, wire: Wire, dialect: Dialect, model: str | None, deck: Deck | TextDeck, wanted: Wanted) -> None:
        self._wire, self._dialect, self._model, self._deck = wire, dialect, model, deck
        self._wanted = wanted
        self._random = random.Random(wanted.seed)

    async def clients(self, run: Run, num_clients: int, bounds: Bounds) -> None:
        """Run a closed loop of `num_clients` clients."""
        await loops.clients(run, num_clients, bounds, self._one)

    async def arrivals(self, run: Run, moments: Iterable[float], bounds: Bounds) -> None:
        """Run an open loop with requests at these moments, in seconds from the start."""
        await loops.arrivals(run, moments, bounds, self._one)

    async def warm_up(self, num_requests: int, max_tokens: int = WARM_UP_TOKENS) -> None:
        """Send concurrent requests that are not recorded. Errors are ignored: they will occur again when measured."""
        asks = [self._ask() for _ in range(num_requests)]
        short = [Ask(ask.prompt, min(max_tokens, ask.max_tokens), ask.ignore_eos, ask.model) for ask in asks]
        await asyncio.gather(*(streamed(self._wire, self._dialect, ask) for ask in short), return_exceptions=True)

    async def _one(self, run: Run, client: int, intended: float) -> Answered:
        ask = self._ask()
        return Answered(intended, client, ask.max_tokens, await streamed(self._wire, self._dialect, ask, run.note))

    def _ask(self) -> Ask:
        wanted = self._wanted
        prompt = self._deck.prompt(wanted.prompt_tokens.draw(self._random))
        return Ask(prompt, wanted.max_tokens.draw(self._random), wanted.ignore_eos, self._model)
