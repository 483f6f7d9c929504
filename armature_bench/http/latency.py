"""Effects of one request on others over HTTP.

Measures running streams while a long prompt arrives, and a second request that shares a prefix with the first.
"""

from __future__ import annotations

import asyncio
import statistics
import time

from armature_bench.console import AdvanceProgress, Figure, MeasurementFailed, percentile
from armature_bench.http.client import ArmatureClient, StreamTiming, concurrent_tasks
from armature_bench.http.workload import TokenPrompts

NUM_STREAMS = 4
STREAM_PROMPT_TOKENS = 64
STREAM_MAX_TOKENS = 1024  # the streams are aborted once the long prompt is answered
QUIET_CHUNKS = 40  # chunks of each stream before the long prompt is sent
TAIL_TOKENS = 16
ITL_TARGET = 3.0
PREFIX_TARGET = 0.15


async def inter_token_latency(
    client: ArmatureClient, prompt_tokens: int, rounds: int, advance: AdvanceProgress
) -> list[Figure]:
    """Measure the gaps between chunks of running streams before a long prompt, and from then until its first token."""
    prompts = await client.token_prompts()
    quiet: list[float] = []
    disturbed: list[float] = []
    for number in range(rounds):
        before, during = await _one_arrival(client, prompts, prompt_tokens)
        quiet += before
        disturbed += during
        advance(f"arrival {number + 1} of {rounds}")
    median, worst = statistics.median(quiet), percentile(disturbed, 0.99)
    return [
        Figure(f"ITL, {NUM_STREAMS} streams undisturbed", median * 1e3, "ms", p99=percentile(quiet, 0.99) * 1e3),
        Figure(
            f"ITL, {NUM_STREAMS} streams while {prompt_tokens} tokens prefill",
            statistics.median(disturbed) * 1e3,
            "ms",
            p99=worst * 1e3,
            ratio=worst / median,
            against="p99 / undisturbed p50",
            target=ITL_TARGET,
            at_most=True,
        ),
    ]


async def _one_arrival(
    client: ArmatureClient, prompts: TokenPrompts, prompt_tokens: int
) -> tuple[list[float], list[float]]:
    counts = [0] * NUM_STREAMS
    warm, over = asyncio.Event(), asyncio.Event()

    def should_continue(index: int) -> bool:
        counts[index] += 1
        if min(counts) > QUIET_CHUNKS:
            warm.set()
        return not over.is_set()

    async def stream(index: int) -> StreamTiming:
        prompt = prompts.prompt(STREAM_PROMPT_TOKENS)
        answer = await client.generate(prompt, STREAM_MAX_TOKENS, lambda _: should_continue(index))
        if not over.is_set():
            raise MeasurementFailed(
                f"a stream of {STREAM_MAX_TOKENS} tokens ended in {counts[index]} chunks before the long prompt was answered"
            )
        return answer

    async def arrival() -> tuple[float, float]:
        await warm.wait()
        sent = time.perf_counter()
        try:
            answer = await client.generate(prompts.prompt(prompt_tokens), 1)
        finally:
            over.set()
        return sent, answer.chunks[0][0]

    async with concurrent_tasks() as tasks:
        running = [tasks.create_task(stream(index)) for index in range(NUM_STREAMS)]
        long = tasks.create_task(arrival())
    sent, answered = long.result()
    streams = [task.result() for task in running]
    during = [gap for each in streams for gap in each.gaps(since=sent, until=answered)]
    if not during:
        raise MeasurementFailed("the long prompt was answered between two tokens of the streams: use a longer prompt")
    return [gap for each in streams for gap in each.gaps(until=sent)], during


async def shared_prefix(
    client: ArmatureClient, prefix_tokens: int, rounds: int, advance: AdvanceProgress
) -> list[Figure]:
    """Measure the time to first token of a prompt, and of a second prompt with the same first tokens.

    The second prompt is sent after the first was answered.
    """
    prompts = await client.token_prompts()
    await client.generate(prompts.prompt(TAIL_TOKENS), 1)  # the first request of a process has extra costs
    firsts: list[float] = []
    seconds: list[float] = []
    for number in range(rounds):
        prefix = prompts.prompt(prefix_tokens)
        for samples in (firsts, seconds):
            answer = await client.generate(prompts.prompt(prefix_tokens + TAIL_TOKENS, prefix), 1)
            samples.append(answer.time_to_first_token)
        advance(f"prefix {number + 1} of {rounds}")
    ratios = [second / first for first, second in zip(firsts, seconds, strict=True)]
    return [
        Figure(
            f"TTFT, {prefix_tokens + TAIL_TOKENS} tokens", statistics.median(firsts) * 1e3, "ms", p99=max(firsts) * 1e3
        ),
        Figure(
            f"TTFT, {prefix_tokens} of them cached",
            statistics.median(seconds) * 1e3,
            "ms",
            p99=max(seconds) * 1e3,
            ratio=statistics.median(ratios),
            against="the first prompt, median of pairs",
            target=PREFIX_TARGET,
            at_most=True,
        ),
    ]
