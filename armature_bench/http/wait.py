"""Accuracy of a server's predictions: capacity under full load, and the wait for a first token under partial load.

The predicted wait is read from the gauge in `/metrics` just before a request is sent, and compared with the wait that
the client observes. Tokenization, HTTP and the scrape therefore count as errors, as they do for a router that reads the
gauge.
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

from armature_bench.console import AdvanceProgress, Figure, MeasurementFailed, percentile
from armature_bench.http.client import ArmatureClient, StreamTiming, concurrent_tasks
from armature_bench.http.tally import steady_rate
from armature_bench.http.workload import TokenPrompts

MAX_CONTEXT_TOKENS = 1024  # limit of prompt plus completion; the model's maximum length if that is less
MIN_CHUNK_TOKENS = 64  # smallest prefill chunk, in tokens, of a step that also decodes
LOAD_FRACTIONS = (0.5, 0.9)  # fractions of the capacity
ARRIVALS_PER_ROUND = 12
ANSWERS_PER_CLIENT = 2  # consecutive answers per client of the full load
CAPACITY_TARGET, WAIT_TARGET = 0.15, 0.25
_CAPACITY = re.compile(r'armature_capacity_tokens_per_second{phase="(\w+)",rows="(\d+)"}')
_WAIT = "armature_predicted_wait_seconds"


@dataclass(frozen=True, slots=True)
class RequestMix:
    """Request mix of the bench.

    A prompt has a quarter of the context, and a completion between one and three quarters, so that sequences end at
    different times. A sequence is on average half a context long, the length that the reported capacity refers to.
    """

    context: int

    @property
    def prompt_tokens(self) -> int:
        return self.context // 4

    @property
    def mean_completion(self) -> float:
        return self.context / 2

    def draw(self, prompts: TokenPrompts, rng: random.Random) -> tuple[list[int], int]:
        return prompts.prompt(self.prompt_tokens), rng.randint(self.context // 4, 3 * self.context // 4 - 1)


@dataclass(frozen=True, slots=True)
class ReportedCapacity:
    """Capacity that the server reports, in tokens per second.

    `decode` is the rate of completion tokens while `rows` sequences run. `step_seconds` is the server's shortest step.
    """

    rows: int
    prefill: float
    decode: float
    step_seconds: float

    @classmethod
    def of(cls, counters: Mapping[str, float], max_running: int) -> ReportedCapacity:
        """Read the capacity for the largest reported number of rows that may run. Raises `MeasurementFailed`."""
        rates: dict[str, dict[int, float]] = {"prefill": {}, "decode": {}}
        for name, value in counters.items():
            found = _CAPACITY.fullmatch(name)
            if found is not None:
                rates.setdefault(found[1], {})[int(found[2])] = value
        decode = {rows: speed for rows, speed in rates["decode"].items() if rows <= max_running}
        if not decode or not rates["prefill"]:
            raise MeasurementFailed("the server reports no capacity: it was not calibrated (see `calibrate` in /info)")
        fewest, most = min(decode), max(decode)
        enough = [size for size in rates["prefill"] if size >= MIN_CHUNK_TOKENS] or [max(rates["prefill"])]
        return cls(most, rates["prefill"][min(enough)], decode[most], fewest / decode[fewest])

    def requests_per_second(self, asks: RequestMix) -> float:
        """Return the requests per second that the capacity allows, with one prompt for each completion."""
        return 1 / (asks.prompt_tokens / self.prefill + asks.mean_completion / self.decode)


@dataclass(frozen=True, slots=True)
class WaitSample:
    predicted: float
    actual: float

    def error(self, step_seconds: float) -> float:
        """Return the relative error of the prediction; a wait shorter than one step counts as one step."""
        return abs(self.predicted - self.actual) / max(self.actual, step_seconds)


async def capacity_and_wait(client: ArmatureClient, rounds: int, advance: AdvanceProgress) -> list[Figure]:
    """Measure a full load first, then random arrivals at fractions of the capacity."""
    plan = (await client.info())["plan"]
    asks = RequestMix(min(MAX_CONTEXT_TOKENS, plan["max_model_len"]["value"]))
    before = ReportedCapacity.of(await client.counters(), plan["max_running_seqs"]["value"])
    prompts, rng = await client.token_prompts(), random.Random(7)
    measured = await _full_load(client, before.rows, lambda: asks.draw(prompts, rng))
    advance("a full load")
    after = ReportedCapacity.of(await client.counters(), plan["max_running_seqs"]["value"])
    figures = [
        Figure(f"throughput, {before.rows} clients without pauses", measured, "tok/s"),
        _capacity_figure("reported capacity before the first request", before, asks, measured),
        _capacity_figure("reported capacity after the full load", after, asks, measured),
    ]
    for load in LOAD_FRACTIONS:
        gaps = [rng.expovariate(load * after.requests_per_second(asks)) for _ in range(rounds * ARRIVALS_PER_ROUND)]
        requests = [(gap, *asks.draw(prompts, rng)) for gap in gaps]
        waits = await _arrivals(client, requests, partial(advance, f"{load:g} of capacity"))
        figures += _figures(waits, load, after.step_seconds)
    return figures


def _capacity_figure(name: str, reported: ReportedCapacity, asks: RequestMix, measured: float) -> Figure:
    value = asks.mean_completion * reported.requests_per_second(asks)
    against = "the throughput: |reported − measured| / measured"
    return Figure(name, value, "tok/s", None, abs(value / measured - 1), against, CAPACITY_TARGET, at_most=True)


def _figures(waits: Sequence[WaitSample], load: float, step_seconds: float) -> list[Figure]:
    actual, predicted = [wait.actual * 1e3 for wait in waits], [wait.predicted * 1e3 for wait in waits]
    error = statistics.median(wait.error(step_seconds) for wait in waits)
    name = f"first token at {load:g} of capacity"
    median_predicted = statistics.median(predicted)
    return [
        Figure(f"{name}, measured", statistics.median(actual), "ms", p99=percentile(actual, 0.99)),
        Figure(
            f"{name}, predicted",
            median_predicted,
            "ms",
            p99=percentile(predicted, 0.99),
            ratio=error,
            against="the wait: median of |predicted − measured| / measured",
            target=WAIT_TARGET,
            at_most=True,
        ),
    ]


async def _full_load(client: ArmatureClient, clients: int, draw_request: Callable[[], tuple[list[int], int]]) -> float:
    """Return the completion tokens per second while every client has a running request.

    The window is from the last client's first token to the first client's last answer.
    """

    async def send_continuously() -> list[StreamTiming]:
        return [await client.generate(*draw_request()) for _ in range(ANSWERS_PER_CLIENT)]

    async with concurrent_tasks() as tasks:
        running = [tasks.create_task(send_continuously()) for _ in range(clients)]
    return steady_throughput([task.result() for task in running])


def steady_throughput(answers: Sequence[Sequence[StreamTiming]]) -> float:
    """Return the tokens per second of clients with consecutive answers, while all of them have a stream."""
    rate = steady_rate(answers)
    if rate is None:
        raise MeasurementFailed("the clients of the full load never all had a stream at the same time")
    return rate


async def _arrivals(
    client: ArmatureClient, requests: Sequence[tuple[float, list[int], int]], on_round: Callable[[], None]
) -> list[WaitSample]:
    """Send requests with the given gaps between them, regardless of earlier requests."""
    arrival, running = time.perf_counter(), []
    async with concurrent_tasks() as tasks:
        for number, (gap, prompt, max_tokens) in enumerate(requests, start=1):
            arrival += gap
            await asyncio.sleep(arrival - time.perf_counter())
            running.append(tasks.create_task(_ask(client, prompt, max_tokens)))
            if number % ARRIVALS_PER_ROUND == 0:
                on_round()
    return [task.result() for task in running]


async def _ask(client: ArmatureClient, prompt: Sequence[int], max_tokens: int) -> WaitSample:
    predicted = (await client.counters()).get(_WAIT)
    if predicted is None:
        raise MeasurementFailed("the server does not report a predicted wait")
    answer = await client.generate(prompt, max_tokens)
    return WaitSample(predicted, answer.time_to_first_token)
