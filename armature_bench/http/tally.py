"""Streamed generation requests to one server in one dialect: prompts, timing of each answer, and summary of the runs.

Prompts are token ids if the server accepts them, else text with tokens that the server has counted.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from armature_bench.console import Figure, percentile
from armature_bench.http import loops
from armature_bench.http.client import StreamTiming, stream_request
from armature_bench.http.dialects import GenerateDialect, StreamRequest
from armature_bench.http.loops import LoadRun, RunLimits, ServerRuns
from armature_bench.http.wire import HttpClient, HttpRequestFailed
from armature_bench.http.workload import FREQUENT_WORDS, Pictures, TextPrompts, TokenPrompts, UniformLengths

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class GenerateWorkload:
    prompt_tokens: UniformLengths
    max_tokens: UniformLengths
    ignore_eos: bool = True
    seed: int = 0
    image: tuple[int, int] | None = None  # width and height of a picture in each request


@dataclass(frozen=True, slots=True)
class GenerateTiming:
    """One answered request.

    `intended` is when the request should have been sent (`time.perf_counter` seconds); latency starts there. `client`
    is the index of its client.
    """

    intended: float
    client: int
    asked_tokens: int
    stream: StreamTiming


GenerateRun = LoadRun[GenerateTiming]


class GenerateTraffic:
    """Generation requests to one server in one dialect.

    Lengths are drawn in the order of requests, so every server receives the same lengths.
    """

    def __init__(
        self,
        wire: HttpClient,
        dialect: GenerateDialect,
        model: str | None,
        prompts: TokenPrompts | TextPrompts,
        wanted: GenerateWorkload,
    ) -> None:
        self._wire, self._dialect, self._model, self._prompts = wire, dialect, model, prompts
        self._workload = wanted
        self._random = random.Random(wanted.seed)
        self._pictures = None if wanted.image is None else Pictures(*wanted.image, wanted.seed)

    async def run_closed_loop(self, run: GenerateRun, num_clients: int, bounds: RunLimits) -> None:
        await loops.run_closed_loop(run, num_clients, bounds, self._one)

    async def run_open_loop(self, run: GenerateRun, moments: Iterable[float], bounds: RunLimits) -> None:
        await loops.run_open_loop(run, moments, bounds, self._one)

    async def warm_up(self, num_requests: int, max_tokens: int = WARM_UP_TOKENS) -> None:
        """Send concurrent requests that are not recorded. Errors are ignored: they will occur again when measured."""
        asks = [self._ask() for _ in range(num_requests)]
        short = [replace(ask, max_tokens=min(max_tokens, ask.max_tokens)) for ask in asks]
        await asyncio.gather(*(stream_request(self._wire, self._dialect, ask) for ask in short), return_exceptions=True)

    async def _one(self, run: GenerateRun, client: int, intended: float) -> GenerateTiming:
        ask = self._ask()
        return GenerateTiming(
            intended, client, ask.max_tokens, await stream_request(self._wire, self._dialect, ask, run.note)
        )

    def _ask(self) -> StreamRequest:
        wanted = self._workload
        prompt = self._prompts.prompt(wanted.prompt_tokens.draw(self._random))
        picture = None if self._pictures is None else self._pictures.url()
        return StreamRequest(prompt, wanted.max_tokens.draw(self._random), wanted.ignore_eos, self._model, picture)


FEW_WORDS, MORE_WORDS = 16, 80  # lengths of the two probe prompts
PROBE_IDS = 8
PROBE_TOKENS = 8  # more than one: the first tokens of some models have no text
# Tokenize requests of Armature and vLLM, and of llama.cpp.
_TOKENIZE = ({"prompt": FREQUENT_WORDS, "add_special_tokens": False}, {"content": FREQUENT_WORDS, "add_special": False})


async def prompts_for(
    wire: HttpClient, dialect: GenerateDialect, model: str | None, seed: int
) -> tuple[TokenPrompts | TextPrompts, str]:
    """Return a source of prompts with a requested number of tokens, and a description of them."""
    if dialect.takes_ids:
        token_ids = await _tokenize_frequent_words(wire)
        if len(set(token_ids)) > 1 and await _accepts_token_ids(wire, dialect, token_ids, model):
            return TokenPrompts(token_ids, seed), "token ids"
    few, more = [await _counted_prompt_tokens(wire, dialect, model, num_words) for num_words in (FEW_WORDS, MORE_WORDS)]
    if few is None or more is None or more <= few:
        return TextPrompts(1.0, 0.0, seed), "text, one word per token: the server does not report prompt tokens"
    tokens_per_word = (more - few) / (MORE_WORDS - FEW_WORDS)
    return TextPrompts(tokens_per_word, few - FEW_WORDS * tokens_per_word, seed), "text, by the server's own count"


async def served_model(wire: HttpClient, preferred: str | None) -> str | None:
    """Return the preferred model if the server lists it, else the first one that it lists, or None."""
    with suppress(HttpRequestFailed, ValueError, LookupError, TypeError):
        listed = (await wire.get("/v1/models")).raise_for_status("/v1/models").json()["data"]
        names = [str(each["id"]) for each in listed]
        return preferred if preferred in names else names[0]
    return None


async def _tokenize_frequent_words(wire: HttpClient) -> list[int]:
    """Return the token ids of common words, or an empty list if the server has no usable tokenize route."""
    for body in _TOKENIZE:
        with suppress(HttpRequestFailed, ValueError):
            answer = (await wire.post("/tokenize", body)).raise_for_status("/tokenize").json()
            token_ids = answer.get("token_ids") or answer.get("tokens") if isinstance(answer, dict) else None
            if token_ids and all(isinstance(token_id, int) for token_id in token_ids):
                return list(token_ids)
    return []


async def _accepts_token_ids(
    wire: HttpClient, dialect: GenerateDialect, token_ids: list[int], model: str | None
) -> bool:
    """Return True if the server accepts token ids as a prompt and counts them as such."""
    try:
        stream = await _send_probe(wire, dialect, model, token_ids[:PROBE_IDS])
    except HttpRequestFailed as error:
        if error.kind == "no connection":
            raise
        return False
    return stream.usage is None or stream.usage.prompt_tokens == PROBE_IDS


async def _counted_prompt_tokens(
    wire: HttpClient, dialect: GenerateDialect, model: str | None, num_words: int
) -> int | None:
    usage = (await _send_probe(wire, dialect, model, TextPrompts(1.0, 0.0).words(num_words))).usage
    return None if usage is None or not usage.prompt_tokens else usage.prompt_tokens


async def _send_probe(
    wire: HttpClient, dialect: GenerateDialect, model: str | None, prompt: str | list[int]
) -> StreamTiming:
    return await stream_request(wire, dialect, StreamRequest(prompt, PROBE_TOKENS, ignore_eos=False, model=model))


@dataclass(frozen=True, slots=True)
class LatencyObjective:
    """Latency objective of a client: limits in seconds for the first token and for the mean time per later token."""

    ttft_seconds: float | None = None
    itl_seconds: float | None = None

    def met(self, answered: GenerateTiming) -> bool:
        per_token = seconds_per_token(answered.stream) or 0.0
        soon = self.ttft_seconds is None or time_to_first_token(answered) <= self.ttft_seconds
        return soon and (self.itl_seconds is None or per_token <= self.itl_seconds)


# Objectives by name. People answer each other within about 200 ms (Levinson and Torreira, 2015).
NAMED_OBJECTIVES: Mapping[str, LatencyObjective] = {"turn-taking": LatencyObjective(ttft_seconds=0.2)}


def tokens_per_second(side: ServerRuns[GenerateTiming]) -> float:
    """Return the median of all rounds' tokens per second."""
    return statistics.median(_rate(run, side.closed) for run in side.runs if run.answered)


