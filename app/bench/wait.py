"""What a server says of its own speed against what it does: capacity under a full load, and the wait for a first token under less.

The wait is read where everybody can read it, from the gauge of `/metrics`, just before a request is sent; what it is held against is what
the client itself waits. So tokenising, HTTP and the scrape count as errors, as they do for a router that reads the gauge.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from app.bench.client import Client, Stream, beside_each_other
from app.bench.console import Advance
from app.bench.stats import Figure, MeasurementFailed, percentile
from app.bench.tally import steady_rate
from app.bench.workload import Deck

MOST_TOKENS = 1024  # of a prompt and its completion, or as many as the model was made for
CHUNK_TOKENS = 64  # of a prompt that is read in a step, while others decode
LOADS = (0.5, 0.9)  # of capacity
ARRIVALS_PER_ROUND = 12
ANSWERS_PER_PLACE = 2  # of a full load, one after the other
CAPACITY_TARGET, WAIT_TARGET = 0.15, 0.25
_CAPACITY = re.compile(r'armature_capacity_tokens_per_second{phase="(\w+)",rows="(\d+)"}')
_WAIT = "armature_predicted_wait_seconds"


@dataclass(frozen=True, slots=True)
class Asks:
    """A quarter of the context is prompt, and a quarter to three of them completion, so that sequences do not end together.

    On the way a sequence is half a context long, which is how long those are that capacity is told for.
    """

    context: int

    @property
    def prompt_tokens(self) -> int:
        return self.context // 4

    @property
    def mean_completion(self) -> float:
        return self.context / 2

    def deal(self, deck: Deck, chance: random.Random) -> tuple[list[int], int]:
        """A prompt, and how many tokens are to follow."""
        return deck.prompt(self.prompt_tokens), chance.randint(self.context // 4, 3 * self.context // 4 - 1)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Tokens a second that the server says it makes of prompts, and of completions when so many sequences run; `step` is its shortest."""

    rows: int
    prefill: float
    decode: float
    step_seconds: float

    @classmethod
    def of(cls, counters: Mapping[str, float], max_running: int) -> Capacity:
        """At the most rows that may run and are told of. Raises `MeasurementFailed` where a server knows nothing of itself."""
        told: dict[str, dict[int, float]] = {"prefill": {}, "decode": {}}
        for name, value in counters.items():
            found = _CAPACITY.fullmatch(name)
            if found is not None:
                told.setdefault(found[1], {})[int(found[2])] = value
        decode = {rows: speed for rows, speed in told["decode"].items() if rows <= max_running}
        if not decode or not told["prefill"]:
            raise MeasurementFailed("the server tells no capacity: it was not calibrated (see `calibrate` under /info)")
        fewest, most = min(decode), max(decode)
        enough = [size for size in told["prefill"] if size >= CHUNK_TOKENS] or [max(told["prefill"])]
        return cls(most, told["prefill"][min(enough)], decode[most], fewest / decode[fewest])

    def requests_per_second(self, asks: Asks) -> float:
        """That can be answered, where a prompt has to be read for each completion."""
        return 1 / (asks.prompt_tokens / self.prefill + asks.mean_completion / self.decode)


@dataclass(frozen=True, slots=True)
class Wait:
    """What one request was told before it was sent, and what it waited for its first token, seconds."""

    predicted: float
    actual: float

    def error(self, step_seconds: float) -> float:
        """Part of the wait by which the prediction was off; a wait shorter than a step counts as one."""
        return abs(self.predicted - self.actual) / max(self.actual, step_seconds)


async def capacity_and_wait(client: Client, rounds: int, advance: Advance) -> list[Figure]:
    """A full load first, then arrivals by chance at parts of the capacity."""
    plan = (await client.info())["plan"]
    asks = Asks(min(MOST_TOKENS, plan["max_model_len"]["value"]))
    before = Capacity.of(await client.counters(), plan["max_running_seqs"]["value"])
    deck, chance = await client.deck(), random.Random(7)
    measured = await _full_load(client, before.rows, lambda: asks.deal(deck, chance))
    advance("a full load")
    after = Capacity.of(await client.counters(), plan["max_running_seqs"]["value"])
    figures = [
        Figure(f"throughput, {before.rows} clients without a pause", measured, "tok/s"),
        _held("capacity as told before the first request", before, asks, measured),
        _held("capacity as told afterwards", after, asks, measured),
    ]
    for load in LOADS:
        gaps = [chance.expovariate(load * after.requests_per_second(asks)) for _ in range(rounds * ARRIVALS_PER_ROUND)]
        requests = [(gap, *asks.deal(deck, chance)) for gap in gaps]
        waits = await _arrivals(client, requests, partial(advance, f"{load:g} of capacity"))
        figures += _figures(waits, load, after.step_seconds)
    return figures


def _held(name: str, told: Capacity, asks: Asks, measured: float) -> Figure:
    value = asks.mean_completion * told.requests_per_second(asks)
    against = "it and the throughput, their difference over the throughput"
    return Figure(name, value, "tok/s", None, abs(value / measured - 1), against, CAPACITY_TARGET, at_most=True)


def _figures(waits: Sequence[Wait], load: float, step_seconds: float) -> list[Figure]:
    actual, predicted = [wait.actual * 1e3 for wait in waits], [wait.predicted * 1e3 for wait in waits]
    error = statistics.median(wait.error(step_seconds) for wait in waits)
    name = f"first token at {load:g} of capacity"
    told = statistics.median(predicted)
    return [
        Figure(f"{name}, as waited", statistics.median(actual), "ms", p99=percentile(actual, 0.99)),
        Figure(
            f"{name}, as predicted",
            told,
            "ms",
            p99=percentile(predicted, 0.99),
            ratio=error,
            against="the wait: median of |predicted − waited| over waited",
            target=WAIT_TARGET,
            at_most=True,
        ),
    ]


async def _full_load(client: Client, clients: int, deal: Callable[[], tuple[list[int], int]]) -> float:
    """Completion tokens a second while every place is taken: from the last client's first token to the first client's last answer."""

    async def keep_asking() -> list[Stream]:
        return [await client.generate(*deal()) for _ in range(ANSWERS_PER_PLACE)]

    async with beside_each_other() as tasks:
        running = [tasks.create_task(keep_asking()) for _ in range(clients)]
    return throughput([task.result() for task in running])


def throughput(answers: Sequence[Sequence[Stream]]) -> float:
    """Tokens a second of clients that each had one answer after the other, while all of them were busy."""
    rate = steady_rate(answers)
    if rate is None:
        raise MeasurementFailed("the clients of a full load never ran all at once")
    return rate


async def _arrivals(client: Client, requests: Sequence[tuple[float, list[int], int]], on_round: Callable[[], None]) -> list[Wait]:
    """Requests that come so long after each other, whatever became of those before them."""
    arrival, running = time.perf_counter(), []
    async with beside_each_other() as tasks:
        for number, (gap, prompt, max_tokens) in enumerate(requests, start=1):
            arrival += gap
            await asyncio.sleep(arrival - time.perf_counter())
            running.append(tasks.create_task(_ask(client, prompt, max_tokens)))
            if number % ARRIVALS_PER_ROUND == 0:
                on_round()
    return [task.result() for task in running]


async def _ask(client: Client, prompt: Sequence[int], max_tokens: int) -> Wait:
    predicted = (await client.counters()).get(_WAIT)
    if predicted is None:
        raise MeasurementFailed("the server predicts no wait")
    answer = await client.generate(prompt, max_tokens)
    return Wait(predicted, answer.time_to_first_token)
