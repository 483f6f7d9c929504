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

PROMPT_TOKENS = 64
COMPLETION_TOKENS = (64, 192)  # drawn evenly between them, so that sequences do not end together
LOADS = (0.5, 0.9)  # of capacity
ARRIVALS_PER_ROUND = 20
ANSWERS_PER_PLACE = 3  # of a full load, one after the other
CAPACITY_TARGET, WAIT_TARGET = 0.15, 0.25
_CAPACITY = re.compile(r'armature_capacity_tokens_per_second{phase="(\w+)",rows="(\d+)"}')
_WAIT = "armature_predicted_wait_seconds"
_MEAN_COMPLETION = sum(COMPLETION_TOKENS) / 2


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
        enough = [rows for rows in told["prefill"] if rows >= PROMPT_TOKENS] or [max(told["prefill"])]
        return cls(most, told["prefill"][min(enough)], decode[most], fewest / decode[fewest])

    @property
    def completion_tokens_per_second(self) -> float:
        """Of this load, in which a prompt has to be read for each completion."""
        return _MEAN_COMPLETION * self.requests_per_second

    @property
    def requests_per_second(self) -> float:
        return 1 / (PROMPT_TOKENS / self.prefill + _MEAN_COMPLETION / self.decode)


@dataclass(frozen=True, slots=True)
class Wait:
    """What one request was told before it was sent, and what it waited for its first token, seconds."""

    predicted: float
    actual: float

    def error(self, step_seconds: float) -> float:
        """Part of the wait by which the prediction was off; a wait shorter than a step counts as one."""
        return abs(self.predicted - self.actual) / max(self.actual, step_seconds)


async def capacity_and_wait(client: Client, rounds: int, advance: Advance) -> list[Figure]:
    """A full load first, then arrivals by chance at parts of the capacity that was told before the first request."""
    plan = (await client.info())["plan"]
    before = Capacity.of(await client.counters(), plan["max_running_seqs"]["value"])
    deck, chance = await client.deck(), random.Random(7)
    measured = await _full_load(client, deck, before.rows, chance)
    advance("a full load")
    after = Capacity.of(await client.counters(), plan["max_running_seqs"]["value"])
    figures = [
        Figure(f"throughput, {before.rows} clients without a pause", measured, "tok/s"),
        _held("capacity as told before the first request", before, measured),
        _held("capacity as told afterwards", after, measured),
    ]
    for load in LOADS:
        gaps = [chance.expovariate(load * after.requests_per_second) for _ in range(rounds * ARRIVALS_PER_ROUND)]
        waits = await _arrivals(client, deck, gaps, partial(advance, f"{load:g} of capacity"))
        figures += _figures(waits, load, after.step_seconds)
    return figures


def _held(name: str, told: Capacity, measured: float) -> Figure:
    value = told.completion_tokens_per_second
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


async def _full_load(client: Client, deck: Deck, clients: int, chance: random.Random) -> float:
    """Completion tokens a second while every place is taken: from the last client's first token to the first client's last answer."""

    async def keep_asking() -> list[Stream]:
        return [
            await client.generate(deck.prompt(PROMPT_TOKENS), chance.randint(*COMPLETION_TOKENS))
            for _ in range(ANSWERS_PER_PLACE)
        ]

    async with beside_each_other() as tasks:
        running = [tasks.create_task(keep_asking()) for _ in range(clients)]
    return throughput([task.result() for task in running])


def throughput(answers: Sequence[Sequence[Stream]]) -> float:
    """Tokens a second of clients that each had one answer after the other, while all of them were busy."""
    rate = steady_rate(answers)
    if rate is None:
        raise MeasurementFailed("the clients of a full load never ran all at once")
    return rate


async def _arrivals(client: Client, deck: Deck, gaps: Sequence[float], on_round: Callable[[], None]) -> list[Wait]:
    """Requests that come one after the other, whatever became of those before them."""
    lengths = random.Random(len(gaps))
    arrival, running = time.perf_counter(), []
    async with beside_each_other() as tasks:
        for number, gap in enumerate(gaps, start=1):
            arrival += gap
            await asyncio.sleep(arrival - time.perf_counter())
            running.append(tasks.create_task(_ask(client, deck.prompt(PROMPT_TOKENS), lengths.randint(*COMPLETION_TOKENS))))
            if number % ARRIVALS_PER_ROUND == 0:
                on_round()
    return [task.result() for task in running]


async def _ask(client: Client, prompt: Sequence[int], max_tokens: int) -> Wait:
    predicted = (await client.counters()).get(_WAIT)
    if predicted is None:
        raise MeasurementFailed("the server predicts no wait")
    answer = await client.generate(prompt, max_tokens)
    return Wait(predicted, answer.time_to_first_token)
