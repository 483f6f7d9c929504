"""Share of wall time outside the model at a steady decode: HTTP, tokenisation, scheduling and sampling."""

from __future__ import annotations

import asyncio
import statistics
import time

from app.bench.client import Client, beside_each_other
from app.bench.console import Advance
from app.bench.stats import Figure, MeasurementFailed

NUM_STREAMS = 8
PROMPT_TOKENS = 64
WARM_PIECES = 8
MAX_TOKENS = 200
OVERHEAD_TARGET = 0.10
MODEL_SECONDS = "armature_model_seconds_total"


async def outside_the_model(client: Client, rounds: int, advance: Advance) -> list[Figure]:
    """Measure one minus the model's share of wall time.

    The window starts when all streams decode and ends before the first stream does.
    """
    shares: list[float] = []
    rates: list[float] = []
    for number in range(rounds):
        share, rate = await _one_window(client, seed=number)
        shares.append(share)
        rates.append(rate)
        advance(f"window {number + 1} of {rounds}")
    return [
        Figure(f"decode ×{NUM_STREAMS} over HTTP", statistics.median(rates), "tok/s"),
        Figure(
            "outside the model",
            statistics.median(shares) * 100,
            "%",
            p99=max(shares) * 100,
            ratio=statistics.median(shares),
            against="wall time",
            target=OVERHEAD_TARGET,
            at_most=True,
            is_share=True,
        ),
    ]


async def _one_window(client: Client, seed: int) -> tuple[float, float]:
    deck = await client.deck(seed)
    warm, ending = asyncio.Event(), asyncio.Event()
    counts = [0] * NUM_STREAMS

    def note(index: int) -> bool:
        counts[index] += 1
        if min(counts) >= WARM_PIECES:
            warm.set()
        if max(counts) >= MAX_TOKENS - WARM_PIECES:
            ending.set()
        return True

    async def stream(index: int) -> None:
        await client.generate(deck.prompt(PROMPT_TOKENS), MAX_TOKENS, lambda _: note(index))
        if not ending.is_set():
            raise MeasurementFailed(
                f"a stream of {MAX_TOKENS} tokens came in {counts[index]} chunks, too few to measure its rate"
            )

    async with beside_each_other() as tasks:
        for index in range(NUM_STREAMS):
            tasks.create_task(stream(index))
        await warm.wait()
        seconds_before, tokens_before, start = await _model_seconds(client), sum(counts), time.perf_counter()
        await ending.wait()
        seconds_after, tokens_after, end = await _model_seconds(client), sum(counts), time.perf_counter()
    wall = end - start
    return 1.0 - (seconds_after - seconds_before) / wall, (tokens_after - tokens_before) / wall


async def _model_seconds(client: Client) -> float:
    """Return the seconds spent in the model's forward pass since the server started."""
    samples = [value for name, value in (await client.counters()).items() if name.partition("{")[0] == MODEL_SECONDS]
    if not samples:
        raise MeasurementFailed(f"the server's /metrics has no {MODEL_SECONDS}")
    return sum(samples)
