"""Sends requests and notes what becomes of each: as many clients as wanted who wait for their answers, or arrivals that wait for nobody."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from app.bench.client import Stream, streamed
from app.bench.dialects import Ask, Dialect
from app.bench.wire import RequestBroken, Wire
from app.bench.workload import Deck, Lengths, TextDeck

LONGEST_PAUSE_SECONDS = 5.0  # of a client that was sent away: at most so long, whatever the server asks for
SHORTEST_PAUSE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Wanted:
    """What every request asks for."""

    prompt_tokens: Lengths
    max_tokens: Lengths
    ignore_eos: bool = True
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much of it: so many requests, or those sent within so many seconds; whichever comes first."""

    num_requests: int | None = None
    seconds: float | None = None

    def hold(self, num_sent: int, elapsed: float) -> bool:
        """Whether another one may be sent."""
        few_enough = self.num_requests is None or num_sent < self.num_requests
        return few_enough and (self.seconds is None or elapsed < self.seconds)


@dataclass(frozen=True, slots=True)
class Answered:
    """`intended`: when the request should have been sent, which is when latency begins. `client`: whose it was."""

    intended: float
    client: int
    asked_tokens: int
    stream: Stream


@dataclass(slots=True)
class Run:
    """One stretch of load on one server."""

    started: float = 0.0
    ended: float = 0.0
    cpu_seconds: float = 0.0  # of this process
    num_sent: int = 0
    num_pieces: int = 0  # so far, for whoever watches
    answered: list[Answered] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)  # the first of each kind

    def done(self, bounds: Bounds) -> float:
        """The share of what it will be."""
        num_ended = len(self.answered) + self.failures.total()
        requests = num_ended / bounds.num_requests if bounds.num_requests else 0.0
        seconds = (time.perf_counter() - self.started) / bounds.seconds if bounds.seconds and self.started else 0.0
        return min(1.0, max(requests, seconds))

    def note(self, num_pieces: int) -> bool:
        self.num_pieces += 1
        return True


class Traffic:
    """To one server, in one dialect. Lengths are drawn in the order of requests: the same for every server."""

    def __init__(self, wire: Wire, dialect: Dialect, model: str | None, deck: Deck | TextDeck, wanted: Wanted) -> None:
        self._wire, self._dialect, self._model, self._deck = wire, dialect, model, deck
        self._wanted = wanted
        self._random = random.Random(wanted.seed)

    async def clients(self, run: Run, num_clients: int, bounds: Bounds) -> None:
        """A closed loop: each client sends its next request when the last has been answered."""

        async def visit(client: int) -> None:
            while bounds.hold(run.num_sent, time.perf_counter() - run.started):
                pause = await self._one(run, client, time.perf_counter())
                if pause:
                    await asyncio.sleep(pause)

        with _timed(run):
            async with asyncio.TaskGroup() as tasks:
                for client in range(num_clients):
                    tasks.create_task(visit(client))

    async def arrivals(self, run: Run, moments: Iterable[float], bounds: Bounds) -> None:
        """An open loop: requests come when they come, however busy the server is."""
        with _timed(run):
            async with asyncio.TaskGroup() as tasks:
                for number, moment in enumerate(moments):
                    if not bounds.hold(number, moment):
                        break
                    while (early := run.started + moment - time.perf_counter()) > 0:  # an event loop may wake a little too soon
                        await asyncio.sleep(early)
                    tasks.create_task(self._one(run, number, run.started + moment))

    async def warm_up(self, num_requests: int, max_tokens: int) -> None:
        """Requests that are not counted, beside each other; what fails will fail again."""
        asks = [self._ask() for _ in range(num_requests)]
        short = [Ask(ask.prompt, min(max_tokens, ask.max_tokens), ask.ignore_eos, ask.model) for ask in asks]
        await asyncio.gather(*(streamed(self._wire, self._dialect, ask) for ask in short), return_exceptions=True)

    async def _one(self, run: Run, client: int, intended: float) -> float:
        """Sends one request, and answers for how many seconds its client should pause."""
        run.num_sent += 1
        ask = self._ask()
        try:
            stream = await streamed(self._wire, self._dialect, ask, run.note)
        except RequestBroken as error:
            run.failures[error.kind] += 1
            run.messages.setdefault(error.kind, str(error))
            return min(max(error.retry_after, SHORTEST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
        run.answered.append(Answered(intended, client, ask.max_tokens, stream))
        return 0.0

    def _ask(self) -> Ask:
        wanted = self._wanted
        prompt = self._deck.prompt(wanted.prompt_tokens.draw(self._random))
        return Ask(prompt, wanted.max_tokens.draw(self._random), wanted.ignore_eos, self._model)


@contextmanager
def _timed(run: Run) -> Iterator[None]:
    """When it began and ended, and what it cost this process, however it ends."""
    run.started, cpu_seconds = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        run.ended, run.cpu_seconds = time.perf_counter(), time.process_time() - cpu_seconds
