"""Share of wall time outside the model at a steady decode: HTTP, tokenisation, scheduling and sampling."""

from __future__ import annotations

import asyncio
import statistics
import time

from armature_bench.console import AdvanceProgress, Figure, MeasurementFailed
from armature_bench.http.client import ArmatureClient, concurrent_tasks

NUM_STREAMS = 8
PROMPT_TOKENS = 64
WARM_UP_CHUNKS = 8
MAX_TOKENS = 200
OVERHEAD_TARGET = 0.10
MODEL_SECONDS = "armature_model_seconds_total"


async def overhead_outside_model(client: ArmatureClient, rounds: int, advance: AdvanceProgress) -> list[Figure]:
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


async def _one_window(client: ArmatureClient, seed: int) -> tuple[float, float]:
    prompts = await client.token_prompts(seed)
    warm, ending = asyncio.Event(), asyncio.Event()
    counts = [0] * NUM_STREAMS

    def note(index: int) -> bool:
        counts[index] += 1
        if min(counts) >= WARM_UP_CHUNKS:
            warm.set()
        if max(counts) >= MAX_TOKENS - WARM_UP_CHUNKS:
            ending.set()
        return True

    async def stream(index: int) -> None:
        await client.generate(prompts.prompt(PROMPT_TOKENS), MAX_TOKENS, lambda _: note(index))
        if not ending.is_set():
            raise MeasurementFailed(
                f"a stream of {MAX_TOKENS} tokens came in {counts[index]} chunks, too few to measure its rate"
            )

    async with concurrent_tasks() as tasks:
        for index in range(NUM_STREAMS):
            tasks.create_task(stream(index))
        await warm.wait()
        seconds_before, tokens_before, start = await _model_seconds(client), sum(counts), time.perf_counter()
        await ending.wait()
        seconds_after, tokens_after, end = await _model_seconds(client), sum(counts), time.perf_counter()
    wall = end - start
    return 1.0 - (seconds_after - seconds_before) / wall, (tokens_after - tokens_before) / wall


async def _model_seconds(client: ArmatureClient) -> float:
    """Return the seconds spent in the model's forward pass since the server started."""
    samples = [value for name, value in (await client.counters()).items() if name.partition("{")[0] == MODEL_SECONDS]
    if not samples:
        raise MeasurementFailed(f"the server's /metrics has no {MODEL_SECONDS}")
    return sum(samples)