def tokens_per_second_ratio(side: ServerRuns[GenerateTiming], other: ServerRuns[GenerateTiming]) -> float | None:
    """Return the median over the rounds of the ratio of both servers' tokens per second, or None."""
    ratios = [_rate(run, side.closed) / _rate(its, other.closed) for run, its in side.pairs(other)]
    return statistics.median(ratios) if ratios else None


def _rate(run: GenerateRun, closed: bool) -> float:
    begin, end = stream_window(run, closed)
    return sum(tokens_within(each.stream, begin, end) for each in run.answered) / (end - begin)


def stream_window(run: GenerateRun, closed: bool) -> tuple[float, float]:
    """Return the begin and end of the window in which throughput is counted.

    In a closed loop this is while all clients have a stream; otherwise from the first request to the last token.
    """
    by_client: dict[int, list[StreamTiming]] = {}
    for answered in run.answered:
        by_client.setdefault(answered.client, []).append(answered.stream)
    whole = closed and not run.failures  # a rejected client has no stream for a while
    steady = _all_streaming_window(by_client.values()) if whole else None
    return steady or (run.started, max(answered.stream.chunks[-1][0] for answered in run.answered))


def time_to_first_token(answered: GenerateTiming) -> float:
    """Return the seconds from the intended start of a request to its first token."""
    return answered.stream.chunks[0][0] - answered.intended


def seconds_per_token(stream: StreamTiming) -> float | None:
    """Return the mean seconds per token after the first one, or None if there is no later chunk."""
    later = stream.num_tokens - 1
    return (stream.chunks[-1][0] - stream.chunks[0][0]) / later if later > 0 and len(stream.chunks) > 1 else None


def overall_rate(run: GenerateRun) -> float:
    """Return the tokens per second from the start of the run to the last token."""
    last = max(answered.stream.chunks[-1][0] for answered in run.answered)
    return sum(answered.stream.num_tokens for answered in run.answered) / (last - run.started)


