"""What runs of requests come to: latencies by percentile, tokens a second, and every failure by its kind."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from app.bench.client import Stream
from app.bench.loops import Side, Stretch
from app.bench.stats import Figure, percentile
from app.bench.traffic import Answered, Run


@dataclass(frozen=True, slots=True)
class Objective:
    """What a client calls good service: a first token, and then each mean token, within so many seconds."""

    ttft_seconds: float | None = None
    itl_seconds: float | None = None

    def met(self, answered: Answered) -> bool:
        per_token = seconds_per_token(answered.stream) or 0.0
        soon = self.ttft_seconds is None or first_token_seconds(answered) <= self.ttft_seconds
        return soon and (self.itl_seconds is None or per_token <= self.itl_seconds)


def tokens_per_second(side: Side[Answered]) -> float:
    """Median of rounds."""
    return statistics.median(_rate(run, side.closed) for run in side.runs if run.answered)


def over(side: Side[Answered], other: Side[Answered]) -> float | None:
    """How many times as many tokens a second, round by round; the median."""
    ratios = [_rate(run, side.closed) / _rate(its, other.closed) for run, its in side.pairs(other)]
    return statistics.median(ratios) if ratios else None


def _rate(run: Run, closed: bool) -> float:
    begin, end = window(run, closed)
    return sum(tokens_within(each.stream, begin, end) for each in run.answered) / (end - begin)


def window(run: Run, closed: bool) -> tuple[float, float]:
    """While all clients had a stream where there are clients, else from the first request to the last token."""
    by_client: dict[int, list[Stream]] = {}
    for answered in run.answered:
        by_client.setdefault(answered.client, []).append(answered.stream)
    whole = closed and not run.failures  # a client that was sent away has no stream for a while
    steady = _steady(by_client.values()) if whole else None
    return steady or (run.started, max(answered.stream.pieces[-1][0] for answered in run.answered))


def first_token_seconds(answered: Answered) -> float:
    return answered.stream.pieces[0][0] - answered.intended


def seconds_per_token(stream: Stream) -> float | None:
    """Of the tokens after the first."""
    later = stream.num_tokens - 1
    return (stream.pieces[-1][0] - stream.pieces[0][0]) / later if later > 0 and len(stream.pieces) > 1 else None


def overall_rate(run: Run) -> float:
    last = max(answered.stream.pieces[-1][0] for answered in run.answered)
    return sum(answered.stream.num_tokens for answered in run.answered) / (last - run.started)


def steady_rate(clients: Collection[Sequence[Stream]]) -> float | None:
    """Tokens a second while every client has a stream; None: never."""
    steady = _steady(clients)
    if steady is None:
        return None
    begin, end = steady
    return sum(tokens_within(stream, begin, end) for streams in clients for stream in streams) / (end - begin)


def _steady(clients: Collection[Sequence[Stream]]) -> tuple[float, float] | None:
    """From when every client has had a first token until the first client has nothing more to ask; None: never."""
    begin = max(streams[0].pieces[0][0] for streams in clients)
    end = min(streams[-1].pieces[-1][0] for streams in clients)
    return None if end <= begin else (begin, end)


def tokens_within(stream: Stream, begin: float, end: float) -> float:
    """Within `(begin, end]`. Where the server has counted more tokens than pieces show, each piece is taken to carry its share."""
    seen = sum(count for _, count in stream.pieces)
    inside = sum(count for moment, count in stream.pieces if begin < moment <= end)
    return inside * stream.num_tokens / seen


def figures(side: Side[Answered], objective: Objective, against: Side[Answered] | None = None) -> Iterator[Figure]:
    """`against`: another server under the same load in the same run."""
    label, answered, runs = side.label, side.answered, side.runs
    if answered:
        rate = tokens_per_second(side)
        ratio = None if against is None else over(side, against)
        overall = statistics.median(overall_rate(run) for run in runs if run.answered)
        requests = side.requests_per_second
        parts = {"overall": overall, "req/s": requests, "answered": len(answered)}
        yield Figure(
            f"{label} tokens", rate, "tok/s", ratio=ratio, against=against.server if against is not None else "", parts=parts
        )
        yield from _latencies(label, answered)
        if objective != Objective():
            good = sum(map(objective.met, answered))
            sent = sum(run.num_sent for run in runs)
            yield Figure(f"{label} goodput", requests * good / len(answered), "req/s", ratio=good / sent, against="of all sent")
    yield from failures(side)


def _latencies(label: str, answered: Sequence[Answered]) -> Iterator[Figure]:
    streams = [each.stream for each in answered]
    samples = {
        "TTFT": [first_token_seconds(each) for each in answered],
        "ITL": [gap for stream in streams for gap in stream.gaps()],
        "TPOT": [seconds for seconds in map(seconds_per_token, streams) if seconds is not None],
        "E2E": [each.stream.pieces[-1][0] - each.intended for each in answered],
    }
    for name, seconds in samples.items():
        if seconds:
            yield latency(f"{label} {name}", seconds)


def failures(side: Side[Any]) -> Iterator[Figure]:
    """How many requests failed, by kind."""
    for kind, number in sorted(sum((run.failures for run in side.runs), Counter[str]()).items()):
        yield Figure(f"{side.label} failed, {kind}", number, "requests", target=0, at_most=True)


def latency(name: str, seconds: Sequence[float]) -> Figure:
    """Milliseconds, from the middle to the end."""
    parts = {f"p{share}": percentile(seconds, share / 100) * 1e3 for share in (90, 95)}
    return Figure(name, statistics.median(seconds) * 1e3, "ms", p99=percentile(seconds, 0.99) * 1e3, parts=parts)


def cpu_figure(runs: Iterable[Stretch[Any]], unit: str = "piece") -> Figure:
    """What the client itself took of a core: it shares them with the server."""
    taken = list(runs)
    wall = sum(run.ended - run.started for run in taken)
    cpu, pieces = sum(run.cpu_seconds for run in taken), sum(run.num_pieces for run in taken)
    parts = {f"us/{unit}": 1e6 * cpu / pieces} if pieces else {}
    return Figure("this client, of a core", 100 * cpu / wall if wall else 0.0, "%", parts=parts)


def record(answered: Answered, started: float) -> dict[str, Any]:
    """One request for a file: seconds since its run began, and tokens."""
    stream = answered.stream
    usage = None if stream.usage is None else stream.usage.prompt_tokens
    return {
        "client": answered.client,
        "intended": round(answered.intended - started, 6),
        "first_token": round(first_token_seconds(answered), 6),
        "last_token": round(stream.pieces[-1][0] - answered.intended, 6),
        "prompt_tokens": usage,
        "tokens": stream.num_tokens,
        "pieces": len(stream.pieces),
    }
