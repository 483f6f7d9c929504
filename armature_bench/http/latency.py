"""Effects of one request on others over HTTP.

Measures running streams while a long prompt or pictures arrive, and a second request that shares a prefix or a picture
with the first.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

from armature_bench.console import AdvanceProgress, Figure, MeasurementFailed, percentile
from armature_bench.http.client import ArmatureClient, StreamTiming, concurrent_tasks
from armature_bench.http.workload import Pictures, TokenPrompts

NUM_STREAMS = 4
STREAM_PROMPT_TOKENS = 64
STREAM_MAX_TOKENS = 1024  # the streams are aborted once the long prompt is answered
QUIET_CHUNKS = 40  # chunks of each stream before the long prompt is sent
TAIL_TOKENS = 16
ITL_TARGET = 3.0
PREFIX_TARGET = 0.15
NUM_PICTURES = 3  # that arrive one by one beside the streams
PICTURE_TOKENS = 8  # of an answer: the first tokens of some models have no text
PICTURE_TARGET, PICTURE_ITL_TARGET = 0.1, 2.0


async def inter_token_latency(
    client: ArmatureClient, prompt_tokens: int, rounds: int, advance: AdvanceProgress
) -> list[Figure]:
    """Measure the gaps between chunks of running streams before a long prompt, and from then until its first token."""
    prompts = await client.token_prompts()
    quiet: list[float] = []
    disturbed: list[float] = []
    for number in range(rounds):
        before, during = await _one_arrival(
            client, prompts, lambda: client.generate(prompts.prompt(prompt_tokens), 1), "the long prompt"
        )
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
    client: ArmatureClient, prompts: TokenPrompts, arrive: Callable[[], Awaitable[StreamTiming]], what: str
) -> tuple[list[float], list[float]]:
    """Return the gaps of running streams before `arrive`, and from then until the first token of what it returns."""
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
                f"a stream of {STREAM_MAX_TOKENS} tokens ended in {counts[index]} chunks before {what} was answered"
            )
        return answer

    async def arrival() -> tuple[float, float]:
        await warm.wait()
        sent = time.perf_counter()
        try:
            answer = await arrive()
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
        raise MeasurementFailed(f"{what} was answered between two tokens of the streams: use a larger one")
    return [gap for each in streams for gap in each.gaps(until=sent)], during


async def pictures(
    client: ArmatureClient, size: tuple[int, int], rounds: int, advance: AdvanceProgress
) -> list[Figure]:
    """Measure the time to first token of a question about a picture, of a second one about it, and running streams beside."""
    prompts, source = await client.token_prompts(), Pictures(*size)
    await client.ask_about(source.url(), "What is it?", PICTURE_TOKENS)  # it loads the tower
    firsts: list[float] = []
    seconds: list[float] = []
    quiet: list[float] = []
    disturbed: list[float] = []

    async def several() -> StreamTiming:
        answers = [await client.ask_about(source.url(), "What is it?", PICTURE_TOKENS) for _ in range(NUM_PICTURES)]
        return answers[-1]

    for number in range(rounds):
        picture = source.url()
        for samples, question in ((firsts, "What is in this picture?"), (seconds, "Which colors has it?")):
            answer = await client.ask_about(picture, question, PICTURE_TOKENS)
            samples.append(answer.time_to_first_token)
        before, during = await _one_arrival(client, prompts, several, "the last picture")
        quiet += before
        disturbed += during
        advance(f"pictures {number + 1} of {rounds}")
    ratios = [second / first for first, second in zip(firsts, seconds, strict=True)]
    calm, worst = percentile(quiet, 0.99), percentile(disturbed, 0.99)
    return [
        Figure(f"TTFT, a picture of {source}", statistics.median(firsts) * 1e3, "ms", p99=max(firsts) * 1e3),
        Figure(
            "TTFT, a second question about it",
            statistics.median(seconds) * 1e3,
            "ms",
            p99=max(seconds) * 1e3,
            ratio=statistics.median(ratios),
            against="the first question, median of pairs",
            target=PICTURE_TARGET,
            at_most=True,
        ),
        Figure(f"ITL, {NUM_STREAMS} streams undisturbed", statistics.median(quiet) * 1e3, "ms", p99=calm * 1e3),
        Figure(
            f"ITL, {NUM_STREAMS} streams while pictures arrive",
            statistics.median(disturbed) * 1e3,
            "ms",
            p99=worst * 1e3,
            ratio=worst / calm,
            against="p99 / undisturbed p99",
            target=PICTURE_ITL_TARGET,
            at_most=True,
        ),
    ]


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