def steady_rate(clients: Collection[Sequence[StreamTiming]]) -> float | None:
    """Return the tokens per second while every client has a stream, or None if there is no such time."""
    steady = _all_streaming_window(clients)
    if steady is None:
        return None
    begin, end = steady
    return sum(tokens_within(stream, begin, end) for streams in clients for stream in streams) / (end - begin)


def _all_streaming_window(clients: Collection[Sequence[StreamTiming]]) -> tuple[float, float] | None:
    """Return the begin and end of the time in which every client has a stream, or None.

    It starts when every client has a first token, and ends when the first client has received its last token.
    """
    begin = max(streams[0].chunks[0][0] for streams in clients)
    end = min(streams[-1].chunks[-1][0] for streams in clients)
    return None if end <= begin else (begin, end)


def tokens_within(stream: StreamTiming, begin: float, end: float) -> float:
    """Return the number of tokens within `(begin, end]`.

    If the server counted more tokens than the chunks show, every chunk is scaled in proportion.
    """
    seen = sum(count for _, count in stream.chunks)
    inside = sum(count for moment, count in stream.chunks if begin < moment <= end)
    return inside * stream.num_tokens / seen


def stream_figures(
    side: ServerRuns[GenerateTiming], objective: LatencyObjective, against: ServerRuns[GenerateTiming] | None = None
) -> Iterator[Figure]:
    """Yield the figures of one server; `against` is another server under the same load in the same run."""
    label, answered, runs = side.label, side.answered, side.runs
    if answered:
        rate = tokens_per_second(side)
        ratio = None if against is None else tokens_per_second_ratio(side, against)
        overall = statistics.median(overall_rate(run) for run in runs if run.answered)
        requests = side.requests_per_second
        parts = {"overall": overall, "req/s": requests, "answered": len(answered)}
        yield Figure(
            f"{label} tokens",
            rate,
            "tok/s",
            ratio=ratio,
            against=against.server if against is not None else "",
            parts=parts,
        )
        yield from _latencies(label, answered)
        if objective != LatencyObjective():
            good = sum(map(objective.met, answered))
            sent = sum(run.num_sent for run in runs)
            yield Figure(
                f"{label} goodput", requests * good / len(answered), "req/s", ratio=good / sent, against="all sent"
            )
    yield from failure_figures(side)


def _latencies(label: str, answered: Sequence[GenerateTiming]) -> Iterator[Figure]:
    streams = [each.stream for each in answered]
    samples = {
        "TTFT": [time_to_first_token(each) for each in answered],
        "ITL": [gap for stream in streams for gap in stream.gaps()],
        "TPOT": [seconds for seconds in map(seconds_per_token, streams) if seconds is not None],
        "E2E": [each.stream.chunks[-1][0] - each.intended for each in answered],
    }
    for name, seconds in samples.items():
        if seconds:
            yield latency_figure(f"{label} {name}", seconds)


def failure_figures(side: ServerRuns[Any]) -> Iterator[Figure]:
    for kind, number in sorted(sum((run.failures for run in side.runs), Counter[str]()).items()):
        yield Figure(f"{side.label} failed, {kind}", number, "requests", target=0, at_most=True)


def latency_figure(name: str, seconds: Sequence[float]) -> Figure:
    """Return a latency figure in milliseconds: median, p90, p95 and p99."""
    parts = {f"p{share}": percentile(seconds, share / 100) * 1e3 for share in (90, 95)}
    return Figure(name, statistics.median(seconds) * 1e3, "ms", p99=percentile(seconds, 0.99) * 1e3, parts=parts)


def cpu_figure(runs: Iterable[LoadRun[Any]], unit: str = "piece") -> Figure:
    """Return the share of a core that the client itself used; it shares the processor with the server."""
    taken = list(runs)
    wall = sum(run.ended - run.started for run in taken)
    cpu, num_units = sum(run.cpu_seconds for run in taken), sum(run.num_units for run in taken)
    parts = {f"us/{unit}": 1e6 * cpu / num_units} if num_units else {}
    return Figure("this client, of a core", 100 * cpu / wall if wall else 0.0, "%", parts=parts)


def stream_record(answered: GenerateTiming, started: float) -> dict[str, Any]:
    """Return one request for the result file: seconds since its run `started` or since it was due, and tokens."""
    stream = answered.stream
    usage = None if stream.usage is None else stream.usage.prompt_tokens
    return {
        "client": answered.client,
        "intended": round(answered.intended - started, 6),
        "first_token": round(time_to_first_token(answered), 6),
        "last_token": round(stream.chunks[-1][0] - answered.intended, 6),
        "prompt_tokens": usage,
        "tokens": stream.num_tokens,
        "pieces": len(stream.chunks),
    }
